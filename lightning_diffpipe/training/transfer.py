"""Random batch transforms that draw the same numbers whenever they run.

A module may change batches on their way to the device (`on_after_batch_transfer`), at random: flips,
crops, caption dropout. With filling the next batches are brought to the device while this one trains, so
the same hooks run at another time, and once more when Lightning brings the batch itself. Seeded by the
number of the batch, they give the same batch each time, with filling and without, and on all ranks of a pipeline.
Validation draws the same numbers in every pass, so that losses compare.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Generator
from typing import Any

from lightning.pytorch.trainer.states import RunningStage
from lightning.pytorch.utilities.model_helpers import is_overridden

from lightning_diffpipe.runtime.seeding import derived_seed, isolated_random_numbers
from lightning_diffpipe.training.pipeline import Pipeline

_HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")


class SeededTransfer:
    """Seeds the batch hooks that a user wrote, in training and in its validations.

    Args:
        trainer: Whose module and data module have the hooks.
        pipeline: Whose batches are transferred.
    """

    def __init__(self, trainer: Any, pipeline: Pipeline) -> None:
        self._trainer, self._pipeline = trainer, pipeline
        self._ahead = 0
        self._installed: list[tuple[Any, str]] = []
        for owner in (trainer.lightning_module, getattr(trainer, "datamodule", None)):
            for name in _HOOKS if owner is not None else ():
                if is_overridden(name, owner):
                    setattr(owner, name, self._seeded(getattr(owner, name)))
                    self._installed.append((owner, name))

    @contextlib.contextmanager
    def of_later_batch(self, ahead: int) -> Generator[None, None, None]:
        """Inside, hooks draw the random numbers of a later batch; 1 is the next."""
        # While a batch is trained on it counts as ready, so the next one has the number as it stands.
        self._ahead = ahead - 1
        try:
            yield
        finally:
            self._ahead = 0

    def _seeded(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(hook)
        def seeded(*args: Any, **kwargs: Any) -> Any:
            with isolated_random_numbers(self._seed()):
                return hook(*args, **kwargs)

        return seeded

    def _seed(self) -> int:
        """Returns the seed of the batch that is transferred now, from its number in training, or in the pass."""
        loop, pipeline = self._trainer.fit_loop.epoch_loop, self._pipeline
        stage, number = "transfer", loop.batch_progress.total.ready + self._ahead
        if self._trainer.state.stage != RunningStage.TRAINING:
            stage, number = "transfer of validation", loop.val_loop.batch_progress.current.ready
        return derived_seed(pipeline.seed, stage, pipeline.mesh.pipeline, number)

    def uninstall(self) -> None:
        """Gives the owners their hooks back."""
        for owner, name in self._installed:
            delattr(owner, name)
        self._installed.clear()
