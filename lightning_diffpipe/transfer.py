"""Random batch transforms that draw the same numbers whenever they run.

A module may change batches on their way to the device (`on_after_batch_transfer`), at random: flips,
crops, caption dropout. With filling the next batches are brought to the device while this one trains, so
the same hooks run at another time, and once more when Lightning brings the batch itself. Seeded by the
number of the batch, they give the same batch each time, with filling and without.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from lightning.pytorch.utilities.model_helpers import is_overridden

from lightning_diffpipe.runtime.seeding import isolated_random_numbers

_HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")


class SeededTransfer:
    """Seeds the batch hooks that a user wrote.

    Args:
        owners: The module, and the data module if there is one.
        seed: The seed of the batch that is transferred now; `None` leaves random numbers alone.
    """

    def __init__(self, owners: Sequence[Any], seed: Callable[[], int | None]) -> None:
        self._seed = seed
        self._installed: list[tuple[Any, str]] = []
        for owner in owners:
            for name in _HOOKS:
                if is_overridden(name, owner):
                    setattr(owner, name, self._seeded(getattr(owner, name)))
                    self._installed.append((owner, name))

    def _seeded(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(hook)
        def seeded(*args: Any, **kwargs: Any) -> Any:
            seed = self._seed()
            if seed is None:
                return hook(*args, **kwargs)
            with isolated_random_numbers(seed):
                return hook(*args, **kwargs)

        return seeded

    def uninstall(self) -> None:
        """Gives the owners their hooks back."""
        for owner, name in self._installed:
            delattr(owner, name)
        self._installed.clear()
