"""One rank's side of a pipeline, and the module around it, from the first step until the module is whole again.

`preparation.py` makes it from a plan. Here is what is asked between steps: whether anything was changed or
unfrozen, who trains what.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterable, Iterator, Sequence
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
from lightning_diffpipe.errors import ConfigurationError
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
from lightning_diffpipe.runtime.engine import Engine
from lightning_diffpipe.runtime.optimizer_offload import OptimizerOffload
from lightning_diffpipe.runtime.optimizer_sharding import OptimizerSharding
from lightning_diffpipe.runtime.ownership import spread
from lightning_diffpipe.runtime.relay import RelayRun, RelayView
from lightning_diffpipe.training.patching import patched
from lightning_diffpipe.training.step_watch import StepWatch

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
