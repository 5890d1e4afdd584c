"""Noticing that a step is no longer the one that was probed, where nothing else would.

What a stage runs and sends was decided by one probe of the step before training. A branch on the epoch, or
a call of `.train()`, may change later what the step reads. Three things show it:

    modes        a module is in training mode that was not, or the other way round
    gradients    a parameter got one that had none coming, so that nobody would put it aside
    not finite   the loss is NaN: dummies are, so it may have read one

With other modes, and when a loss is not finite for the first time, the step is traced again, and if it has changed
the run ends and says what was changed. With other modes a step that needs values runs for this on what a rank
holds, with NaN for the rest; if that fails, a warning says what may be wrong. A loss or gradients that are not
finite are allowed for some steps: training may diverge, too.
"""

import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from lightning_diffpipe.errors import ConfigurationError, DivergenceError, GraphError, raised_by_all
from lightning_diffpipe.runtime.batch_layout import BatchLayout, microbatches
from lightning_diffpipe.runtime.engine import StepResult
from lightning_diffpipe.runtime.upcoming import begin_copy_to_host

_log = logging.getLogger(__name__)
_TRAINING = attrgetter("training")
_REMEDY = (
    "Branches on what hooks set or on values must read the same layers and train the same parameters "
    "from the first step on: multiply a term by 0 until it shall count, instead of leaving it out"
)
_NOT_FINITE = (
    "Either training diverges: lower the learning rate or clip gradients; check_finite=True finds the layer. Or "
    "the step reads since then what it did not read when it was probed, and gets NaN for what nobody sends. "
    f"{_REMEDY}"
)


@dataclass(frozen=True)
class _Finite:
    """Finiteness of the loss of a step, and of its gradients, if they are whole, once `event` has happened."""

    finite: Tensor
    event: torch.cuda.Event | None
    loss: Tensor
    number: int


@dataclass(eq=False)
class StepWatch:
    """Compares what one rank's steps do with what was probed.

    Attributes:
        module: The module, its training flags as they were probed.
        layout: Lays batches out, and knows the cut steps.
        idle: Parameters of this rank that could be trained, but get no gradient, by name.
        num_diverged: Optimizer steps in a row, up to the latest that was checked, with a gradient of this rank
            that is not finite, or a loss where there is one pipeline: of several each has a loss of its own, and
            gradients are summed over all, so that they agree.
        last_finite: The latest batch with a finite loss, and that loss; equal on all ranks of a pipeline.
    """

    module: nn.Module
    layout: BatchLayout
    idle: Mapping[str, nn.Parameter]
    num_diverged: int = 0
    last_finite: tuple[int, Tensor] | None = None

    def __post_init__(self) -> None:
        # Walking through a large module takes milliseconds.
        self._modules = tuple(self.module.modules())
        self._modes = self._current_modes()
        self._warned = False
        self._under_way: _Finite | None = None
        self._latest: tuple[Any, ...] = ()

    def before_step(self, batch: Any, arguments: tuple[Any, ...]) -> None:
        """Checks training flags; takes microseconds as long as they are as they were.

        Raises:
            ConfigurationError: They are not, and the step samples other random numbers or writes other
                buffers because of it; names the modules.
        """
        modes, self._latest = self._current_modes(), (batch, arguments)
        if modes == self._modes:
            return
        try:
            self._require_unchanged()
        except Exception as error:
            if isinstance(error, GraphError) or not self.layout.steps.needs_values:
                raise ConfigurationError(
                    f"{self._changed_modes()}, and stages would not agree on it ({error}). Set modes before "
                    "trainer.fit, e.g. in __init__"
                ) from error
            # The user's code may refuse NaN, and the device may be too small for the whole step.
            _log.warning(
                "%s. Stages agree on it if the step draws the same random numbers and writes the same buffers, "
                "which cannot be found out, as it needs values (%s: %s). Set modes before trainer.fit, e.g. in "
                "__init__",
                self._changed_modes(), type(error).__name__, error,
            )  # fmt: skip
        self._modes = modes

    def _require_unchanged(self) -> None:
        batch, arguments = self._latest
        number, steps = self.layout.schedule.num_microbatches, self.layout.steps
        steps.require_unchanged(microbatches(batch, number, steps.batch_spec)[0], arguments)

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
        self, loss: Tensor, number: int, gradients: Sequence[Tensor | None] | None = ()
    ) -> None:
        """Checks the gradients and the loss; on a GPU those of the step before.

        Args:
            loss: Loss of the step.
            number: The batch's, since training began.
            gradients: Those of this rank, summed over all ranks and an accumulation window; None before its end.

        Raises:
            GraphError: The step has changed since it was probed; says what it reads now.
        """
        for name, parameter in self.idle.items():
            if parameter.grad is not None:
                raise GraphError(
                    f"{name} got a gradient, though the loss did not read it when the step was probed, so "
                    f"that it would never be trained. {_REMEDY}"
                )
        values = _values(loss, number, gradients)
        before, self._under_way = self._under_way, values
        if values.event is None:
            self.finish()
        elif before is not None:  # nobody waits for the device
            self._examine(before)

    def has_diverged(self, allowed: int | None) -> bool:
        """Returns whether more steps in a row were not finite than are allowed; None allows all."""
        return allowed is not None and self.num_diverged >= allowed

    def refuse_divergence(self, allowed: int | None, global_step: int, result: StepResult) -> None:
        """Raises DivergenceError on all ranks, in the step in which all know that one has diverged."""
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
                "(bf16-mixed, 32-true); strategy.check_finite=True names the layer that is the first. Or the "
                f"step has changed since it was probed. {_REMEDY}. strategy.max_diverged_steps says how many steps "
                "are allowed"
            )

    def finish(self) -> None:
        """Checks the latest step, too, whose values a GPU may not have given yet; waits for them."""
        values, self._under_way = self._under_way, None
        if values is not None:
            self._examine(values)

    def _examine(self, values: _Finite) -> None:
        if values.event is not None:
            values.event.synchronize()
        loss_is_finite, *gradients_are = values.finite.tolist()
        if loss_is_finite:
            self.last_finite = values.number, values.loss
        if gradients_are:
            alone = self.layout.mesh.layout.num_pipelines == 1
            healthy = all(gradients_are) and (loss_is_finite or not alone)
            self.num_diverged = 0 if healthy else self.num_diverged + 1
        if not loss_is_finite and not self._warned:
            self._warned = True
            try:
                if self._latest and not self.layout.steps.needs_values:
                    self._require_unchanged()
            except GraphError as error:
                said = f"the loss of batch {values.number} is not finite, as {error}. {_REMEDY}"
                raise GraphError(said) from error
            except Exception as error:  # of any code
                _log.debug("whether the step has changed cannot be found out: %s", error)
            _log.warning("the loss of batch %d is not finite. %s", values.number, _NOT_FINITE)

    @contextlib.contextmanager
    def as_in_steps(self) -> Iterator[None]:
        """Sets training flags to those of steps inside: who saves after a validation finds them all off.

        There nothing gets a gradient, either.
        """
        modes = self._current_modes()
        self._set_modes(self._modes)
        try:
            with torch.inference_mode(False), torch.enable_grad():
                yield
        finally:
            self._set_modes(modes)

    def _set_modes(self, modes: list[bool]) -> None:
        for module, mode in zip(self._modules, modes, strict=True):
            module.training = mode

    def _current_modes(self) -> list[bool]:
        return list(map(_TRAINING, self._modules))


def _values(loss: Tensor, number: int, gradients: Sequence[Tensor | None] | None) -> _Finite:
    finite = loss.isfinite().reshape(1)
    if gradients is not None:
        plain = [gradient for gradient in gradients if gradient is not None]
        all_finite = _are_finite(plain) if plain else torch.ones((), dtype=torch.bool)
        finite = torch.cat([finite, all_finite.to(finite.device).reshape(1)])
    return _Finite(*begin_copy_to_host(finite), loss, number)


@torch.no_grad()
def _are_finite(tensors: list[Tensor]) -> Tensor:
    """Returns whether all values are finite, by the operator of `torch.amp.GradScaler`, which multiplies them by 1.

    A CPU needs a twentieth of the time of norms for 500 small tensors, and as long for large ones.
    """
    device = tensors[0].device
    not_finite, one = torch.zeros((), device=device), torch.ones((), device=device)
    check = torch._amp_foreach_non_finite_check_and_unscale_
    try:
        check(tensors, not_finite, one)
    except RuntimeError:
        # It knows no sparse, complex or negated ones, and writes, so that none may be spread over its memory.
        dense = [t._values() if t.is_sparse else t for t in tensors]
        plain = [t.contiguous() if 0 in t.stride() else t for t in dense]
        real = [
            torch.view_as_real(t.resolve_conj()) if t.is_complex() else t.resolve_neg()
            for t in plain
        ]
        check(real, not_finite, one)
    return not_finite == 0
