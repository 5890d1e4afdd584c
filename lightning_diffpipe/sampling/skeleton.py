"""A denoiser without weights, and stored weights of some of its parameters, read by name.

A rank of a PipeFusion pipeline needs one N-th of a denoiser, but every rank needs to know its structure. So the
module is built from its config with parameters that take no memory (`graph/placement.py` calls them
placeholders), and then only the tensors of this rank are read: safetensors files are read tensor by tensor, and
checkpoints are mapped into memory. No rank ever holds more than its part, not even for a moment, where xDiT loads
the whole model on every rank first.

Weights that are stored quantized are put together from what bitsandbytes or torchao keeps of each:

    a.weight, a.weight.absmax, ...    4 bits of bitsandbytes: a packed weight and its scales
    a.weight, a.SCB                   8 bits of bitsandbytes: whole numbers, and a scale for each row
    a._weight_qdata, ...              torchao; what else it needs is in the header of the file

Loaders of diffusers and transformers put such components on a GPU as a whole, and bitsandbytes makes other layers
of them. Here layers stay `nn.Linear`, whose weights are read by their names as plain ones are: mapped from their
files, they take no memory until their rank places them.
"""

import json
import math
import re
import threading
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol
from unittest import mock

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from lightning_diffpipe.errors import CheckpointError, ConfigurationError
from lightning_diffpipe.graph.placement import (
    created_in,
    is_quantized_later,
    placeholder_of,
    quantized_of,
    replace_parameters,
    restore_parameter,
)
from lightning_diffpipe.quantization import (
    QuantizedWeight,
    Weight4Bit,
    Weight8Bit,
    torchao_weight,
)

_NAMES_SHOWN = 3
_PACKAGES = ("bitsandbytes", "torchao")
_PLAIN_DTYPE = torch.float16  # of the weights of which bitsandbytes makes those of 8 bits
_REPLACING = threading.RLock()
_STEM = "diffusion_pytorch_model"
_SCALES = re.compile(r"\.weight\.|\.SCB$|\._weight_")
_FLOATS = {
    **{"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16},
    **{"F8_E4M3": torch.bfloat16, "F8_E5M2": torch.bfloat16},
}
"""Types of safetensors headers in which models compute."""


class Weights(Protocol):
    """Stored tensors of one module, by parameter name.

    Attributes:
        origin: Path of the files, for messages.
    """

    origin: str

    def names(self) -> set[str]:
        """Returns all stored names."""

    def read(self, names: Collection[str]) -> Iterator[tuple[str, Tensor]]:
        """Reads some of them, one at a time."""

    def quantized_bytes(self) -> Mapping[str, int]:
        """Returns the stored bytes of each weight that is read as a quantized one."""
        return {}


def _opened(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except Exception as error:
        raise CheckpointError(f"cannot read {path}: {error}") from error


class SafetensorsFolder(Weights):
    """Weights of one part of a diffusers folder: one file, or several with an index.

    Args:
        folder: Sub-folder of the part, such as `.../transformer`.
        variant: As in diffusers: `"fp16"` for `diffusion_pytorch_model.fp16.safetensors`.
        stem: First part of the files' names.

    Raises:
        CheckpointError: There is no safetensors file, or one that the index names is missing.
    """

    def __init__(self, folder: str | Path, variant: str | None = None, stem: str = _STEM) -> None:
        self.origin, folder = str(folder), Path(folder)
        infix = f".{variant}" if variant else ""
        paths = [folder / f"{stem}{infix}.safetensors"]
        if not paths[0].exists():
            # The second is how older releases of diffusers named it.
            names = [f"{stem}.safetensors{x}.json" for x in (f".index{infix}", f"{infix}.index")]
            index = next((folder / n for n in names if (folder / n).exists()), None)
            if index is None:
                raise CheckpointError(
                    f"{folder} has neither {paths[0].name} nor {names[0]}; {_what_to_do(folder, variant)}"
                )
            try:
                stored = set(json.loads(index.read_text())["weight_map"].values())
            except (KeyError, ValueError) as error:
                raise CheckpointError(
                    f"cannot read the index {index} ({error!r}); a download that broke off? Copy it again"
                ) from error
            paths = sorted(folder / name for name in stored)
            if missing := [path for path in paths if not path.exists()]:
                raise CheckpointError(f"{index} names {missing[0].name}, which is not there")
        self._file_of: dict[str, Path] = {}
        for path in paths:
            with _opened(path) as file:
                self._file_of |= dict.fromkeys(file.keys(), path)

    def names(self) -> set[str]:
        """Returns all stored names."""
        return set(self._file_of)

    def read(self, names: Collection[str]) -> Iterator[tuple[str, Tensor]]:
        """Reads some of them, file by file."""
        for path in sorted({self._file_of[name] for name in names}):
            with safe_open(path, framework="pt") as file:
                for name in sorted(n for n in names if self._file_of[n] == path):
                    yield name, file.get_tensor(name)

    def header(self) -> dict[str, str]:
        """Returns the metadata in the headers of the files."""
        texts: dict[str, str] = {}
        for path in sorted(set(self._file_of.values())):
            with _opened(path) as file:
                of_file = file.metadata() or {}
            earlier = json.loads(texts.get("tensor_names", "[]"))  # of torchao
            names = earlier + json.loads(of_file.get("tensor_names", "[]"))
            texts |= of_file | {"tensor_names": json.dumps(names)}
        return texts


def _what_to_do(folder: Path, variant: str | None) -> str:
    """Returns the remedy for missing weights, as the end of a message."""
    names = (path.name.removeprefix(f"{_STEM}.") for path in folder.glob(f"{_STEM}.*.safetensors"))
    variants = {name.partition("-")[0].removesuffix(".safetensors") for name in names}
    if variants:
        choices = " or variant=".join(map(repr, sorted(variants)))
        return f"it has other variants: take variant={choices}"
    found_plain = any(folder.glob(f"{_STEM}*.safetensors"))
    if found_plain and variant is None:
        return "it has parts of several files, but not their index: copy the folder again, with all files"
    if found_plain:
        return "it has files without a variant: leave variant out"
    return (
        "a rank reads only its own tensors, which needs safetensors: write them with "
        "pipeline.save_pretrained(folder)"
    )


def dtype_named(name: str, value: str | torch.dtype | None) -> torch.dtype | None:
    """Returns a type in which models compute, by its name; None as it is.

    Raises:
        ConfigurationError: There is no such type; `name` says of which setting.
    """
    dtype = getattr(torch, value, value) if isinstance(value, str) else value
    if dtype is not None and dtype not in _FLOATS.values():
        raise ConfigurationError(
            f"{name}={value!r}; choose bfloat16, float16, float32 or float64, in which models compute"
        )
    return dtype


def stored_dtype(folder: Path, variant: str | None = None) -> torch.dtype | None:
    """Returns the floating-point type of most values in the safetensors files of a part; None without any.

    That of float8, which layers cannot compute with, is bfloat16, which has all its values. Scales of weights that
    are stored quantized do not count.

    Raises:
        CheckpointError: A file cannot be read.
    """
    sizes: dict[str, int] = defaultdict(int)
    infix = re.escape(f".{variant}") if variant and any(folder.glob(f"*.{variant}*")) else ""
    config = folder / "config.json"
    is_quantized = config.is_file() and "quantization_config" in config.read_text()
    for path in folder.glob("*.safetensors"):
        if re.fullmatch(rf"({_STEM}|model){infix}(-\d+-of-\d+)?{infix}\.safetensors", path.name):
            with _opened(path) as file:
                for name in file.keys():  # noqa: SIM118
                    if is_quantized and _SCALES.search(name):
                        continue
                    tensor = file.get_slice(name)
                    sizes[tensor.get_dtype()] += math.prod(tensor.get_shape())
    floats = {_FLOATS[name]: size for name, size in sizes.items() if name in _FLOATS}
    return max(floats, key=lambda dtype: floats[dtype], default=None)


class StateDict(Weights):
    """Weights that are in memory, or mapped into it."""

    def __init__(self, values: Mapping[str, Tensor], origin: str) -> None:
        self.origin, self._values = origin, dict(values)

    def names(self) -> set[str]:
        """Returns all stored names."""
        return set(self._values)

    def read(self, names: Collection[str]) -> Iterator[tuple[str, Tensor]]:
        """Yields copies of some of them."""
        for name in sorted(names):
            yield name, self._values[name].clone()


class ChangedWeights:
    """Stored weights, some of which a subclass changes; other methods are those of the wrapped weights."""

    def __init__(self, weights: Weights) -> None:
        self._weights = weights

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._weights, name)


@contextmanager
def _parameters_without_memory() -> Iterator[None]:
    """Context in which modules that this thread makes get parameters on the meta device.

    One thread does so at a time, or the first to end would put back the method that the other has replaced.
    """
    with _REPLACING:
        register, thread = nn.Module.register_parameter, threading.get_ident()

        def register_on_meta(self: nn.Module, name: str, p: nn.Parameter | None) -> None:
            if threading.get_ident() == thread and p is not None and not p.is_meta:
                p = nn.Parameter(p.detach().to("meta"), p.requires_grad)
            register(self, name, p)

        with mock.patch.object(nn.Module, "register_parameter", register_on_meta):
            yield


def skeleton(
    cls: Any, config: Mapping[str, Any], device: torch.device, dtype: torch.dtype
) -> nn.Module:
    """Builds a diffusers model whose parameters are all placeholders; its buffers are real.

    Types are those of `cls.from_pretrained(folder, dtype=dtype)`: what is stored is cast, what the model makes for
    itself, such as a table of positions in float32, is left as it was made.
    """
    settings = {name: value for name, value in config.items() if name != "quantization_config"}
    with _parameters_without_memory(), created_in(dtype):
        model = cls.from_config(settings)
    in_float32 = set(getattr(cls, "_keep_in_fp32_modules", None) or ())

    def wanted(name: str, tensor: Tensor) -> torch.dtype:
        if not tensor.dtype.is_floating_point:
            return tensor.dtype
        return torch.float32 if in_float32 & set(name.split(".")) else dtype

    stand_ins: dict[int, nn.Parameter] = {}  # tied parameters stay tied
    for path, module in model.named_modules():
        for key, parameter in module._parameters.items():
            if parameter is not None:
                if id(parameter) not in stand_ins:
                    shaped = parameter.detach().to(wanted(f"{path}.{key}", parameter))
                    stand_in = placeholder_of(shaped, device)
                    # torch multiplies by another kernel if weights ask for gradients, even where none is computed.
                    stand_ins[id(parameter)] = stand_in.requires_grad_(parameter.requires_grad)
                module._parameters[key] = stand_ins[id(parameter)]
        for key, buffer in module._buffers.items():
            if buffer is not None:
                is_stored = key not in module._non_persistent_buffers_set
                type_of = wanted(f"{path}.{key}", buffer) if is_stored else buffer.dtype
                module._buffers[key] = buffer.to(device, type_of)
    return model.eval()


def check_weights(model: nn.Module, weights: Weights) -> None:
    """Compares names, before anything is read.

    Raises:
        CheckpointError: Some tensors of the model are not stored, or others are.
    """
    in_model, stored = set(model.state_dict()), weights.names()
    refuse_names(type(model).__name__, weights.origin, in_model - stored, len(in_model))
    ignored = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    more = {n for n in stored - in_model if not any(re.search(each, n) for each in ignored)}
    refuse_names(type(model).__name__, weights.origin, more, None)


def refuse_names(cls: str, origin: str, names: Collection[str], num_known: int | None) -> None:
    """Raises CheckpointError if there are names of tensors that only a model has, or only its files have.

    They are missing of `num_known` tensors of the model, or stored and unknown if that is None.
    """
    if not names:
        return
    shown = ", ".join(sorted(names)[:_NAMES_SHOWN]) + (", ..." if len(names) > _NAMES_SHOWN else "")
    if num_known is not None:
        raise CheckpointError(
            f"{origin} lacks {len(names)} of {num_known} tensors of {cls}: {shown}; is it a folder of another "
            "model, or a download that broke off?"
        )
    raise CheckpointError(
        f"{origin} has {len(names)} tensors that the config of {cls} does not know: {shown}; is its config.json "
        "another model's, or are its weights quantized (SCB, absmax and scale are stored with such)? Without them "
        "other images would be sampled"
    )


def load_weights(model: nn.Module, weights: Weights, names: Collection[str] | None = None) -> None:
    """Gives placeholders their values; buffers are always read.

    Raises:
        CheckpointError: A stored tensor is missing, has another shape, or holds whole numbers for others.
    """
    check_weights(model, weights)
    parameters = dict(model.named_parameters())
    stored = model.state_dict(keep_vars=True)
    buffers = [name for name in stored if name not in parameters]
    to_read = parameters.keys() if names is None else sorted(set(names))
    quantized: dict[Tensor, nn.Parameter] = {}
    for name, value in weights.read([*to_read, *buffers]):
        if value.shape != stored[name].shape:
            raise CheckpointError(
                f"{name} in {weights.origin} has shape {tuple(value.shape)}, but the config of the "
                f"{type(model).__name__} says {tuple(stored[name].shape)}"
            )
        if stored[name].is_floating_point() and not value.is_floating_point():
            raise CheckpointError(
                f"{name} in {weights.origin} is stored as {value.dtype}, so probably quantized without saying so "
                f"in its config.json, but the {type(model).__name__} computes in floating numbers, whose scale is "
                "not known: take a folder with plain weights"
            )
        if name in parameters:
            parameter = parameters[name]
            value = value.to(parameter.device, parameter.dtype)
            if is_traceable_wrapper_subclass(value):  # stored so
                quantized[parameter] = nn.Parameter(value, requires_grad=False)
            elif is_quantized_later(parameter):
                quantized[parameter] = quantized_of(parameter, value)
            else:
                restore_parameter(name, parameter, value)
        else:
            stored[name].copy_(value)
    replace_parameters(model, quantized)


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
    """Opens a folder, whose weights may be quantized; raises as `quantization_config` and `SafetensorsFolder`."""
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
        members = [name for each in self._members.values() for name in each.values()]
        # Mapped, so that nothing is read.
        sizes = {name: x.nbytes for name, x in self._weights.read(members)}
        return {
            name: sum(sizes[member] for member in each.values())
            for name, each in self._members.items()
        }

    def _made(self, name: str, tensors: dict[str, Tensor]) -> QuantizedWeight:
        if self._header:
            stored = {self._members[name][kind]: tensor for kind, tensor in tensors.items()}
            return torchao_weight(name, stored, self._header[name])
        packed = tensors.pop("packed")
        if "SCB" in tensors:
            if int(tensors.get("weight_format", 0)):
                raise ValueError("its layout is not that of rows")
            scaled = {"packed": packed, "scales": tensors["SCB"]}
            return Weight8Bit(scaled, {}, packed.shape, _PLAIN_DTYPE)
        dtype = getattr(torch, self._config.get("bnb_4bit_compute_dtype") or "float32")
        return Weight4Bit.stored(packed, tensors, dtype)


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
