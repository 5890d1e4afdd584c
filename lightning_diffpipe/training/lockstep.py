"""What Lightning decides on each rank by itself between two steps, decided by all ranks together.

    stop on SIGTERM          Lightning broadcasts rank 0's flag over the default group, on NCCL by way of the device
    val_check_interval="..." each rank looks at a clock of its own, and begins to validate after another batch

Ranks of a pipeline that stop or validate after different batches wait for each other's messages. So a signal is
only noted where it finds a rank, and passed on before the next batch; the time is that of rank 0's clock.
"""

from __future__ import annotations

from typing import Any

from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_diffpipe.comm.agreement import Agreement
from lightning_diffpipe.comm.liveness import liveness
from lightning_diffpipe.comm.mesh import Mesh


class LockStep:
    """Takes the place of Lightning's own decisions while a trainer fits, until `uninstall`.

    Args:
        trainer: Before it registers its signal handlers.
        mesh: This rank's groups.
    """

    def __init__(self, trainer: Any, mesh: Mesh) -> None:
        self._trainer, self._mesh, self._agreement = trainer, mesh, Agreement(mesh)
        self._signals = trainer._signal_connector
        self._signalled = False
        loop = trainer.fit_loop.epoch_loop
        self._replaced = [
            (loop, "_broadcast_sigterm_tensor"),
            (self._signals, "_sigterm_notifier_fn"),
        ]
        loop._broadcast_sigterm_tensor = self.stop_together
        self._signals._sigterm_notifier_fn = self._note_signal
        if getattr(trainer, "_val_check_time_interval", None) is not None:
            own = loop._should_check_val_fx
            loop._should_check_val_fx = lambda fetcher: self._agreement.of_first(own(fetcher))
            self._replaced.append((loop, "_should_check_val_fx"))
        liveness.agrees_on_signals = True

    def stop_together(self, last: bool = False) -> None:
        """Ends training if any rank got a signal to stop; every rank calls it before each batch.

        Args:
            last: After the last batch.

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
        signalled = self._mesh.gathered([bool(self._signalled or liveness.signals)], patient=True)
        if any(map(any, signalled)):
            self._stop()

    def _stop(self) -> None:
        # Only now, as Lightning ends training wherever it finds this set.
        self._signals.received_sigterm = True
        raise SIGTERMException

    def _note_signal(self, signum: Any, frame: Any) -> None:
        liveness.note_signal()
        launcher = self._trainer.strategy.launcher
        if launcher is not None and not self._signalled:
            launcher.kill(signum)
        self._signalled = True

    def uninstall(self) -> None:
        """Gives Lightning its own decisions back."""
        for owner, name in self._replaced:
            delattr(owner, name)
        self._replaced.clear()
        liveness.agrees_on_signals = False
