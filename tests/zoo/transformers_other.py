"""World models, proteins, and signatures unlike any other family's."""

import torch
from diffusers.models.transformers.transformer_wan_animate_2 import WanAnimate2KVCache
from torch import Tensor, nn

from .case import Batch, Case, Draw, filled, normal, steps, times, tokens, uniform

HEADS = {"num_attention_heads": 2, "attention_head_dim": 16}


def omni(model: nn.Module, batch: Batch) -> list[Tensor]:
    """Packs text and a video into one sequence: five words, 2 x 2 x 3 patches."""
    return model(
        input_ids=batch["input_ids"][0], text_indexes=torch.arange(5), position_ids=torch.arange(17).expand(3, -1),
        und_len=5, sequence_length=17, vision_tokens=[batch["vision"]], vision_token_shapes=[(2, 2, 3)],
        vision_sequence_indexes=torch.arange(5, 17), vision_mse_loss_indexes=torch.arange(5, 17),
        vision_timesteps=batch["timestep"].expand(12), vision_noisy_frame_indexes=[torch.arange(2)],
        return_dict=False,
    )[0]  # fmt: skip


def reference_pass(model: nn.Module, batch: Batch) -> Tensor:
    """The pass that fills the cache of keys and values; the other one needs FlexAttention."""
    output = model(
        list(batch["hidden_states"]), batch["timestep"], list(batch["encoder_hidden_states"]),
        list(batch["condition_latents"]), WanAnimate2KVCache(4), "extract", seq_len=72,
        offset_grid_sizes=torch.tensor([[3, 4, 6]]).expand(len(batch["timestep"]), -1),
    )  # fmt: skip
    return torch.stack(output.sample)


def camera(num_frames: int) -> Draw:
    """A camera that stands still: its 4 x 4 pose, focal lengths and centre, per frame."""
    pose = torch.cat([torch.eye(4).flatten(), torch.tensor([6.0, 4.0, 3.0, 2.0])]).double()
    return lambda n, generator: pose.expand(n, num_frames, -1)


CASES = [
    Case(
        "Cosmos3OmniTransformer",
        dict(head_dim=16, hidden_size=16, intermediate_size=24, latent_channel=4)
        | dict(num_attention_heads=2, num_hidden_layers=4, num_key_value_heads=1)
        | dict(patch_latent_dim=16, vocab_size=50, rope_axes_dim=(4, 2, 2)),
        dict(input_ids=tokens(50, 5), vision=normal(4, 2, 4, 6), timestep=times()),
        call=omni,
        num_samples=1,
    ),
    Case(
        "SanaWMTransformer3DModel",
        dict(in_channels=4, num_layers=4, hidden_size=32, num_attention_heads=2)
        | dict(linear_head_dim=16, softmax_every_n=2, caption_channels=8, mlp_ratio=2.0)
        | dict(chunk_plucker_channels=6, chunk_plucker_post_attn_blocks=4),
        dict(
            hidden_states=normal(4, 3, 4, 6), timestep=tokens(1000, 1, 3), encoder_hidden_states=normal(1, 7, 8),
            encoder_attention_mask=filled(1, 7), chunk_plucker=normal(6, 3, 4, 6), camera_conditions=camera(3),
        ),
    ),
    Case(
        "SanaWMLTX2RefinerTransformer3DModel",
        HEADS
        | dict(in_channels=4, out_channels=4, cross_attention_dim=32, num_layers=4)
        | dict(audio_in_channels=4, audio_out_channels=4, audio_num_attention_heads=2)
        | dict(audio_attention_head_dim=8, audio_cross_attention_dim=16, caption_channels=12),
        dict(hidden_states=normal(24, 4), encoder_hidden_states=normal(7, 12), timestep=times()),
        {"video_rotary_emb": (torch.ones(1, 24, 32).double(), torch.zeros(1, 24, 32).double())},
    ),
    Case(
        "RFD4ProteinaTransformer",
        dict(nlayers=4, token_dim=16, nheads=2, dim_cond=8, pair_repr_dim=8, latent_dim=4)
        | dict(token_type_emb_dim=4, t_emb_dim=8, tri_mult_c=8, num_sequence_classes=7)
        | dict(feats_seq=("xt_bb_ca", "xt_local_latents", "token_type"))
        | dict(feats_cond_seq=("time_emb_bb_ca", "time_emb_local_latents"))
        | dict(feats_pair_repr=("xt_bb_ca_pair_dists",)),
        dict(
            bb_ca=normal(9, 3), local_latents=normal(9, 4), bb_ca_time=uniform(), local_latents_time=uniform(),
            padding_mask=filled(1.0, 9), token_type=tokens(7, 9), is_in_context_conditioning=filled(0.0, 9),
            supports_local_latent=filled(1.0, 9),
        ),
        call=lambda model, batch: model(
            **{k: v for k, v in batch.items() if not k.startswith(("is_in", "supports"))},
            conditioning={k: v for k, v in batch.items() if k.startswith(("is_in", "supports"))},
            return_dict=False,
        ),
    ),
    Case(
        "WanAnimate2Transformer3DModel reference pass",
        dict(text_len=7, in_dim=8, dim=24, ffn_dim=32, freq_dim=32, text_dim=16, out_dim=4)
        | dict(num_heads=2, num_layers=4, use_img_emb=False),
        dict(
            hidden_states=normal(4, 3, 8, 12), timestep=times(), encoder_hidden_states=normal(7, 16),
            condition_latents=normal(4, 3, 8, 12),
        ),
        call=reference_pass,
    ),
    Case(
        "Kandinsky6SRTransformer3DModel",
        dict(in_visual_dim=4, out_visual_dim=4, time_dim=8, model_dim=32, ff_dim=48)
        | dict(num_visual_blocks=4, axes_dims=(4, 6, 6)),
        dict(hidden_states=normal(1, 16, 24, 9), timestep=times()),
        reason="FlexAttention has no backward on CPU",
        error="FlexAttention does not support backward on CPU",
    ),
    Case(
        "AudioLDM2UNet2DConditionModel",
        dict(in_channels=4, out_channels=4, block_out_channels=(8, 16), norm_num_groups=4)
        | dict(down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), attention_head_dim=4)
        | dict(
            up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
            cross_attention_dim=((None, 8, 12),) * 2,
        ),
        dict(
            sample=normal(4, 16, 8), timestep=steps(), encoder_hidden_states=normal(7, 8),
            encoder_hidden_states_1=normal(5, 12),
        ),
    ),
    Case(
        "UniDiffuserModel",
        dict(text_dim=12, clip_img_dim=6, num_text_tokens=5, num_attention_heads=2)
        | dict(attention_head_dim=8, in_channels=4, out_channels=4, num_layers=4, patch_size=2)
        | dict(sample_size=8, norm_type="layer_norm", block_type="unidiffuser"),
        dict(
            latent_image_embeds=normal(4, 8, 8), image_embeds=normal(1, 6), prompt_embeds=normal(5, 12),
            timestep_img=steps(), timestep_text=steps(),
        ),
    ),
]  # fmt: skip
