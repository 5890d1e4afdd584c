"""Every exception this package raises on purpose, as one tree.

    DiffPipeError
    ├── ConfigurationError     (ValueError)    an argument, config value or batch that cannot work
    │   └── DataError                          a sample that cannot be read
    ├── ProfileError           (ValueError)    a profile file or measurement that is malformed
    ├── PartitionError         (ValueError)    layers that cannot be cut as asked
    ├── ScheduleError          (ValueError)    programs that break a law: deadlock, missing message
    ├── PlanError              (ValueError)    a plan that is malformed or made for something else
    ├── GraphError             (ValueError)    a callable that cannot be cut into layers
    │   ├── ForeignLayerError                  a layer of another stage was called outside a step
    │   └── LayoutError                        a denoiser that cannot be run on a part of its tokens
    ├── CheckpointError        (ValueError)    a checkpoint that cannot be read or does not fit
    │   └── MissingCheckpointError (FileNotFoundError) there is none
    ├── SamplingError          (ValueError)    final latents that are not finite
    ├── DivergenceError                        loss, gradients or weights are not finite any more
    ├── BoundaryError                          a value crossing a stage boundary is not finite
    └── PipelineTimeoutError   (TimeoutError)  a message did not arrive in time
        └── LostRankError                      a rank was lost; says how, and in which phase

User mistakes are also `ValueError`s, so that generic handlers keep working. Messages name what is wrong
with the numbers, then the remedy. `assert` is for our own invariants.

Where several ranks raise the same error, one may print it for all; an error of one rank must be printed by that
rank, as no other knows it. `raised_by_all` marks the first kind.
"""

import contextlib
import math
import traceback
from collections.abc import Iterator, Sequence
from numbers import Integral, Real
from typing import Any

_LONGEST_S = 1e8  # three years


class DiffPipeError(Exception):
    """Base class of every exception raised on purpose by this package.

    Attributes:
        is_of_all_ranks: Every rank raises this error, rank 0 among them.
        leaves_messages: Messages are under way after it that cannot be taken back, as over NCCL.
    """

    is_of_all_ranks: bool = False
    leaves_messages: bool = False


class ConfigurationError(DiffPipeError, ValueError):
    """An argument, a config value, a trainer option or a batch cannot work with pipelines."""


class DataError(ConfigurationError):
    """A sample cannot be read; names the file, and the line that names it."""


class ProfileError(DiffPipeError, ValueError):
    """A profile is malformed, or its measurements make no sense."""


class PartitionError(DiffPipeError, ValueError):
    """The layers cannot be cut into stages as asked."""


class ScheduleError(DiffPipeError, ValueError):
    """The programs of the ranks break a law every schedule obeys."""


class PlanError(DiffPipeError, ValueError):
    """A plan is malformed, or was made for another model, batch or number of ranks."""


class GraphError(DiffPipeError, ValueError):
    """A callable cannot be cut at its layers, or behaved differently from its probe."""


class ForeignLayerError(GraphError):
    """A layer was called, or a parameter read, outside a pipeline step that lives on another rank."""


class LayoutError(GraphError):
    """A denoiser cannot be run on a part of its tokens, or behaved differently from its probe."""


class CheckpointError(DiffPipeError, ValueError):
    """A checkpoint cannot be read, or does not fit the module."""


class MissingCheckpointError(CheckpointError, FileNotFoundError):
    """There is no checkpoint at a path."""


class SamplingError(DiffPipeError, ValueError):
    """The final latents of a request are not finite; raised on all ranks alike."""


class DivergenceError(DiffPipeError):
    """The loss, gradients or weights of training are NaN or infinite."""


class BoundaryError(DiffPipeError):
    """A value that crosses a stage boundary is not finite."""


class PipelineTimeoutError(DiffPipeError, TimeoutError):
    """A message or a rank did not arrive in time."""


class LostRankError(PipelineTimeoutError):
    """A rank was lost, or a collective broke for an unknown reason.

    Args:
        message: Text with the number of the rank, the cause and the phase of the run.
        by_signal: Whether the rank was stopped by SIGTERM.
    """

    def __init__(self, message: str, by_signal: bool = False) -> None:
        super().__init__(message)
        self.by_signal = by_signal


@contextlib.contextmanager
def raised_by_all() -> Iterator[None]:
    """Marks errors that are raised inside as those of all ranks, as a context or a decorator.

    For what all ranks have agreed on, or can only find alike: in their arguments, options or layers, and not in
    files and devices of a host. A wait that ended is each rank's own in any case.

    Example:
        >>> try:
        ...     with raised_by_all():
        ...         raise ConfigurationError("num_stages must be >= 1; got 0")
        ... except ConfigurationError as error:
        ...     error.is_of_all_ranks
        True
    """
    try:
        yield
    except PipelineTimeoutError:
        raise
    except DiffPipeError as error:
        error.is_of_all_ranks = True
        raise


def is_out_of_memory(error: BaseException) -> bool:
    """Returns whether an error is for lack of memory, by its text: not all libraries have a class for it."""
    signs = ("out of memory", "ALLOC_FAILED", "can't allocate memory")
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in signs)


def clear_variables(error: BaseException | None) -> None:
    """Clears the variables of functions that an error ended, which hold tensors: also of errors that led to it.

    The traceback still says where it was raised.
    """
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def require_number(
    name: str,
    value: Any,
    least: float | None = None,
    most: float | None = None,
    *,
    above: float | None = None,
    whole: bool = False,
) -> None:
    """Refuses an argument that is no finite number in its range.

    Args:
        name: Name of the argument.
        value: Value of the argument; true and false are no numbers.
        least: Smallest value.
        most: Largest value.
        above: Bound that the value must exceed.
        whole: Whether it must be a whole number.

    Raises:
        ConfigurationError: It is not.

    Example:
        >>> require_number("batch_size", -3, 1, whole=True)
        Traceback (most recent call last):
        lightning_diffpipe.errors.ConfigurationError: batch_size must be a whole number >= 1; got -3
    """
    kind = Integral if whole else Real
    good = isinstance(value, kind) and not isinstance(value, bool)
    good = good and -math.inf < value < math.inf  # `math.isfinite` fails on integers of 310 digits
    good = good and (least is None or value >= least) and (most is None or value <= most)
    if not good or (above is not None and value <= above):
        signs = ((">", above), (">=", least), ("<=", most))
        bounds = " and ".join(f"{sign} {bound:.10g}" for sign, bound in signs if bound is not None)
        number = "a whole number" if whole else "a number"
        raise ConfigurationError(f"{name} must be {f'{number} {bounds}'.strip()}; got {value!r}")


def require_flags(**values: Any) -> None:
    """Raises ConfigurationError for an argument that is neither true nor false."""
    for name, value in values.items():
        if not isinstance(value, bool):
            raise ConfigurationError(f"{name} must be true or false; got {value!r}")


def require_choice(name: str, value: Any, choices: Sequence[Any]) -> None:
    """Raises ConfigurationError for an argument that is none of some choices."""
    if value not in choices:
        *others, last = map(str, choices)
        raise ConfigurationError(f"{name}={value!r}; choose {', '.join(others)} or {last}")


def require_timeout(timeout_s: Any, name: str = "timeout_s") -> None:
    """Refuses a longest wait, in seconds, that torch cannot count: it takes nanoseconds in 64 bits.

    Raises:
        ConfigurationError: It is not above 0 and at most three years.
    """
    require_number(name, timeout_s, above=0, most=_LONGEST_S)
