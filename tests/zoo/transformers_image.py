"""Image transformers that take latents as (samples, channels, height, width)."""

import torch

from .case import Case, filled, mask, normal, steps, times, tokens, uniform

ANGLES = torch.linspace(0, 10, 96 * 96 * 4).reshape(96, 96, 4)  # of a rotary table
HEADS = {"num_attention_heads": 2, "attention_head_dim": 8}
COGVIEW_INPUTS = dict(
    hidden_states=normal(4, 8, 12), encoder_hidden_states=normal(7, 8), timestep=steps(), original_size=uniform(2),
    target_size=uniform(2), crop_coords=uniform(2),
)  # fmt: skip

CASES = [
    Case(
        "DiTTransformer2DModel",
        HEADS
        | dict(in_channels=4, out_channels=8, num_layers=4, sample_size=16, norm_num_groups=4),
        dict(hidden_states=normal(4, 16, 16), timestep=steps(), class_labels=tokens(1000)),
    ),
    Case(
        "PixArtTransformer2DModel",
        HEADS
        | dict(in_channels=4, out_channels=8, num_layers=5, cross_attention_dim=16)
        | dict(caption_channels=8, sample_size=16, norm_num_groups=4),
        dict(
            hidden_states=normal(4, 16, 24), encoder_hidden_states=normal(7, 8), encoder_attention_mask=mask(7),
            timestep=steps(),
        ),
        {"added_cond_kwargs": {"resolution": None, "aspect_ratio": None}},
    ),
    Case(
        "PixArtTransformer2DModel with additional conditions",
        HEADS
        | dict(in_channels=4, out_channels=8, num_layers=4, cross_attention_dim=48)
        | dict(caption_channels=8, sample_size=128, norm_num_groups=4)
        | dict(num_attention_heads=6, attention_head_dim=8),
        dict(
            hidden_states=normal(4, 8, 12), encoder_hidden_states=normal(7, 8), timestep=steps(),
            resolution=normal(2), aspect_ratio=normal(1),
        ),
        call=lambda model, batch: model(
            **{k: v for k, v in batch.items() if k not in ("resolution", "aspect_ratio")},
            added_cond_kwargs={k: batch[k] for k in ("resolution", "aspect_ratio")},
        ),
    ),
    Case(
        "Transformer2DModel",
        HEADS | dict(in_channels=16, num_layers=4, norm_num_groups=4, cross_attention_dim=12),
        dict(hidden_states=normal(16, 8, 12), encoder_hidden_states=normal(5, 12)),
    ),
    Case(
        "DreamLiteTransformer2DModel",
        HEADS | dict(in_channels=16, num_layers=4, norm_num_groups=4, cross_attention_dim=12),
        dict(hidden_states=normal(16, 8, 12), encoder_hidden_states=normal(5, 12)),
    ),
    Case(
        "HunyuanDiT2DModel",
        HEADS
        | dict(in_channels=4, num_layers=6, sample_size=16, patch_size=2, mlp_ratio=2)
        | dict(cross_attention_dim=8, cross_attention_dim_t5=8, pooled_projection_dim=4)
        | dict(hidden_size=16, text_len=4, text_len_t5=4),
        dict(
            hidden_states=normal(4, 16, 16), timestep=times(), encoder_hidden_states=normal(4, 8),
            text_embedding_mask=mask(4), encoder_hidden_states_t5=normal(4, 8), text_embedding_mask_t5=mask(4),
            image_meta_size=filled(64.0, 6), style=tokens(1),
        ),
        {"image_rotary_emb": [torch.ones(64, 8).double(), torch.zeros(64, 8).double()]},
    ),
    Case(
        "SD3Transformer2DModel",
        HEADS
        | dict(sample_size=16, in_channels=4, out_channels=4, num_layers=4, joint_attention_dim=12)
        | dict(caption_projection_dim=16, pooled_projection_dim=10, pos_embed_max_size=24),
        dict(
            hidden_states=normal(4, 16, 24), encoder_hidden_states=normal(7, 12), pooled_projections=normal(10),
            timestep=steps(),
        ),
    ),
    Case(
        "SD3Transformer2DModel 3.5",
        HEADS
        | dict(sample_size=16, in_channels=4, out_channels=4, num_layers=4, joint_attention_dim=12)
        | dict(caption_projection_dim=16, pooled_projection_dim=10, pos_embed_max_size=24)
        | dict(dual_attention_layers=(0, 1), qk_norm="rms_norm"),
        dict(
            hidden_states=normal(4, 16, 24), encoder_hidden_states=normal(7, 12), pooled_projections=normal(10),
            timestep=steps(),
        ),
    ),
    Case(
        "AuraFlowTransformer2DModel",
        HEADS
        | dict(sample_size=16, in_channels=4, out_channels=4, num_mmdit_layers=3)
        | dict(num_single_dit_layers=4, joint_attention_dim=12, caption_projection_dim=16)
        | dict(pos_embed_max_size=256),
        dict(
            hidden_states=normal(4, 12, 16), encoder_hidden_states=normal(7, 12), timestep=uniform()
        ),
    ),
    Case(
        "CogView3PlusTransformer2DModel",
        HEADS
        | dict(in_channels=4, out_channels=4, num_layers=4, text_embed_dim=8, time_embed_dim=8)
        | dict(condition_dim=2, pos_embed_max_size=8, sample_size=8),
        COGVIEW_INPUTS,
    ),
    Case(
        "CogView4Transformer2DModel",
        HEADS
        | dict(in_channels=4, out_channels=4, num_layers=4, text_embed_dim=8, time_embed_dim=8)
        | dict(condition_dim=4, pos_embed_max_size=8, sample_size=8, rope_axes_dim=(8, 8)),
        COGVIEW_INPUTS,
    ),
    Case(
        "GlmImageTransformer2DModel",
        HEADS
        | dict(in_channels=4, out_channels=4, num_layers=4, text_embed_dim=8, time_embed_dim=8)
        | dict(condition_dim=4, prior_vq_quantizer_codebook_size=32),
        dict(
            hidden_states=normal(4, 8, 12), encoder_hidden_states=normal(7, 8), prior_token_id=tokens(32, 24),
            prior_token_drop=lambda n, generator: torch.zeros(n, 24, dtype=torch.bool), timestep=steps(),
            target_size=uniform(2), crop_coords=uniform(2),
        ),
    ),
    Case(
        "SanaTransformer2DModel",
        HEADS
        | dict(in_channels=4, out_channels=4, num_layers=4, num_cross_attention_heads=2)
        | dict(cross_attention_head_dim=8, cross_attention_dim=16, caption_channels=8)
        | dict(sample_size=8),
        dict(
            hidden_states=normal(4, 8, 12), encoder_hidden_states=normal(7, 8), encoder_attention_mask=mask(7),
            timestep=steps(),
        ),
    ),
    Case(
        "LuminaNextDiT2DModel",
        dict(sample_size=16, in_channels=4, hidden_size=24, num_layers=4, num_attention_heads=3)
        | dict(num_kv_heads=1, multiple_of=16, cross_attention_dim=8),
        dict(
            hidden_states=normal(4, 16, 24), timestep=uniform(), encoder_hidden_states=normal(7, 8),
            encoder_mask=mask(7),
        ),
        {
            "image_rotary_emb": torch.polar(torch.ones(96, 96, 4), ANGLES),
            "cross_attention_kwargs": {},
        },
    ),
    Case(
        "Lumina2Transformer2DModel",
        dict(sample_size=16, in_channels=4, hidden_size=24, num_layers=4, num_refiner_layers=2)
        | dict(num_attention_heads=3, num_kv_heads=1, multiple_of=16, axes_dim_rope=(4, 2, 2))
        | dict(axes_lens=(128, 128, 128), cap_feat_dim=8),
        dict(
            hidden_states=normal(4, 16, 12), timestep=uniform(), encoder_hidden_states=normal(7, 8),
            encoder_attention_mask=mask(7),
        ),
    ),
    Case(
        "PRXTransformer2DModel",
        dict(in_channels=4, context_in_dim=8, hidden_size=16, mlp_ratio=2, num_heads=2, depth=4)
        | dict(axes_dim=[4, 4]),
        dict(
            hidden_states=normal(4, 8, 12), timestep=uniform(), encoder_hidden_states=normal(7, 8)
        ),
    ),
    Case(
        "OmniGenTransformer2DModel",
        dict(in_channels=4, hidden_size=16, num_attention_heads=2, num_key_value_heads=2)
        | dict(intermediate_size=32, num_layers=4, pad_token_id=0, vocab_size=50)
        | dict(time_step_dim=8, rope_scaling={"long_factor": [1.0] * 4, "short_factor": [1.0] * 4}),
        dict(
            hidden_states=normal(4, 8, 12), timestep=uniform(), input_ids=tokens(50, 9),
            attention_mask=filled(1.0, 34, 34), position_ids=lambda n, generator: torch.arange(34).expand(n, -1),
        ),
        {"input_img_latents": [], "input_image_sizes": {}},
    ),
    Case(
        "UVit2DModel",
        dict(hidden_size=16, cond_embed_dim=8, micro_cond_encode_dim=2, micro_cond_embed_dim=10)
        | dict(encoder_hidden_size=8, vocab_size=20, codebook_size=18, in_channels=16)
        | dict(block_out_channels=16, num_res_blocks=2, block_num_heads=2, num_hidden_layers=4)
        | dict(num_attention_heads=2, intermediate_size=24, sample_size=8),
        dict(
            input_ids=tokens(18, 8, 12), encoder_hidden_states=normal(5, 8), pooled_text_emb=normal(8),
            micro_conds=uniform(5),
        ),
    ),
    Case(
        "PriorTransformer",
        HEADS | dict(num_layers=4, embedding_dim=12, num_embeddings=7, additional_embeddings=4),
        dict(
            hidden_states=normal(12), timestep=steps(), proj_embedding=normal(12),
            encoder_hidden_states=normal(7, 12),
        ),
    ),
]  # fmt: skip
