"""Placeholders for parameters of other ranks.

A placeholder is one NaN, expanded to the shape of the parameter: modules, names, list lengths and state-dict keys
stay as they are, and a value that should not have been read is loud. `Parameter` objects keep their identity, so
that optimizers built before or after find the same ones. In steps, which every stage runs with all their code, the
NaN may be read. Elsewhere, in a hook say, who reads or writes a placeholder gets an error that says whose it is:
meanwhile its class is `ForeignParameter`.

Never call `.to()` on a module with placeholders: moving an expanded tensor allocates all of it.

A parameter that is mapped from its file (`keep_stored`) takes no memory there, so that its value is kept under the
placeholder, and found again when the module shall be whole. A rank can offload its own ones so; what is in no file
is written to one. They are placeholders until `loaded` gives them values for a while, or `load_back` for good.

Parameters of `quantize_when_placed` are plain until then, and plain again in a module that is made whole: a rank
quantizes what it runs, and nothing else. Away from its rank's place such a parameter is the plain value rounded to
what the quantized one stands for (`rounded`).
"""

import bisect
import contextlib
import os
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextvars import ContextVar
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from lightning_diffpipe.errors import ForeignLayerError, GraphError
from lightning_diffpipe.graph.versions import plain_tensors
from lightning_diffpipe.host_memory import trim

_STRIDE, _WHERE, _STORED = "_diffpipe_stride", "_diffpipe_where", "_diffpipe_stored"
_OFFLOADED, _QUANTIZED = "_diffpipe_offloaded", "_diffpipe_quantized"
_STORED_BYTES = "_diffpipe_stored_bytes"
_ALIGNMENT = 64  # bytes, of tensors in a file

readable: ContextVar[bool] = ContextVar("readable", default=False)
"""Whether reads of placeholders give NaN, as in steps, and no error."""

_METADATA = {
    "size", "dim", "numel", "nelement", "stride", "is_contiguous", "element_size", "__len__", "ndimension",
    "is_floating_point", "is_complex", "type", "get_device", "untyped_storage", "data_ptr", "is_same_size",
    "__hash__", "__format__", "__repr__", "requires_grad_", "_has_compatible_shallow_copy_type", "retain_grad",
    "register_hook", "register_post_accumulate_grad_hook", "is_inference", "storage_offset", "zeros_like",
    "ones_like", "empty_like", "full_like", "rand_like", "randn_like", "is_pinned", "is_shared", "new_zeros",
    "new_ones", "new_empty", "new_full", "new_tensor", "result_type", "_is_view", "is_tensor",
}  # fmt: skip
_MOVES = {"to", "cuda", "cpu", "double", "float", "half", "bfloat16"}
_VALUE_PROPERTIES = {"data", "T", "mT", "H", "mH", "real", "imag"}
_ALIASES = (Tensor.detach, Tensor.data.__get__)  # type: ignore[attr-defined]


def reads_values(func: Any, args: Any, kwargs: Any) -> bool:
    """Returns whether a function of torch reads values of a tensor, or moves one to where it is not yet."""
    name, tensor = getattr(func, "__name__", ""), args[0] if args else None
    if name in ("__get__", "__set__"):
        reads = getattr(func.__self__, "__name__", "") in _VALUE_PROPERTIES
        return reads and not (name == "__set__" and tensor is args[1])  # `p.data = p`
    if name in _MOVES and isinstance(tensor, Tensor):
        # `module.to(device)` moves all of them, also those that are there.
        with torch._C.DisableTorchFunction():
            like = torch.empty((), dtype=tensor.dtype, device=tensor.device)
            return func(like, *args[1:], **kwargs) is not like
    return name not in _METADATA


class ForeignTensor(Tensor):
    """Stands for the values of another rank: has a shape, and an error for who reads or writes it."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Lets functions have what they may know.

        Raises:
            ForeignLayerError: They read or write values outside of steps.
        """
        with torch._C.DisableTorchFunctionSubclass():
            if readable.get() or not reads_values(func, args, kwargs or {}):
                return func(*args, **(kwargs or {}))
            tensors = pytree.tree_leaves((args, kwargs))
            foreign = [x for x in tensors if isinstance(x, ForeignTensor) and hasattr(x, _WHERE)]
            if foreign and func not in _ALIASES:
                raise ForeignLayerError(
                    f"{getattr(foreign[0], _WHERE)}, so that here it has a shape, but neither memory nor values, "
                    f"and Tensor.{func.__name__} cannot read or write it. Use the parameters of which "
                    "self.trainer.strategy.is_resident(name) is true; or, on all ranks, those of all inside `with "
                    "self.trainer.strategy.whole_model():`. For averages of weights add the callback "
                    "lightning_diffpipe.EMA; or train with num_stages=1"
                )
            out = func(*args, **(kwargs or {}))
            if foreign:
                out = out.as_subclass(ForeignTensor)
                vars(out).update(vars(foreign[0]))
            return out

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        """Says whose it is."""
        return f"<{tuple(self.shape)}: {getattr(self, _WHERE, 'of another rank')}>"


class ForeignParameter(ForeignTensor, nn.Parameter):
    """A parameter of another rank."""


@contextlib.contextmanager
def created_in(dtype: torch.dtype) -> Iterator[None]:
    """Makes tensors inside in a type at once, unless their code names another.

    Converted later, they would need the memory of both types. The default type is that of the process: meanwhile
    other threads make tensors in it, too.
    """
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def is_placeholder(tensor: Tensor) -> bool:
    """Returns whether a parameter lives on another rank, or is offloaded."""
    return hasattr(tensor, _STRIDE)


def is_offloaded(tensor: Tensor) -> bool:
    """Returns whether a parameter of this rank has its value in a file only."""
    return hasattr(tensor, _OFFLOADED)


def true_stride(tensor: Tensor) -> tuple[int, ...]:
    """Returns strides of a parameter where it lives; of any other tensor its own."""
    return tuple(getattr(tensor, _STRIDE, None) or tensor.stride())


def place_parameters(
    root: nn.Module,
    resident: Collection[str],
    device: torch.device | str,
    whereabouts: Mapping[str, str] | None = None,
    later: Collection[str] = (),
) -> tuple[str, ...]:
    """Frees all parameters but the resident ones, and moves those, buffers and metrics to the device.

    Args:
        root: The module; changed in place. May be called again with other resident names as long as no placeholder
            becomes resident.
        resident: Names of the parameters that stay.
        device: Device to place them on, which placeholders give as theirs, too.
        whereabouts: For errors, where parameters live; without, placeholders are NaN for whoever reads them.
        later: Resident ones that are offloaded: values stay where they are until `load_back`, or until a layer
            needs a copy.

    Returns:
        Names of the placeholders.

    Raises:
        GraphError: A name is unknown, or names a parameter whose values are gone.
    """
    parameters = dict(root.named_parameters())
    unknown = set(resident) - parameters.keys()
    freed = [name for name in resident if name in parameters and is_placeholder(parameters[name])]
    if unknown:
        raise GraphError(f"{len(unknown)} resident parameters do not exist, e.g. {min(unknown)}")
    if freed:
        raise GraphError(
            f"{freed[0]} was freed on this rank; load it with restore_parameter() first"
        )
    place = torch.device(device)
    placeholders, replacements = [], dict[Tensor, nn.Parameter]()
    for name, parameter in parameters.items():
        if stored_value(parameter) is None:
            forget_stored(parameter)
        if name in resident and name not in later:
            if is_quantized_later(parameter):
                replacements[parameter] = _quantized(parameter, place)
            elif (placed := moved(parameter, place)) is not parameter:
                replacements[parameter] = placed
            take_from_file(parameter)
            continue
        value = parameter.detach()
        if is_traceable_wrapper_subclass(parameter):  # `.data` of these takes no plain tensor
            replacements[parameter] = placeholder_of(parameter, place)
            keep_notes(parameter, replacements[parameter])
            parameter = replacements[parameter]
        if name in later:
            _offload(name, parameter, value, place)
            continue
        _free(parameter, place)
        if whereabouts is not None:
            setattr(parameter, _WHERE, f"{name} lives on {whereabouts.get(name, 'another rank')}")
        placeholders.append(name)
    replace_parameters(root, replacements)
    for module in root.modules():
        for key, buffer in module._buffers.items():
            if buffer is not None and buffer.device != place:
                module._buffers[key] = buffer.to(place)
    for module in root.modules():  # `.to()` moves more than parameters and buffers
        if "_device" in module.__dict__:  # what `LightningModule.device` answers
            module.__dict__["_device"] = place
        if has_own_tensors(module):
            module._apply(lambda tensor: tensor.to(place))
    return tuple(placeholders)


def replace_parameters(root: nn.Module, others: Mapping[Tensor, nn.Parameter]) -> None:
    """Replaces parameters by others, in all modules that hold them."""
    if not others:
        return
    for module in root.modules():
        for key, parameter in module._parameters.items():
            if parameter is not None and parameter in others:
                module._parameters[key] = others[parameter]


def has_own_tensors(module: nn.Module) -> bool:
    """Returns whether `.to()` moves more of a module than parameters and buffers: metrics have states besides."""
    # Recurrent layers would pack their weights again, which are parameters.
    return type(module)._apply is not nn.Module._apply and not isinstance(module, nn.RNNBase)


def own_tensors(modules: Iterable[nn.Module]) -> list[tuple[nn.Module, dict[str, Any]]]:
    """Returns tensors, and lists of them, that are plain attributes of modules: states of metrics."""
    return [
        (module, {name: value for name, value in module.__dict__.items() if _is_tensors(value)})
        for module in modules
        if has_own_tensors(module)
    ]


def _is_tensors(value: Any) -> bool:
    if isinstance(value, list):
        return all(map(_is_tensors, value))
    return isinstance(value, Tensor) and not isinstance(value, nn.Parameter)


class Quantizing(Protocol):
    """A way to quantize a parameter; see `quantization.py`."""

    @property
    def quantize(self) -> Callable[[Tensor], Tensor]:
        """Quantizes a plain value, on its device; the result has `dequantize`."""

    def num_bytes(self, weight: Tensor) -> int:
        """Returns the size of a value when it is quantized."""


def quantize_when_placed(parameter: nn.Parameter, how: Quantizing) -> None:
    """Marks a frozen parameter, which the rank that holds it quantizes when it is placed there."""
    setattr(parameter, _QUANTIZED, how)


def is_quantized_later(parameter: Tensor) -> bool:
    """Returns whether a parameter is one of `quantize_when_placed`, and still plain."""
    return hasattr(parameter, _QUANTIZED) and not is_traceable_wrapper_subclass(parameter)


def quantizations_noted(root: nn.Module) -> set[tuple[Quantizing, torch.dtype]]:
    """Returns how parameters will be quantized, and their types while they are plain."""
    return {(getattr(p, _QUANTIZED), p.dtype) for p in root.parameters() if is_quantized_later(p)}


def note_stored_bytes(placeholder: nn.Parameter, num_bytes: int) -> None:
    """Notes the size of the quantized value that will take the place of a placeholder."""
    setattr(placeholder, _STORED_BYTES, num_bytes)


def held_bytes(parameter: Tensor) -> int:
    """Returns the size of a parameter where it is placed."""
    if hasattr(parameter, _STORED_BYTES):
        return int(getattr(parameter, _STORED_BYTES))
    if is_quantized_later(parameter):
        return getattr(parameter, _QUANTIZED).num_bytes(parameter)
    return sum(plain.nbytes for plain in plain_tensors(parameter))


def rounded(parameter: Tensor, value: Tensor) -> Tensor:
    """Returns what a parameter stands for where it is placed, as a plain value, of its stored or quantized one."""
    if is_traceable_wrapper_subclass(value):
        return value.dequantize()
    how = getattr(parameter, _QUANTIZED, None)
    return value if how is None else how.quantize(value).dequantize().to(value.dtype)


def moved(parameter: nn.Parameter, device: torch.device) -> nn.Parameter:
    """Moves a parameter to a device; returns another one in its place where its `data` is not all of it."""
    if parameter.device != device:
        if is_traceable_wrapper_subclass(parameter) and not parameter.requires_grad:
            return _with_notes(parameter.detach().to(device), parameter)
        parameter.data = parameter.data.to(device)
    move_scales(parameter, device)
    return parameter


def is_in_file(value: Tensor) -> bool:
    """Returns whether a value is in the memory of a file without a name (`building.py`)."""
    is_plain = type(value) in (Tensor, nn.Parameter) and value.is_cpu
    return is_plain and value.is_shared() and value.untyped_storage().filename is not None


def take_from_file(parameter: Tensor) -> None:
    """Copies a parameter that is in the memory of a file to memory of its own."""
    if is_in_file(parameter):
        parameter.data = parameter.data.clone()


def move_scales(parameter: Tensor, device: torch.device) -> None:
    """Moves what a parameter of bitsandbytes keeps of its quantization next to its data."""
    scales: Any = getattr(parameter, "quant_state", None)
    if scales is not None:
        scales.to(device)


@contextlib.contextmanager
def quantized(root: nn.Module, device: torch.device) -> Iterator[None]:
    """Quantizes the parameters that are marked for it while the context lasts, on a device."""
    swap = quantize_all(root, device)
    try:
        yield
    finally:
        swap()


def quantize_all(root: nn.Module, device: torch.device) -> Callable[[], None]:
    """Quantizes all parameters of `quantize_when_placed` on a device.

    Returns:
        A function that puts the plain ones back, and called again the quantized ones, as `root.to()` has left them.
    """
    places = [
        (module, key)
        for module in root.modules()
        for key, parameter in module._parameters.items()
        if parameter is not None and is_quantized_later(parameter)
    ]
    plain = {module._parameters[key]: None for module, key in places}
    quantized = {parameter: _quantized(parameter, device) for parameter in plain}
    others = [quantized[module._parameters[key]] for module, key in places]

    def swap() -> None:
        for index, (module, key) in enumerate(places):
            others[index], module._parameters[key] = module._parameters[key], others[index]

    swap()
    return swap


def make_plain(root: nn.Module) -> None:
    """Makes parameters plain again that were quantized when they were placed: those of their files, if from one."""
    parameters = (p for p in root.parameters() if hasattr(p, _QUANTIZED) and not is_placeholder(p))
    replace_parameters(root, {p: _plain(p) for p in parameters if not is_quantized_later(p)})


def quantized_of(parameter: Tensor, value: Tensor) -> nn.Parameter:
    """Returns the quantized parameter for one of `quantize_when_placed`, of a plain value."""
    quantized = _with_notes(getattr(parameter, _QUANTIZED).quantize(value), parameter)
    trim()  # else glibc keeps holes between quantized weights: five times their size was seen
    return quantized


def _quantized(parameter: Tensor, device: torch.device | str) -> nn.Parameter:
    return quantized_of(parameter, parameter.detach().to(device))


def _plain(parameter: nn.Parameter) -> nn.Parameter:
    value = stored_value(parameter)
    return _with_notes(parameter.detach().dequantize() if value is None else value, parameter)


def _with_notes(value: Tensor, parameter: Tensor) -> nn.Parameter:
    replacement = nn.Parameter(value, requires_grad=False)
    keep_notes(parameter, replacement)
    return replacement


def keep_notes(parameter: Tensor, other: Tensor) -> None:
    """Notes of another tensor how it is quantized and where it is stored, as of a parameter whose value it has."""
    notes = vars(parameter)
    vars(other).update({name: notes[name] for name in (_QUANTIZED, _STORED) if name in notes})


def keep_stored(root: nn.Module) -> None:
    """Notes the parameters that are mapped from files of weights; known on Linux only."""
    maps = Path("/proc/self/maps")
    lines = maps.read_text().splitlines() if maps.exists() else []
    ends = [line.split(None, 1)[0].split("-") for line in lines if line.endswith(".safetensors")]
    starts, stops = (
        zip(*sorted((int(a, 16), int(b, 16)) for a, b in ends), strict=True) if ends else ((), ())
    )
    for parameter in root.parameters():
        address = plain_tensors(parameter.detach())[0].data_ptr()
        at = bisect.bisect(starts, address) - 1
        if at >= 0 and address < stops[at]:
            setattr(parameter, _STORED, (parameter.detach(), parameter._version))


def stored_value(parameter: Tensor) -> Tensor | None:
    """Returns the value of a parameter that is mapped from a file; None if it is not, or was written or replaced.

    A placeholder's value is the one that the parameter had when it was placed.
    """
    value, version = getattr(parameter, _STORED, (None, 0))
    if value is None or is_placeholder(parameter) or is_traceable_wrapper_subclass(parameter):
        return value
    is_same = parameter._version == version and parameter.dtype == value.dtype
    # On another device it was put by `place_parameters`.
    is_there = parameter.device != value.device or parameter.data_ptr() == value.data_ptr()
    return value if is_same and is_there else None


def take_from_files(root: nn.Module, names: Collection[str]) -> None:
    """Gives parameters of these names that are on a device the values of their files again, without a copy."""
    for name, parameter in root.named_parameters():
        value = None if name not in names or is_placeholder(parameter) else stored_value(parameter)
        if value is not None and value.device != parameter.device:
            restore_parameter(name, parameter, value, root)


def forget_stored(parameter: Tensor) -> None:
    """Counts a parameter as not mapped, as where ranks have other files."""
    vars(parameter).pop(_STORED, None)


def leave_on_host(root: nn.Module) -> None:
    """Lets placeholders pretend to live on the host, so that the module can be moved there."""
    for parameter in root.parameters():
        if is_placeholder(parameter):
            _free(parameter, torch.device("cpu"))


def restore_parameter(
    name: str, parameter: Tensor, value: Tensor, root: nn.Module | None = None
) -> None:
    """Gives a placeholder its value, which it keeps, or a copy of it laid out as the parameter was.

    A quantized value becomes a parameter of its own, in the placeholder's place in `root`.

    Raises:
        GraphError: The value has the wrong shape.
    """
    if value.shape != parameter.shape:
        raise GraphError(
            f"{name} has shape {tuple(parameter.shape)}, its value {tuple(value.shape)}"
        )
    if is_traceable_wrapper_subclass(value):
        assert root is not None
        replace_parameters(root, {parameter: _with_notes(value, parameter)})
        return
    _hold(parameter, _laid_out(parameter, value).detach())


def _laid_out(parameter: Tensor, value: Tensor) -> Tensor:
    """Returns a value of a parameter in the type and with the strides that it had."""
    if value.dtype == parameter.dtype and value.stride() == true_stride(parameter):
        return value
    laid_out = torch.empty_strided(
        parameter.shape, true_stride(parameter), dtype=parameter.dtype, device=value.device
    )
    return laid_out.copy_(value)


def may_be_offloaded(parameter: nn.Parameter) -> bool:
    """Returns whether `offload` takes a parameter: a plain one, or one of `quantize_when_placed`."""
    return type(parameter) is nn.Parameter or hasattr(parameter, _QUANTIZED)


def offload(
    root: nn.Module, parameters: Mapping[str, nn.Parameter], folder: Path
) -> dict[str, nn.Parameter]:
    """Frees parameters of this rank, whose values are then in files: their own ones, or one that is written.

    Args:
        root: The module.
        parameters: Parameters by name; of quantized ones those of `quantize_when_placed`.
        folder: Folder with room for those that are in no file. Their file has no name there: its room is free
            again when the process ends, however that happens.

    Returns:
        The parameters; plain ones in the place of quantized ones.
    """
    devices = {name: parameter.device for name, parameter in parameters.items()}
    others = {p: _plain(p) for p in parameters.values() if is_traceable_wrapper_subclass(p)}
    replace_parameters(root, others)
    parameters = {name: others.get(p, p) for name, p in parameters.items()}
    stored = {n: value for n, p in parameters.items() if (value := stored_value(p)) is not None}
    stored |= _in_a_file({n: p for n, p in parameters.items() if n not in stored}, folder)
    for name, parameter in parameters.items():
        _offload(name, parameter, stored[name], devices[name])
    return dict(parameters)


def _offload(name: str, parameter: nn.Parameter, value: Tensor, device: torch.device | str) -> None:
    setattr(parameter, _OFFLOADED, value)
    setattr(parameter, _WHERE, f"{name} is offloaded until its layer runs")
    _free(parameter, torch.device(device))


def _in_a_file(tensors: Mapping[str, Tensor], folder: Path) -> dict[str, Tensor]:
    """Returns tensors that are mapped from a new file without a name."""
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        starts = []
        for tensor in tensors.values():
            starts.append(file.seek(-file.tell() % _ALIGNMENT, os.SEEK_CUR))
            raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            file.write(memoryview(raw.numpy()))
        file.flush()
        memory = torch.UntypedStorage.from_file(file.name, False, file.tell()) if starts else None
    return {
        name: torch.empty(0, dtype=x.dtype).set_(memory, start // x.dtype.itemsize, x.shape)
        for start, (name, x) in zip(starts, tensors.items(), strict=True)
    }


@contextlib.contextmanager
def loaded(
    parameters: Iterable[Tensor],
    device: torch.device | None = None,
    root: nn.Module | None = None,
) -> Iterator[None]:
    """Gives those of some parameters that are offloaded their values inside.

    Args:
        parameters: Any ones.
        device: Device of the values; None for that of each parameter.
        root: The module in which values that are stored quantized stay so; without it they are dequantized.
    """

    def value_of(parameter: Tensor) -> Tensor:
        value = host_value(parameter).to(device or parameter.device)
        stays = root is not None and is_traceable_wrapper_subclass(value)
        return nn.Parameter(value, False) if stays else rounded(parameter, value)

    away: Any = [p for p in parameters if is_offloaded(p) and is_placeholder(p)]
    with filled_placeholders({p: value_of(p) for p in away}, root):
        yield


def host_value(parameter: Tensor) -> Tensor:
    """Returns the value of an offloaded parameter: a quantized one, or one in its type and with its strides."""
    value: Tensor = getattr(parameter, _OFFLOADED)
    return value if is_traceable_wrapper_subclass(value) else _laid_out(parameter, value)


def value_to_stream(parameter: Tensor, device: torch.device) -> Tensor:
    """Returns the value of an offloaded parameter as its layer shall read it; quantizes it on a device."""
    value = host_value(parameter)
    if not is_quantized_later(parameter) or is_traceable_wrapper_subclass(value):
        return value
    return quantized_of(parameter, value.to(device)).detach()


def keep_on_host(parameter: Tensor, value: Tensor) -> None:
    """Lets an offloaded parameter have its value elsewhere on the host, or quantized."""
    setattr(parameter, _OFFLOADED, value)


def load_back(
    parameters: Iterable[Tensor], device: torch.device, root: nn.Module, quantizes: bool = True
) -> None:
    """Gives offloaded parameters their values for good, on a device.

    Args:
        parameters: Offloaded ones.
        device: Device to place them on.
        root: The module, in which quantized values become parameters of their own.
        quantizes: Whether those that wait for it are quantized.
    """
    others: dict[Tensor, nn.Parameter] = {}
    for parameter in parameters:
        value = host_value(parameter)
        delattr(parameter, _OFFLOADED)
        if is_traceable_wrapper_subclass(value):
            stored = stored_value(parameter)
            value = stored if type(stored) is type(value) else value
            others[parameter] = _with_notes(value.to(device), parameter)
        elif is_quantized_later(parameter) and quantizes:
            _hold(parameter, value)
            others[parameter] = _quantized(parameter, device)
        else:
            _hold(parameter, value.to(device))
            take_from_file(parameter)
    replace_parameters(root, others)


def _hold(parameter: Tensor, value: Tensor) -> dict[str, Any]:
    """Gives a parameter a value, so that it is no placeholder; returns its attributes as one."""
    with torch._C.DisableTorchFunction():
        parameter.data = value
    if type(parameter) is ForeignParameter:
        parameter.__class__ = nn.Parameter
    attributes = vars(parameter)
    return {name: attributes.pop(name) for name in (_STRIDE, _WHERE) if name in attributes}


@contextlib.contextmanager
def filled_placeholders(
    values: Mapping[nn.Parameter, Tensor], root: nn.Module | None = None
) -> Iterator[None]:
    """Fills placeholders with values while the context lasts, of their shape and dtype and on their device.

    Quantized values are parameters, which take the places of the placeholders in `root`.
    """
    others: dict[Any, Any] = {p: v for p, v in values.items() if is_traceable_wrapper_subclass(v)}
    values = {p: v for p, v in values.items() if p not in others}
    with torch._C.DisableTorchFunction():
        empty = [parameter.data for parameter in values]
    before = {parameter: _hold(parameter, value) for parameter, value in values.items()}
    assert root is not None or not others
    try:
        if root is not None:
            replace_parameters(root, others)
        yield
    finally:
        if root is not None:
            replace_parameters(root, {value: parameter for parameter, value in others.items()})
        for (parameter, notes), value in zip(before.items(), empty, strict=True):
            vars(parameter).update(notes)
            _empty(parameter, value)


def placeholder_of(parameter: Tensor, device: torch.device) -> nn.Parameter:
    """Returns a placeholder with the shape, strides and dtype of a parameter, which may be on the meta device."""
    empty = torch.empty((), dtype=parameter.dtype, device=device).expand(parameter.shape)
    placeholder = nn.Parameter(empty, requires_grad=False)
    setattr(placeholder, _STRIDE, tuple(parameter.stride()))
    _free(placeholder, device)
    return placeholder


def _free(parameter: nn.Parameter, device: torch.device) -> None:
    if not is_placeholder(parameter):
        setattr(parameter, _STRIDE, tuple(parameter.stride()))
    floating = parameter.dtype.is_floating_point or parameter.dtype.is_complex
    value = torch.full((), float("nan") if floating else 0, dtype=parameter.dtype, device=device)
    _empty(parameter, value.expand(parameter.shape))


def _empty(parameter: nn.Parameter, value: Tensor) -> None:
    parameter.grad = None
    with torch._C.DisableTorchFunction():
        parameter.data = value
    if type(parameter) is nn.Parameter:
        parameter.__class__ = ForeignParameter
