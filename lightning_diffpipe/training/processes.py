"""The process hooks of the strategy: who runs where, how they start, meet and end.

One process for each device, each started by re-running the script or by torchrun; all of them in
Lightning's default process group, which the pipeline itself never uses.
"""

import inspect
import logging
import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments import SLURMEnvironment
from lightning.fabric.utilities.distributed import (
    _distributed_is_initialized,
    _get_default_process_group_backend_for_device,
    _init_dist_connection,
    _set_num_threads_if_needed,
    _sync_ddp_if_available,
)
from lightning.fabric.utilities.rank_zero import rank_zero_only as fabric_rank_zero_only
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from lightning.pytorch.strategies.parallel import ParallelStrategy
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.rank_zero import rank_zero_only, rank_zero_warn
from torch import Tensor

from lightning_diffpipe.comm.mesh import Mesh, broadcast_object
from lightning_diffpipe.comm.rendezvous import open_store, rendezvous
from lightning_diffpipe.comm.waiting import ask_for_queues
from lightning_diffpipe.comm.watcher import LAUNCHER, watcher
from lightning_diffpipe.errors import ConfigurationError, LostRankError, require_timeout
from lightning_diffpipe.training.pipeline import Pipeline, Process
from lightning_diffpipe.training.signals import (
    GRACE_S,
    report_signals,
    stop_by_signal,
    stopping_at_signals,
)

_log = logging.getLogger(__name__)


class ProcessHooks(ParallelStrategy):
    """Hooks by which Lightning asks a strategy about processes.

    Args:
        timeout_s: Longest wait for a message, in seconds.
        busy_timeout_s: Longest time in which a rank may give no sign of progress while another waits, in seconds.
        backend: `"gloo"` or `"nccl"`; chosen by device if not given.

    Attributes:
        pipeline: This rank's part, while there is one.
        last_saved: The checkpoint that was saved last.

    Raises:
        ConfigurationError: A timeout is no positive number of seconds, or there is no such backend.
    """

    pipeline: Pipeline | None
    mesh: Mesh | None
    _ended_by: ClassVar[str | None] = None
    last_saved: str | None

    def __init__(self, timeout_s: float, busy_timeout_s: float, backend: str | None) -> None:
        super().__init__()
        require_timeout(timeout_s)
        require_timeout(busy_timeout_s, "busy_timeout_s")
        if backend is not None and not dist.is_backend_available(backend):
            raise ConfigurationError(
                f"process_group_backend={backend!r} is none that this build of torch has; choose gloo or nccl"
            )
        self.timeout_s, self.busy_timeout_s = float(timeout_s), float(busy_timeout_s)
        self.num_nodes = 1
        self._backend = backend

    @property
    def is_distributed(self) -> bool:
        """Lightning gives only its own strategies a distributed sampler unless they say this."""
        return True

    @property
    def root_device(self) -> torch.device:
        """The device this rank computes on."""
        return self.parallel_devices[self.local_rank]

    @property
    def num_processes(self) -> int:
        """Ranks on this host."""
        return len(self.parallel_devices) if self.parallel_devices is not None else 0

    @property
    def process(self) -> Process:
        """Rank and device of this process; known once processes have met."""
        return Process(
            self.global_rank, self.world_size, self.root_device, str(self._backend), self.timeout_s
        )

    def _configure_launcher(self) -> None:
        self._launcher = _Launcher(self.cluster_environment, self.num_processes, self.num_nodes)
        self._launcher.check_run = self.check_run

    def check_run(self, trainer: Any, arguments: dict[str, Any]) -> None:
        """Checks what a trainer was asked for, before any process is started or met.

        Args:
            trainer: About to run.
            arguments: Arguments of `fit`, `validate`, `test` or `predict`, by name; may be replaced.
        """

    def refuse_alone(self) -> None:
        """Raises ConfigurationError where the processes that were started for an earlier run have been ended."""
        if self._ended_by is not None and self.world_size > 1:
            raise ConfigurationError(
                f"an earlier run of this process has failed ({self._ended_by.splitlines()[0]}), and the processes "
                "that it had started were ended with it, so nobody is there to run with. Start the script again, "
                "with ckpt_path='last'; under torchrun every process catches its error by itself, and can go on"
            )

    def set_world_ranks(self) -> None:
        """Tells the environment and Lightning's rank-zero helpers which rank this is."""
        if self.cluster_environment is not None:
            self.cluster_environment.set_global_rank(
                self.node_rank * self.num_processes + self.local_rank
            )
            self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        rank_zero_only.rank = fabric_rank_zero_only.rank = self.global_rank

    def setup_environment(self) -> None:
        """Sets the device and joins the default process group."""
        if self.root_device.type == "cuda" and self.world_size > 1:
            ask_for_queues()
        super().setup_environment()
        self.set_world_ranks()
        self._backend = self._backend or _get_default_process_group_backend_for_device(
            self.root_device
        )
        # Processes start, download and save at their own pace; only messages of a step are urgent.
        watcher.busy_timeout_s = self.busy_timeout_s
        patience_s = max(self.timeout_s, watcher.patience_s)
        options: dict[str, Any] = {"timeout": timedelta(seconds=patience_s)}
        if self.world_size > 1:
            if not _distributed_is_initialized():
                os.environ["MASTER_ADDR"] = self.cluster_environment.main_address
                os.environ["MASTER_PORT"] = str(self.cluster_environment.main_port)
            # Before torch's own connections, which wait for as long as ranks may take to start.
            options["store"] = rendezvous(
                self.global_rank, self.world_size, self.timeout_s, patience_s
            )
        watcher.enter("connecting")
        _init_dist_connection(self.cluster_environment, self._backend, **options)
        if isinstance(self._launcher, _Launcher):
            self._launcher.store = None  # that of the default process group now
        watcher.enter("setting up")

    def stop_requeueing(self) -> None:
        """Turns off SLURM's auto-requeue of several ranks; Lightning registers its handler only later.

        The handler saves where the signal finds a rank: one has made a step that another has not, so that the file
        would be mixed, or they wait for each other's messages for ever.
        """
        environment = self.cluster_environment
        if self.world_size == 1 or not isinstance(environment, SLURMEnvironment):
            return
        if environment.auto_requeue:
            environment.auto_requeue = False
            rank_zero_warn(
                "SLURM's auto-requeue is off: on its signal every rank would save where it stands, and ranks of a "
                "pipeline stand in different steps. Save in time with ModelCheckpoint(every_n_train_steps=...), "
                "requeue with `#SBATCH --requeue` or in the job script, leave out its `--signal`, and go on with "
                "ckpt_path. plugins=[SLURMEnvironment(auto_requeue=False)] says so without this warning"
            )

    def barrier(self, name: str | None = None) -> None:
        """Waits for all ranks."""
        if not _distributed_is_initialized():
            return
        if dist.get_backend() == "nccl":
            dist.barrier(device_ids=[self.root_device.index])
        else:
            dist.barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Returns an object of one rank on all ranks.

        It uses no device with a pipeline, as `Timer` and `ModelCheckpoint` ask after every batch.
        """
        if not _distributed_is_initialized():
            return obj
        if self.pipeline is not None:
            return self.pipeline.mesh.of_rank(src, obj)
        return broadcast_object(obj, src, group=None)

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduces a tensor over all ranks.

        Ranks of a pipeline hold equal values, in training and evaluation; in a `"sum"` over all ranks each
        pipeline counts once.
        """
        if not isinstance(tensor, Tensor):
            return tensor
        reduced = _sync_ddp_if_available(tensor, group, reduce_op=reduce_op)
        if group is not None or reduce_op != "sum" or self.mesh is None:
            return reduced
        copies = self.mesh.layout.ranks_per_pipeline
        return reduced.div_(copies, rounding_mode=None if reduced.is_floating_point() else "floor")

    def on_exception(self, exception: BaseException) -> None:
        """Ends the processes that this one started.

        They get a few seconds to say what went wrong on their side. On NCCL nobody else would ever end
        them, as a lost peer closes no connection.
        """
        if isinstance(exception, SIGTERMException):
            report_signals(self)
        if self._backend == "nccl":
            # Its watchdog may end the process before Python prints the error.
            _log.error("rank %d stops: %r", self.global_rank, exception)
        if isinstance(self._launcher, _SubprocessScriptLauncher):
            if self._launcher.procs:
                ProcessHooks._ended_by = f"{type(exception).__name__}: {exception}"
            deadline_s = time.monotonic() + GRACE_S
            while time.monotonic() < deadline_s and any(
                p.poll() is None for p in self._launcher.procs
            ):
                time.sleep(0.1)
            self._launcher.kill(signal.SIGKILL)


def take_place_in_slurm() -> None:
    """Tells the tasks of `srun` what torchrun would: their ranks and where they meet, in the environment.

    What is there already stays. A batch script without `srun` is one process, whatever it has been granted.
    """
    if int(os.environ.get("SLURM_STEP_NUM_TASKS", "1")) < 2:
        return
    if "WORLD_SIZE" not in os.environ:
        job, nodes = int(os.environ["SLURM_JOB_ID"]), os.environ["SLURM_NODELIST"]
        os.environ |= {
            "WORLD_SIZE": os.environ["SLURM_STEP_NUM_TASKS"],
            "RANK": os.environ["SLURM_PROCID"],
            "MASTER_ADDR": SLURMEnvironment.resolve_root_node_address(nodes),
            "MASTER_PORT": str(15000 + job % 10000),  # no other job's, most probably
        }
    os.environ.setdefault("LOCAL_RANK", os.environ["SLURM_LOCALID"])


class _Launcher(_SubprocessScriptLauncher):
    """Starts the other processes of this machine, if nobody has, and sees a run through to its end.

    The store where processes meet is open before they look for it. Where a rank is lost, the watcher ends the
    others; Lightning's own observer would kill them before they have said anything.
    """

    store: dist.TCPStore | None = None
    check_run: Callable[[Any, dict[str, Any]], None]

    @property
    def is_interactive_compatible(self) -> bool:
        """A notebook cannot be started again for each process."""
        return bool(self.cluster_environment.creates_processes_externally)

    def launch(
        self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kw: Any
    ) -> Any:
        """Calls the function on this process, once there are others, unless the run is refused.

        Raises:
            LostRankError: A rank was lost.
            SIGTERMException: A rank got SIGTERM.
        """
        call = inspect.signature(function).bind(*args, **kw)
        self.check_run(trainer, call.arguments)
        environment = self.cluster_environment
        environment.validate_settings(num_devices=self.num_processes, num_nodes=self.num_nodes)
        if not environment.creates_processes_externally:
            if self.num_processes > 1:
                _log.info("starting %d processes", self.num_processes)
            self._call_children_scripts()
            _set_num_threads_if_needed(num_processes=self.num_processes)
        if max(self.num_processes * self.num_nodes, environment.world_size()) == 1:
            return function(*call.args, **call.kwargs)
        rank = trainer.strategy.node_rank * self.num_processes + environment.local_rank()
        watcher.children |= enumerate(self.procs, rank + 1)
        try:
            with stopping_at_signals(trainer), watcher.run(rank):
                return function(*call.args, **call.kwargs)
        except LostRankError as error:
            if error.by_signal:
                raise stop_by_signal() from None
            raise

    def _call_children_scripts(self) -> None:
        if not {"MASTER_PORT", "STANDALONE_PORT"} & os.environ.keys():
            self.store = open_store()
            os.environ["MASTER_PORT"] = str(self.store.port)
        first = self.cluster_environment.node_rank() * self.num_processes
        os.environ[LAUNCHER] = f"{first} {os.getpid()}"
        try:
            super()._call_children_scripts()
        finally:
            del os.environ[LAUNCHER]
