"""Circumstances of results besides arguments, and their changes: rounding, code, settings, weights.

torch has two sets of names for how float32 is rounded. Once the newer ones are used, the older ones (`allow_tf32`,
`get_float32_matmul_precision`) raise a RuntimeError when they are read; the newer ones always answer.

Writes in place count up a tensor's version, and a replaced tensor is another object. Writes through `.data`, as in
many averages of weights, do neither: so some elements of each tensor are compared too.
"""

import contextlib
import hashlib
import inspect
import operator
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass, transform_subclass

from lightning_diffpipe.graph.layer import CONSTANT_TYPES


def float32_precisions() -> tuple[str, str, str]:
    """Returns the precision of products on GPUs, of convolutions on GPUs, and of products on CPUs.

    Each is "tf32" or "bf16" where inputs are rounded to that; "ieee" or "none" where they are not.

    Example:
        >>> float32_precisions()
        ('none', 'tf32', 'none')
    """
    backends = torch.backends
    return (
        backends.cuda.matmul.fp32_precision,
        backends.cudnn.conv.fp32_precision,
        backends.mkldnn.matmul.fp32_precision,
    )


def rounding_of(dtype: torch.dtype, device: torch.device, convolves: bool = True) -> float:
    """Returns the distance from 1 to the next number of a type in products: that of TF32 for float32 on a GPU.

    `convolves` says whether convolutions count, which may round to TF32 unless torch is told otherwise.
    """
    epsilon = float(torch.finfo(dtype).eps)
    if device.type != "cuda" or dtype != torch.float32:
        return epsilon
    products, convolutions, _ = float32_precisions()
    return 2.0**-10 if "tf32" in (products, convolutions if convolves else "") else epsilon


def module_digest(module: nn.Module) -> str:
    """Returns a hash of what a module computes: its code, structure, settings, weights and buffers."""
    digest = hashlib.sha256(f"{module!r} {torch.__version__}".encode())
    modules = list(module.modules())
    for code in dict.fromkeys(map(type, modules)):
        library = sys.modules.get(code.__module__.partition(".")[0])
        version = getattr(library, "__version__", None)
        if version is None:
            with contextlib.suppress(OSError, TypeError):  # typed in, or made on the fly
                version = inspect.getsource(code)
        digest.update(f"{code.__module__}.{code.__qualname__} {version or ''};".encode())
    for part in modules:
        digest.update(f"{_settings(part)};".encode())
    configs = {id(c): c for part in modules if (c := getattr(part, "config", None)) is not None}
    for config in configs.values():  # of diffusers or transformers
        values = config if isinstance(config, Mapping) else getattr(config, "to_dict", dict)()
        attention = getattr(config, "_attn_implementation", None)
        stored = sorted((str(k), repr(v)) for k, v in values.items() if k not in _OF_A_PLACE)
        digest.update(f"{type(config).__qualname__} {stored} {attention};".encode())
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        for plain in plain_tensors(tensor):
            digest.update(bytes_of(plain))
    return digest.hexdigest()


def settings_digest(module: nn.Module) -> str:
    """Hashes how a module computes, without its weights: classes, plain attributes, also of attention processors.

    It takes some ten milliseconds for a U-Net.
    """
    parts = []
    for part in module.modules():
        processor = vars(part).get("processor")  # one that is a module is a part itself
        attributes = sorted(getattr(processor, "__dict__", {}).items())
        of_processor = [(name, _plain(value)) for name, value in attributes]
        parts.append(f"{type(part).__qualname__} {_settings(part)} {of_processor}")
    return hashlib.sha256(";".join(parts).encode()).hexdigest()


OF_EVERY_MODULE = frozenset(vars(nn.Module())) - {"training"}
_OF_A_PLACE = ("name_or_path", "_name_or_path")  # the same weights in another folder are the same


def _settings(module: nn.Module) -> str:
    """Returns the plain attributes of a module, and the kinds of the others, such as attention processors."""
    return repr(
        [
            (name, _plain(value))
            for name, value in sorted(vars(module).items())
            if name not in OF_EVERY_MODULE
            and name not in _OF_A_PLACE
            and not isinstance(value, torch.device)
            and not callable(getattr(type(module), name, None))  # a wrapper around a method
        ]
        + [module.training]
    )


def _plain(value: Any) -> Any:
    if isinstance(value, CONSTANT_TYPES):
        return value
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    kind = value if callable(value) and hasattr(value, "__qualname__") else type(value)
    return f"{kind.__module__}.{kind.__qualname__}"


def circumstances() -> str:
    """Returns settings of the process that change results."""
    return repr((autocasts(), float32_precisions()))


def autocasts() -> list[tuple[str, str]]:
    """Returns kinds of devices under autocast, with its type."""
    kinds = filter(torch.is_autocast_enabled, ("cpu", "cuda"))
    return [(kind, str(torch.get_autocast_dtype(kind))) for kind in kinds]


def bytes_of(tensor: Tensor) -> memoryview:
    """Returns the bytes of a tensor, on the host and in one piece."""
    return memoryview(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())


def plain_tensors(tensor: Tensor) -> list[Tensor]:
    """Returns the tensors that hold the values of one: itself, or those inside of a quantized one."""
    if not is_traceable_wrapper_subclass(tensor):
        return [tensor]
    names, _ = tensor.__tensor_flatten__()
    return [plain for name in names for plain in plain_tensors(getattr(tensor, name))]


def with_plain_tensors(tensor: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
    """Returns a tensor like another one, with changed plain tensors inside; they are changed in their order."""
    if not is_traceable_wrapper_subclass(tensor):
        return change(tensor)
    inner = lambda _, each: with_plain_tensors(each, change)
    changed: Tensor = transform_subclass(tensor, inner)
    return changed


SAMPLED_BLOCKS = 4
BLOCK_BYTES = 4096


def digest_of_tensor(tensor: Tensor) -> str:
    """Returns the digest of a tensor in memory, mapped or not, from samples of its bytes (`SAMPLED_BLOCKS`)."""
    digest = hashlib.blake2b(f"{tensor.dtype} {list(tensor.shape)}".encode(), digest_size=16)
    for plain in plain_tensors(tensor.detach()):
        flat = plain.contiguous().reshape(-1).view(torch.uint8)
        blocks, rest = [flat], len(flat) - BLOCK_BYTES
        if len(flat) > SAMPLED_BLOCKS * BLOCK_BYTES:
            starts = (rest * i // (SAMPLED_BLOCKS - 1) for i in range(SAMPLED_BLOCKS))
            blocks = [flat[start : start + BLOCK_BYTES] for start in starts]
        for block in blocks:
            digest.update(block.cpu().numpy().tobytes())
    return digest.hexdigest()


_MOST_ENTRIES = 1000  # of a dict whose numbers are compared: larger ones are tables
_NUM_ELEMENTS = 16  # of each tensor that are compared
_NUM_UPDATES = 3  # of the optimizer, after which no GPU is waited for any more

_State = tuple[list[Tensor | None], list[int], list[int]]
"""Tensors, how often each was written, and its address."""


class Versions:
    """Versions of a module's tensors, which tell whether one was written in place, or replaced, since.

    So do numbers and texts of parts of it, in dicts, too, but for those that had changed by then:
    what runs in between changes them itself.

    A write through `.data` is seen by 16 elements, spread over the tensor. On GPUs they count until the optimizer
    has made three steps, as comparing waits for the device: averages of trained weights change with the first.
    """

    def __init__(
        self,
        root: nn.Module,
        parameters: Collection[str],
        buffers: Collection[str],
        parts: Collection[str] = (),
    ) -> None:
        modules = {m for part in parts for m in root.get_submodule(part).modules()}
        values = (value for m in modules for value in vars(m).values())
        dicts = [x for x in values if type(x) is dict and len(x) <= _MOST_ENTRIES]
        self._numbers = [
            (held, name)
            for held in (*map(vars, modules), *dicts)
            for name, value in held.items()
            if isinstance(value, int | float | str) and name != "training"
        ]
        self._values = self._present()
        self._places = [
            (module._parameters if key in module._parameters else module._buffers, key)
            for name, module, key in _places(root)
            if name in parameters or name in buffers
        ]
        self._num_updates = 0
        self._pieces: list[list[Tensor]] = []
        self._recorded: _State = [], [], []
        self.note()

    def note(self, before_update: bool = False) -> None:
        """Notes the present versions: changes count from now on; `before_update` if the optimizer steps next."""
        self._forget_changed(self._values)
        before, self._recorded = self._recorded, self._now()
        if not _same(before, self._recorded):  # pieces share the tensors' memory
            present = [tensor for tensor in self._recorded[0] if tensor is not None]
            self._pieces = _pieces([plain for tensor in present for plain in plain_tensors(tensor)])
        self._num_updates += before_update
        if self._num_updates >= _NUM_UPDATES:
            self._pieces = [pieces for pieces in self._pieces if not _waits_for(pieces[0])]
        self._elements = self._compared()

    @contextlib.contextmanager
    def changed_by_layers(self) -> Iterator[None]:
        """Forgets the numbers that change inside, where layers run: they set these themselves."""
        before = self._present()
        try:
            yield
        finally:
            self._forget_changed(before)

    def _forget_changed(self, before: list[Any]) -> None:
        """Compares those numbers no more that have changed since `before`."""
        places = zip(self._numbers, self._values, before, self._present(), strict=True)
        kept = [(p, value) for p, value, old, now in places if old is now or old == now]
        self._numbers, self._values = [p for p, _ in kept], [value for _, value in kept]

    def changed(self) -> bool:
        """Returns whether anything was written or replaced since; takes 1 ms for a thousand tensors, about."""
        if self._present() != self._values or not _same(self._recorded, self._now()):
            return True
        return not all(map(torch.equal, self._compared(), self._elements))

    def _present(self) -> list[Any]:
        return [attributes.get(name) for attributes, name in self._numbers]

    def _now(self) -> _State:
        # The tensors themselves, as the identity of one that is gone may be given to another.
        tensors = [
            held[key] if key in held else None  # noqa: SIM401, as scripted modules' have no `get`
            for held, key in self._places
        ]
        present = [tensor for tensor in tensors if tensor is not None]
        versions = [0 if tensor.is_inference() else tensor._version for tensor in present]
        return tensors, versions, list(map(Tensor.data_ptr, present))

    def _compared(self) -> list[Tensor]:
        # As bytes, as NaN equals nothing.
        return [torch.cat(pieces).view(torch.uint8) for pieces in self._pieces]


def _same(before: _State, now: _State) -> bool:
    return before[1:] == now[1:] and all(map(operator.is_, before[0], now[0]))


def _waits_for(tensor: Tensor) -> bool:
    """Returns whether the host waits for the device if it compares this version."""
    return tensor.device.type != "cpu"


def _pieces(tensors: Collection[Tensor]) -> list[list[Tensor]]:
    """Returns some elements of each tensor, as views, by dtype and device."""
    groups: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        layout = torch.channels_last if tensor.dim() == 4 else torch.contiguous_format
        is_dense = tensor.is_contiguous() or tensor.is_contiguous(memory_format=layout)
        if tensor.numel() and not tensor.is_meta and is_dense:
            step = max(1, tensor.numel() // _NUM_ELEMENTS)
            count = min(tensor.numel(), _NUM_ELEMENTS)
            piece = tensor.detach().as_strided((count,), (step,))
            groups.setdefault((tensor.dtype, tensor.device), []).append(piece)
    return list(groups.values())


def _places(root: nn.Module) -> list[tuple[str, nn.Module, str]]:
    return [
        (f"{name}.{key}" if name else key, module, key)
        for name, module in root.named_modules()
        for key in (*module._parameters.keys(), *module._buffers.keys())
    ]


def version_of(tensor: Tensor | None) -> int:
    """Returns how often a tensor was written; 0 for inference tensors, which do not count it."""
    return 0 if tensor is None or tensor.is_inference() else tensor._version
