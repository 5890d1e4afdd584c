"""Names and types of the verbs' own settings, as structured configs in Hydra's store.

The config of a verb begins with its one (`defaults: [settings_train, ...]`): Hydra refuses values of other types.
"""

from dataclasses import make_dataclass
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf

_TEXT, _WHOLE = str | None, int | None
_PROCESS: dict[str, Any] = {"seed": _WHOLE, "offline": bool, "num_threads": _WHOLE}
TYPES: dict[str, dict[str, Any]] = {
    "train": {
        **_PROCESS,
        **dict.fromkeys(("name", "ckpt_path", "save_to", "lora_from", "save_lora"), _TEXT),
        **dict.fromkeys(("attention", "compile"), _TEXT),
        **{"output_dir": str, "save_dtype": str, "save_lora_every_n_steps": _WHOLE},
    },
    "sample": {
        **_PROCESS,
        **dict.fromkeys(("path", "output_type", "video_format"), str),
        **dict.fromkeys(("dtype", "pipeline_class", "base", "variant", "output"), _TEXT),
        **{"num_inference_steps": int, "fps": int, "height": _WHOLE, "width": _WHOLE},
        **{"guidance_scale": float | None, "timeout_s": float, "report": bool, "progress": bool},
        **{"vae_tiling": bool, "vae_slicing": bool, "decoding": str, "compile": _TEXT},
    },
    "profile": {
        **_PROCESS,
        **{"output": _TEXT, "name": _TEXT, "cluster_output": str, "precision": str, "device": str},
        **{"sample_counts": list[int] | None, "repeats": _WHOLE, "budget_s": float},
        **{"max_share": float, "progress": bool},
    },
    "plan": {"profile": _TEXT, "output": _TEXT, "explain_s": float}
    | dict.fromkeys(("explain", "encode_first"), bool),
    "show": {"plan": str, "profile": _TEXT, "output": _TEXT, "max_columns": int, "samples": int},
    "data": {"tokenizer": _TEXT, "output": _TEXT, "samples": int},
    "diff": {"before": str, "after": str},
}
# Of the group `model`, where it is for `diffpipe plan`: arguments of `ModelOnPaper`.
_PAPER = {
    "path": _TEXT,
    "device": str,
    "dtype": str,
    "resolution": _WHOLE,
    "num_frames": _WHOLE,
    "lora_rank": _WHOLE,
}

for _verb, _types in TYPES.items():
    _node = OmegaConf.structured(make_dataclass(_verb, _types.items()))
    OmegaConf.set_struct(_node, False)  # groups stand beside them
    ConfigStore.instance().store(name=f"settings_{_verb}", node=_node)
_paper = make_dataclass("paper", (_PAPER | {"call": Any}).items())
ConfigStore.instance().store(group="model", name="settings_on_paper", node=_paper)
