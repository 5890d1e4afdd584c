"""Devices on paper, and profiles of models that one cannot run here: exact sizes, modelled times.

The model is on the meta device, its training step is probed like any other, and then run without values under a
clock that shows what a device on paper would need: the roofline model with stated efficiencies, plus a latency for
every kernel that is started.

    seconds = latency + max(FLOPs / (peak x efficiency of its class), bytes / (bandwidth x efficiency))

So parameter, boundary and activation bytes and FLOPs are those of the real model, and times are estimates. Peaks
and bandwidths are the vendors'; efficiencies are shares of the peak that large operators of a class commonly reach
in PyTorch. From the same peaks comes what a run makes of its devices:

    MFU = FLOPs per sample x samples per second / (peak FLOP/s of a device x devices)

Counted are matrix products, convolutions and attention, once, however often the work is done.

Sources:
    roofline, Williams et al. (2009), https://doi.org/10.1145/1498765.1498785
    model FLOPs utilization, Chowdhery et al. (2022), https://arxiv.org/abs/2204.02311
"""

import contextlib
import functools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from lightning_diffpipe.clock import Clock
from lightning_diffpipe.errors import ConfigurationError
from lightning_diffpipe.graph.calltree import tensors_in
from lightning_diffpipe.graph.interception import Interception
from lightning_diffpipe.graph.layer import LayerGraph
from lightning_diffpipe.graph.placement import quantized
from lightning_diffpipe.graph.probe import probe
from lightning_diffpipe.graph.sizes import layer_sizes
from lightning_diffpipe.graph.step import Step
from lightning_diffpipe.planning.profile import ModelProfile
from lightning_diffpipe.profiling.layer_costs import MeasuredCosts, Seen, encodings
from lightning_diffpipe.profiling.step_run import (
    Backward,
    StepRun,
    StepTimes,
    kept_bytes,
    saved_bytes,
    scratch_gradients,
)

TERA = 1e12
EFFICIENCY = {"matmul": 0.6, "convolution": 0.4, "attention": 0.4, "memory": 0.7}


@dataclass(frozen=True)
class DeviceModel:
    """A device on paper.

    Attributes:
        peak_flops: Peak FLOP/s of dense matrix products, by name of the type.
        bandwidth_bytes_per_s: Bandwidth of its memory.
        latency_s: Seconds to start a kernel, while kernels before it still run.
        efficiency: Share of the peak that is reached: "matmul", "convolution", "attention" of the FLOP/s, "memory"
            of the bandwidth.
    """

    name: str
    peak_flops: Mapping[str, float]
    bandwidth_bytes_per_s: float
    latency_s: float = 4e-6
    efficiency: Mapping[str, float] = field(default_factory=lambda: EFFICIENCY)

    def seconds(self, kind: str, flops: float, num_bytes: float, dtype: torch.dtype) -> float:
        """Returns the time of one operator of a class ("memory" for all but matrix products)."""
        moved_s = num_bytes / (self.bandwidth_bytes_per_s * self.efficiency["memory"])
        if kind == "memory":
            return self.latency_s + moved_s
        computed_s = flops / (self.peak_of(dtype) * self.efficiency[kind])
        return self.latency_s + max(computed_s, moved_s)

    def peak_of(self, dtype: torch.dtype) -> float:
        """Returns the peak FLOP/s for a type; that of single precision for types that are not listed."""
        return self.peak_flops.get(str(dtype).removeprefix("torch."), self.peak_flops["float32"])


def _gpu(name: str, half: float, single: float, terabytes_per_s: float) -> DeviceModel:
    peaks = {"bfloat16": half * TERA, "float16": half * TERA, "float32": single * TERA}
    return DeviceModel(name, peaks, terabytes_per_s * TERA)


# Dense tensor-core peaks (float32 as TF32 where the device has it) and bandwidths, vendors' data sheets.
DEVICES = {
    "t4": DeviceModel("t4", {"float16": 65 * TERA, "float32": 8.1 * TERA}, 0.32 * TERA),
    "v100": DeviceModel("v100", {"float16": 125 * TERA, "float32": 15.7 * TERA}, 0.9 * TERA),
    "v100_pcie": DeviceModel(
        "v100_pcie", {"float16": 112 * TERA, "float32": 14 * TERA}, 0.9 * TERA
    ),
    "a10g": _gpu("a10g", 70, 35, 0.6),
    "rtx4090": _gpu("rtx4090", 165, 82.6, 1.008),
    "a100": _gpu("a100", 312, 156, 2.039),
    "h100": _gpu("h100", 989, 494, 3.35),
    "h100_pcie": _gpu("h100_pcie", 756, 378, 2.0),
    "h200": _gpu("h200", 989, 494, 4.8),
}


def device_named(device: str | DeviceModel) -> DeviceModel:
    """Returns the device of a name, or raises ConfigurationError if there is none."""
    if isinstance(device, DeviceModel):
        return device
    if device not in DEVICES:
        raise ConfigurationError(
            f"there is no device model {device!r}; choose one of {', '.join(DEVICES)}, "
            "or pass a DeviceModel"
        )
    return DEVICES[device]


class ModelledClock(TorchDispatchMode):
    """A clock that shows the time a device on paper would have spent on what was run meanwhile.

    Values are not computed. An operator that was run on tensors of these sizes before is not run again: on the meta
    device most are written in Python, and blocks of a model are all alike.
    """

    def __init__(self, device: DeviceModel) -> None:
        super().__init__()
        self._device = device
        self._now_s = 0.0
        self._known: dict[Any, tuple[Any, float, float]] = {}
        self.flops = 0.0

    def stamp(self) -> float:
        """See `Clock`."""
        return self._now_s

    def settle(self) -> None:
        """See `Clock`."""

    def seconds(self, start: float, stop: float) -> float:
        """See `Clock`."""
        return stop - start

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        call = _call_of(func, args, kwargs)
        if call in self._known:
            make, flops, spent_s = self._known[call]
            out = make()
        else:
            out = func(*args, **kwargs)
            flops, spent_s = self._cost(func, args, kwargs, out)
            make = _maker(out, (args, kwargs))
            if call is not None and make is not None:
                self._known[call] = make, flops, spent_s
        self.flops += flops
        self._now_s += spent_s
        return out

    def _cost(self, func: Any, args: Any, kwargs: Any, out: Any) -> tuple[float, float]:
        """Returns FLOPs and seconds of an operator."""
        written = tensors_in(out)
        # `_unsafe_view` is a view that autograd does not know; it follows every batched product.
        is_view = func.is_view or func.overloadpacket is torch.ops.aten._unsafe_view
        if is_view or not written or func.__name__.startswith("empty"):
            return 0.0, 0.0
        moved = {id(t): t for t in (*tensors_in((args, kwargs)), *written)}.values()
        # An expanded tensor is as small as its storage.
        num_bytes = sum(min(t.nbytes, t.untyped_storage().nbytes()) for t in moved)
        count = flop_registry.get(func.overloadpacket)
        flops = float(count(*args, **kwargs, out_val=out)) if count is not None else 0.0
        kind = "memory"
        if flops:
            names = {"attention": "attention", "conv": "convolution", "": "matmul"}
            kind = next(kind for part, kind in names.items() if part in func.__name__)
        return flops, self._device.seconds(kind, flops, num_bytes, written[0].dtype)


@functools.cache
def _is_pure(func: Any) -> bool:
    arguments = func._schema.arguments, func._schema.returns
    return not any(each.alias_info for each in chain(*arguments))


def _call_of(func: Any, args: Any, kwargs: Any) -> tuple[Any, ...] | None:
    """Returns what outputs and cost of an operator depend on, None if it may return or write its inputs."""
    if not _is_pure(func):
        return None
    seen: dict[int, int] = {}

    def of(value: Any) -> tuple[Any, ...]:
        if isinstance(value, Tensor):
            number = seen.setdefault(id(value), len(seen))  # the same one is read once
            num_bytes = value.untyped_storage().nbytes()
            return number, value.shape, value.stride(), value.dtype, value.device, num_bytes
        if isinstance(value, list | tuple):
            return tuple(map(of, value))
        return type(value), value

    return func, of(args), *((name, of(value)) for name, value in kwargs.items())


def _maker(out: Any, inputs: Any) -> Callable[[], Any] | None:
    """Returns what makes outputs like these; None if they are not tensors of their own on the meta device."""
    if isinstance(out, list | tuple):
        kind, makers = type(out), [_maker(each, inputs) for each in out]
        return None if None in makers else lambda: kind(make() for make in makers if make)
    if out is None:
        return lambda: None
    if type(out) is not Tensor or out.device.type != "meta":
        return None
    storage, shape, stride, dtype = out.untyped_storage(), out.shape, out.stride(), out.dtype
    make = lambda: torch.empty_strided(shape, stride, dtype=dtype, device="meta")
    is_own = all(storage._cdata != t.untyped_storage()._cdata for t in tensors_in(inputs))
    return make if is_own and make().untyped_storage().nbytes() == storage.nbytes() else None


@contextlib.contextmanager
def fused_attention() -> Iterator[None]:
    """Lets attention be one fused operator inside, as it is on a GPU; masks are left out, as they cost nothing."""
    plain = F.scaled_dot_product_attention

    def fused(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if query.ndim == 3:
            return fused(query[None], key[None], value[None])[0]
        return torch.ops.aten._scaled_dot_product_efficient_attention(
            query, key, value, None, torch.is_grad_enabled()
        )[0]

    F.scaled_dot_product_attention = fused
    try:
        yield
    finally:
        F.scaled_dot_product_attention = plain


_DTYPES = {"bf16": torch.bfloat16, "16": torch.float16}

# A driver's name is taken word by word: an RTX A1000 is no A100. The first that has all its words counts.
_BY_WORDS = (
    (("t4",), "t4"),
    (("v100", "pcie"), "v100_pcie"),
    (("v100",), "v100"),
    (("a10g",), "a10g"),
    (("rtx", "4090"), "rtx4090"),
    (("a100",), "a100"),  # the peak of its PCIe card is the same
    (("h100", "pcie"), "h100_pcie"),
    (("h100",), "h100"),
    (("h200",), "h200"),
    (("gh200",), "h200"),
)
_OTHERS = {"laptop", "mig", "grid", "nvl", "fhhl", "d", "max"}
"""Words of cards, or parts of them, whose peak is another one and not known here."""


def flops_per_sample(graph: LayerGraph) -> float:
    """Returns FLOPs of one training step for one sample.

    A layer with trained weights costs three times its forward, one that only passes gradients on twice, one that
    is frozen or that no gradient reaches (an estimate under `torch.no_grad`) once.
    """
    total = 0
    for layer in graph.layers:
        forward_only = layer.frozen or not layer.carries_gradient
        passes = 1 if forward_only else 3 if layer.parameters & graph.trained else 2
        total += passes * layer.cost_flops
    return total / (graph.num_samples or 1)


def peak_flops(device: torch.device, precision: str) -> float | None:
    """Returns the vendor's peak FLOP/s of dense matrix products, None where it is not known, as for CPUs.

    For single precision it is that of TF32, where the device has it. `precision` is Lightning's name,
    `"bf16-mixed"`.
    """
    if device.type != "cuda":
        return None
    return peak_of_name(torch.cuda.get_device_name(device), precision)


def peak_of_name(name: str, precision: str) -> float | None:
    """Returns the peak of a device by the name that its driver gives it; see `peak_flops`.

    Example:
        >>> peak_of_name("NVIDIA H100 80GB HBM3", "bf16-mixed"), peak_of_name("Radeon", "32-true")
        (989000000000000.0, None)
    """
    words = set(re.findall("[a-z0-9]+", name.lower()))
    if words & _OTHERS:
        return None
    model = next((DEVICES[key] for parts, key in _BY_WORDS if words.issuperset(parts)), None)
    if model is None:
        return None
    return model.peak_of(_DTYPES.get(precision.split("-")[0], torch.float32))


_NUM_PROBED_SAMPLES = 2


def modelled(
    title: str,
    module: nn.Module,
    step: Step,
    batch: Callable[[int], Any],
    denoiser: str,
    device: DeviceModel,
    sample_counts: Sequence[int] = (1, 8),
) -> ModelProfile:
    """Returns the profile of a module on the meta device, as a device on paper would run it.

    `batch` makes a batch of some number of samples. `denoiser` names the part that reads noise; all other frozen
    parts follow from the sample alone. Each use of a quantized weight, forward or backward, writes a plain one.
    """

    def seen_on_paper(graph: LayerGraph) -> Seen:
        of_samples = (i for i in graph.frozen if not graph.layers[i].name.startswith(denoiser))
        return Seen(frozenset(of_samples), frozenset())

    probed = batch(_NUM_PROBED_SAMPLES)

    def run(count: int, backward: Backward) -> StepTimes:
        call = partial(step, module, batch(count))
        with ModelledClock(device) as clock:
            return StepRun(graph, clock).measure(call, interception, backward)

    with fused_attention():
        graph = probe(module, step, probed, mode="real")  # fakes of fakes have no integers
        interception = Interception(module, graph.layer_names)
        on_paper = quantized(module, torch.device("meta"))
        with on_paper, interception.installed(), scratch_gradients(module, graph.trained):
            rounds = {n: ([run(n, "whole")], [run(n, "inputs")]) for n in sample_counts}
        forward = StepRun(graph, Clock())
        known_tensors = [*module.parameters(), *module.buffers()]
        with interception.installed(), saved_bytes(forward, known_tensors) as saved:
            forward.forward_only(partial(step, module, probed), interception)
        encoder_results = encodings(module, step, probed, graph, seen_on_paper)
    stored = kept_bytes({_NUM_PROBED_SAMPLES: saved})
    sizes = layer_sizes(module, graph, title)
    rate = device.bandwidth_bytes_per_s * device.efficiency["memory"]
    profile = MeasuredCosts(sizes, graph, rounds, stored, None, encoder_results).profile()
    return replace(profile, memory_bytes_per_s=rate)
