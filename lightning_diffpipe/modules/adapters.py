"""Adapters (LoRA) of parts: kept apart in checkpoints, merged into the weights in folders.

    unet.add_adapter(config)       to_q.weight  ->  to_q.base_layer.weight, to_q.lora_A.default.weight, ...
    checkpoint                     these names, and the settings that make such layers again
    folder of save_pretrained      to_q.weight again, with the adapters in it

A config of diffusers or transformers does not know of adapters, so weights under these names would load as nothing.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Collection, Mapping
from typing import Any

from torch import nn

from lightning_diffpipe.errors import CheckpointError

_REMEDY = "save the trained module with save_pretrained(folder), which merges adapters"


def names_of_adapted(names: Collection[str]) -> list[str]:
    """Those names of weights that only a part with adapters has.

    Example:
        >>> names_of_adapted(["to_q.base_layer.weight", "to_q.lora_A.default.weight", "to_v.weight"])
        ['to_q.base_layer.weight', 'to_q.lora_A.default.weight']
    """
    return [name for name in names if ".base_layer." in name or ".lora_" in name]


def settings_of(part: Any) -> dict[str, Any]:
    """What makes the adapters of a part again, as plain values; nothing if it has none."""
    configs = getattr(part, "peft_config", None)
    # What get_peft_model wraps is of a class that no folder knows; it is refused by that.
    if not isinstance(part, nn.Module) or not configs or hasattr(part, "merge_and_unload"):
        return {}
    texts = {name: json.dumps(c.to_dict(), default=sorted) for name, c in configs.items()}
    return {"configs": texts, "active": list(part.active_adapters())}


def add_adapters(part: nn.Module, settings: Mapping[str, Any]) -> None:
    """Makes the adapters of `settings_of` again, with weights that still have to be loaded.

    Raises:
        CheckpointError: The package peft is missing.
    """
    if not settings:
        return
    try:
        from peft import PeftConfig
    except ImportError as error:
        raise CheckpointError(
            f"the {type(part).__name__} of this checkpoint has adapters ({', '.join(settings['configs'])}), which "
            f"need the package peft; run: pip install 'lightning-diffpipe[lora]', or {_REMEDY}"
        ) from error
    for name, text in settings["configs"].items():
        part.add_adapter(PeftConfig.from_peft_type(**json.loads(text)), name)
    part.set_adapter(settings["active"])


def merged(part: nn.Module) -> nn.Module:
    """A copy of a part with its active adapters in the weights, under ordinary names; others as they are."""
    if not getattr(part, "peft_config", None):
        return part
    part = copy.deepcopy(part)
    if hasattr(part, "merge_and_unload"):  # wrapped by get_peft_model
        return part.merge_and_unload()
    # A layer under two names has to be replaced under both.
    for name, layer in list(part.named_modules(remove_duplicate=False)):
        if hasattr(layer, "unload_and_optionally_merge_module"):
            plain = layer.unload_and_optionally_merge_module(True, False, None)
            part.set_submodule(name, plain)
        elif hasattr(layer, "merge") and hasattr(layer, "get_base_layer"):
            if layer.merged == layer.disable_adapters:  # neither in twice, nor in though turned off
                layer.unmerge() if layer.merged else layer.merge()
            part.set_submodule(name, layer.get_base_layer())
    del part.peft_config
    part._hf_peft_config_loaded = False
    return part


def refuse_adapted(names: Collection[str], origin: str) -> None:
    """Refuses weights of a part with adapters where nothing says how to make these.

    Raises:
        CheckpointError: There are such weights.
    """
    if adapted := names_of_adapted(names):
        raise CheckpointError(
            f"{origin} has weights of adapters ({adapted[0]}, and {len(adapted) - 1} more), but not their "
            "settings, so they would be lost; load it into a module with the same adapters "
            f"(module.load_state_dict), and then {_REMEDY}"
        )
