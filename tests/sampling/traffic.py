"""Bytes and messages of a request, as pure arithmetic: what ranks must have sent, as integers.

Per call of attention with `t` tokens of width `h`, on N ranks that hold a part of them each, if heads and tokens
divide evenly; the functions here count them as they are:

    Ulysses     heads for tokens, and back:    4 (N - 1) / N   e B t h   bytes of all ranks together
    ring        keys and values rotate:        2 (N - 1)       e B t h

Finds where a denoising loop would wait for a device, on a machine that has none.

Parameters, latents and timesteps count as the device's, and so does all that is computed from them or made on their
device, which says that it is `cpu:1`. A copy to any other device is the host's. Tables that schedulers make are the
host's, as they are on a GPU.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_diffpipe.planning.schedules.pipefusion import PipeFusionPlan
from lightning_diffpipe.sampling.pipefusion import PipeFusionSetting, SequenceParallel
from lightning_diffpipe.sampling.pipefusion.patch import Stages
from lightning_diffpipe.sampling.request import Request
from lightning_diffpipe.sampling.tracing.layout import AttentionSize, Layout, Part

CHANGE_BYTES = 16
"""Two sums of squares in float64: of the change of a rank's rows, and of the rows."""


def pipefusion_bytes(
    plan: PipeFusionPlan,
    cut_bytes: Sequence[int],
    latent_bytes: int,
    attention_bytes: tuple[int, int] = (0, 0),
) -> dict[str, int]:
    """Payload by kind, of all ranks; but for attention and a byte per decision independent of M, W and q.

    Args:
        plan: Of the request.
        cut_bytes: For each of the N - 1 cuts, bytes of everything that crosses it in one step: `e B p h`
            with cross-attention, `e B (p + T) h` with text tokens in joint attention, more where
            long skips cross. All visits together.
        latent_bytes: Of the full latents.
        attention_bytes: What the ranks of a stage send each other in one synchronous step, and in one of
            patches, all stages together; where no mask is made from tokens.
    """
    n, q = plan.num_ranks, plan.ranks_per_stage
    synchronous, patched = plan.num_synchronous, plan.num_steps - plan.num_synchronous
    sent = {"hidden": plan.num_steps * sum(cut_bytes)}
    if n > 1:
        sent["latents"] = (plan.num_steps - 1) * latent_bytes
    # The ranks of the last stage put their rows together; each then broadcasts in its own pipeline.
    sent["result"] = (q - 1 + q * (n - 1)) * latent_bytes
    sent["sequence"] = synchronous * attention_bytes[0] + patched * attention_bytes[1]
    sent |= _of_decisions(plan, CHANGE_BYTES)
    return {kind: size for kind, size in sent.items() if size}


def pipefusion_messages(
    plan: PipeFusionPlan, messages_per_call: Sequence[int], attention_messages: int = 0
) -> dict[str, int]:
    """Messages by kind, of all ranks.

    Args:
        plan: Of the request.
        messages_per_call: For each cut, messages across it in one turn: G, unless nothing crosses.
        attention_messages: Of one turn, all stages together.
    """
    n, q = plan.num_ranks, plan.ranks_per_stage
    synchronous, patched = plan.num_synchronous, plan.num_steps - plan.num_synchronous
    turns = synchronous * plan.warmup_microbatches + patched * plan.num_patches
    back = synchronous + patched * plan.num_patches
    sent = {"hidden": q * turns * sum(messages_per_call)}
    if n > 1:
        sent["latents"] = q * (back - (plan.num_patches if patched else 1))
    sent["result"] = q * (q - 1) + q * (n - 1)
    sent["sequence"] = turns * attention_messages
    sent |= _of_decisions(plan, 1)
    return {kind: count for kind, count in sent.items() if count}


def _of_decisions(plan: PipeFusionPlan, of_change: int) -> dict[str, int]:
    """The ranks of the last stage exchange their shares of a change; one byte then goes to all others."""
    q, decisions = plan.ranks_per_stage, sum(map(plan.decides_after, plan.turns))
    return {
        "statistics": q * (q - 1) * decisions * of_change,
        "control": decisions * (plan.num_ranks - 1) * q,
    }


def output_bytes(block) -> int:
    """Of all tokens that a block returns."""
    return sum(shape.nbytes for shape in block.shapes(Part()))


def cut_bytes(stages: Stages, layout: Layout) -> list[int]:
    """Bytes that cross each boundary between two ranks in one step, all tokens together."""
    return [
        sum(output_bytes(layout.blocks[call]) for visit in stage.outgoing for call in visit)
        for stage in stages.stages[:-1]
    ]


def messages_per_call(stages: Stages) -> list[int]:
    """Messages across each boundary in one call of `denoise`."""
    return [sum(map(bool, stage.outgoing)) for stage in stages.stages[:-1]]


def ulysses_bytes(size: AttentionSize, tokens: Sequence[int]) -> int:
    """Bytes sent by all ranks for one call.

    Args:
        size: Of the call.
        tokens: Of each rank.
    """
    n, total = len(tokens), 0

    def share(heads: int, rank: int) -> int:
        return heads * (rank + 1) // n - heads * rank // n

    for rank in range(n):
        for peer in range(n):
            if peer == rank:
                continue
            key_heads = share(size.key_heads, peer)
            there = share(size.heads, peer) * size.head_size
            there += key_heads * (size.head_size + size.value_size)
            back = share(size.heads, rank) * size.value_size
            total += tokens[rank] * there + tokens[peer] * back
    return total * size.batch * size.element_bytes


def ring_bytes(size: AttentionSize, tokens: Sequence[int]) -> int:
    """Bytes sent by all ranks for one call; see `ulysses_bytes`."""
    width = size.key_heads * (size.head_size + size.value_size)
    return (len(tokens) - 1) * sum(tokens) * width * size.batch * size.element_bytes


def attention_bytes(
    layout: Layout, mode: str, parts: Sequence[Part], samples: tuple[int, int] = (0, 1)
) -> int:
    """Bytes sent by the ranks that share the tokens of all blocks, for a share of the samples."""
    if len(parts) == 1:
        return 0
    total, of_call = 0, {"ulysses": ulysses_bytes, "ring": ring_bytes}[mode]
    for block in layout.blocks:
        for tokens, size in zip(block.attention, block.sizes, strict=True):
            if tokens is not None:
                here = Part(samples=samples).samples_of(size.batch)
                fewer = replace(size, batch=here.stop - here.start)
                total += of_call(fewer, [len(tokens.owned(part)) for part in parts])
    return total


def bytes_inside_stages(setting: PipeFusionSetting, mode: str) -> tuple[int, int]:
    """What the ranks of a stage send in one synchronous step and in one of patches, all stages together."""
    q, n = setting.plan.ranks_per_stage, setting.plan.warmup_microbatches
    # The rows that are a rank's own in patches are its own in synchronous steps.
    whole = [Part(tuple(shares[k].units for shares in setting.shares), (k, q)) for k in range(q)]
    synchronous = sum(attention_bytes(setting.layout, mode, whole, (k, n)) for k in range(n))
    return synchronous, sum(attention_bytes(setting.layout, mode, each) for each in setting.shares)


def messages_inside_stages(setting: PipeFusionSetting, mode: str) -> int:
    """Of one turn: there and back with Ulysses, once round in a ring."""
    calls = sum(t is not None for block in setting.layout.blocks for t in block.attention)
    q = setting.plan.ranks_per_stage
    return calls * (2 if mode == "ulysses" else 1) * q * (q - 1)


def sequence_bytes(sampler: SequenceParallel, layout: Layout, request: Request) -> dict[str, int]:
    """Payload of a whole request by kind, of all ranks together.

    Neither masks that are made from tokens count, nor predictions before guidance, which loops are given that
    bring rows together.
    """
    n, latents = sampler.sequence_links.num_ranks, request.latents
    parts = [Part(units, text=(k, n)) for k, units in enumerate(layout.split_units(n))]
    inside = attention_bytes(layout, sampler.sequence_mode, parts)
    out = (n - 1) * latents.numel() * latents.element_size()
    return {"sequence": request.num_steps * inside, "prediction": request.num_steps * out}


def assert_traffic_is_as_planned(samplers, request):
    """Bytes and messages, of all ranks together, as integers."""
    num_bytes, num_messages = Counter(), Counter()
    for sampler in samplers:
        num_bytes += sampler.statistics.traffic.bytes_sent
        num_messages += sampler.statistics.traffic.messages_sent
    first = samplers[0]
    layout = first.layouts.layout_for(request)
    setting = first.setting(layout, first.positions, request)
    plan = replace(setting.plan, warmup_steps=first.statistics.num_synchronous)
    latent_bytes = request.latents.numel() * request.latents.element_size()
    inside = bytes_inside_stages(setting, first.sequence_mode)
    # What crosses the cut and what returns is spread over two links each, but is not more.
    crossing = cut_bytes(setting.stages, layout)
    assert dict(num_bytes) == pipefusion_bytes(plan, crossing, latent_bytes, inside)
    assert dict(num_messages) == pipefusion_messages(
        plan,
        messages_per_call(setting.stages),
        messages_inside_stages(setting, first.sequence_mode),
    )


DEVICE = torch.device("cpu:1")
"""The device, by name: torch takes it for the CPU."""

WAITS = {"_local_scalar_dense", "equal", "nonzero", "masked_select", "_unique2"}
"""Operators whose results the host waits for: `item`, `bool`, comparisons, and shapes made of values."""


class Waits(TorchDispatchMode):
    """Counts what reads values of the device, by operator, as often as a step has ended."""

    def __init__(self) -> None:
        super().__init__()
        self.counted: Counter[str] = Counter()
        self.ends: list[Counter[str]] = []
        self._copies = _Copies(self.counted)

    def __enter__(self):
        self._copies.__enter__()
        return super().__enter__()

    def __exit__(self, *error):
        super().__exit__(*error)
        return self._copies.__exit__(*error)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        out = func(*args, **(kwargs or {}))
        if any(map(of_device, given)):
            name = func._schema.name.removeprefix("aten::")
            masks = name in ("index", "index_put_") and any(x.dtype == torch.bool for x in given)
            if name in WAITS or masks:
                self.counted[name] += 1
            pytree.tree_map_only(Tensor, on_device, out)
        return out

    def end_step(self, step: int) -> None:
        self.ends.append(self.counted.copy())

    def after(self, num_steps: int) -> Counter[str]:
        return self.ends[-1] - self.ends[num_steps - 1]


class _Copies(TorchFunctionMode):
    """Counts copies to the host as waits, and says where tensors are: on a CPU no operator of torch copies them."""

    def __init__(self, counted: Counter[str]) -> None:
        super().__init__()
        self.counted = counted

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func == Tensor.device.__get__:
            return DEVICE if of_device(args[0]) else func(*args)
        if func in (Tensor.cpu, Tensor.to):
            target = torch.device("cpu") if func is Tensor.cpu else target_of(*args, **kwargs)
            if target == DEVICE:
                return on_device(func(*args, **kwargs).view_as(args[0]))
            if target is not None and of_device(args[0]):
                self.counted["cpu"] += 1
                out = func(*args, **kwargs).clone()
                out.is_of_device = False
                return out
        elif func in (Tensor.tolist, Tensor.numpy) and of_device(args[0]):
            self.counted[func.__name__] += 1
        out = func(*args, **kwargs)
        return on_device(out) if kwargs.get("device") == DEVICE else out


def target_of(x: Tensor, *args, **kwargs) -> torch.device | None:
    """Returns where `x.to(...)` puts a tensor; None for where it is."""
    targets = [each for each in (*args, *kwargs.values()) if isinstance(each, Tensor)]
    if targets:
        return DEVICE if of_device(targets[0]) else targets[0].device
    kwargs.pop("copy", None)
    device, *_ = torch._C._nn._parse_to(*args, **kwargs)
    return device


def of_device(x: Tensor) -> bool:
    return getattr(x, "is_of_device", False)


def on_device(x: Tensor) -> Tensor:
    x.is_of_device = True
    return x


def request_on_device(request: Request) -> Request:
    """Puts what a request brings to a GPU on the device."""
    for x in (*request.model.parameters(), *request.model.buffers(), request.latents):
        on_device(x)
    request.scheduler = copy.deepcopy(request.scheduler)
    request.timesteps = on_device(request.timesteps.clone())
    request.scheduler.timesteps = request.timesteps
    return request
