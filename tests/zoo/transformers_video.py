"""Video transformers: latents as (samples, channels, frames, height, width)."""

import torch

from .case import Case, listed, mask, normal, steps, times, uniform

HEADS = {"num_attention_heads": 2, "attention_head_dim": 16}
CHANNELS = {"in_channels": 4, "out_channels": 4}
HUNYUAN_VIDEO = (
    CHANNELS
    | HEADS
    | dict(num_layers=2, num_single_layers=3, num_refiner_layers=2, mlp_ratio=2)
    | dict(text_embed_dim=12, pooled_projection_dim=10, rope_axes_dim=(4, 6, 6))
)
HUNYUAN_VIDEO_INPUTS = dict(
    hidden_states=normal(4, 3, 8, 12), timestep=times(), encoder_hidden_states=normal(7, 12),
    encoder_attention_mask=mask(7), pooled_projections=normal(10), guidance=uniform(),
)  # fmt: skip

CASES = [
    Case(
        "AllegroTransformer3DModel",
        CHANNELS
        | HEADS
        | dict(num_layers=4, cross_attention_dim=32, sample_height=16, sample_width=24)
        | dict(sample_frames=4, caption_channels=8),
        dict(
            hidden_states=normal(4, 3, 8, 12), encoder_hidden_states=normal(7, 8), encoder_attention_mask=mask(7),
            timestep=steps(),
        ),
        {"image_rotary_emb": None},
    ),
    Case(
        "CogVideoXTransformer3DModel",
        CHANNELS
        | HEADS
        | dict(time_embed_dim=8, text_embed_dim=8, num_layers=4, sample_width=12, sample_height=16)
        | dict(sample_frames=9, patch_size=2, temporal_compression_ratio=4, max_text_seq_length=7)
        | dict(use_rotary_positional_embeddings=True),
        dict(
            hidden_states=normal(3, 4, 16, 12), encoder_hidden_states=normal(7, 8), timestep=steps()
        ),
        {"image_rotary_emb": (torch.ones(144, 16).double(), torch.zeros(144, 16).double())},
    ),
    Case(
        "ConsisIDTransformer3DModel",
        CHANNELS
        | dict(num_attention_heads=2, attention_head_dim=8, time_embed_dim=2, text_embed_dim=8)
        | dict(num_layers=4, sample_width=8, sample_height=8, sample_frames=8, patch_size=2)
        | dict(temporal_compression_ratio=4, max_text_seq_length=8, cross_attn_interval=1)
        | dict(is_kps=False, is_train_face=True, cross_attn_dim_head=4, cross_attn_num_heads=1)
        | dict(LFE_id_dim=2, LFE_vit_dim=2, LFE_depth=5, LFE_dim_head=8, LFE_num_heads=2)
        | dict(LFE_num_id_token=1, LFE_num_querie=2, LFE_output_dim=10, LFE_ff_mult=1)
        | dict(LFE_num_scale=1),
        dict(
            hidden_states=normal(1, 4, 8, 8), encoder_hidden_states=normal(8, 8), timestep=steps(),
            id_cond=normal(2), id_vit_hidden=normal(2, 2),
        ),
        call=lambda model, batch: model(**(batch | {"id_vit_hidden": [batch["id_vit_hidden"]]})),
    ),
    Case(
        "CosmosTransformer3DModel",
        CHANNELS
        | HEADS
        | dict(num_layers=4, mlp_ratio=2, text_embed_dim=12, adaln_lora_dim=4, max_size=(4, 16, 16))
        | dict(concat_padding_mask=False),
        dict(
            hidden_states=normal(4, 3, 8, 12), timestep=steps(), encoder_hidden_states=normal(7, 12)
        ),
        {"fps": 30},
    ),
    Case(
        "EasyAnimateTransformer3DModel",
        CHANNELS
        | HEADS
        | dict(patch_size=2, num_layers=4, mmdit_layers=3, time_embed_dim=8, text_embed_dim=12)
        | dict(sample_width=12, sample_height=8),
        dict(
            hidden_states=normal(4, 3, 8, 12), timestep=steps(), encoder_hidden_states=normal(7, 12)
        ),
    ),
    Case("HunyuanVideoTransformer3DModel", HUNYUAN_VIDEO, HUNYUAN_VIDEO_INPUTS),
    Case(
        "HunyuanVideoTransformer3DModel token replace",
        HUNYUAN_VIDEO | dict(image_condition_type="token_replace"),
        HUNYUAN_VIDEO_INPUTS,
    ),
    Case(
        "HunyuanVideo15Transformer3DModel",
        CHANNELS
        | HEADS
        | dict(num_layers=4, num_refiner_layers=2, mlp_ratio=2, text_embed_dim=12)
        | dict(text_embed_2_dim=8, image_embed_dim=6, rope_axes_dim=(4, 6, 6)),
        dict(
            hidden_states=normal(4, 2, 4, 6), timestep=times(), encoder_hidden_states=normal(7, 12),
            encoder_attention_mask=mask(7), encoder_hidden_states_2=normal(5, 8), encoder_attention_mask_2=mask(5),
            image_embeds=normal(3, 6),
        ),
    ),
    Case(
        "HunyuanVideoFramepackTransformer3DModel",
        HUNYUAN_VIDEO | dict(has_image_proj=True, image_proj_dim=6, has_clean_x_embedder=True),
        dict(
            hidden_states=normal(4, 2, 8, 12), timestep=times(), encoder_hidden_states=normal(7, 12),
            encoder_attention_mask=mask(7), pooled_projections=normal(10), guidance=uniform(),
            image_embeds=normal(3, 6), latents_clean=normal(4, 2, 8, 12), latents_history_2x=normal(4, 2, 8, 12),
            latents_history_4x=normal(4, 4, 8, 12),
        ),
        {
            "indices_latents": torch.tensor([8, 9]),
            "indices_latents_clean": torch.tensor([0, 1]),
            "indices_latents_history_2x": torch.tensor([2, 3]),
            "indices_latents_history_4x": torch.arange(4, 8),
        },
    ),
    Case(
        "JoyImageEditTransformer3DModel",
        CHANNELS
        | dict(hidden_size=32, num_attention_heads=2, text_dim=12, mlp_width_ratio=2, num_layers=4)
        | dict(rope_dim_list=[4, 6, 6]),
        dict(
            hidden_states=normal(4, 3, 8, 12), timestep=steps(), encoder_hidden_states=normal(7, 12)
        ),
    ),
    Case(
        "JoyImageEditPlusTransformer3DModel",
        CHANNELS
        | dict(hidden_size=32, num_attention_heads=2, text_dim=12, mlp_width_ratio=2, num_layers=4)
        | dict(rope_dim_list=[4, 6, 6]),
        dict(
            hidden_states=normal(24, 4, 1, 2, 2), timestep=steps(), encoder_hidden_states=normal(7, 12),
            encoder_hidden_states_mask=mask(7), shape_list=listed([(1, 3, 4), (1, 3, 4)]),
        ),
    ),
    Case(
        "Kandinsky5Transformer3DModel",
        dict(in_visual_dim=4, out_visual_dim=4, in_text_dim=12, in_text_dim2=8, time_dim=8)
        | dict(
            model_dim=32, ff_dim=48, num_text_blocks=2, num_visual_blocks=4, axes_dims=(4, 6, 6)
        ),
        dict(
            hidden_states=normal(2, 8, 12, 4), encoder_hidden_states=normal(7, 12), timestep=uniform(),
            pooled_projections=normal(8),
        ),
        {
            "visual_rope_pos": [torch.arange(2), torch.arange(4), torch.arange(6)],
            "text_rope_pos": torch.arange(7),
        },
    ),
    Case(
        "LatteTransformer3DModel",
        HEADS
        | dict(in_channels=4, out_channels=4, num_layers=4, patch_size=2, sample_size=8)
        | dict(cross_attention_dim=32, caption_channels=8, video_length=3)
        | dict(attention_bias=True, num_embeds_ada_norm=1000, norm_type="ada_norm_single")
        | dict(norm_elementwise_affine=False, activation_fn="gelu-approximate"),
        dict(
            hidden_states=normal(4, 3, 8, 8), timestep=steps(), encoder_hidden_states=normal(7, 8)
        ),
    ),
    Case(
        "LTXVideoTransformer3DModel",
        CHANNELS | HEADS | dict(cross_attention_dim=32, num_layers=4, caption_channels=8),
        dict(
            hidden_states=normal(24, 4), encoder_hidden_states=normal(7, 8), timestep=steps(),
            encoder_attention_mask=mask(7),
        ),
        {"num_frames": 2, "height": 3, "width": 4},
    ),
    Case(
        "MochiTransformer3DModel",
        CHANNELS
        | HEADS
        | dict(num_layers=4, pooled_projection_dim=32, text_embed_dim=32, time_embed_dim=4)
        | dict(max_sequence_length=7),
        dict(
            hidden_states=normal(4, 2, 8, 12), encoder_hidden_states=normal(7, 32), timestep=steps(),
            encoder_attention_mask=lambda n, generator: mask(7)(n, generator).bool(),
        ),
    ),
    Case(
        "MotifVideoTransformer3DModel",
        CHANNELS
        | HEADS
        | dict(num_layers=2, num_single_layers=4, num_decoder_layers=2, mlp_ratio=2)
        | dict(text_embed_dim=12, image_embed_dim=6, rope_axes_dim=(4, 6, 6)),
        dict(
            hidden_states=normal(4, 2, 8, 12), timestep=times(), encoder_hidden_states=normal(7, 12),
            encoder_attention_mask=mask(7), image_embeds=normal(3, 6),
        ),
    ),
    Case(
        "SanaVideoTransformer3DModel",
        CHANNELS
        | HEADS
        | dict(num_layers=4, num_cross_attention_heads=2, cross_attention_head_dim=16)
        | dict(cross_attention_dim=32, caption_channels=8, sample_size=8),
        dict(
            hidden_states=normal(4, 2, 8, 12), encoder_hidden_states=normal(7, 8), timestep=steps()
        ),
    ),
    Case(
        "TransformerTemporalModel", HEADS | dict(in_channels=16, num_layers=4, norm_num_groups=4),
        dict(hidden_states=normal(3, 16, 4, 6)),
        call=lambda model, batch: model(batch["hidden_states"].flatten(0, 1), num_frames=3),
    ),
]  # fmt: skip
