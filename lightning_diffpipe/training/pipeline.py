"""One rank's side of a pipeline, and the module around it, from the first step until the module is whole again.

`preparation.py` makes it from a plan. Here is what is asked between steps: whether anything was changed or
unfrozen, who trains what, and whether a step is still the one that was probed (`StepWatch`). What a stage runs and
sends was decided by one probe of the step before training. A branch on the epoch, or a call of `.train()`, may
change later what the step reads. Three things show it:

    modes        a module is in training mode that was not, or the other way round
    gradients    a parameter got one that had none coming, so that nobody would put it aside
    not finite   the loss is NaN: dummies are, so it may have read one

With other modes, and when a loss is not finite for the first time, the step is traced again, and if it has changed
the run ends and says what was changed. With other modes a step that needs values runs for this on what a rank
holds, with NaN for the rest; if that fails, a warning says what may be wrong. A loss or gradients that are not
finite are allowed for some steps: training may diverge, too.
"""

import contextlib
import logging
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from lightning_diffpipe.comm.mesh import Mesh, broadcast_object, gathered_objects
from lightning_diffpipe.errors import ConfigurationError, DivergenceError, GraphError, raised_by_all
from lightning_diffpipe.graph.interception import Interception
from lightning_diffpipe.graph.layer import LayerGraph
from lightning_diffpipe.graph.placement import (
    held_bytes,
    is_placeholder,
    leave_on_host,
    load_back,
    make_plain,
    may_be_offloaded,
    offload,
    restore_parameter,
    stored_value,
    take_from_files,
)
from lightning_diffpipe.graph.versions import Versions
from lightning_diffpipe.planning.cluster import Cluster
from lightning_diffpipe.planning.plan import PipelinePlan
from lightning_diffpipe.planning.profile import ModelProfile
from lightning_diffpipe.runtime.batch_layout import BatchLayout, microbatches
from lightning_diffpipe.runtime.engine import Engine, StepResult
from lightning_diffpipe.runtime.optimizer_states import OptimizerOffload, OptimizerSharding
from lightning_diffpipe.runtime.ownership import spread
from lightning_diffpipe.runtime.relay import RelayRun, RelayView
from lightning_diffpipe.runtime.upcoming import begin_copy_to_host
from lightning_diffpipe.training.patching import patched

_log = logging.getLogger(__name__)
_TRAINING = attrgetter("training")
_REMEDY = (
    "Branches on what hooks set or on values must read the same layers and train the same parameters "
    "from the first step on: multiply a term by 0 until it shall count, instead of leaving it out"
)
_NOT_FINITE = (
    "Either training diverges: lower the learning rate or clip gradients; check_finite=True finds the layer. Or "
    "the step reads since then what it did not read when it was probed, and gets NaN for what nobody sends. "
    f"{_REMEDY}"
)


@dataclass(frozen=True)
class _Finite:
    """Finiteness of the loss of a step, and of its gradients, if they are whole, once `event` has happened."""

    finite: Tensor
    event: torch.cuda.Event | None
    loss: Tensor
    number: int


@dataclass(eq=False)
class StepWatch:
    """Compares what one rank's steps do with what was probed.

    Attributes:
        module: The module, its training flags as they were probed.
        layout: Lays batches out, and knows the cut steps.
        idle: Parameters of this rank that could be trained, but get no gradient, by name.
        num_diverged: Optimizer steps in a row, up to the latest that was checked, with a gradient of this rank
            that is not finite, or a loss where there is one pipeline: of several each has a loss of its own, and
            gradients are summed over all, so that they agree.
        last_finite: The latest batch with a finite loss, and that loss; equal on all ranks of a pipeline.
    """

    module: nn.Module
    layout: BatchLayout
    idle: Mapping[str, nn.Parameter]
    num_diverged: int = 0
    last_finite: tuple[int, Tensor] | None = None

    def __post_init__(self) -> None:
        # Walking through a large module takes milliseconds.
        self._modules = tuple(self.module.modules())
        self._modes = self._current_modes()
        self._warned = False
        self._under_way: _Finite | None = None
        self._latest: tuple[Any, ...] = ()

    def before_step(self, batch: Any, arguments: tuple[Any, ...]) -> None:
        """Checks training flags; takes microseconds as long as they are as they were.

        Raises:
            ConfigurationError: They are not, and the step samples other random numbers or writes other
                buffers because of it; names the modules.
        """
        modes, self._latest = self._current_modes(), (batch, arguments)
        if modes == self._modes:
            return
        try:
            self._require_unchanged()
        except Exception as error:
            if isinstance(error, GraphError) or not self.layout.steps.needs_values:
                raise ConfigurationError(
                    f"{self._changed_modes()}, and stages would not agree on it ({error}). Set modes before "
                    "trainer.fit, e.g. in __init__"
                ) from error
            # The user's code may refuse NaN, and the device may be too small for the whole step.
            _log.warning(
                "%s. Stages agree on it if the step draws the same random numbers and writes the same buffers, "
                "which cannot be found out, as it needs values (%s: %s). Set modes before trainer.fit, e.g. in "
                "__init__",
                self._changed_modes(), type(error).__name__, error,
            )  # fmt: skip
        self._modes = modes

    def _require_unchanged(self) -> None:
        batch, arguments = self._latest
        number, steps = self.layout.schedule.num_microbatches, self.layout.steps
        steps.require_unchanged(microbatches(batch, number, steps.batch_spec)[0], arguments)

    def _changed_modes(self) -> str:
        changed = [
            f"{name or 'the module itself'} ({'train' if module.training else 'eval'})"
            for (name, module), mode in zip(self.module.named_modules(), self._modes, strict=False)
            if module.training != mode
        ]
        return (
            f".train() or .eval() was called since the step was probed: {len(changed)} modules are in another "
            f"mode, e.g. {', '.join(changed[:3])}"
        )

    def after_step(
        self, loss: Tensor, number: int, gradients: Sequence[Tensor | None] | None = ()
    ) -> None:
        """Checks the gradients and the loss; on a GPU those of the step before.

        Args:
            loss: Loss of the step.
            number: The batch's, since training began.
            gradients: Those of this rank, summed over all ranks and an accumulation window; None before its end.

        Raises:
            GraphError: The step has changed since it was probed; says what it reads now.
        """
        for name, parameter in self.idle.items():
            if parameter.grad is not None:
                raise GraphError(
                    f"{name} got a gradient, though the loss did not read it when the step was probed, so "
                    f"that it would never be trained. {_REMEDY}"
                )
        values = _values(loss, number, gradients)
        before, self._under_way = self._under_way, values
        if values.event is None:
            self.finish()
        elif before is not None:  # nobody waits for the device
            self._examine(before)

    def has_diverged(self, allowed: int | None) -> bool:
        """Returns whether more steps in a row were not finite than are allowed; None allows all."""
        return allowed is not None and self.num_diverged >= allowed

    def refuse_divergence(self, allowed: int | None, global_step: int, result: StepResult) -> None:
        """Raises DivergenceError on all ranks, in the step in which all know that one has diverged."""
        if not result.alarm:
            return
        before = "none was"
        if self.last_finite:
            number, loss = self.last_finite
            before = f"the last finite one was {loss:.4g}, of batch {number}"
        with raised_by_all():
            raise DivergenceError(
                f"training has diverged: in {allowed} optimizer steps in a row, up to step {global_step}, the loss "
                f"or gradients were not finite (loss {result.loss:.4g}; {before}). Go on from the newest "
                "checkpoint (ckpt_path='last') with a lower learning rate, gradient_clip_val, or more bits "
                "(bf16-mixed, 32-true); strategy.check_finite=True names the layer that is the first. Or the "
                f"step has changed since it was probed. {_REMEDY}. strategy.max_diverged_steps says how many steps "
                "are allowed"
            )

    def finish(self) -> None:
        """Checks the latest step, too, whose values a GPU may not have given yet; waits for them."""
        values, self._under_way = self._under_way, None
        if values is not None:
            self._examine(values)

    def _examine(self, values: _Finite) -> None:
        if values.event is not None:
            values.event.synchronize()
        loss_is_finite, *gradients_are = values.finite.tolist()
        if loss_is_finite:
            self.last_finite = values.number, values.loss
        if gradients_are:
            alone = self.layout.mesh.layout.num_pipelines == 1
            healthy = all(gradients_are) and (loss_is_finite or not alone)
            self.num_diverged = 0 if healthy else self.num_diverged + 1
        if not loss_is_finite and not self._warned:
            self._warned = True
            try:
                if self._latest and not self.layout.steps.needs_values:
                    self._require_unchanged()
            except GraphError as error:
                said = f"the loss of batch {values.number} is not finite, as {error}. {_REMEDY}"
                raise GraphError(said) from error
            except Exception as error:  # of any code
                _log.debug("whether the step has changed cannot be found out: %s", error)
            _log.warning("the loss of batch %d is not finite. %s", values.number, _NOT_FINITE)

    @contextlib.contextmanager
    def as_in_steps(self) -> Iterator[None]:
        """Sets training flags to those of steps inside: who saves after a validation finds them all off.

        There nothing gets a gradient, either.
        """
        modes = self._current_modes()
        self._set_modes(self._modes)
        try:
            with torch.inference_mode(False), torch.enable_grad():
                yield
        finally:
            self._set_modes(modes)

    def _set_modes(self, modes: list[bool]) -> None:
        for module, mode in zip(self._modules, modes, strict=True):
            module.training = mode

    def _current_modes(self) -> list[bool]:
        return list(map(_TRAINING, self._modules))


def _values(loss: Tensor, number: int, gradients: Sequence[Tensor | None] | None) -> _Finite:
    finite = loss.isfinite().reshape(1)
    if gradients is not None:
        plain = [gradient for gradient in gradients if gradient is not None]
        all_finite = _are_finite(plain) if plain else torch.ones((), dtype=torch.bool)
        finite = torch.cat([finite, all_finite.to(finite.device).reshape(1)])
    return _Finite(*begin_copy_to_host(finite), loss, number)


@torch.no_grad()
def _are_finite(tensors: list[Tensor]) -> Tensor:
    """Returns whether all values are finite, by the operator of `torch.amp.GradScaler`, which multiplies them by 1.

    A CPU needs a twentieth of the time of norms for 500 small tensors, and as long for large ones.
    """
    device = tensors[0].device
    not_finite, one = torch.zeros((), device=device), torch.ones((), device=device)
    check = torch._amp_foreach_non_finite_check_and_unscale_
    try:
        check(tensors, not_finite, one)
    except RuntimeError:
        # It knows no sparse, complex or negated ones, and writes, so that none may be spread over its memory.
        dense = [t._values() if t.is_sparse else t for t in tensors]
        plain = [t.contiguous() if 0 in t.stride() else t for t in dense]
        real = [
            torch.view_as_real(t.resolve_conj()) if t.is_complex() else t.resolve_neg()
            for t in plain
        ]
        check(real, not_finite, one)
    return not_finite == 0


_REQUIRES_GRAD = attrgetter("requires_grad")


@dataclass(frozen=True)
class Process:
    """A rank, its device, and how it communicates."""

    rank: int
    world_size: int
    device: torch.device
    backend: str
    timeout_s: float


@dataclass(frozen=True)
class Basis:
    """Profile and cluster from which a plan was made.

    Attributes:
        cluster: Ranks and links; links count as free where layers were not timed.
    """

    profile: ModelProfile
    cluster: Cluster


class Ended:
    """A pipeline in another process, of a trainer that was pickled while something held its own; does nothing."""

    def __call__(self, *args: Any, **options: Any) -> None:
        """Does nothing."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self


def _owners_of(parameters: Iterable[str]) -> frozenset[str]:
    """Returns names of the modules that have some parameters."""
    return frozenset(name.rpartition(".")[0] for name in parameters)


@dataclass
class Pipeline:
    """One rank's pipeline, ready to run.

    Attributes:
        module: The whole module; foreign parameters are placeholders.
        residents: Names of the parameters held at each position of the pipeline.
        owners: Position in the pipeline of the first holder, for every entry of the state dict that
            is not held by all its ranks.
        trained: Parameters of this rank that get gradients, by name.
        untrained: Parameters of the module with `requires_grad=False`, by name.
        watch: Notices a step that is no longer the one that was probed.
        sharding: Divides optimizer states over the holders of a stage, if the plan says so.
        optimizer_offload: Keeps optimizer states in host memory, if the plan says so.
        basis: Profile and cluster of the plan; None if the plan was given.
        runs_ahead: Frozen layers may still run before the step of their batch.
        offloaded: Parameters of this rank whose values are in files or in host memory, by name: those of streamed
            layers, and of encoders that have stored their results.
        later: Parameters of its stages that stay on the host until all samples are encoded.
    """

    module: nn.Module
    plan: PipelinePlan
    graph: LayerGraph
    mesh: Mesh
    engine: Engine
    residents: Sequence[frozenset[str]]
    owners: dict[str, int]
    trained: dict[str, nn.Parameter]
    untrained: dict[str, nn.Parameter]
    watch: StepWatch
    seed: int
    _interception: Interception
    _relay: RelayView
    sharding: OptimizerSharding | None = None
    optimizer_offload: OptimizerOffload | None = None
    basis: Basis | None = None
    runs_ahead: bool = True
    offloaded: dict[str, nn.Parameter] = field(default_factory=dict)
    later: dict[str, nn.Parameter] = field(default_factory=dict)

    def __post_init__(self) -> None:
        frozen = self.resident - self.graph.trained
        # Not of trained ones: optimizers may write through `.data`.
        self._mapped = Versions(self.module, frozen, ())
        self._relay.offloaded = _owners_of(self.offloaded)

    def __reduce__(self) -> tuple[Any, ...]:
        """Stores none of what only this process has: threads, groups, messages."""
        return Ended, ()

    @property
    def resident(self) -> frozenset[str]:
        """Names of the parameters this rank holds."""
        return self.residents[self.mesh.local_rank]

    @cached_property
    def loss_dtype(self) -> torch.dtype:
        """The dtype a loss is returned in, alike on all ranks: double for modules in double precision."""
        parameters = dict(self.module.named_parameters())
        dtypes = {parameters[name].dtype for name in self.graph.trained}
        is_double = bool(dtypes & {torch.float64, torch.complex128})
        return torch.float64 if is_double else torch.float32

    @property
    def fills(self) -> bool:
        """Whether frozen layers of coming batches run in the bubbles of this one."""
        return (
            self.plan.options.filling != "none"
            and self.plan.ranks_per_pipeline > 1
            and bool(self.graph.frozen)
        )

    @cached_property
    def read_ahead(self) -> Versions:
        """What frozen layers read: weights, buffers and numbers, but for those that layers change themselves."""
        layers = self.graph.layers
        written = frozenset().union(*(layer.written_buffers for layer in layers))
        parameters = frozenset().union(*(layers[i].parameters for i in self.graph.frozen))
        parameters -= self.offloaded.keys()  # which cannot be written
        buffers = frozenset().union(*(layers[i].buffers for i in self.graph.frozen))
        parts = self.graph.frozen_calls.union(layers[i].name for i in self.graph.frozen)
        return Versions(self.module, parameters, buffers - written, parts)

    def stop_ahead_if_changed(self) -> bool:
        """Runs nothing ahead any more if what frozen layers read was changed between two steps.

        Returns:
            Whether it stopped just now.
        """
        if not self.runs_ahead or not self.read_ahead.changed():
            return False
        self.runs_ahead = False
        self.engine.drop_prepared()
        return True

    def count_as_unchanged(self) -> None:
        """Takes what frozen layers read now for unchanged, as after a checkpoint was loaded."""
        self.engine.drop_prepared()
        if (stream := self.engine.layout.steps.stream) is not None:
            stream.forget()
        self.read_ahead.note()

    def offload(self, layers: frozenset[str], folder: Path) -> int:
        """Frees the parameters that only these frozen layers read, as what they give is stored.

        None if frozen parameters have been written: their files would not have their values.

        Returns:
            Bytes that this rank holds no more.
        """
        others = [layer.parameters for layer in self.graph.layers if layer.name not in layers]
        still_read = self.graph.tail_parameters.union(self.graph.trained, *others)
        read = (layer.parameters for layer in self.graph.layers if layer.name in layers)
        names = (frozenset().union(*read) & self.resident) - still_read - self.offloaded.keys()
        named = dict(self.module.named_parameters())
        away = {n: named[n] for n in sorted(names) if may_be_offloaded(named[n])}
        if not (away and self.runs_ahead) or self.stop_ahead_if_changed():
            return 0
        num_bytes = sum(map(held_bytes, away.values()))
        with self._moving():
            self.offloaded |= offload(self.module, away, folder)
        self._relay.offloaded = _owners_of(self.offloaded)
        vars(self).pop("read_ahead", None)
        self.count_as_unchanged()
        return num_bytes

    def load_stages(self) -> None:
        """Brings the parameters of the stages to the device, where they were left on the host."""
        with self._moving():
            load_back(self.later.values(), self.mesh.device, self.module)
        self.later = {}

    @contextlib.contextmanager
    def _moving(self) -> Iterator[bool]:
        """Takes no move inside for a write; gives whether frozen weights have been written before."""
        is_written = self._mapped.changed()
        yield is_written
        if not is_written:
            self._mapped.note()

    def refuse_unfrozen(self) -> None:
        """Checks that nothing was unfrozen since the pipeline was made; takes microseconds.

        Raises:
            ConfigurationError: Something was; names the first parameter.
        """
        if any(map(_REQUIRES_GRAD, self.untrained.values())):
            name = next(n for n, p in self.untrained.items() if p.requires_grad)
            raise ConfigurationError(
                f"parameters were unfrozen during training, e.g. {name}, but the plan was made with them "
                "frozen and computes no gradients for them, so they would never be trained. Unfreeze them "
                "before trainer.fit, and go on from a checkpoint"
            )

    @torch.no_grad()
    def not_finite(self) -> list[str]:
        """Returns names of trained parameters of this rank that hold NaN or infinity; waits for the device."""
        named = {n: p for n, p in self.trained.items() if p.is_floating_point() and p.numel()}
        if not named:
            return []
        largest = [torch.linalg.vector_norm(p, torch.inf).isfinite() for p in named.values()]
        finite = torch.stack(largest).tolist()
        return [name for name, good in zip(named, finite, strict=True) if not good]

    @property
    def planned_shares(self) -> tuple[float, ...]:
        """Planned share of the frozen work of each rank of the pipeline; empty if unknown."""
        samples = [0.0] * self.plan.ranks_per_pipeline
        for piece in self.plan.pieces:
            samples[piece.rank] += piece.num_samples
        return tuple(samples) if any(samples) else ()

    @contextlib.contextmanager
    def relayed(self) -> Generator[None, None, None]:
        """Lets layers of other ranks answer with their results inside; all ranks in lock step."""
        with self._relay.active():
            yield

    def changed_by_layers(self) -> contextlib.AbstractContextManager[None]:
        """Inside, numbers that frozen layers change are their own, such as sizes that they store."""
        ahead = vars(self).get("read_ahead")  # not yet made in the sanity check
        return ahead.changed_by_layers() if ahead else contextlib.nullcontext()

    @contextlib.contextmanager
    def alone(self) -> Generator[None, None, None]:
        """Lets this rank, within `relayed`, call layers by itself, with the parameters that it has."""
        run = self._interception.current()
        assert isinstance(run, RelayRun), "ranks are not in lock step"
        with patched(run, inside=True):
            yield

    def trained_by(self, optimizer: Optimizer) -> dict[str, nn.Parameter]:
        """Returns parameters of an optimizer among `trained`, by name."""
        members = {id(p) for group in optimizer.param_groups for p in group["params"]}
        return {name: p for name, p in self.trained.items() if id(p) in members}

    def connect(self, optimizer: Optimizer) -> None:
        """Lets an optimizer that has `sum_over_ranks` add up sums of all stages, each parameter counted once."""
        mesh, sharding = self.mesh, self.sharding

        def summed(values: Tensor) -> Tensor:
            values = values.to(mesh.device, mesh.number_dtype)
            mesh.reduce(values)
            if sharding is None:
                return values
            return values.new_tensor([mesh.summed_over_pipelines(x) for x in values.tolist()])

        if hasattr(optimizer, "sum_over_ranks"):
            trained, position = self.trained_by(optimizer), mesh.local_rank
            first = {name for name in trained if self.owners.get(name, 0) == position}
            names = sharding.updated_here & trained.keys() if sharding else first
            optimizer.sum_over_ranks([trained[name] for name in names], summed)

    def dismantle(self, connected: bool = True) -> None:
        """Makes the module ordinary again: all tensors up to date and on the host, no wrappers, no groups.

        Args:
            connected: Whether the other ranks are still there; if not, placeholders stay.
        """
        self.engine.drop_prepared()  # of which one may be paused in a layer that is loaded
        if (stream := self.engine.layout.steps.stream) is not None:  # a step may have failed in one
            stream.rest()
        with self._moving() as is_written:
            away = [*self.offloaded.values(), *self.later.values()]
            load_back(away, torch.device("cpu"), self.module, quantizes=False)
            make_plain(self.module)
            if not is_written:
                take_from_files(self.module, self.resident - self.graph.trained)
        if connected:
            # Not of `state_dict()`: it lacks some buffers, and modules may leave out or rename the rest.
            parameters = dict(self.module.named_parameters(remove_duplicate=False))
            tensors = {**parameters, **dict(self.module.named_buffers())}
            with torch.no_grad():
                for name, value in self.values_of(self.owners):
                    tensor = tensors[name]
                    if is_placeholder(tensor) or value is stored_value(tensor):
                        restore_parameter(name, tensor, value, self.module)
                    elif name not in parameters:
                        tensor.copy_(value)
        self.engine.close()
        self._interception.uninstall()
        if not connected:
            self.mesh.abort()
            leave_on_host(self.module)
            return
        self.module.cpu()
        self.mesh.disconnect()

    def values_of(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """Yields tensors on the host that not all ranks hold, by name; a collective call of the pipeline.

        Parameters mapped from a file that no rank has written are read from it; only the others are sent.
        """
        owners = {name: self.owners[name] for name in names}
        if not owners:
            return
        parameters = dict(self.module.named_parameters(remove_duplicate=False))
        tensors = {**parameters, **dict(self.module.named_buffers())}
        frozen = [n for n in owners if n not in self.graph.trained and not tensors[n].requires_grad]
        mapped = {n: value for n in frozen if (value := stored_value(tensors[n])) is not None}
        owned = [n for n, owner in owners.items() if owner == self.mesh.local_rank]
        written = owned if self._mapped.changed() else [n for n in owned if n not in mapped]
        is_quantized = {n: is_traceable_wrapper_subclass(tensors[n]) for n in written}
        sent = dict[str, bool]()  # names, and whether the tensor is quantized
        for of_rank in gathered_objects(is_quantized, self.mesh.transfers):
            sent |= of_rank
        yield from ((name, value) for name, value in mapped.items() if name not in sent)
        plain = {name: owner for name, owner in owners.items() if sent.get(name) is False}
        yield from spread(tensors, plain, self.mesh)
        for name, owner in owners.items():
            if sent.get(name):  # pickled: its class has several tensors
                here = tensors[name].detach().cpu() if owner == self.mesh.local_rank else None
                source = self.mesh.world_rank(owner)
                yield name, broadcast_object(here, source, self.mesh.transfers)
