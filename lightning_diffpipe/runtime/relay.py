"""Running any code on all ranks in lock step, each layer where its parameters live.

For validation and sampling on the training partition: that code was not probed.
All ranks run the same code on the same data. A call of a module whose parameters live on one rank, or whose
running statistics one rank keeps, is executed there, and its output broadcast to the others; a module that is
spread is entered; one without, or with parameters that every rank has, runs everywhere. Parameters read outside of
such calls (by a container's own code, or tied weights) are broadcast by their owner.

    rank 0 | unet(x) ─ down_blocks.0 runs  ─▶ broadcast ─ mid_block waits   ...
    rank 1 | unet(x) ─ down_blocks.0 waits ◀─ broadcast ─ mid_block runs ─▶ ...

Of parameters that this rank has offloaded, each is loaded while a module that holds it runs, and no longer.

Random numbers are those of one process: where a layer has sampled some, its owner's generators go along with its
output, and all ranks go on from there. Gradients stay on the rank that ran a layer: who takes them is refused.

An output is any object that can be pickled, and what it is made of travels before its tensors (`comm/packing.py`).
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_diffpipe.comm.mesh import Mesh, broadcast_object
from lightning_diffpipe.comm.packing import pickled_value
from lightning_diffpipe.errors import ConfigurationError, ForeignLayerError, GraphError
from lightning_diffpipe.graph import rng
from lightning_diffpipe.graph.interception import Interception, Run, Site
from lightning_diffpipe.graph.placement import is_offloaded, is_placeholder, loaded, reads_values
from lightning_diffpipe.graph.side_effects import transform_around

Share = Callable[[int, Any], Any]
"""`share(owner, output)` gives every rank the owner's output: a collective call, such as `RelayChannel`."""

NOT_IN_STEP = (
    "whole_model() was entered inside training_step, but each stage runs that at another time, and a whole model "
    "answers only where all ranks ask together. Call the layers as they are, or enter it in a hook, such as "
    "on_train_batch_end, or in validation_step"
)


class RelayView:
    """Lets the ranks of a pipeline run code together.

    Args:
        root: The module; the same on all ranks, except for placeholders.
        interception: Installed on the root.
        owners: For every parameter that some rank lacks, and every buffer of which some rank has an old copy,
            the rank that answers for it; equal on all ranks. What is not named here is the same on all.
        share: Broadcasts an output from its owner.

    Attributes:
        offloaded: Names of modules with parameters of their own that this rank has offloaded.
    """

    offloaded: frozenset[str] = frozenset()

    def __init__(
        self, root: nn.Module, interception: Interception, owners: Mapping[str, int], share: Share
    ) -> None:
        self._root, self._interception, self._share = root, interception, share
        named = dict(root.named_parameters())
        self._owners = {id(p): (owners[n], n) for n, p in named.items() if n in owners}
        self._state: dict[str, set[int]] = {}
        for buffer in owners.keys() & dict(root.named_buffers()).keys():
            parts = buffer.split(".")
            for depth in range(1, len(parts)):  # the modules that hold it, without the root
                self._state.setdefault(".".join(parts[:depth]), set()).add(owners[buffer])
        self._names = {
            name
            for name, module in root.named_modules()
            if name
            and (name in self._state or any(id(p) in self._owners for p in module.parameters()))
        }

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Answers calls inside, where all ranks run the same code; raises ConfigurationError in `training_step`."""
        current = self._interception.current()
        if isinstance(current, RelayRun):  # two would ask each other's questions
            yield
            return
        if current is not None:
            raise ConfigurationError(NOT_IN_STEP)
        run = RelayRun(self._owners, self._state, self._share, offloads=bool(self.offloaded))
        with (
            self._interception.also_watching(self._names | self.offloaded),
            self._interception.running(run),
            _FetchesParameters(run),
        ):
            yield


@dataclass(eq=False)
class RelayRun(Run):
    """Answers calls while a relay view is active.

    Attributes:
        owners: Owner and name of each parameter, by its identity.
        state: Owner of the buffers inside of each module, by the module's name.
        share: As for the view.
        inside: A module runs, or this rank calls modules by itself.
        offloads: This rank has offloaded parameters.
    """

    owners: Mapping[int, tuple[int, str]]
    state: Mapping[str, set[int]]
    share: Share
    inside: bool = False
    offloads: bool = False
    _decisions: dict[str, tuple[int | None, bool]] = field(default_factory=dict)
    _fetched: dict[int, Tensor] = field(default_factory=dict)

    def call(self, site: Site, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Executes a module, receives its output, or enters it."""
        if not self.offloads:
            return self._call(site, args, kwargs)
        with loaded(p for p in site.module._parameters.values() if p is not None):
            return self._call(site, args, kwargs)

    def _call(self, site: Site, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Returns the owner's output of a module on all ranks; one with several owners is entered."""
        if self.inside:
            return site.diffpipe_original(*args, **kwargs)
        if site.name not in self._decisions:
            parameters = list(site.module.parameters())
            owners = {self.owners[id(p)][0] for p in parameters if id(p) in self.owners}
            owners |= self.state.get(site.name, set())
            owner = owners.pop() if len(owners) == 1 else None
            self._decisions[site.name] = owner, any(p.requires_grad for p in parameters)
        owner, is_trained = self._decisions[site.name]
        if owner is None:
            return site.diffpipe_original(*args, **kwargs)
        where = f"{site.name}, which position {owner} of the pipeline ran"
        if transform := transform_around():  # whose tensors are of this process only
            raise _refused(f"{transform} is taken through {where}")
        executed = None
        if all(is_offloaded(p) or not is_placeholder(p) for p in site.module.parameters()):
            executed = self._execute(site, args, kwargs)
        out, state = self.share(owner, executed)
        if state is not None and executed is None:
            rng.restore(state)
        if not torch.is_grad_enabled():
            return out
        leaves = pytree.tree_leaves((args, kwargs))
        differentiable = [x for x in leaves if isinstance(x, Tensor) and x.requires_grad]
        differentiable += [torch.zeros((), requires_grad=True)] if is_trained else []
        return _without_graph(out, where, differentiable)

    def fetched(self, parameter: Tensor) -> Tensor | None:
        """Returns the value of a parameter that not all ranks hold, or that is offloaded; None if it is here."""
        entry = self.owners.get(id(parameter))
        if entry is None or self.inside:
            return self._held(parameter) if is_offloaded(parameter) else None
        owner, name = entry
        if id(parameter) not in self._fetched:
            value = self.share(owner, self._held(parameter))
            if not isinstance(value, Tensor):
                raise ForeignLayerError(f"{name} is read here, but no rank holds it")
            self._fetched[id(parameter)] = value
        return self._fetched[id(parameter)]

    @staticmethod
    def _held(parameter: nn.Parameter) -> Tensor | None:
        """Returns the value of a parameter that this rank holds, in memory or in a file."""
        with loaded([parameter]):
            return None if is_placeholder(parameter) else parameter.detach()

    def _execute(self, site: Site, args: Any, kwargs: Any) -> tuple[Any, rng.RandomState | None]:
        """Returns the output of a module, and the states of the generators after it, if it sampled."""
        self.inside, before = True, rng.capture(host=True)
        try:
            return site.diffpipe_original(*args, **kwargs), rng.moved(before)
        finally:
            self.inside = False


class _Crossing(torch.autograd.Function):
    """Stands where a gradient would have to go to another rank, and refuses to take it there."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, where: str, *_: Tensor) -> Tensor:
        """Returns the value, as one that needs a gradient."""
        ctx.where = where
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        """Raises, on all ranks."""
        raise _refused(f"a gradient is taken through {ctx.where}")


def _refused(what: str) -> GraphError:
    return GraphError(
        f"{what}, outside of training_step, where layers of other ranks give values without graphs. Take it inside "
        "the forward of one module that a single rank holds, or train with num_stages=1"
    )


def _without_graph(out: Any, where: str, inputs: Sequence[Tensor]) -> Any:
    """Returns a layer's output detached; backward through it raises if `inputs`, which need gradients, are any."""

    def refusing(value: Tensor) -> Tensor:
        may_need = value.is_floating_point() or value.is_complex()
        detached = value.detach()
        return _Crossing.apply(detached, where, *inputs) if inputs and may_need else detached

    return pytree.tree_map_only(Tensor, refusing, out)


class _FetchesParameters(TorchFunctionMode):
    """Replaces parameters that code between modules reads by their owner's values."""

    def __init__(self, run: RelayRun) -> None:
        super().__init__()
        self._run = run

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        run = self._run
        if (run.offloads or not run.inside) and reads_values(func, args, kwargs):
            args = tuple(map(self._fetched, args))
            kwargs = {key: self._fetched(value) for key, value in kwargs.items()}
        return func(*args, **kwargs)

    def _fetched(self, value: Any) -> Any:
        if isinstance(value, nn.Parameter):
            with torch._C.DisableTorchFunction():
                fetched = self._run.fetched(value)
            return value if fetched is None else fetched
        if type(value) in (list, tuple):
            return type(value)(map(self._fetched, value))
        return value


class RelayChannel:
    """Broadcasts the output of a layer from the rank that ran it."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh

    def __call__(self, owner: int, output: Any) -> Any:
        """Broadcasts the owner's output over the pipeline; a collective call.

        Args:
            owner: Position of the rank that ran the layer.
            output: Output of the module there; ignored elsewhere.

        Returns:
            The output, tensors on this rank's device.

        Raises:
            ForeignLayerError: It is of a type that cannot travel; on all ranks.
            PipelineTimeoutError: A rank is gone, or did not come in half an hour.
        """
        mesh, pickled, tensors = self._mesh, None, list[Tensor]()
        runs = mesh.local_rank == owner
        if runs:
            try:
                pickled, tensors = pickled_value(output, mesh.device, keeps_gradients=False)
            except Exception as error:  # of any kind, from code of the object's own
                pickled = (
                    f"a layer returns a {type(output).__name__}, which cannot be sent to the ranks that have not "
                    f"run it ({type(error).__name__}: {error}); return tensors, or an object that can be pickled"
                )
        with mesh.naming(mesh.pipeline_ranks):  # which may be busy between two steps
            pickled = broadcast_object(pickled, mesh.world_rank(owner), mesh.transfers)
            if isinstance(pickled, str):
                raise ForeignLayerError(pickled)
            # In a broadcast the owner does not wait for all, and tensors are waited for no longer than `timeout_s`.
            if pickled.specs:
                mesh.barrier()
        with mesh.naming(mesh.pipeline_ranks, patient=False):
            received = mesh.put_together(pickled, tensors, owner)
        return output if runs else received
