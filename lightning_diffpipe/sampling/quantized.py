"""Weights that are stored quantized, each put together from what bitsandbytes or torchao keeps of it.

    a.weight, a.weight.absmax, ...    4 bits of bitsandbytes: a packed weight and its scales
    a.weight, a.SCB                   8 bits of bitsandbytes: whole numbers, and a scale for each row
    a._weight_qdata, ...              torchao; what else it needs is in the header of the file

Loaders of diffusers and transformers put such components on a GPU as a whole, and bitsandbytes makes other layers
of them. Here layers stay `nn.Linear`, whose weights are read by their names as plain ones are: mapped from their
files, they take no memory until their rank places them.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lightning_diffpipe.errors import CheckpointError, ConfigurationError
from lightning_diffpipe.graph.placement import replace_parameters
from lightning_diffpipe.quantization import (
    QuantizedWeight,
    Weight4Bit,
    Weight8Bit,
    torchao_weight,
)
from lightning_diffpipe.sampling.skeleton import (
    ChangedWeights,
    SafetensorsFolder,
    Weights,
    refuse_names,
)

_PACKAGES = ("bitsandbytes", "torchao")


def quantization_config(folder: Path) -> dict[str, Any] | None:
    """Returns the stored quantization config of a component's folder; None for plain weights.

    Raises:
        ConfigurationError: The weights are quantized by a method that cannot be read, or its package is missing.
    """
    try:
        config = json.loads((folder / "config.json").read_text()).get("quantization_config")
    except (OSError, ValueError):  # whoever reads the rest of it says why
        return None
    if not config:
        return None
    method = config.get("quant_method")
    if method not in _PACKAGES:
        raise ConfigurationError(
            f"{folder} is stored quantized by {method}, says its config.json, and what can be read is stored by "
            f"{' or '.join(_PACKAGES)}. Open the folder with the plain weights that it was made from, with "
            "quantization=nf4, int8 or float8"
        )
    # Rows of 8 bits and their scales are multiplied here, by torch alone.
    if not config.get("load_in_8bit") and find_spec(method) is None:
        raise ConfigurationError(
            f"{folder} is stored quantized, and reading it needs the package {method}; run: pip install {method}"
        )
    return dict(config)


def opened_weights(folder: Path, variant: str | None, stem: str | None = None) -> Weights:
    """Opens a `SafetensorsFolder`, whose weights may be stored quantized.

    Raises:
        ConfigurationError: See `quantization_config`.
        CheckpointError: See `SafetensorsFolder`.
    """
    config = quantization_config(folder)
    weights = SafetensorsFolder(folder, variant, *filter(None, [stem]))
    return weights if config is None else QuantizedWeights(weights, config)


class QuantizedWeights(ChangedWeights):
    """Weights that are stored quantized, by the names of plain ones; `config` is the `quantization_config`."""

    def __init__(self, weights: SafetensorsFolder, config: Mapping[str, Any]) -> None:
        super().__init__(weights)
        self._config = config
        self._header: dict[str, str] = {}
        self._members: dict[str, dict[str, str]] = defaultdict(dict)
        """For each quantized weight, the names of its stored tensors, by what they are."""
        if config["quant_method"] == "torchao":
            self._header = weights.header()
            for name in json.loads(self._header.get("tensor_names", "[]")):
                layer, _, key = name.rpartition(".")
                for kind in json.loads(self._header[name]).get("_tensor_data_names", ()):
                    self._members[name][kind] = f"{layer}._{key}_{kind}"
        else:
            for name in weights.names():
                layer, is_scale, kind = name.partition(".weight.")
                if not is_scale:
                    layer, _, kind = name.rpartition(".")
                    is_scale = "." if kind in ("SCB", "weight_format") else ""
                if is_scale:
                    self._members[f"{layer}.weight"] |= {kind: name, "packed": f"{layer}.weight"}

    def names(self) -> set[str]:
        """Returns the names of all weights."""
        members = {name for each in self._members.values() for name in each.values()}
        return (self._weights.names() - members) | self._members.keys()

    def read(self, names: Collection[str]) -> Iterator[tuple[str, Tensor]]:
        """Reads some of them; quantized ones as `QuantizedWeight`."""
        yield from self._weights.read([name for name in names if name not in self._members])
        for name in sorted(set(names) & self._members.keys()):
            members = self._members[name]
            try:
                tensors = dict(self._weights.read(members.values()))
                yield name, self._made(name, {kind: tensors[n] for kind, n in members.items()})
            except (KeyError, ValueError, AssertionError, AttributeError, ImportError) as error:
                raise CheckpointError(
                    f"{name} in {self.origin} is not stored as {self._config['quant_method']} stores quantized "
                    f"weights ({type(error).__name__}: {error}); copy the folder again, or update the package"
                ) from error

    def quantized_bytes(self) -> Mapping[str, int]:
        """See `Weights`."""
        weights = {
            each: name for name, members in self._members.items() for each in members.values()
        }
        sizes = Counter[str]()
        for member, tensor in self._weights.read(weights.keys()):  # mapped, so that nothing is read
            sizes[weights[member]] += tensor.nbytes
        return sizes

    def _made(self, name: str, tensors: dict[str, Tensor]) -> QuantizedWeight:
        if self._header:
            stored = {self._members[name][kind]: tensor for kind, tensor in tensors.items()}
            return torchao_weight(name, stored, self._header[name])
        packed = tensors.pop("packed")
        if "SCB" in tensors:
            if int(tensors.get("weight_format", 0)):
                raise ValueError("its layout is not that of rows")
            return Weight8Bit(
                {"packed": packed, "scales": tensors["SCB"]}, {}, packed.shape, _SAVED
            )
        dtype = getattr(torch, self._config.get("bnb_4bit_compute_dtype") or "float32")
        return Weight4Bit.stored(packed, tensors, dtype)


_SAVED = torch.float16
"""Type of the plain weights of which bitsandbytes makes those of 8 bits."""


def load_transformer(cls: Any, folder: Path, dtype: torch.dtype, variant: str | None) -> nn.Module:
    """Loads a model of transformers that is stored quantized, mapped from its files.

    Its own loader gives names their places, and placeholders without memory in those of quantized weights.

    Raises:
        CheckpointError: Weights are missing.
    """
    config = cls.config_class.from_pretrained(folder)
    del config.quantization_config
    weights = opened_weights(folder, variant, "model")
    values, quantized = dict[str, Tensor](), dict[int, Tensor]()
    for name, value in weights.read(weights.names()):
        values[name] = value
        if isinstance(value, QuantizedWeight):
            values[name] = torch.empty((), dtype=dtype).expand(value.shape)
            quantized[values[name].data_ptr()] = value.to(dtype)
    options = {"config": config, "state_dict": values, "dtype": dtype}
    part, report = cls.from_pretrained(None, output_loading_info=True, **options)
    refuse_names(cls.__name__, str(folder), report["missing_keys"], len(part.state_dict()))
    placed = {
        p: nn.Parameter(quantized.pop(p.data_ptr()), requires_grad=False)
        for p in part.parameters()
        if p.data_ptr() in quantized
    }
    if quantized:
        raise CheckpointError(
            f"{len(quantized)} quantized weights of the {cls.__name__} in {folder} are no weights of its layers as "
            "they are stored; open a folder with plain weights"
        )
    replace_parameters(part, placed)
    return part
