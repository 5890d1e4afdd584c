"""What a step keeps for hooks: loss curves in lists, averages in attributes, which ranks have each their own of.

    self.losses.append(loss.detach())      in the step, once for each microbatch, on the last stage only
    torch.stack(self.losses).mean()        in on_train_epoch_end, on all ranks

Neither is an error where it is written, and what hooks make of it differs from rank to rank. So after the first
batch, attributes that the step has changed are looked for among the names in the code of hooks, and named.
"""

from __future__ import annotations

import logging
import types
from collections.abc import Iterator, Sequence
from typing import Any

from lightning_diffpipe.graph.layer import Attribute

_log = logging.getLogger(__name__)
_REMEDY = (
    "A rank runs layers of its own stage, on one microbatch after the other: what they give is NaN or missing "
    "elsewhere. Log it instead (self.log; trainer.callback_metrics has it on all ranks), or keep outputs['loss'] "
    "in on_train_batch_end"
)
_EXACT = (int, bool, str, type(None))
_SIZED = (list, dict, set)


class KeptResults:
    """Warns, once, of what hooks read and the step has left on this rank.

    Args:
        module: The root, before its first batch.
        left: Attributes that the step sets between layers.
        callbacks: Of the trainer; those of Lightning and of this project read nothing of it.
    """

    def __init__(self, module: Any, left: frozenset[Attribute], callbacks: Sequence[Any]) -> None:
        self._module = module
        self._read = {
            name: f"{type(owner).__name__}.{hook}"
            for owner in (*callbacks, module)
            for hook, names in hooks_of(type(owner))
            for name in names
            if owner is module or not hasattr(owner, name)  # it may be a callback's own
        }
        self._left = sorted(name for owner, name in left if not owner and name in self._read)
        self._sizes = self._sizes_now()

    def warn(self) -> None:
        """Looks after the first batch what is there now; in a list of losses on the last stage only."""
        held = vars(self._module)
        for name in self._left:
            if name not in held or type(held[name]) not in _EXACT:
                self._say(name, "sets")
        for name, size in self._sizes_now().items():
            if self._sizes.get(name, size) != size:
                self._say(name, "puts something into")

    def _say(self, name: str, how: str) -> None:
        _log.warning(
            "training_step %s self.%s, and %s reads it. %s", how, name, self._read[name], _REMEDY
        )

    def _sizes_now(self) -> dict[str, int]:
        held = {name: vars(self._module).get(name) for name in self._read}
        return {name: len(value) for name, value in held.items() if isinstance(value, _SIZED)}


def hooks_of(kind: type) -> Iterator[tuple[str, set[str]]]:
    """Yields the hooks that a class of the user's defines, with names of attributes and globals in their code."""
    for base in kind.__mro__:
        if base.__module__.partition(".")[0] in ("lightning", "lightning_diffpipe", "torch"):
            continue
        for hook, function in vars(base).items():
            if hook.startswith("on_") and isinstance(function, types.FunctionType):
                yield hook, _names_in(function.__code__)


def _names_in(code: types.CodeType) -> set[str]:
    inner = (_names_in(each) for each in code.co_consts if isinstance(each, types.CodeType))
    return set(code.co_names).union(*inner)
