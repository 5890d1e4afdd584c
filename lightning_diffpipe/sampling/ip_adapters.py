"""IP-Adapters at sampling: images as prompts, by image tokens that attention layers of the denoiser also read.

A file has `image_proj`, which makes tokens of what an image encoder answers, and `ip_adapter`, keys and values for
each layer. The pipeline's own `load_ip_adapter` puts both into the denoiser, on every rank into a skeleton of it.
What that adds is taken out again: placeholders stay in the denoiser, and the values join its stored weights, so
that a rank reads those of its own layers. The image encoder is asked before the loop, on rank 0 only.

Source: IP-Adapter, Ye et al. (2023), https://arxiv.org/abs/2308.06721
"""

import inspect
import json
import logging
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import transformers
from diffusers.models.model_loading_utils import load_state_dict
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lightning_diffpipe.errors import CheckpointError, ConfigurationError
from lightning_diffpipe.graph.placement import placeholder_of
from lightning_diffpipe.sampling.skeleton import ChangedWeights, StateDict, Weights

_ENCODER = "image_encoder"
_IMAGE, _EMBEDDINGS = "ip_adapter_image", "ip_adapter_image_embeds"


class ExtendedWeights(ChangedWeights):
    """Stored weights of a denoiser, and of the adapters that were loaded into it."""

    def __init__(self, weights: Weights, added: StateDict) -> None:
        super().__init__(weights)
        self._added = added

    def names(self) -> set[str]:
        """Returns all stored names."""
        return self._weights.names() | self._added.names()

    def read(self, names: Collection[str]) -> Iterator[tuple[str, Tensor]]:
        """Reads some of them, one at a time."""
        added = self._added.names()
        yield from self._weights.read([name for name in names if name not in added])
        yield from self._added.read([name for name in names if name in added])

    def digests(self) -> dict[str, str]:
        """Returns the digests of all tensors."""
        return self._weights.digests() | self._added.digests()


def require_ip_adapters(cls: Any, adapters: Mapping[str | Path, Any]) -> list[Path]:
    """Returns the files of adapters.

    Raises:
        ConfigurationError: They are no mapping, or the pipeline's class takes none, or one only.
        CheckpointError: A file is not there.
    """
    if not isinstance(adapters, Mapping):
        raise ConfigurationError(
            f"ip_adapters must be a mapping of files to their scales; got {adapters!r}"
        )
    if adapters and not hasattr(cls, "load_ip_adapter"):
        raise ConfigurationError(
            f"{cls.__name__} of diffusers takes no IP-Adapter; leave ip_adapters out"
        )
    if len(adapters) > 1:
        files = inspect.signature(cls.load_ip_adapter).parameters["weight_name"].annotation
        if "list" not in str(files).lower():
            raise ConfigurationError(
                f"{cls.__name__} of diffusers takes one IP-Adapter at a time; ip_adapters has {len(adapters)}"
            )
    for path, scale in adapters.items():
        if any(isinstance(x, bool) or not isinstance(x, int | float) for x in tree_leaves(scale)):
            raise ConfigurationError(f"scales in ip_adapters must be numbers; {path} has {scale!r}")
    paths = [Path(path) for path in adapters]
    for path in paths:
        if not path.is_file():
            raise CheckpointError(
                f"there is no IP-Adapter {path}; name its file, such as FOLDER/models/ip-adapter_sd15.safetensors"
            )
    return paths


def load_image_encoder(
    pipeline: Any, paths: Collection[Path], device: torch.device, dtype: torch.dtype
) -> None:
    """Gives a pipeline the `image_encoder` in a file's folder, if it lacks one; raises CheckpointError."""
    folders = [path.parent / _ENCODER for path in paths if (path.parent / _ENCODER).is_dir()]
    if not folders or getattr(pipeline, _ENCODER, None) is not None:
        return
    folder = folders[0]
    try:
        [name] = json.loads((folder / "config.json").read_text())["architectures"]
        load = getattr(transformers, name).from_pretrained
        encoder, report = load(folder, dtype=dtype, output_loading_info=True)
        if missing := report["missing_keys"]:
            raise ValueError(f"it lacks {len(missing)} tensors, such as {min(missing)}")
        parts = {_ENCODER: encoder.to(device).eval()}
        if (folder / "preprocessor_config.json").exists():
            parts["feature_extractor"] = transformers.AutoImageProcessor.from_pretrained(folder)
    except Exception as error:
        raise CheckpointError(f"cannot read the image encoder in {folder}: {error}") from error
    pipeline.register_modules(**parts)


def with_ip_adapters(
    pipeline: Any, denoiser: nn.Module, weights: Weights, adapters: Mapping[str | Path, Any]
) -> Weights:
    """Loads adapters into a pipeline whose denoiser is a skeleton, and sets their scales.

    The denoiser gets further layers, whose parameters are placeholders.

    Returns:
        The weights of the denoiser with those of the adapters.

    Raises:
        ConfigurationError: The pipeline takes no such scale, or not several adapters.
        CheckpointError: A file cannot be read, or is of another model.
    """
    paths = [Path(path) for path in adapters]
    files = ", ".join(map(str, paths))
    before = {id(parameter) for parameter in denoiser.parameters()}
    load = pipeline.load_ip_adapter
    folders, names = [str(path.parent) for path in paths], [path.name for path in paths]
    several = len(paths) > 1
    empty = {name: None for name in inspect.signature(load).parameters if "image_encoder" in name}
    empty.pop("image_encoder_dtype", None)
    try:
        num_stored = sum(map(_num_layer_tensors, paths))
        # It warns that the image encoder is missing, also on ranks that need none.
        with mock.patch.object(logging.getLogger(load.__module__), "disabled", True):
            load(
                folders if several else folders[0],
                subfolder=[""] * len(paths) if several else "",
                weight_name=names if several else names[0],
                local_files_only=True,
                **empty,
            )
    except Exception as error:  # whatever does not fit
        raise CheckpointError(
            f"cannot load {files} into the {type(denoiser).__name__}, is it of another model? "
            f"{type(error).__name__}: {error}"
        ) from error
    added = _taken_out(denoiser, before)
    num_layer_tensors = sum(".processor." in name for name in added)
    is_whole = num_layer_tensors == num_stored > 0
    if not is_whole or any(value.is_meta for value in added.values()):
        raise CheckpointError(
            f"{files} of another model: of {num_stored} tensors for layers the {type(denoiser).__name__} takes "
            f"{num_layer_tensors}; LoRAs besides, as adapters for faces have, belong into a file of `loras`"
        )
    scales = list(adapters.values())
    try:
        pipeline.set_ip_adapter_scale(scales if several else scales[0])
        # Some take any scales as they are, and compare them later.
        getattr(pipeline, "is_ip_adapter_active", None)
    except Exception as error:
        raise ConfigurationError(
            f"ip_adapters={scales}: {type(pipeline).__name__} takes no such scales ({error}); take numbers"
        ) from error
    return ExtendedWeights(weights, StateDict(added, "", files))


def _num_layer_tensors(path: Path) -> int:
    """Returns the number of tensors for attention layers in a file."""
    names = list[str]()
    for name, value in load_state_dict(str(path)).items():
        names += [f"{name}.{each}" for each in value] if isinstance(value, Mapping) else [name]
    return sum(name.startswith(("ip_adapter.", "double_blocks.")) for name in names)


def _taken_out(denoiser: nn.Module, before: Collection[int]) -> dict[str, Tensor]:
    """Returns the values of parameters that were not there before, which become placeholders."""
    values: dict[str, Tensor] = {}
    for path, module in denoiser.named_modules():
        for key, parameter in module._parameters.items():
            if parameter is not None and id(parameter) not in before:
                values[f"{path}.{key}"] = parameter.detach()
                stand_in = placeholder_of(parameter, parameter.device)
                module._parameters[key] = stand_in.requires_grad_(parameter.requires_grad)
    return values


def refuse_images(
    pipeline: str, has_adapters: bool, can_encode: bool, given: Mapping[str, Any]
) -> None:
    """Raises ConfigurationError unless the arguments of a call have the images of the adapters, and no more."""
    names = [name for name in given if name.startswith("ip_adapter_") and given[name] is not None]
    if names and not has_adapters:
        raise ConfigurationError(
            f"{names[0]} needs an IP-Adapter: open the pipeline with ip_adapters={{FILE: 0.6}}, a file such as "
            "FOLDER/models/ip-adapter_sd15.safetensors"
        )
    if has_adapters and not names:
        raise ConfigurationError(
            f"the {pipeline} was opened with ip_adapters, which read an image; give {_IMAGE}= or "
            f"{_EMBEDDINGS}=, or leave ip_adapters out"
        )
    if _IMAGE in names and _EMBEDDINGS not in names and not can_encode:
        raise ConfigurationError(
            f"{_IMAGE} needs an image encoder, and the {pipeline} has none: put its folder `{_ENCODER}` beside the "
            f"file of the IP-Adapter, or give {_ENCODER}=, or {_EMBEDDINGS}= in place of the image"
        )
