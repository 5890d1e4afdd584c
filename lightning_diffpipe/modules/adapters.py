"""Adapters (LoRA) of parts: separate tensors in checkpoints, merged into the weights in folders.

    unet.add_adapter(config)       to_q.weight  ->  to_q.base_layer.weight, to_q.lora_A.default.weight, ...
    checkpoint                     these names, and the settings that make such layers again
    folder of save_pretrained      to_q.weight again, with the adapters in it

A config of diffusers or transformers does not know of adapters, so weights under these names would load as nothing.
"""

import copy
import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn

from lightning_diffpipe.errors import CheckpointError, ConfigurationError, require_number
from lightning_diffpipe.files import write_atomically
from lightning_diffpipe.quantization import QuantizedWeight, dequantize, has_quantized
from lightning_diffpipe.sampling.adapters import MERGE, name_in_file, weights_of

LORA_FILE = "pytorch_lora_weights.safetensors"
"""The name under which `load_lora_weights` of diffusers looks in a folder."""

TEXT_TARGETS = ("q_proj", "k_proj", "v_proj", "out_proj", "q", "k", "v", "o")
"""How the attention of text encoders, CLIP's and T5's, calls the layers that denoisers call `to_q` and so on."""


@dataclass(frozen=True)
class Lora:
    """Low-rank adapters, which are trained in place of a part's own weights.

    Attributes:
        rank: Rank of the adapters.
        alpha: Their outputs are scaled by `alpha / rank`; None for the rank.
        targets: Names of layers that get one, by their last components (`to_q`), or one regular expression for
            whole names.
        dropout: Dropout of their inputs.
        store_all: Checkpoints hold the frozen weights as well, also where they are as they were read from a folder;
            else they name that folder, and are small.
        lora_from: A file, or a folder with one, to go on from, also one of another program: of the parts that it
            has adapters of, rank, scale and layers are its own.

    Raises:
        ConfigurationError: A number is out of its range, targets are no names, or there is no such file.

    Source:
        LoRA, Hu et al. (2021), https://arxiv.org/abs/2106.09685
    """

    rank: int = 16
    alpha: float | None = None
    targets: str | Sequence[str] = ("to_q", "to_k", "to_v", "to_out.0", *TEXT_TARGETS)
    dropout: float = 0.0
    store_all: bool = False
    lora_from: str | Path | None = None

    def __post_init__(self) -> None:
        if self.lora_from is not None and not Path(self.lora_from).exists():
            raise ConfigurationError(f"lora_from={self.lora_from}: there is no such file or folder")
        require_number("rank", self.rank, 1, whole=True)
        if self.alpha is not None:
            require_number("alpha", self.alpha, above=0)
        require_number("dropout", self.dropout, 0, 1)
        named = isinstance(self.targets, Iterable) and all(isinstance(n, str) for n in self.targets)
        if not named or not self.targets:
            raise ConfigurationError(
                f"adapters need targets, names of layers or one regular expression; got targets={self.targets!r}"
            )
        if isinstance(self.targets, str):
            try:
                re.compile(self.targets)
            except re.error as error:
                raise ConfigurationError(
                    f"targets={self.targets!r} is no regular expression: {error}"
                ) from error

    def add_to(self, part: nn.Module) -> None:
        """Freezes a part of diffusers or transformers and adds adapters; none if it has some, as from a checkpoint.

        Raises:
            ConfigurationError: The package peft is missing or too old, or no layer has such a name.
        """
        part.requires_grad_(False)
        if not getattr(part, "peft_config", None):
            try:
                from peft import LoraConfig
            except ImportError as error:
                raise ConfigurationError(
                    "adapters need the package peft; run: pip install 'lightning-diffpipe[lora]'"
                ) from error
            targets = self.targets if isinstance(self.targets, str) else list(self.targets)
            config = LoraConfig(
                r=self.rank,
                lora_alpha=self.rank if self.alpha is None else self.alpha,
                lora_dropout=self.dropout,
                target_modules=targets,
                init_lora_weights="gaussian",
            )
            try:
                _add(part, config)
            except ValueError as error:
                linear = [n for n, m in part.named_modules() if isinstance(m, nn.Linear)]
                ends = {name.rpartition(".")[2] for name in linear}
                raise ConfigurationError(
                    f"{type(part).__name__} takes no adapters at targets={targets!r}: {error} "
                    f"(its linear layers end in {', '.join(sorted(ends))})"
                ) from error
        for name, parameter in part.named_parameters():
            parameter.requires_grad_(".lora_" in name)


def lora_weights(
    parts: Mapping[str, Any],
    names: Mapping[str, str] | None = None,
    state: Mapping[str, Tensor] | None = None,
) -> dict[str, Tensor]:
    """Returns the adapters of parts as the tensors of a LoRA file, by their names in it.

    ComfyUI knows nothing of peft's settings, so the factor `alpha / rank` is in the `B` matrices.

    Args:
        parts: Parts of a pipeline, by their names there.
        names: Regular expressions, and their replacements in names, applied one after the other.
        state: Weights of the module that has the parts, where they are not all here; None for the parts' own.

    Raises:
        ConfigurationError: None of the parts has adapters, they are more than a file can hold, or names cannot be
            replaced so.
    """
    from peft.utils import get_peft_model_state_dict

    weights: dict[str, Tensor] = {}
    for name, part in adapted_parts(parts).items():
        adapter = _only_adapter(name, part)
        # Embeddings that were made larger are no adapters, and peft would look for the former config in the hub.
        own = state and weights_of(name, state)
        adapters = get_peft_model_state_dict(part, own, adapter, save_embedding_layers=False)
        for key, value in adapters.items():
            layer, _, kind = key.rpartition(".lora_")
            if not layer or kind.startswith("embedding"):
                raise ConfigurationError(
                    f"{key} of the {name} is trained along, and {LORA_FILE} holds the adapters of linear and "
                    f"convolutional layers only; {MERGE}"
                )
            factor = part.get_submodule(layer).scaling[adapter] if kind.startswith("B.") else 1
            key = key.removeprefix("base_model.model.")  # in what get_peft_model wraps
            stored = renamed(stored_name(name, key), names or {})
            if stored in weights:
                raise ConfigurationError(
                    f"save_lora_names give two tensors of the LoRA the name {stored}"
                )
            weights[stored] = (value.detach().cpu() * factor).contiguous()
    if not weights:
        raise ConfigurationError(
            f"none of {', '.join(parts)} has adapters; train with lora=Lora(...)"
        )
    return weights


def write_lora(folder: Path, parts: Mapping[str, Any], weights: Mapping[str, Tensor]) -> None:
    """Writes adapters of parts, by name, as one file for diffusers and ComfyUI, whole or not there."""
    configs = {}
    for name, part in adapted_parts(parts).items():
        config = part.peft_config[_only_adapter(name, part)].to_dict()
        scales = {"lora_alpha": config["r"], "alpha_pattern": config["rank_pattern"]}
        config |= scales | {"use_rslora": False}
        configs |= {f"{name_in_file(name)}.{key}": value for key, value in config.items()}
    metadata = {"format": "pt", "lora_adapter_metadata": json.dumps(configs, default=sorted)}
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / LORA_FILE, safetensors.torch.save(dict(weights), metadata))


def adapted_parts(parts: Mapping[str, Any]) -> dict[str, nn.Module]:
    """Returns the parts of a pipeline that have adapters."""
    return {name: part for name, part in parts.items() if getattr(part, "peft_config", None)}


def _only_adapter(name: str, part: nn.Module) -> str:
    active = _active(part)
    if len(active) != 1:
        raise ConfigurationError(
            f"a LoRA file holds one adapter, and of those of the {name} ({', '.join(part.peft_config)}) "
            f"{len(active)} are active; choose one: module.{name}.set_adapter(NAME)"
        )
    return active[0]


def stored_name(part: str, key: str) -> str:
    """Returns the name of an adapter's weight in a file that diffusers and ComfyUI take.

    Those of U-Nets are diffusers' from before peft, and encoders of prompts have `text_model`, as transformers had
    it before its release 5: ComfyUI maps no others.

    Example:
        >>> stored_name("unet", "mid_block.attn1.to_out.0.lora_B.weight")
        'unet.mid_block.attn1.processor.to_out_lora.up.weight'
        >>> stored_name("unet", "mid_block.ff.net.2.lora_A.weight")
        'unet.mid_block.ff.net.2.lora.down.weight'
        >>> stored_name("text_encoder", "encoder.layers.0.self_attn.q_proj.lora_A.weight")
        'text_encoder.text_model.encoder.layers.0.self_attn.q_proj.lora_A.weight'
        >>> stored_name("transformer", "blocks.0.attn.to_q.lora_A.weight")
        'transformer.blocks.0.attn.to_q.lora_A.weight'
    """
    if part.startswith("text_encoder") and key.startswith("encoder.layers."):
        key = f"text_model.{key}"
    if part == "unet":
        key = key.replace(".lora_A.", ".lora.down.").replace(".lora_B.", ".lora.up.")
        key = re.sub(r"\.to_(q|k|v|out)(\.0)?\.lora\.", r".processor.to_\1_lora.", key)
    return f"{name_in_file(part)}.{key}"


def renamed(name: str, names: Mapping[str, str]) -> str:
    r"""Replaces regular expressions in a name, one after the other.

    Raises:
        ConfigurationError: One is none, or refers to a group that it does not have.

    Example:
        >>> renamed("transformer.attn1.to_q.lora_A.weight", {r"attn(\d)": r"a\1", "^transformer": "model"})
        'model.a1.to_q.lora_A.weight'
    """
    for pattern, text in names.items():
        try:
            name = re.sub(pattern, text, name)
        except (re.error, TypeError, IndexError, OverflowError) as error:
            raise ConfigurationError(
                f"save_lora_names has {pattern!r}: {text!r}, no regular expression with what replaces it: {error}"
            ) from error
    return name


def settings_of(part: Any) -> dict[str, Any]:
    """Returns the settings that make the adapters of a part again, as plain values; none if it has no adapters."""
    configs = getattr(part, "peft_config", None)
    # What get_peft_model wraps is of a class that no folder knows; it is refused by that.
    if not isinstance(part, nn.Module) or not configs or hasattr(part, "merge_and_unload"):
        return {}
    texts = {name: json.dumps(c.to_dict(), default=sorted) for name, c in configs.items()}
    layers = {n: m for n, m in part.named_modules() if hasattr(m, "merged_adapters")}
    states = {
        name: {
            "scaling": dict(getattr(layer, "scaling", {})),
            "merged": list(layer.merged_adapters),
            "is_off": layer.disable_adapters,
        }
        for name, layer in layers.items()
    }
    return {"configs": texts, "active": _active(part), "layers": states}


def _active(part: Any) -> list[str]:
    """Names of the adapters that change what a part gives; models whose class does not know of any have one."""
    active = getattr(part, "active_adapters", part.peft_config)
    return list(active() if callable(active) else active)  # no method of what get_peft_model wraps


def add_adapters(part: nn.Module, settings: Mapping[str, Any]) -> None:
    """Makes the adapters of `settings_of` again, without their weights; raises CheckpointError without peft."""
    if not settings:
        return
    try:
        from peft import PeftConfig
    except ImportError as error:
        raise CheckpointError(
            f"the {type(part).__name__} of this checkpoint has adapters ({', '.join(settings['configs'])}), which "
            f"need the package peft; run: pip install 'lightning-diffpipe[lora]', or {MERGE}"
        ) from error
    for name, text in settings["configs"].items():
        _add(part, PeftConfig.from_peft_type(**json.loads(text)), name)
    if hasattr(part, "set_adapter"):
        part.set_adapter(settings["active"])
    for name, state in settings.get("layers", {}).items():
        layer: Any = part.get_submodule(name)
        getattr(layer, "scaling", {}).update(state["scaling"])  # of set_adapters(names, weights)
        layer.merged_adapters = list(state["merged"])  # of fuse_lora()
        if state["is_off"]:
            layer.enable_adapters(False)


def _add(part: nn.Module, config: Any, name: str = "default") -> None:
    """Adds an adapter, in float32 at least, also to models whose class does not know how, such as PixArt's."""
    if hasattr(part, "add_adapter"):
        part.add_adapter(config, name)
    else:
        from peft import inject_adapter_in_model

        inject_adapter_in_model(config, part, name)
        part.peft_config = {**getattr(part, "peft_config", {}), name: config}
    for key, parameter in part.named_parameters():
        if ".lora_" in key:
            parameter.data = parameter.data.to(torch.promote_types(parameter.dtype, torch.float32))


def refuse_others(
    name: str, part: Any, settings: Mapping[str, Any], stored: Mapping[str, Tensor]
) -> None:
    """Raises CheckpointError for adapters of a checkpoint on other layers, or of another rank or scale, than now.

    The checkpoint has settings of the part's adapters, as of `settings_of`, and its weights are `stored`.
    """
    weights = part.state_dict() if isinstance(part, nn.Module) else {}
    now, then = (
        {key: tuple(value.shape) for key, value in each.items() if ".lora_" in key}
        | {key: layer["scaling"] for key, layer in layers.get("layers", {}).items()}
        for each, layers in ((weights, settings_of(part)), (stored, settings))
    )
    differing = [key for key in now | then if now.get(key) != then.get(key)]
    if differing:
        key = differing[0]
        raise CheckpointError(
            f"the adapters of the {name} are others than those of the checkpoint, by names, shapes or scale: {key} "
            f"has {now.get(key)} now, {then.get(key)} there. Go on with the settings that they were made with "
            "(lora=Lora(...), in the command model.lora), or save the model of the checkpoint with "
            "save_pretrained(folder), which merges adapters, and add new ones to that"
        )


def copied(part: nn.Module, own: Collection[nn.Parameter] = ()) -> nn.Module:
    """Copies a part, whose parameters share the memory of the present ones, but for those of `own`."""
    shared: Any = {
        id(p): nn.Parameter(p.detach(), p.requires_grad)
        for p in part.parameters()
        if p not in own and (type(p) is nn.Parameter or isinstance(p, QuantizedWeight))
    }
    return copy.deepcopy(part, shared)


def merged(part: nn.Module) -> nn.Module:
    """Copies a part, with its active adapters in plain weights, under ordinary names; others as they are.

    Weights without adapters share the memory of the part's.
    """
    has_adapters = bool(getattr(part, "peft_config", None))
    if not has_adapters and not has_quantized(part):
        return part
    below = (x.get_base_layer() for x in part.modules() if hasattr(x, "get_base_layer"))
    part = copied(part, {weight for layer in below for weight in layer.parameters()})
    dequantize(part)
    if len({p.device for p in part.parameters()}) > 1:  # a plain base on the host
        part.cpu()
    if not has_adapters:
        return part
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
