"""`method="auto"`: measures a denoising step and the links, and lets the planner choose.

On rank 0, with the first request: one step is timed, whole and in two patches, attention and convolutions in it
are counted, and the model is probed for whether patches can flow through it. Weights are not needed for any of
that. On accelerators memory is measured, too. The choice itself is pure arithmetic, `planning/sampling_choice.py`.
Where a rehearsal then refuses what was chosen, the choice is made again among the rest.
"""

from __future__ import annotations

import re
import statistics
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_diffpipe.clock import clock_for
from lightning_diffpipe.errors import ConfigurationError, DiffPipeError, GraphError
from lightning_diffpipe.graph.placement import is_placeholder
from lightning_diffpipe.planning.cluster import Link
from lightning_diffpipe.planning.sampling_choice import (
    MIN_STEPS,
    DenoiserProfile,
    Refusal,
    SamplingChoice,
    SamplingWish,
    choose_sampling,
)
from lightning_diffpipe.sampling.call import Call
from lightning_diffpipe.sampling.distrifusion.bands import windows_of
from lightning_diffpipe.sampling.mesh import SamplingMesh
from lightning_diffpipe.sampling.methods import CHOOSABLE, MethodOptions, options_taken
from lightning_diffpipe.sampling.pipefusion import PipeFusion
from lightning_diffpipe.sampling.pipefusion.sequence_attention import divides_text
from lightning_diffpipe.sampling.rehearsal import (
    failing,
    is_out_of_memory,
    needing_memory,
    release_memory,
)
from lightning_diffpipe.sampling.request import Request
from lightning_diffpipe.sampling.tracing.layout import Layout
from lightning_diffpipe.sampling.tracing.marks import calls_answered

_REPEATS = 3


class Chooser:
    """Chooses how to run requests, on rank 0; others only hear of it.

    Args:
        model: The denoiser, perhaps a skeleton.
        link: Between any two ranks.
        num_ranks: Ranks there are.
        memory_bytes: What every rank has left; None means that it is no limit.
        options: Wishes, which are left as they are.
    """

    def __init__(
        self,
        model: Any,
        link: Link,
        num_ranks: int,
        memory_bytes: int | None,
        options: MethodOptions,
    ) -> None:
        self._model, self._link = model, link
        self._num_ranks, self._memory_bytes, self._options = num_ranks, memory_bytes, options
        self._measured: tuple[DenoiserProfile, int] | None = None  # with the number of steps
        self._refused: list[tuple[Refusal, DiffPipeError]] = []

    def choose(self, call: Call) -> MethodOptions:
        """Returns the fastest way that has not been refused, as measured with the first request.

        Args:
            call: The request; nothing in it is changed but the state of its generators.

        Returns:
            The options with everything that is decided.

        Raises:
            ConfigurationError: Nothing is as wished.
            DiffPipeError: The last refusal, if nothing is left; what was refused may then be tried again.
        """
        refused = tuple(refusal for refusal, _ in self._refused)
        wish = replace(wish_of(self._options), refused=refused)
        if self._measured is None:
            request = call.request(self._model)
            profile = profile_request(request, call.num_shares, call.branches)
            self._measured = profile, request.num_steps
        profile, num_steps = self._measured
        try:
            choice = choose_sampling(
                profile, self._link, self._num_ranks, num_steps, self._memory_bytes, wish
            )
        except ConfigurationError:
            if not self._refused:
                raise
            last = self._refused[-1][1]
            self._refused.clear()
            raise last from None
        options = self._options
        automatic = options.warmup_steps == "auto" and choice.warmup_steps is not None
        return replace(
            options,
            method=choice.method,
            mesh=SamplingMesh(**choice.axes),
            num_patches=choice.num_patches,
            warmup_steps="auto" if automatic else choice.warmup_steps,
            reason=choice.reason,
            further={**options_of(choice), **options.further},
        )

    def refuse(self, options: MethodOptions, error: DiffPipeError) -> None:
        """Takes something out of the choice: a method that the model cannot be sampled with, or else its mesh."""
        mixes = isinstance(error, GraphError)
        axes = None if mixes or options.mesh is None else asdict(options.mesh)
        # Functions after it hold a worker and latents.
        refusal = error.with_traceback(None)
        self._refused.append((Refusal(options.method, _short(error), axes), refusal))


def wish_of(options: MethodOptions) -> SamplingWish:
    """Returns what a choice has to keep to.

    Args:
        options: With `method="auto"`. One synchronous step, which is what they say by default, is no wish.

    Raises:
        ConfigurationError: No method takes the further options.
    """
    further, methods = options.further, None
    if further:
        methods = tuple(name for name in CHOOSABLE if set(further) <= options_taken(name))
        if not methods:
            raise ConfigurationError(f"method=auto: no method takes {', '.join(sorted(further))}")
    given = options.warmup_steps
    return SamplingWish(
        options.num_patches,
        given if isinstance(given, int) and given != 1 else None,
        options.data,
        options.guidance,
        options.parallel,
        options.sequence,
        further.get("mode", further.get("sequence_mode")),
        methods,
    )


def free_memory(device: torch.device) -> int | None:
    """Returns the bytes that are left on an accelerator; None for hosts, whose ranks share what there is."""
    if device.type != "cuda":
        return None
    free: int = torch.cuda.mem_get_info(device)[0]
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def options_of(choice: SamplingChoice) -> dict[str, Any]:
    """Returns the options of the method's own that were chosen."""
    name = {"sequence": "mode", "pipefusion": "sequence_mode"}.get(choice.method)
    return {name: choice.sequence_mode} if name and choice.sequence_mode else {}


@torch.inference_mode()
@needing_memory(
    "for the step that method=auto measures on one rank",
    "name a method and its mesh instead, such as method=pipefusion with parallel=, or draw fewer or smaller "
    "pictures at a time",
)
def profile_request(request: Request, num_samples: int, branches: int) -> DenoiserProfile:
    """Times one step of a request, which is not changed, and counts what the methods would have to send.

    Raises:
        ConfigurationError: This rank alone has too little memory for a step.
    """
    latents, timestep = request.latents, request.timesteps[0]
    with _Counted(request.model, latents.device) as counted:
        request.denoise(latents, timestep)
    step_s = _seconds(lambda: request.denoise(latents, timestep), latents.device)
    whole = DenoiserProfile(
        step_s=step_s,
        glue_s=0.0,
        num_samples=num_samples,
        branches=branches,
        num_blocks=0,
        num_units=latents.shape[-2],
        cut_bytes=0,
        latent_bytes=latents.numel() * latents.element_size(),
        weight_bytes=_missing_bytes(request.model),
        shares_tokens=False,
        **counted.counts,
    )
    patched = PipeFusion(request.model, num_patches=2, warmup_steps=0, verify=False)
    try:
        with failing("in 2 patches"):
            setting = patched.prepare(request)
            patch_s = _patch_s(request, patched, step_s)
        glue_s = min(_glue_s(request, setting.layout), step_s)
    except DiffPipeError as error:
        if error.__cause__ is not None and is_out_of_memory(error.__cause__):
            raise error.__cause__ from None  # says nothing of the model
        return replace(whole, refusal=_short(error))
    layout, blocks = setting.layout, setting.layout.blocks
    attention = [pair for b in blocks for pair in zip(b.attention, b.sizes, strict=True)]
    sizes = [size for tokens, size in attention if tokens is not None]
    return replace(
        whole,
        glue_s=glue_s,
        call_s=max(patch_s - glue_s, 0.0),
        num_blocks=len(layout.block_names),
        num_units=layout.num_units,
        cut_bytes=max(block.output_bytes for block in blocks),
        num_calls=max(Counter(block.name for block in blocks).values()),
        warmup_microbatches=setting.plan.warmup_microbatches,
        num_heads=min((size.heads for size in sizes), default=0),
        num_key_heads=min((size.key_heads for size in sizes), default=0),
        block_bytes=_missing_bytes(request.model, layout),
        shares_tokens=divides_text(layout),
    )


def _missing_bytes(model: nn.Module, layout: Layout | None = None) -> int:
    """Returns the bytes of weights that are yet to be loaded: of all, or of those in blocks that stages share."""
    blocks = ("",) if layout is None else tuple(f"{name}." for name in layout.block_names)
    everywhere = frozenset() if layout is None else layout.glue_parameters
    return sum(
        p.numel() * p.element_size()
        for name, p in model.named_parameters()
        if is_placeholder(p) and name.startswith(blocks) and name not in everywhere
    )


def _short(error: Exception) -> str:
    return re.split(r"[:;\n]", str(error), maxsplit=1)[0]


def _glue_s(request: Request, layout: Layout) -> float:
    """Returns seconds of a step with all blocks answering at once."""
    device, calls = request.latents.device, iter(())

    def stubbed(*_: Any) -> Any:
        block = next(calls)
        return block.nested(block.dummy(0.0, device))

    def run() -> Tensor:
        nonlocal calls
        calls = iter(layout.blocks)
        return request.denoise(request.latents, request.timesteps[0])

    with calls_answered(request.model, layout.block_names, stubbed):
        return _seconds(run, device)


def _patch_s(request: Request, patched: PipeFusion, step_s: float) -> float:
    """Returns what one more patch costs: a step in two patches less one without."""
    if request.num_steps < MIN_STEPS:
        return 0.0
    # The first step in patches fills caches, so the next two are timed.
    try:
        patched.sample(replace(request, timesteps=request.timesteps[:3], begin=None, stepped=None))
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        return 0.0  # not known: one rank keeps keys of all blocks here, of which a stage has its own only
    finally:
        release_memory()
    return min(max(min(patched.statistics.step_s[1:]) - step_s, 0.0), step_s)


def _seconds(function: Callable[[], Any], device: torch.device) -> float:
    clock, times = clock_for(device), []
    for _ in range(_REPEATS):
        clock.settle()
        start_s = time.perf_counter()
        function()
        clock.settle()
        times.append(time.perf_counter() - start_s)
    return statistics.median(times)


class _Counted(TorchFunctionMode):
    """Counts what looks beyond a row while a model runs; what the model is given, every band has whole.

    On accelerators it also measures the most memory that is held meanwhile; hosts do not count it.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        super().__init__()
        self._model, self._device, self._given = model, device, ()
        self.counts = Counter(key_value_bytes=0, sequence_bytes=0, num_attention=0)

    def __enter__(self) -> _Counted:
        def note(model: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
            self._given = (*args, *kwargs.values())

        self._hook = self._model.register_forward_pre_hook(note, with_kwargs=True)
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
            self._before = torch.cuda.memory_allocated(self._device)
        super().__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        self._hook.remove()
        if self._device.type == "cuda":
            most = torch.cuda.max_memory_allocated(self._device)
            self.counts["activation_bytes"] = most - self._before

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is F.scaled_dot_product_attention:
            # Some call it by position, others by name.
            given = dict(zip(("query", "key", "value"), args, strict=False)) | (kwargs or {})
            self._attention(given["query"], given["key"], given["value"])
        elif func in (F.conv2d, torch.conv2d):
            self._convolution(*args, **(kwargs or {}))
        elif func in (F.group_norm, torch.group_norm):
            self.counts["num_norms"] += 1
        return out

    def _attention(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        if query.shape[-2] != key.shape[-2]:
            return  # cross-attention: nothing to send
        size, keys = query.element_size(), key.numel() + value.numel()
        self.counts["num_attention"] += 1
        self.counts["key_value_bytes"] += keys * size
        self.counts["sequence_bytes"] += (2 * query.numel() + keys) * size

    def _convolution(self, input: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> None:
        border, (rows, _) = weight.shape[-2] // 2, windows_of(weight, *args, **kwargs)
        if input.dim() != 4 or not border or rows.is_patch:
            return
        if not any(input is x for x in self._given):
            batch, channels, _, width = input.shape
            self.counts["num_halos"] += 1
            self.counts["halo_bytes"] += batch * channels * border * width * input.element_size()
