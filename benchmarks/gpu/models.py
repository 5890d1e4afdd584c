"""The models of the GPU's parts: well-known ones with random weights, at their real sizes or tiny.

Tiny ones have the same layers and the same code, for a CPU.
"""

from __future__ import annotations

from typing import Any

from lightning_diffpipe.modules.on_paper import read_configs

_HEADS = {"num_attention_heads": 2, "attention_head_dim": 8}
_UNET = {"block_out_channels": (16, 32), "norm_num_groups": 4, "cross_attention_dim": 16}
_UNET |= {"layers_per_block": 1, "attention_head_dim": 2, "sample_size": 8}
_DOWN, _UP = ("CrossAttnDownBlock2D",) * 2, ("CrossAttnUpBlock2D",) * 2
_CONTROLNET = {k: v for k, v in _UNET.items() if k != "sample_size"} | {"down_block_types": _DOWN}
_TINY: dict[str, dict[str, Any]] = {
    "sd21": _UNET | {"down_block_types": _DOWN, "up_block_types": _UP},
    "controlnet": _UNET | {"down_block_types": _DOWN, "up_block_types": _UP},
    "sdxl": _UNET
    | {"down_block_types": ("DownBlock2D", _DOWN[0]), "up_block_types": (_UP[0], "UpBlock2D")}
    | {"transformer_layers_per_block": (1, 2), "cross_attention_dim": 32}
    | {"addition_time_embed_dim": 8, "projection_class_embeddings_input_dim": 64},
    "sd3": _HEADS
    | {"num_layers": 3, "joint_attention_dim": 48, "caption_projection_dim": 16}
    | {"pooled_projection_dim": 32},
    "flux": _HEADS
    | {"num_layers": 2, "num_single_layers": 2, "joint_attention_dim": 48}
    | {"pooled_projection_dim": 16, "axes_dims_rope": (4, 2, 2)},
    "pixart": _HEADS | {"num_layers": 4, "cross_attention_dim": 16, "caption_channels": 48},
}
_CLIP = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
_CLIP |= {"num_hidden_layers": 2, "projection_dim": 16}
_T5 = {"d_model": 48, "d_ff": 32, "d_kv": 8, "num_heads": 2, "num_layers": 2}


def sized(name: str, tiny: bool) -> dict[str, Any]:
    """Configurations of a well-known model as published, or with a few narrow layers of each kind.

    Args:
        name: One of `PUBLISHED`.
        tiny: Narrow.
    """
    configs = dict(read_configs(name))
    if not tiny:
        return configs
    for part, config in configs.items():
        kind = configs["model_index"].get(part, ["", ""])[1]
        if part in ("unet", "transformer"):
            configs[part] = {**config, **_TINY[name]}
        elif part == "controlnet":
            small = {"conditioning_embedding_out_channels": (8,) * 4}
            configs[part] = {**config, **_CONTROLNET, **small}
        elif part == "vae":
            configs[part] = {**config, "block_out_channels": (8,) * 4, "norm_num_groups": 4}
        elif part.startswith("text_encoder"):
            configs[part] = {**config, **(_T5 if kind.startswith("T5") else _CLIP)}
        elif part.startswith("tokenizer"):
            configs[part] = {"model_max_length": 7}
    return configs | {"size": {"height": 64, "width": 64, "num_frames": 1}}
