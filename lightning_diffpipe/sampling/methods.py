"""The methods by name, which docs/sampling.md lists, and one rank's part in the chosen one."""

import functools
import inspect
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from lightning_diffpipe.comm.links import Alone, Links, Traffic
from lightning_diffpipe.comm.packing import TensorShape
from lightning_diffpipe.errors import (
    ConfigurationError,
    DiffPipeError,
    GraphError,
    require_choice,
    require_number,
)
from lightning_diffpipe.graph.placement import held_bytes, is_placeholder
from lightning_diffpipe.planning.cluster import Link
from lightning_diffpipe.planning.sampling_rule import (
    SamplingCase,
    SamplingChoice,
    ranked_choices,
    reason_for,
)
from lightning_diffpipe.sampling.call import Call
from lightning_diffpipe.sampling.distrifusion import DistriFusion
from lightning_diffpipe.sampling.loop import callbacks_in, settings_restored
from lightning_diffpipe.sampling.pipefusion import PipeFusion, SequenceParallel
from lightning_diffpipe.sampling.pipefusion.patch import resident_parameters
from lightning_diffpipe.sampling.pipefusion.sequence_attention import (
    SEQUENCE_MODES,
    refuse_without_normaliser,
)
from lightning_diffpipe.sampling.report import SamplingReport, SamplingStatistics
from lightning_diffpipe.sampling.request import OneProcess, Request, Sampler, require_warmup
from lightning_diffpipe.sampling.skeleton import load_weights
from lightning_diffpipe.sampling.source import Source
from lightning_diffpipe.sampling.step_caches import refuse_cache, refuse_cache_of, step_cache_named
from lightning_diffpipe.sampling.tracing.attention import compile_blocks, set_attention
from lightning_diffpipe.sampling.world import AXES, Axis, MeshLinks, SamplingMesh, World, fit_mesh

_WARMUP_STEPS = {"distrifusion": 4, "naive": 0}
"""Synchronous steps where none are asked for; 1 for other methods."""

CHOOSABLE = ("single", "sequence", "synchronous", "pipefusion", "distrifusion")
"""Those that `method="auto"` chooses among."""

_SAMPLERS: dict[str, type] = dict.fromkeys(AXES, DistriFusion)
_SAMPLERS |= {"single": OneProcess, "sequence": SequenceParallel, "pipefusion": PipeFusion}
_GIVEN = {"model", "links", "sequence_links", "num_patches", "warmup_steps"}


@dataclass(frozen=True)
class MethodOptions:
    """Method, mesh and further options by which ranks share the work.

    Attributes:
        method: One of `AXES`, or `"auto"`.
        num_patches: Patches of PipeFusion; None takes as many as stages.
        warmup_steps: Sampler warm-up: synchronous steps at the start, or `"auto"`; None takes what suits the
            method.
        data: Size of the data axis of the mesh, or None to leave it open; so are the next three.
        compile: `"blocks"` compiles the blocks that the denoiser repeats, when they are called for the first time.
        compile_backend: Backend of `torch.compile`.
        cache: Step cache of diffusers: `"first_block"`, `"pyramid_attention"`, `"taylor_seer"`, or a configuration
            such as `FirstBlockCacheConfig(threshold=0.1)`; see docs/sampling.md.
        attention: Kernel of the denoiser's attention, by diffusers' name, such as `"flash"`; None leaves it alone.
        decoding: `"auto"` divides calls of the decoder (tiles, images with `vae_slicing`) over all ranks,
            each of which then holds the autoencoder; `"rank_0"` leaves it to that rank.
        further: Options that only this method has.
        mesh: The mesh that was decided on; None before that.
        reason: Reason for the choice, if the method was chosen automatically.
    """

    method: str = "pipefusion"
    num_patches: int | None = None
    warmup_steps: int | str | None = 1
    data: int | None = None
    guidance: int | None = None
    parallel: int | None = None
    sequence: int | None = None
    compile: Literal["blocks"] | None = None
    compile_backend: str = "inductor"
    cache: Any = None
    attention: str | None = None
    decoding: Literal["auto", "rank_0"] = "auto"
    further: Mapping[str, Any] = field(default_factory=dict)
    mesh: SamplingMesh | None = None
    reason: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "cache", step_cache_named(self.cache))
        if self.warmup_steps is not None:
            require_warmup(self.warmup_steps)
        for name in ("num_patches", *get_args(Axis)):
            if getattr(self, name) is not None:
                require_number(name, getattr(self, name), 1, whole=True)
        require_choice("decoding", self.decoding, ("auto", "rank_0"))
        require_choice("compile", self.compile, (None, "blocks"))
        if self.num_patches is not None and self.method in AXES.keys() - {"pipefusion"}:
            raise ConfigurationError(
                f"num_patches={self.num_patches} is of method=pipefusion; method={self.method} has no patches, "
                "leave it out"
            )

    @property
    def synchronous_steps(self) -> int | str:
        """The requested sampler warm-up, or else the one that suits the method."""
        if self.warmup_steps is None:
            return _WARMUP_STEPS.get(self.method, 1)
        return self.warmup_steps

    @property
    def patches(self) -> int | None:
        """Patches of PipeFusion on the mesh; None for other methods."""
        return (self.num_patches or self.mesh.parallel) if self.method == "pipefusion" else None


def options_taken(method: str) -> set[str]:
    """Returns the names of a method's own options, without those that the Predictor sets itself."""
    sampler = _SAMPLERS[method]
    names = set(inspect.signature(sampler).parameters) - _GIVEN
    return names - {"mode"} if sampler is DistriFusion else names


def fitted(options: MethodOptions, num_ranks: int) -> MethodOptions:
    """Chooses the mesh, and refuses options that cannot work with any model, before one is loaded.

    Returns:
        The options with a mesh; with `method="auto"`, which is decided with the first request, as they are.

    Raises:
        ConfigurationError: There is no such method, mesh or option.
    """
    method, given = options.method, {axis: getattr(options, axis) for axis in get_args(Axis)}
    require_choice("method", method, (*AXES, "auto"))
    takers = [options_taken(name) for name in (CHOOSABLE if method == "auto" else (method,))]
    if unknown := sorted(set(options.further) - (taken := set().union(*takers))):
        raise ConfigurationError(
            f"method={method} takes no {unknown[0]!r}; it takes {', '.join(sorted(taken)) or 'none of its own'}, "
            "and those of MethodOptions"
        )
    if not any(set(options.further) <= names for names in takers):
        raise ConfigurationError(
            f"method=auto: no method takes {' and '.join(sorted(options.further))} together; leave one out"
        )
    if method == "auto":
        sizes = {axis: size for axis, size in given.items() if size is not None}
        if num_ranks % math.prod(sizes.values()) or sizes.get("guidance", 1) > 2:
            named = ", ".join(f"{axis}={size}" for axis, size in sizes.items())
            raise ConfigurationError(
                f"{num_ranks} ranks cannot be divided as {named}; choose sizes whose product divides {num_ranks}, "
                "with guidance 1 or 2, or leave them out"
            )
        for name in ("mode", "sequence_mode"):
            if name in options.further:
                require_choice(name, options.further[name], list(SEQUENCE_MODES))
        return options
    mesh = fit_mesh(num_ranks, method, **given)
    chosen = replace(options, mesh=mesh, warmup_steps=options.synchronous_steps)
    _refuse_hooks(chosen)
    make_sampler(nn.Identity(), Alone(), Alone(), chosen)  # checks their values
    return chosen


def _refuse_hooks(options: MethodOptions) -> None:
    """Raises ConfigurationError for compiled blocks, or a step cache, with which the method cannot work."""
    if options.compile and _SAMPLERS[options.method] is DistriFusion:
        raise ConfigurationError(
            f"compile=blocks: with method={options.method} ranks answer convolutions, norms and attention inside "
            "blocks, where compilers leave nothing to answer; take pipefusion, sequence or single, or leave it out"
        )
    refuse_cache(options.cache, options.method, options.mesh.num_ranks, bool(options.compile))


def prepare_denoiser(model: nn.Module, options: MethodOptions) -> None:
    """Chooses the kernel of a denoiser's attention, and compiles its blocks, of which no weights are needed yet.

    Raises:
        ConfigurationError: The denoiser has no such kernel or blocks, or nothing that its step cache could skip.
    """
    refuse_cache_of(model, options.cache)
    if options.attention is not None:
        set_attention(model, options.attention)
    if options.compile:
        compile_blocks(model, options.compile_backend)


def make_sampler(
    model: nn.Module, links: Links, sequence_links: Links, options: MethodOptions
) -> Sampler:
    """Builds the sampler of a rank; raises ConfigurationError for options that the method does not take."""
    given: dict[str, Any] = {"warmup_steps": options.synchronous_steps}
    try:
        match options.method:
            case "single":
                return OneProcess(**options.further)
            case "pipefusion":
                given |= {"num_patches": options.patches, "sequence_links": sequence_links}
                return PipeFusion(model, links, **given, **options.further)
            case "sequence":
                return SequenceParallel(model, sequence_links, **options.further)
            case mode:
                given["mode"] = "displaced" if mode == "distrifusion" else mode
                return DistriFusion(model, links, **given, **options.further)
    except TypeError as error:
        raise ConfigurationError(f"method={options.method}: {error}") from error


# ---------------------------------------------------------------------------------- method="auto"


class Chooser:
    """Chooses method and mesh of requests by the rule, on rank 0, which sends the choice to others.

    Args:
        model: The denoiser, perhaps a skeleton.
        link: Between any two ranks.
        device: Device of a rank.
        num_ranks: Number of ranks.
        memory_bytes: Free memory of every rank, in bytes; None for no limit.
        options: Options of the user, which are not changed.
    """

    def __init__(
        self,
        model: nn.Module,
        link: Link,
        device: torch.device,
        num_ranks: int,
        memory_bytes: int | None,
        options: MethodOptions,
    ) -> None:
        self._model, self._link, self._device = model, link, device
        self._num_ranks, self._memory_bytes, self._options = num_ranks, memory_bytes, options
        self._refused: list[tuple[MethodOptions, DiffPipeError]] = []

    def choose(self, call: Call) -> MethodOptions:
        """Returns the options with the first choice of the rule that they allow and that is not refused.

        Raises:
            ConfigurationError: They allow no choice.
            DiffPipeError: The last refusal, if nothing is left; what was refused may then be tried again.
        """
        case, options = self._case(call), self._options
        ranked = ranked_choices(case, options.num_patches)
        allowed = [
            choice
            for choice in ranked
            if set(options.further) <= options_taken(choice.method)
            and all(getattr(options, axis) in (None, size) for axis, size in choice.axes.items())
        ]
        if not allowed:
            sizes = ((axis, getattr(options, axis)) for axis in get_args(Axis))
            axes = ", ".join(f"{axis}={size}" for axis, size in sizes if size) or "asked"
            best: dict[str, SamplingMesh] = {}
            for each in ranked:
                best.setdefault(each.method, SamplingMesh(**each.axes))
            raise ConfigurationError(
                f"method=auto cannot use {self._num_ranks} ranks as {axes}; these fit this request, among others: "
                + "; ".join(f"{method} on {mesh}" for method, mesh in best.items())
            )
        for choice in allowed:
            decided = self._decided(choice)
            if self._is_refused(decided):
                continue
            try:
                refuse_request(call, decided)
            except ConfigurationError as error:  # no need to try
                self.refuse(decided, error)
                continue
            reasons = reason_for(choice, case), *dict.fromkeys(map(_as_reason, self._refused))
            return replace(decided, reason="; ".join(reasons))
        _, last = self._refused[-1]
        self._refused.clear()
        raise last from None

    def _decided(self, choice: SamplingChoice) -> MethodOptions:
        options = replace(
            self._options,
            method=choice.method,
            mesh=SamplingMesh(**choice.axes),
            num_patches=choice.num_patches,
            warmup_steps=None if self._options.warmup_steps == 1 else self._options.warmup_steps,
        )
        return replace(options, warmup_steps=options.synchronous_steps)

    def refuse(self, options: MethodOptions, error: DiffPipeError) -> None:
        """Records a method with which the model cannot be sampled, or else this choice, not to be tried again."""
        # Functions after it hold a worker and latents.
        self._refused.append((options, error.with_traceback(None)))

    def _case(self, call: Call) -> SamplingCase:
        convolutions = (m for m in self._model.modules() if isinstance(m, nn.Conv2d | nn.Conv3d))
        absent = (p for p in self._model.parameters() if is_placeholder(p))
        return SamplingCase(
            self._num_ranks,
            call.num_shares,
            2 if self._options.guidance == 2 else call.branches,
            len(call.timesteps),
            any(m.kernel_size[-2] > m.stride[-2] for m in convolutions),
            self._link.bandwidth_bytes_per_s,
            self._device.type,
            sum(map(held_bytes, absent)),
            self._memory_bytes,
        )

    def _is_refused(self, decided: MethodOptions) -> bool:
        return any(
            decided.method == options.method
            if isinstance(error, GraphError)
            else replace(decided, reason=options.reason) == options
            for options, error in self._refused
        )


def _as_reason(refused: tuple[MethodOptions, DiffPipeError]) -> str:
    options, error = refused
    where = "" if isinstance(error, GraphError) else f" on {options.mesh}"
    return (
        f"no {options.method}{where}: {re.split(r'[:;]|$', str(error), maxsplit=1, flags=re.M)[0]}"
    )


def free_memory(device: torch.device) -> int | None:
    """Returns the free bytes of an accelerator; None for hosts, whose ranks share memory."""
    if device.type != "cuda":
        return None
    free: int = torch.cuda.mem_get_info(device)[0]
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


# ------------------------------------------------------------------------------------ one rank


def refuse_request(call: Call, options: MethodOptions) -> None:
    """Raises ConfigurationError if ranks cannot share such a request by a method, whatever its denoiser is."""
    mesh, patches = options.mesh, options.patches or 1
    _refuse_hooks(options)
    # Ranks, or patches, share calls of the denoiser.
    if max(mesh.parallel, mesh.sequence, mesh.guidance, patches) > 1:
        call.refuse_steps(options.method)
        for phase in call.phases if mesh.guidance == 2 else ():
            replace(call, phases=[phase]).branch(0)
        if options.method == "pipefusion":
            call.refuse_rows(options.synchronous_steps)
    if patches > 1 and callbacks_in(call.pipeline.arguments):
        raise ConfigurationError(
            "a callback is given the latents of a step, which under PipeFusion ends for one patch after the "
            "other; leave it out, or take on_step=, num_patches=1 or another method"
        )
    if patches > 1 and "noise" in call.mixes:
        raise ConfigurationError(
            f"{call.pipeline.name} samples noise between its steps by torch's default generator, which under "
            "PipeFusion would be other noise for each patch; give it a generator there, or take num_patches=1 or "
            "another method"
        )


class Worker:
    """One rank's part in all requests of a predictor."""

    def __init__(
        self,
        source: Source,
        options: MethodOptions,
        world: World,
        device: torch.device,
        timeout_s: float,
    ) -> None:
        self.options, self.world = options, world
        self.mesh_links = MeshLinks(
            options.mesh, world.rank, device, world.backend, timeout_s,
            chained=options.method == "pipefusion",
        )  # fmt: skip
        self._model, self._weights = source.denoiser, source.weights
        self._sampler: Any = make_sampler(
            self._model, self.mesh_links.links, self.mesh_links.sequence_links, options
        )
        self._of_others: dict[str, Any] = {}  # samplers of further denoisers, by their names
        self._begin()

    def load(self, call: Call) -> dict[str, Any]:
        """Reads what this rank needs for a request before `sample`, whose messages do not wait for slow disks.

        Returns:
            What was decided about the request on the way, for `sample`.

        Raises:
            ConfigurationError: Ranks cannot share such a request by this method.
        """
        refuse_request(call, self.options)
        if self.mesh_links.mesh.sequence > 1 and self._sampler.sequence_mode == "ring":
            refuse_without_normaliser(self._model, call.latents.device)
        share = self._share(call)
        if not len(share.latents):
            return {}
        with call.sampling_alike(self.world.rank):
            return self._load(*self._request(share.phase(0, share.latents)))

    def sample(
        self, call: Call, on_step: Callable[[int], None], prepared: Mapping[str, Any]
    ) -> Tensor:
        """Runs a request with all ranks, when all have loaded.

        Returns:
            The final latents of this rank's share of the samples.

        Raises:
            DiffPipeError: With a note of whether messages are under way that cannot be taken back.
        """
        self._begin()
        share = self._share(call)
        latents, phases = share.latents, list[SamplingStatistics]()
        if not len(latents):
            return latents
        was_training = self._model.training
        self._model.eval()
        try:
            with call.sampling_alike(self.world.rank), settings_restored(call.pipeline.parts):
                for index, phase in enumerate(share.phases):
                    sampler, request = self._request(share.phase(index, latents))
                    latents = sampler.sample(
                        request,
                        lambda step, start=phase.start: on_step(start + step),
                        **({} if index else prepared),
                    )
                    phases.append(sampler.statistics)
            self.mesh_links.branches.finish()
        except DiffPipeError as error:
            error.leaves_messages = self.mesh_links.leaves_messages()
            raise
        finally:
            self._model.train(was_training)
        self._statistics = functools.reduce(SamplingStatistics.followed_by, phases)
        self._statistics.is_finite = bool(latents.isfinite().all())
        return latents

    def _begin(self) -> None:
        """Begins to count for a request."""
        self._statistics, self._sent_before = SamplingStatistics(), self._sent_outside()

    def _share(self, call: Call) -> Call:
        """Returns the request for the samples that ranks at this rank's position on the data axis have."""
        start, stop = self.mesh_links.shares_of(call.num_shares)[self.mesh_links.data]
        return call if stop - start == call.num_shares else call.samples(start, stop)

    def _request(self, call: Call) -> tuple[Any, Request]:
        """Returns the sampler of the request's denoiser, and the request for this rank's branch of guidance."""
        exchange = None
        if self.mesh_links.mesh.guidance == 2:
            call, exchange = call.branch(self.mesh_links.guidance), self.mesh_links.exchange
        if call.denoiser == call.pipeline.denoisers[0]:
            sampler, model = self._sampler, self._model
        else:
            model = call.pipeline.parts[call.denoiser]
            if call.denoiser not in self._of_others:
                prepare_denoiser(model, self.options)
                links = self.mesh_links.links, self.mesh_links.sequence_links
                self._of_others[call.denoiser] = make_sampler(model, *links, self.options)
            sampler = self._of_others[call.denoiser]
        is_shared = self.options.method != "single" or self.options.cache is not None
        if is_shared and getattr(model, "is_cache_enabled", False):
            raise ConfigurationError(
                f"{call.denoiser} has a step cache of its own (enable_cache), which works with method=single only; "
                "take it off (disable_cache), and give cache= to the Predictor"
            )
        halves = (self.mesh_links.branches,) if call.divided == "batch" else ()
        request = replace(call.request(model, exchange), cache=self.options.cache, halves=halves)
        sampler.model = request.model  # with the ControlNets of this request
        return sampler, request

    def _load(self, sampler: Any, request: Request) -> dict[str, Any]:
        """Reads weights that no earlier request has needed; returns further arguments of the sampler."""
        if self._weights is None:
            return {}
        if more := self._model.state_dict().keys() - self._weights.names():
            raise ConfigurationError(
                f"the {type(self._model).__name__} has {len(more)} tensors, such as {min(more)}, that it did not "
                "have when it was opened; weights are read at the first request, and nothing can be made of them "
                "before, as fuse_qkv_projections does: leave that out, and open LoRA files by loras={FILE: SCALE}"
            )
        absent = {name for name, p in self._model.named_parameters() if is_placeholder(p)}
        if self.options.method != "pipefusion" or self.mesh_links.links.num_ranks == 1:
            load_weights(self._model, self._weights, absent)
            self._weights = None
            return {}
        setting = sampler.prepare(request)
        rank = self.mesh_links.links.rank
        parameters = dict(request.model.named_parameters())
        names = resident_parameters(request.model, setting.layout, setting.stages, rank)
        resident = {id(parameters[name]) for name in names}
        names = {name for name, p in self._model.named_parameters() if id(p) in resident}
        if names & absent:
            load_weights(self._model, self._weights, names & absent)
        return {"setting": setting}

    def gather(self, call: Call, latents: Tensor) -> Tensor:
        """Brings the latents of all positions of the data axis to rank 0, when all ranks have sampled.

        Returns:
            On rank 0 the final latents of all samples; elsewhere what was given.
        """
        mesh, links = self.mesh_links.mesh, self.world.links
        if mesh.data == 1:
            return latents
        shares = self.mesh_links.shares_of(call.num_shares)
        leads = (
            self.mesh_links.guidance == self.mesh_links.parallel == self.mesh_links.sequence == 0
        )
        if self.world.rank != 0:
            if leads and len(latents):
                links.send(latents, 0, "result")
                links.finish()
            return latents
        whole = latents.new_empty(call.phases[-1].shape)
        for position, (start, stop) in enumerate(shares):
            rows = call.rows_of(start, stop)
            if rows and position > 0:
                shape = TensorShape((len(rows), *whole.shape[1:]), latents.dtype)
                sender = position * (mesh.num_ranks // mesh.data)
                latents = links.receive(shape, sender, "result").wait()
            whole[rows] = latents[: len(rows)]
        return whole

    def report(self) -> SamplingStatistics:
        """Returns the statistics of the last request, with what was sent outside the sampler.

        Between halves of guidance, and as final latents to rank 0.
        """
        outside = self._sent_outside().since(self._sent_before)
        resident = (p for p in self._model.parameters() if not is_placeholder(p))
        return replace(
            self._statistics,
            traffic=self._statistics.traffic.plus(outside),
            resident_bytes=sum(map(held_bytes, resident)),
        )

    def _sent_outside(self) -> Traffic:
        """Returns the bytes sent so far outside the sampler."""
        return self.mesh_links.branches.traffic.plus(self.world.links.traffic)


def merge(
    options: MethodOptions, num_steps: int, whole_bytes: int, ranks: Sequence[SamplingStatistics]
) -> SamplingReport:
    """Joins the statistics of all ranks, in their order; the denoiser has `whole_bytes`."""
    traffic = functools.reduce(Traffic.plus, (rank.traffic for rank in ranks))
    steps = [median(rank.step_s) for rank in ranks if rank.step_s]
    approximate = options.method in ("pipefusion", "distrifusion", "naive")
    warmup_steps = options.warmup_steps
    if not isinstance(warmup_steps, int):
        synchronous = (rank.num_synchronous for rank in ranks)
        warmup_steps = next((steps for steps in synchronous if steps is not None), None)
    return SamplingReport(
        method=options.method,
        mesh=str(options.mesh),
        num_patches=options.patches,
        warmup_steps=warmup_steps if approximate else None,
        reason=options.reason,
        num_steps=num_steps,
        step_s=max(steps, default=0.0),
        sampling_s=max(rank.total_s for rank in ranks),
        bytes_sent=dict(traffic.bytes_sent),
        messages_sent=dict(traffic.messages_sent),
        resident_bytes=[rank.resident_bytes for rank in ranks],
        whole_bytes=whole_bytes,
    )
