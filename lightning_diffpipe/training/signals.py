"""SIGTERM, and what else Lightning decides on each rank by itself, decided by all ranks together.

    stop on SIGTERM          Lightning broadcasts rank 0's flag over the default group, on NCCL by way of the device
    val_check_interval="..." each rank looks at a clock of its own, and begins to validate after another batch
    trainer.should_stop      a callback may set it on one rank alone, or, by a clock or a file, after another batch

Ranks of a pipeline that stop or validate after different batches wait for each other's messages. So while a
trainer fits, a signal is only recorded where it finds a rank, and passed on before the next batch (`LockStep`); the
time is that of rank 0's clock, and its `should_stop` counts for all, after a batch, a validation, the beginning and
the end of an epoch. Before training, where
Lightning does not listen, a signal ends the run at once. At the end a line says who got it.
"""

import contextlib
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_diffpipe.comm.agreement import Agreement
from lightning_diffpipe.comm.mesh import Mesh
from lightning_diffpipe.comm.watcher import watcher
from lightning_diffpipe.errors import LostRankError
from lightning_diffpipe.training.patching import patched

_log = logging.getLogger(__name__)
_OF_EPOCHS = ("on_run_start", "on_advance_start", "on_advance_end")  # of Lightning's loop over them
GRACE_S = 5.0  # for other processes to say what has ended them, or whom a signal has reached


@contextlib.contextmanager
def stopping_at_signals(trainer: Any) -> Iterator[None]:
    """Stops at SIGTERM where Lightning does not: before its loops, where a process would end silently."""
    connector, process = trainer._signal_connector, os.getpid()

    def stop(signum: int, frame: Any) -> None:
        if os.getpid() != process:  # forked, with this handler
            _die(b"")
        elif not (connector._original_handlers and watcher.at_sigterm == "agree"):  # else recorded
            watcher.note_signal()
            raise stop_by_signal()

    before = signal.getsignal(signal.SIGTERM)
    if threading.current_thread() is not threading.main_thread() or before is not signal.SIG_DFL:
        yield
        return
    after: Any = before
    signal.signal(signal.SIGTERM, stop)
    quiet: Any = contextlib.nullcontext()
    if trainer.state.fn != TrainerFn.FITTING:
        # Lightning's would broadcast from wherever it finds a rank.
        quiet = patched(connector, _sigterm_notifier_fn=lambda *_: None)
    try:
        with quiet, patched(watcher, at_sigterm="stop"):
            yield
    except LostRankError as error:
        after = partial(_die, f"lightning_diffpipe: {error}\n".encode())
        raise
    finally:
        signal.signal(signal.SIGTERM, after)
        if signal.SIGTERM in connector._original_handlers:  # Lightning has yet to restore it
            connector._original_handlers[signal.SIGTERM] = after


def _die(last_words: bytes, *_: Any) -> None:
    """Ends this process by SIGTERM, which `torchrun` sends where a rank is lost, often before its error is out."""
    os.write(2, last_words)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGTERM)


def stop_by_signal() -> SIGTERMException:
    """Ends with the exit code of the signal before Lightning listens to it, and as Lightning does later."""
    return SIGTERMException(*[] if watcher.at_sigterm == "agree" else [128 + signal.SIGTERM])


def report_signals(strategy: Any) -> None:
    """Reports in a line which ranks got SIGTERM, where that ended the run, and what there is to go on from."""
    # Ranks may agree to stop before the word of whom the signal reached has come.
    deadline_s = time.monotonic() + GRACE_S
    while strategy.world_size > 1 and not watcher.signals and time.monotonic() < deadline_s:
        time.sleep(0.02)
    signals = watcher.signals or {strategy.global_rank: "training"}
    # Where a rank is lost, torchrun sends SIGTERM to the others, often before they could say whom they lost.
    lost = watcher.loss() if strategy.pipeline is None else None
    if lost is not None and (lost.follows or lost.signal):
        lost = None
    if lost is None and strategy.global_rank != (
        0 if strategy.pipeline is not None else min(signals)
    ):
        return
    who = ", ".join(f"rank {rank} ({phase})" for rank, phase in sorted(signals.items()))
    if lost is not None:
        who += f" after it lost {lost}"
    where = "nothing was trained"
    if strategy.lightning_module is not None and strategy.pipeline is not None:
        where = f"training ended after step {strategy.lightning_module.trainer.global_step}"
    saved = "nothing was saved in this run"
    if strategy.last_saved is not None:
        saved = f"last saved: {strategy.last_saved}"
    print(f"lightning_diffpipe: SIGTERM to {who}: {where}; {saved}", file=sys.stderr, flush=True)


class LockStep:
    """Takes the place of Lightning's own decisions while a trainer fits.

    Args:
        trainer: Before it registers its signal handlers.
        until: Gives Lightning its own decisions back when it is closed.
    """

    def __init__(self, trainer: Any, mesh: Mesh, until: contextlib.ExitStack) -> None:
        self._mesh, self._agreement = mesh, Agreement(mesh)
        self._signals = trainer._signal_connector
        self._signalled = False
        loop = trainer.fit_loop.epoch_loop

        def note_signal(signum: Any, frame: Any) -> None:
            watcher.note_signal()
            launcher = trainer.strategy.launcher
            if launcher is not None and not self._signalled:
                launcher.kill(signum)
            self._signalled = True

        should_check, of_first = loop._should_check_val_fx, self._agreement.of_first
        by_time = getattr(trainer, "_val_check_time_interval", None) is not None

        def agree_to_stop() -> None:
            own_decision = trainer.should_stop
            trainer.should_stop = of_first(own_decision)
            if own_decision and not trainer.should_stop:
                _log.warning(
                    "rank %d goes on though its trainer.should_stop was set: ranks stop together, when "
                    "rank 0 does; set it on rank 0, or on all ranks",
                    trainer.global_rank,
                )

        def should_check_validation(fetcher: Any) -> bool:
            agree_to_stop()  # who stops validates first
            checks = should_check(fetcher)
            return of_first(checks) if by_time else checks

        def then_agreeing(run: Callable[[], Any]) -> Any:
            result = run()
            agree_to_stop()
            return result

        until.enter_context(patched(self._signals, _sigterm_notifier_fn=note_signal))
        if watcher.at_sigterm == "stop":
            until.enter_context(patched(watcher, at_sigterm="agree"))
        replaced = {
            "_broadcast_sigterm_tensor": self.stop_together,
            "_should_check_val_fx": should_check_validation,
        }
        until.enter_context(patched(loop, **replaced))
        # Hooks of these may ask for a stop, of which Lightning takes note before the next batch.
        validating, epochs = loop.val_loop, trainer.fit_loop
        until.enter_context(patched(validating, run=partial(then_agreeing, validating.run)))
        of_epochs = {n: partial(then_agreeing, getattr(epochs, n)) for n in _OF_EPOCHS}
        until.enter_context(patched(epochs, **of_epochs))

    def stop_together(self, last: bool = False) -> None:
        """Ends training if any rank got a signal to stop; each rank calls it before batches and after the last.

        Raises:
            SIGTERMException: One did.
            PipelineTimeoutError: A rank is gone, or did not come in half an hour.
        """
        if self._agreement.of_any(self._signalled, last):
            self._stop()

    def stop_pipeline_together(self) -> None:
        """Does the same before each batch of an evaluation, which other pipelines need not come to.

        Raises:
            SIGTERMException: A rank got a signal to stop; the other pipelines will hear of it.
            PipelineTimeoutError: As for `stop_together`.
        """
        signalled = self._mesh.gathered([bool(self._signalled or watcher.signals)], patient=True)
        if any(map(any, signalled)):
            self._stop()

    def _stop(self) -> None:
        # Only now, as Lightning ends training wherever it finds this set.
        self._signals.received_sigterm = True
        raise SIGTERMException
