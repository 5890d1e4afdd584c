"""Noticing that a step is no longer the one that was probed, where nothing else would.

What a stage runs and sends was decided by one look at the step before training. A branch on the epoch, or
a call of `.train()`, may change later what the step reads. Three things show it:

    modes        a module is in training mode that was not, or the other way round
    gradients    a parameter got one that had none coming, so that nobody would put it aside
    not finite   the loss, or what is logged, is NaN: dummies are, so it may have read one

Then the step is traced again, and if it has changed the run ends and says what was changed. If it has not, all
goes on as in one process, until one of these happens anew. A step that needs values runs for this on what a rank
holds, with NaN for the rest; if that fails, a warning says what may be wrong. Counters of its own move then.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from lightning_diffpipe.errors import (
    ConfigurationError,
    DivergenceError,
    GraphError,
    raised_by_all,
)
from lightning_diffpipe.runtime.batch_layout import BatchLayout, microbatches
from lightning_diffpipe.runtime.engine import StepResult
from lightning_diffpipe.runtime.upcoming import begin_copy_to_host

_log = logging.getLogger(__name__)
_LOSS, _GRADIENTS = "", "\0"  # names that nothing logged has
_TRAINING = attrgetter("training")
_REMEDY = (
    "Branches on the epoch, the step or batch_idx must read the same layers and train the same parameters "
    "from the first step on: multiply a term by 0 until it shall count, instead of leaving it out"
)
_DIVERGES = "lower the learning rate or clip gradients; check_finite=True finds the layer"
_UNCHANGED = f"The step reads what it read when it was probed, so this is not the pipeline's doing: {_DIVERGES}"
_UNCHANGED_NOW = (
    f"Either training diverges: {_DIVERGES}. Or the step took a branch in this batch that it does not take any "
    f"more, such as on global_step % 100 == 0, and read NaN in place of what nobody sends. {_REMEDY}"
)


@dataclass(frozen=True)
class _Finite:
    """Which values of a step are finite, once `event` has happened, and what can be traced again.

    On a GPU nobody waits for the event, so the step is over when it is looked at, and counters have gone on.
    """

    names: tuple[str, ...]
    finite: Tensor
    loss: Tensor
    event: torch.cuda.Event | None
    batch: Any
    arguments: tuple[Any, ...]
    number: int


@dataclass(eq=False)
class StepWatch:
    """Compares what one rank's steps do with what was probed.

    Attributes:
        module: The module, its training flags as they were probed.
        layout: Lays batches out, and knows the cut steps.
        idle: Parameters of this rank that could be trained, but get no gradient, by name.
        trained: Those that get one.
        num_diverged: Optimizer steps in a row, up to the latest that was looked at, with a gradient of this rank
            that is not finite, or a loss where there is one pipeline: of several each has a loss of its own, and
            gradients are summed over all, so that they agree.
        last_finite: The latest batch with a finite loss, and that loss; equal on all ranks of a pipeline.
    """

    module: nn.Module
    layout: BatchLayout
    idle: Mapping[str, nn.Parameter]
    trained: Mapping[str, nn.Parameter]
    num_diverged: int = 0
    last_finite: tuple[int, Tensor] | None = None

    def __post_init__(self) -> None:
        # Walking through a large module takes milliseconds.
        self._modules = tuple(self.module.modules())
        self._modes = self._current_modes()
        self._num_not_finite: dict[str, int] = {}  # steps in a row, by name
        self._next_look: dict[str, int] = {}  # at so many
        self._warned: set[str] = set()
        self._under_way: _Finite | None = None

    def before_step(self, batch: Any, arguments: tuple[Any, ...]) -> None:
        """Looks at training flags; takes microseconds as long as they are as they were.

        Raises:
            ConfigurationError: They are not, and the step draws other random numbers or writes other
                buffers because of it; names the modules.
        """
        modes = self._current_modes()
        if modes == self._modes:
            return
        try:
            self._trace_again(batch, arguments)
        except Exception as error:
            if isinstance(error, GraphError) or not self.layout.steps.needs_values:
                raise ConfigurationError(
                    f"{self._changed_modes()}, and stages would not agree on it ({error}). Set modes before "
                    "trainer.fit, e.g. in __init__"
                ) from error
            # The user's code may not bear NaN, nor the device the whole step.
            _log.warning(
                "%s. Stages agree on it if the step draws the same random numbers and writes the same buffers, "
                "which cannot be found out, as it needs values (%s: %s). Set modes before trainer.fit, e.g. in "
                "__init__",
                self._changed_modes(), type(error).__name__, error,
            )  # fmt: skip
        self._modes = modes

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
        self,
        result: StepResult,
        batch: Any,
        arguments: tuple[Any, ...],
        number: int,
        whole: bool = True,
    ) -> None:
        """Looks at gradients, and at the loss and what was logged; on a GPU, at those of the step before.

        Args:
            result: Of the step.
            batch: What was trained on.
            arguments: Further arguments of the step.
            number: The batch's, since training began.
            whole: Gradients are those of all ranks and of a whole accumulation window.

        Raises:
            GraphError: The step has changed since it was probed; says how.
        """
        for name, parameter in self.idle.items():
            if parameter.grad is not None:
                raise GraphError(
                    f"{name} got a gradient, though the loss did not read it when the step was probed, so "
                    f"that it would never be trained. {_REMEDY}"
                )
        reduced = [p.grad for p in self.trained.values() if p.grad is not None] if whole else None
        values = _values(result, batch, arguments, number, reduced)
        before, self._under_way = self._under_way, values
        if values.event is None:
            self.finish()
        elif before is not None:  # nobody waits for the device
            self._examine(before)

    def has_diverged(self, allowed: int | None) -> bool:
        """Returns whether more steps in a row were not finite than are allowed; None allows all."""
        return allowed is not None and self.num_diverged >= allowed

    def refuse_divergence(self, allowed: int | None, global_step: int, result: StepResult) -> None:
        """Ends the run on all ranks, in the step in which all know that one has diverged.

        Raises:
            DivergenceError: One has.
        """
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
                "(bf16-mixed, 32-true); strategy.check_finite=True names the layer that is the first. "
                "strategy.max_diverged_steps says how many steps are borne"
            )

    def finish(self) -> None:
        """Looks at the latest step, too, whose values a GPU may not have given yet; waits for them.

        Before anything is saved: a step that has read NaN has made its weights NaN.

        Raises:
            GraphError: As for `after_step`.
        """
        values, self._under_way = self._under_way, None
        if values is not None:
            self._examine(values)

    def _examine(self, values: _Finite) -> None:
        if values.event is not None:
            values.event.synchronize()
        finite = dict(zip(values.names, values.finite.tolist(), strict=True))
        if finite[_LOSS]:
            self.last_finite = values.number, values.loss
        if _GRADIENTS in finite:
            alone = self.layout.mesh.layout.num_pipelines == 1
            healthy = finite[_GRADIENTS] and (finite[_LOSS] or not alone)
            self.num_diverged = 0 if healthy else self.num_diverged + 1
        # A loss is looked at whenever it turns not finite. What is logged may come and go for good reasons, such as
        # the mean over a class that a batch lacks, and tracing takes seconds: after each look only at twice as many
        # steps in a row.
        not_finite = {name for name in finite if not finite[name]} - {_GRADIENTS}
        in_a_row = {name: self._num_not_finite.get(name, 0) + 1 for name in not_finite}
        new = {name for name, steps in in_a_row.items() if steps == self._next_look.get(name, 1)}
        self._next_look |= {name: 2 * in_a_row[name] for name in new - {_LOSS}}
        self._num_not_finite = in_a_row
        if not new:
            return
        what = "the loss" if _LOSS in new else f"{min(new)!r}, which is logged,"
        what = f"{what} of batch {values.number} is not finite"
        try:
            with self.as_in_steps():
                self._trace_again(values.batch, values.arguments)
        except GraphError as error:
            raise GraphError(
                f"{what}, as the step has changed since it was probed: {error}. {_REMEDY}"
            ) from error
        except Exception as error:  # as above
            self._warn_once(
                min(new),
                f"{what}. Either training diverges, or the step has changed since it was probed, which cannot be "
                f"found out, as it needs values ({error}). {_REMEDY}",
            )
            return
        if _LOSS in new:
            self._warn_once(
                _LOSS, f"{what}. {_UNCHANGED if values.event is None else _UNCHANGED_NOW}"
            )

    def _warn_once(self, about: str, warning: str) -> None:
        if about not in self._warned:
            self._warned.add(about)
            _log.warning("%s", warning)

    @contextlib.contextmanager
    def as_in_steps(self) -> Iterator[None]:
        """Sets training flags to those of steps inside: who saves after a validation finds them all off.

        There nothing gets a gradient, either.
        """
        found = self._current_modes()
        self._set_modes(self._modes)
        try:
            with torch.inference_mode(False), torch.enable_grad():
                yield
        finally:
            self._set_modes(found)

    def _set_modes(self, modes: list[bool]) -> None:
        for module, mode in zip(self._modules, modes, strict=True):
            module.training = mode

    def _trace_again(self, batch: Any, arguments: tuple[Any, ...]) -> None:
        number, steps = self.layout.schedule.num_microbatches, self.layout.steps
        steps.require_unchanged(microbatches(batch, number, steps.form)[0], arguments)

    def _current_modes(self) -> list[bool]:
        return list(map(_TRAINING, self._modules))


def _values(
    result: StepResult,
    batch: Any,
    arguments: tuple[Any, ...],
    number: int,
    gradients: list[Tensor] | None,
) -> _Finite:
    names = (_LOSS, *(logged.name for logged in result.logged))
    finite = torch.stack([result.loss, *(logged.value for logged in result.logged)]).isfinite()
    if gradients is not None:
        names += (_GRADIENTS,)
        plain = [t._values() if t.is_sparse else t for t in gradients if t.numel()]
        all_finite = _are_finite(plain) if plain else torch.ones((), dtype=torch.bool)
        finite = torch.cat([finite, all_finite.to(finite.device).reshape(1)])
    on_host, event = begin_copy_to_host(finite)
    return _Finite(names, on_host, result.loss, event, batch, arguments, number)


def _are_finite(tensors: list[Tensor]) -> Tensor:
    if tensors[0].device.type == "cpu":
        # Squares take the CPU a sixth of the time that largest values take, but may overflow.
        all_finite = torch.stack(list(torch._foreach_norm(tensors))).isfinite().all()
        if all_finite:
            return all_finite
    return torch.stack(list(torch._foreach_norm(tensors, torch.inf))).isfinite().all()
