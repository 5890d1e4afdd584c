"""Wan and the video transformers built like it: blocks that read one modulation table each."""

import torch

from .case import Case, normal, steps, times

SMALL = {"num_attention_heads": 2, "attention_head_dim": 12, "in_channels": 4, "out_channels": 4}
TEXT = {"text_dim": 16, "freq_dim": 32, "ffn_dim": 32, "num_layers": 4}
WAN = SMALL | TEXT | {"rope_max_seq_len": 32}
INPUTS = {
    "hidden_states": normal(4, 3, 8, 12),
    "encoder_hidden_states": normal(7, 16),
    "timestep": steps(),
}
# Image tokens are told from text by the length of the text: 512 tokens.
IMAGE = {"encoder_hidden_states_image": normal(5, 6), "encoder_hidden_states": normal(512, 16)}

CASES = [
    Case("WanTransformer3DModel", WAN, INPUTS),
    Case("WanTransformer3DModel image to video", WAN | dict(image_dim=6, added_kv_proj_dim=24), INPUTS | IMAGE),
    Case(
        "WanVACETransformer3DModel",
        WAN | dict(vace_layers=[0, 2], vace_in_channels=6),
        INPUTS | dict(control_hidden_states=normal(6, 3, 8, 12)),
    ),
    Case(
        "WanAnimateTransformer3DModel",
        WAN
        | dict(in_channels=12, latent_channels=4, image_dim=6, added_kv_proj_dim=24)
        | dict(motion_encoder_size=16, motion_style_dim=8, motion_dim=4, motion_encoder_dim=8)
        | dict(motion_encoder_channel_sizes={"4": 8, "8": 8, "16": 8})
        | dict(face_encoder_hidden_dim=16, face_encoder_num_heads=2, inject_face_latents_blocks=2),
        INPUTS
        | IMAGE
        | dict(
            hidden_states=normal(12, 3, 8, 12),
            pose_hidden_states=normal(4, 2, 8, 12),
            face_pixel_values=normal(3, 5, 16, 16),
        ),
    ),
    Case(
        "ChronoEditTransformer3DModel",
        WAN | dict(image_dim=6, added_kv_proj_dim=24, rope_temporal_skip_len=4),
        INPUTS | IMAGE,
    ),
    Case("SkyReelsV2Transformer3DModel", WAN, INPUTS),
    Case(
        "AnyFlowTransformer3DModel",
        WAN,
        INPUTS
        | dict(
            hidden_states=normal(3, 4, 8, 12),
            timestep=lambda n, generator: 1000 * torch.rand(n, 3, generator=generator),
            r_timestep=lambda n, generator: 1000 * torch.rand(n, 3, generator=generator),
        ),
    ),
    Case(
        "AnyFlowFARTransformer3DModel",
        WAN | dict(attention_head_dim=24, chunk_partition=(1, 2), full_chunk_limit=2),
        INPUTS
        | dict(
            hidden_states=normal(3, 4, 8, 12),
            timestep=lambda n, generator: 1000 * torch.rand(n, 3, generator=generator),
            r_timestep=lambda n, generator: 1000 * torch.rand(n, 3, generator=generator),
        ),
        {"chunk_partition": (1, 2)},
        reason="FlexAttention has no backward on CPU",
        error="FlexAttention does not support backward on CPU",
    ),
    Case(
        "HeliosTransformer3DModel",
        SMALL | TEXT | dict(rope_dim=(4, 4, 4)),
        INPUTS
        | dict(
            timestep=times(),
            latents_history_short=normal(4, 2, 8, 12),
            latents_history_mid=normal(4, 2, 8, 12),
            latents_history_long=normal(4, 4, 8, 16),
            indices_hidden_states=lambda n, generator: torch.arange(8, 11).expand(n, -1),
            indices_latents_history_short=lambda n, generator: torch.arange(6, 8).expand(n, -1),
            indices_latents_history_mid=lambda n, generator: torch.arange(4, 6).expand(n, -1),
            indices_latents_history_long=lambda n, generator: torch.arange(4).expand(n, -1),
        ),
    ),
]  # fmt: skip
