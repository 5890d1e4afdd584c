"""The checkpoint hooks of the strategy: one ordinary Lightning file, or a folder of shards, however many ranks.

Parameters are known by their fully qualified names, optimizer states by their numbers on one device. Rank
0 collects what the others hold and writes. Reading, every rank loads the whole module before it is cut, and
later the optimizer states of its own parameters. So a checkpoint moves between strategies and numbers of ranks
in both directions. With shards (`checkpoint_shards.py`) each rank writes what it holds, and nothing is collected;
asynchronously, too, when what it replaces is removed after it is complete.
"""

import contextlib
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.io.checkpoint_io import CheckpointIO
from lightning.fabric.utilities.cloud_io import _is_local_file_protocol
from lightning.fabric.utilities.distributed import _distributed_is_initialized
from lightning.fabric.utilities.optimizer import _optimizer_to_device
from lightning.pytorch.core.optimizer import _MockOptimizer
from lightning.pytorch.plugins.io.wrapper import _WrappingCheckpointIO
from lightning.pytorch.plugins.precision import DoublePrecision
from lightning.pytorch.strategies.parallel import ParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.serialization import safe_globals

from lightning_diffpipe.checkpoint_files import (
    WholeFiles,
    chosen,
    local,
    require_file,
    require_writable,
    types_of_hydra_configs,
    unreadable,
)
from lightning_diffpipe.checkpoint_shards import (
    Divided,
    consolidated,
    is_optimizer_state,
    is_sharded,
    read_shards,
    read_tensors,
    write_shards,
)
from lightning_diffpipe.comm.mesh import Mesh, gathered_objects
from lightning_diffpipe.comm.watcher import watcher
from lightning_diffpipe.errors import (
    CheckpointError,
    DivergenceError,
    ForeignLayerError,
    raised_by_all,
)
from lightning_diffpipe.graph.placement import is_placeholder, loaded
from lightning_diffpipe.host_memory import available_bytes
from lightning_diffpipe.runtime.ownership import collect, owners_of_state, refuse_misfit, take_over
from lightning_diffpipe.training.metric_sync import MetricSync
from lightning_diffpipe.training.pipeline import Pipeline

_FOLDER = "diffpipe_folder"  # from which optimizer states are read


@dataclass(frozen=True)
class Division:
    """Owners of the parts of a module; states of optimizers and averages stay divided when training has ended.

    Attributes:
        owners: Position in the pipeline of the first holder, for what is not held by all its ranks.
        updated_by: World rank that has the optimizer states of a parameter, where holders share them.
    """

    module: nn.Module
    owners: Mapping[str, int]
    mesh: Mesh
    updated_by: Mapping[str, int]


class CheckpointHooks(ParallelStrategy):
    """Hooks by which Lightning asks a strategy about states.

    Attributes:
        pipeline: This rank's part, while there is one.
        division: Division of the latest pipeline, also when that has ended; None before.
        last_saved: The latest file or folder saved; None before.
    """

    pipeline: Pipeline | None
    division: Division | None
    max_diverged_steps: int | None
    last_saved: str | None
    _failed: bool
    _metric_sync: MetricSync | None
    _state_dict_type: str
    _saves_shards = False  # what is being saved
    _writing: tuple[Future[None], str] | None = None  # by a thread, and what it is
    _outdated: Sequence[str | Path] = ()  # to be removed when that is complete
    _found_last: tuple[Any, ...] = ()

    def drain(self) -> None:
        """Brings weights to those after the last batch, if ranks run free."""
        raise NotImplementedError

    @property
    def checkpoint_io(self) -> CheckpointIO:
        """Plugin that reads and writes files: the user's, else `WholeFiles`, also inside of a wrapping one."""
        if self._checkpoint_io is None:
            self._checkpoint_io = WholeFiles()
        elif isinstance(self._checkpoint_io, _WrappingCheckpointIO):
            self._checkpoint_io.checkpoint_io = WholeFiles()
        return self._checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO | None) -> None:
        self._checkpoint_io = io

    def choose_checkpoint(self, trainer: Any, arguments: dict[str, Any]) -> None:
        """Puts the checkpoint to go on from into `arguments`, or raises CheckpointError, before processes start."""
        path = arguments.get("ckpt_path")
        fits = trainer.state.fn == TrainerFn.FITTING
        checkpoint = chosen(trainer, path, fits, arguments.get("weights_only"))
        self._found_last = (checkpoint,) if path == "last" else ()
        if path is not None:
            arguments["ckpt_path"] = checkpoint

    def require_same_checkpoint(self) -> None:
        """Raises CheckpointError if a rank found another checkpoint, or none, as without a folder for all."""
        if self.world_size == 1 or not self._found_last:
            return
        paths = gathered_objects(self._found_last[0], group=None)
        for rank, path in enumerate(paths):
            if path != paths[0]:
                with raised_by_all():
                    raise CheckpointError(
                        f'after ckpt_path="last" rank 0 found {paths[0]}, and rank {rank} {path}; give all ranks '
                        "a folder that they share, or the same path"
                    )

    def check_folders(self, trainer: Any) -> None:
        """Raises CheckpointError on all ranks, before costly work, if one cannot write checkpoints; collective."""
        error = None
        if self.is_global_zero and not trainer.fast_dev_run:
            try:
                require_writable(trainer)
            except CheckpointError as raised:
                error = raised
        if (error := self.broadcast(error)) is not None:
            with raised_by_all():
                raise error

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """The module is whole until the set-up; afterwards Lightning forgets what `weights_only` it was given."""
        return False

    @watcher.inside("saving a checkpoint")
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None
    ) -> None:
        """Writes a checkpoint: on rank 0, or on every rank its shard."""
        self.finish_saving()
        shards, self._saves_shards = self._saves_shards, False
        saved = f"{filepath} (step {checkpoint.get('global_step', 0)})"
        # It says where the weights are that were left out, whatever hooks a subclass of the module has.
        leave_to_base = getattr(self.lightning_module, "leave_to_base", None)
        if leave_to_base is not None:
            leave_to_base(checkpoint)
        if shards:
            if not _is_local_file_protocol(filepath):
                raise CheckpointError(
                    f"cannot write shards to {filepath}: every rank writes a part, to a folder that all of them "
                    "see. Name one, or take state_dict_type=full"
                )
            checkpoint["state_dict"] = Divided(checkpoint["state_dict"])
            asynchronously = self._state_dict_type == "sharded_async"
            mesh = self.pipeline.mesh
            future = write_shards(checkpoint, local(filepath), mesh, asynchronously)
            self._writing = future, saved
            if not asynchronously:
                self.finish_saving()
        else:
            super().save_checkpoint(checkpoint, filepath, storage_options)
            self.last_saved = saved

    def finish_saving(self, limit_s: float | None = None) -> None:
        """Waits until a thread has written the checkpoint it writes, if any, and removes what that replaces.

        Raises:
            CheckpointError: It could not be written; on all ranks.
            PipelineTimeoutError: A rank is gone.
            TimeoutError: It takes longer than `limit_s`.
        """
        writing, self._writing = self._writing, None
        outdated, self._outdated = self._outdated, ()
        if writing is not None:
            with watcher.inside("waiting for a checkpoint to be written"):
                writing[0].result(limit_s)
            self.last_saved = writing[1]
        for path in outdated:
            super().remove_checkpoint(path)

    def give_up_saving(self, limit_s: float | None) -> None:
        """Lets a thread finish its checkpoint when training ends early, and warns if it does not."""
        saved = self._writing and self._writing[1]
        try:
            self.finish_saving(limit_s)
        except Exception as error:
            reason = str(error) or f"{type(error).__name__} ({limit_s=})"
            rank_zero_warn(
                f"the checkpoint {saved} may be lost, as training ended while it was written: {reason}. Those from "
                "before are as they were (ckpt_path='last')"
            )

    def remove_checkpoint(self, filepath: str | Path) -> None:
        """Removes a checkpoint; while another is written, which may replace it, after that one is complete."""
        if self._writing is None:
            super().remove_checkpoint(filepath)
        else:
            self._outdated = (*self._outdated, filepath)

    @watcher.inside("saving a checkpoint")
    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Returns the state of all stages; complete on rank 0, empty elsewhere; a shard has each rank's own.

        Raises:
            CheckpointError: Training has failed, and weights of other ranks with it.
            DivergenceError: Weights are not finite.
            GraphError: The last step was not the one that was probed, and weights may be NaN.
        """
        module, self._saves_shards = self.lightning_module, False
        # Callbacks may save in their `on_exception`, when other ranks stand in the middle of a step. Lightning asks
        # them before it tells the strategy, and an error of theirs would be all that it tells, so the first one is
        # recorded here. On SIGTERM all ranks have agreed on a batch to stop after.
        is_divided = self.pipeline is not None and self.world_size > 1
        first = sys.exc_info()[1] if is_divided and module.trainer.interrupted else None
        if first is not None and not isinstance(first, SIGTERMException):
            self.on_exception(first)
            raise CheckpointError(
                f"training has failed on rank {self.global_rank} with {type(first).__name__}: {first}. A callback "
                "then wanted to save, but other ranks stand in the middle of a step, so there is nothing whole. "
                "Save while all is well: ModelCheckpoint(every_n_train_steps=...)"
            ) from first
        self.drain()
        if self.pipeline is not None:
            self.pipeline.watch.finish()
            self.refuse_diverged("no checkpoint is written")
        with self._metric_sync.whole() if self._metric_sync else contextlib.nullcontext():
            try:
                with self._loaded():
                    state = module.state_dict()
            except ForeignLayerError as error:
                raise CheckpointError(
                    f"{type(module).__name__}.state_dict() computes: {error}. Return the tensors themselves under "
                    "any name, and convert or join them in on_save_checkpoint of the module, where "
                    "checkpoint['state_dict'] is complete on rank 0 and empty elsewhere"
                ) from error
        if self.pipeline is None:
            refuse_divided(module)
            return state
        if hasattr(module, "without_base"):  # it can open what is left out elsewhere
            state = module.without_base(state)
        mesh = self.pipeline.mesh
        with self._loaded():
            owners = owners_of_state(state, self.pipeline.module, self.pipeline.owners)
        self._saves_shards = self._wants_shards(state)
        return self._gathered(state, owners, mesh)

    def _wants_shards(self, state: Mapping[str, Any]) -> bool:
        """Returns whether to save shards, by what a file needs on rank 0's host; the same on all ranks."""
        pipeline = self.pipeline
        if pipeline is None or self.world_size == 1 or self._state_dict_type == "full":
            return False
        if self._state_dict_type != "auto":
            return True
        if not isinstance(self.checkpoint_io, WholeFiles):  # the user's own
            return False
        options, trained = pipeline.plan.options, pipeline.graph.trained
        factor = options.optimizer_bytes_factor + options.averages_bytes_factor
        parameters = {n: p for n, p in pipeline.module.named_parameters() if n in trained}
        needed = _bytes_of(state.values()) + factor * _bytes_of(parameters.values())
        return bool(pipeline.mesh.of_rank(0, needed > available_bytes()))

    def _loaded(self) -> contextlib.AbstractContextManager[None]:
        """Gives offloaded parameters their values inside, mapped from their files, or as they are on the host."""
        if self.pipeline is None:
            return contextlib.nullcontext()
        return loaded(self.pipeline.offloaded.values(), torch.device("cpu"), self.pipeline.module)

    def refuse_diverged(self, what: str) -> None:
        """Raises DivergenceError on all ranks of the pipeline if trained weights are not finite."""
        pipeline = self.pipeline
        if pipeline is None or self.max_diverged_steps is None:
            return
        names, mesh = pipeline.not_finite(), pipeline.mesh
        if not any(number for (number,) in mesh.gathered([len(names)], patient=True)):
            return
        bad = sorted({name for each in gathered_objects(names, mesh.transfers) for name in each})
        step = self.lightning_module.trainer.global_step
        with raised_by_all():
            raise DivergenceError(
                f"{what} at step {step}: {len(bad)} trained parameters are not finite, e.g. {bad[0]}. Checkpoints "
                "from before are as they were: go on from the newest (ckpt_path='last') with a lower learning rate "
                "or gradient_clip_val; strategy.check_finite=True names the layer that is the first"
            )

    @watcher.inside("saving a checkpoint")
    def gather_by_name(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Brings tensors that belong to parameters together, for checkpoints; collective.

        Args:
            tensors: Tensors by the parameters' names, in one order on all ranks; those of other ranks'
                parameters are placeholders.

        Returns:
            Complete on rank 0, empty elsewhere.

        Raises:
            CheckpointError: A run has failed, or the processes have left each other.
        """
        if self.division is None:
            return dict(tensors)
        return self._gathered(tensors, self.division.owners, self.division.mesh)

    @watcher.inside("saving a checkpoint")
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Returns the optimizer state of all stages, numbered as on one device; empty except on rank 0.

        Raises:
            CheckpointError: A run has failed, or the processes have left each other.
        """
        optimizer = getattr(optimizer, "_optimizer", optimizer)
        self.drain()
        state = optimizer.state_dict()
        if self.division is None or isinstance(optimizer, _MockOptimizer):
            return state
        owners = {
            index: self.division.updated_by.get(name, self.division.owners.get(name, 0))
            for index, name in enumerate(_names(optimizer, self.division.module))
        }
        gathered = self._gathered(state["state"], owners, self.division.mesh)
        if self._saves_shards:
            return {**state, "state": gathered}
        return {**state, "state": dict(sorted(gathered.items()))} if self.is_global_zero else {}

    def _gathered(
        self, state: Mapping[Any, Any], owners: Mapping[Any, int], mesh: Mesh
    ) -> dict[Any, Any]:
        """Returns the entries that this rank writes: in shards its own, else all of them, on rank 0."""
        if self._saves_shards:
            return Divided({key: v for key, v in state.items() if owners.get(key, 0) == mesh.rank})
        with self._connected(mesh):
            return collect(state, owners, mesh)

    @contextlib.contextmanager
    def _connected(self, mesh: Mesh) -> Iterator[None]:
        """Lets the ranks of a pipeline communicate inside, be it under way or at its end."""
        if self.pipeline is not None:
            yield
            return
        if self._failed or not _distributed_is_initialized():
            why = "a run has failed" if self._failed else "the processes have left each other"
            raise CheckpointError(
                f"optimizer states and averages are divided over the ranks, and {why}, so rank 0 cannot "
                "collect them. Save before the end of fit (FinalCheckpoint, ModelCheckpoint), or with "
                "weights_only=True"
            )
        with mesh.reconnected():
            yield

    @watcher.inside("loading a checkpoint")
    def load_checkpoint(
        self, checkpoint_path: str | Path, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Reads a checkpoint written by any strategy; of shards all but optimizer states, which come later.

        Raises:
            CheckpointError: The file is missing (then a FileNotFoundError, too), cut short or no checkpoint.
        """
        path = self.broadcast(str(checkpoint_path))
        require_file(path)
        try:
            with safe_globals(types_of_hydra_configs()):
                if not is_sharded(path):
                    return consolidated(super().load_checkpoint(path, weights_only=weights_only))
                is_read = lambda name: not is_optimizer_state(name)
                return read_shards(path, weights_only, is_read) | {_FOLDER: path}
        except Exception as error:
            raise unreadable(path, error) from error

    @watcher.inside("loading a checkpoint")
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Loads a whole state dict: all of it, or this rank's part once the module is cut.

        Raises:
            CheckpointError: Names or shapes do not fit the module.
        """
        if (pipeline := self.pipeline) is not None:
            with self._loaded():
                take_over(
                    checkpoint["state_dict"], pipeline.module, pipeline.resident, pipeline.owners,
                    pipeline.mesh, strict,
                )  # fmt: skip
            pipeline.count_as_unchanged()
            return
        module = self.lightning_module
        if isinstance(self.precision_plugin, DoublePrecision):
            self.precision_plugin.convert_module(module)  # or what is loaded would be rounded
        try:
            super().load_model_state_dict(checkpoint, strict)
        except RuntimeError as error:
            refuse_misfit(checkpoint["state_dict"], module.state_dict(), strict)
            raise CheckpointError(f"the checkpoint does not fit the module: {error}") from error

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Loads the optimizer state of this rank's parameters.

        Raises:
            CheckpointError: There are more or fewer optimizers than there were.
        """
        states = checkpoint["optimizer_states"]
        optimizers = [o for o in self.optimizers if not isinstance(o, _MockOptimizer)]
        states = [state for state in states if state]  # one that does nothing has none
        sizes = lambda groups: [len(group["params"]) for group in groups]
        present = [sizes(optimizer.param_groups) for optimizer in optimizers]
        stored = [sizes(state.get("param_groups", ())) for state in states]
        if present != stored:
            with raised_by_all():
                raise CheckpointError(
                    f"the checkpoint has the states of {_counted(stored)}, and configure_optimizers gives "
                    f"{_counted(present)}, so training cannot go on from it. Give those it was written with, and "
                    "train the same parameters; to begin again with its weights, load checkpoint['state_dict'] "
                    "into the module and leave ckpt_path out"
                )
        for optimizer, state in zip(optimizers, states, strict=True):
            if self.pipeline is not None:
                names = enumerate(_names(optimizer, self.pipeline.module))
                sharding = self.pipeline.sharding
                updated = sharding.updated_here if sharding else self.pipeline.resident
                mine = {index for index, name in names if name in updated}
                local = {index: value for index, value in state["state"].items() if index in mine}
                state = {**state, "state": local}
            if _FOLDER in checkpoint:
                state = read_tensors(checkpoint[_FOLDER], state)
            if self.pipeline is not None and (offload := self.pipeline.optimizer_offload):
                offload.load(optimizer, state)
            else:
                optimizer.load_state_dict(state)
                _optimizer_to_device(optimizer, self.root_device)


def _bytes_of(values: Iterable[Any]) -> int:
    return sum(x.numel() * x.element_size() for x in values if isinstance(x, Tensor))


def _counted(optimizers: Sequence[Sequence[int]]) -> str:
    """Returns in words how many optimizers there are, and of how many parameters each.

    Example:
        >>> _counted([[28, 4], [2]])
        '2 optimizers (of 28 + 4, 2 parameters)'
        >>> _counted([])
        '0 optimizers'
    """
    sizes = ", ".join(" + ".join(map(str, groups)) for groups in optimizers)
    return f"{len(optimizers)} optimizers" + (f" (of {sizes} parameters)" if sizes else "")


def refuse_divided(module: nn.Module | None) -> None:
    """Raises CheckpointError for a module of which a failed run has left one rank's part."""
    parameters = module.named_parameters() if isinstance(module, nn.Module) else ()
    gone = [name for name, parameter in parameters if is_placeholder(parameter)]
    if gone:
        raise CheckpointError(
            f"{len(gone)} parameters, e.g. {gone[0]}, were on other ranks when training failed, so there is "
            "nothing whole to save or to train; build the module again, and go on from the latest checkpoint"
        )


def _names(optimizer: Optimizer, module: nn.Module) -> list[str]:
    """Returns names of an optimizer's parameters, in the order in which it numbers them."""
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    return [names[id(p)] for group in optimizer.param_groups for p in group["params"]]
