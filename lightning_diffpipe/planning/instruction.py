"""The instruction set: everything a rank can do, and how it is written down.

A rank runs a *program*, a tuple of instructions. Every instruction has a short text form that parses back to the
same instruction, so that programs can be read in logs, kept in plans and typed in tests:

    2F0      stage 2 forwards microbatch 0        2a0>3   send what stage 2 reads to rank 3
    2B0      ... and backpropagates it            2a0<1   post its receive from rank 1
    2I0 2W0  ... in two parts                     2a0?1   wait until it is here
    2P0      forwards it without gradients        2g0: also for a gradient
    2U0      steps the optimizer of stage 2
    E3       encodes frozen part 3                X R L   exchange frozen parts; reduce gradients;
                                                          share the loss

On a rank that holds one stage only, the number of that stage may be left out: `F0 B0`.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

from lightning_diffpipe.errors import ScheduleError

Kind = Literal["activation", "gradient"]

LETTER_OF_KIND: dict[Kind, str] = {"activation": "a", "gradient": "g"}
_KIND_OF_LETTER: dict[str, Kind] = {letter: kind for kind, letter in LETTER_OF_KIND.items()}


@dataclass(frozen=True, slots=True)
class _OfStage:
    """Work of a stage for a microbatch; `letter` stands for it in texts."""

    letter: ClassVar[str] = ""

    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.letter}{self.microbatch}"


@dataclass(frozen=True, slots=True)
class Forward(_OfStage):
    """Forwards one microbatch through one stage. Text form: `2F0`.

    Roughly: `stash["output", s, m] = stage(stash["activation", s, m])`
    """

    letter = "F"


@dataclass(frozen=True, slots=True)
class Backward(_OfStage):
    """Backpropagates one microbatch through one stage. Text form: `2B0`.

    Roughly: `stash["gradient", s - 1, m] = autograd(output, stash["gradient", s, m])`
    """

    letter = "B"


@dataclass(frozen=True, slots=True)
class BackwardInput(_OfStage):
    """The half of a backward that other stages wait for: gradients of the inputs. Text: `2I0`.

    Roughly: `stash["gradient", s - 1, m] = grad(output, inputs, stash["gradient", s, m])`
    """

    letter = "I"


@dataclass(frozen=True, slots=True)
class BackwardWeight(_OfStage):
    """The half of a backward that nobody waits for: gradients of the weights. Text: `2W0`.

    Roughly: `for weight in stage: weight.grad += grad(output, weight, stash["gradient", s, m])`
    """

    letter = "W"


@dataclass(frozen=True, slots=True)
class ForwardNoGrad(_OfStage):
    """Forwards one microbatch without keeping anything for a backward. Text form: `2P0`.

    Roughly: `with no_grad(): send(stage(stash["activation", s, m]))`
    """

    letter = "P"


@dataclass(frozen=True, slots=True)
class UpdateWeights(_OfStage):
    """Steps the optimizer of one stage with the gradient of one microbatch. Text form: `2U0`.

    Only schedules without a flush have it; all others step after the last instruction.
    """

    letter = "U"


@dataclass(frozen=True, slots=True)
class Encode:
    """Runs one part of the frozen work; `part` indexes the plan's frozen parts. Text form: `E3`."""

    part: int

    def __str__(self) -> str:
        return f"E{self.part}"


@dataclass(frozen=True, slots=True)
class Send:
    """Starts to send a message and goes on at once. Text form: `2a0>3`.

    Attributes:
        stage: The stage that *reads* the message: an activation into stage 2, or the gradient of
            the outputs of stage 2.
        to_rank: Rank of the same pipeline that reads it.
    """

    kind: Kind
    stage: int
    microbatch: int
    to_rank: int

    def __str__(self) -> str:
        return f"{self.stage}{LETTER_OF_KIND[self.kind]}{self.microbatch}>{self.to_rank}"


@dataclass(frozen=True, slots=True)
class _Arrival:
    """A step in receiving a message; fields as in `Send`, and `sign` stands for it in texts."""

    sign: ClassVar[str] = ""

    kind: Kind
    stage: int
    microbatch: int
    from_rank: int

    def __str__(self) -> str:
        where = f"{self.sign}{self.from_rank}"
        return f"{self.stage}{LETTER_OF_KIND[self.kind]}{self.microbatch}{where}"


@dataclass(frozen=True, slots=True)
class Receive(_Arrival):
    """Posts a receive and goes on at once. Text form: `2a0<1`."""

    sign = "<"


@dataclass(frozen=True, slots=True)
class Wait(_Arrival):
    """Blocks until a posted receive has arrived. Text form: `2a0?1`."""

    sign = "?"


@dataclass(frozen=True, slots=True)
class ExchangeFrozen:
    """All ranks of the pipeline exchange their frozen results; nobody passes alone. Text: `X`."""

    def __str__(self) -> str:
        return "X"


@dataclass(frozen=True, slots=True)
class ReduceGradients:
    """Sums gradients over all ranks that hold the same parameter. Text form: `R`."""

    def __str__(self) -> str:
        return "R"


@dataclass(frozen=True, slots=True)
class ShareResults:
    """All ranks of the pipeline get loss and metrics, at the end of a program. Text form: `L`.

    Only the runtime adds it; it is nearly nothing, and no plan counts it.
    """

    def __str__(self) -> str:
        return "L"


Staged = Forward | Backward | BackwardInput | BackwardWeight | ForwardNoGrad | UpdateWeights
Compute = Staged | Encode
Instruction = Compute | Send | Receive | Wait | ExchangeFrozen | ReduceGradients | ShareResults
Program = tuple[Instruction, ...]

_STAGED: dict[str, type[Staged]] = {kind.letter: kind for kind in get_args(Staged)}
_MESSAGE: dict[str, type[Send | Receive | Wait]] = {">": Send, "<": Receive, "?": Wait}
_COLLECTIVE: dict[str, Instruction] = {
    str(each): each for each in (ExchangeFrozen(), ReduceGradients(), ShareResults())
}
_STAGED_TEXT = re.compile(r"(\d+)?([FBIWPU])(\d+)")
_MESSAGE_TEXT = re.compile(r"(\d+)?([ag])(\d+)([<>?])(\d+)")
_ENCODE_TEXT = re.compile(r"E(\d+)")


def parse_instruction(text: str, stage: int | None = None) -> Instruction:
    """Reads the text form of one instruction back; `stage` is meant where the text leaves it out.

    Raises:
        ScheduleError: The text is no instruction, or names no stage and none was given.

    Example:
        >>> parse_instruction("2F0")
        Forward(stage=2, microbatch=0)
        >>> str(parse_instruction("a0<1", stage=2))
        '2a0<1'
    """
    if text in _COLLECTIVE:
        return _COLLECTIVE[text]
    if match := _ENCODE_TEXT.fullmatch(text):
        return Encode(int(match[1]))
    if match := _STAGED_TEXT.fullmatch(text):
        return _STAGED[match[2]](_stage_of(match[1], text, stage), int(match[3]))
    if match := _MESSAGE_TEXT.fullmatch(text):
        make = _MESSAGE[match[4]]
        read_by = _stage_of(match[1], text, stage)
        return make(_KIND_OF_LETTER[match[2]], read_by, int(match[3]), int(match[5]))
    raise ScheduleError(
        f"{text!r} is no instruction; expected for example F0, 2B1, 2a0>3, 2g0<1, 2a0?1, E3, X, R or L"
    )


def _stage_of(digits: str | None, text: str, default: int | None) -> int:
    if digits is not None:
        return int(digits)
    if default is None:
        raise ScheduleError(f"{text!r} names no stage; write for example 0{text}")
    return default


def format_program(program: Iterable[Instruction], stage: int | None = None) -> str:
    """Writes a program on one line; the number of a stage is left out if it is `stage`, as for `parse_program`.

    Example:
        >>> format_program((Forward(1, 0), Backward(1, 0), Send("gradient", 0, 0, 0)), stage=1)
        'F0 B0 0g0>0'
    """
    return " ".join(without_stage(instruction, stage) for instruction in program)


def without_stage(instruction: Instruction, stage: int | None) -> str:
    """Returns the text of an instruction, its stage left out where it is `stage`."""
    text, own_stage = str(instruction), getattr(instruction, "stage", None)
    return text if own_stage is None or own_stage != stage else text.removeprefix(str(stage))


def parse_program(text: str, stage: int | None = None) -> Program:
    """Reads a program back; inverts `format_program`.

    Example:
        >>> parse_program("F0 B0", stage=1)
        (Forward(stage=1, microbatch=0), Backward(stage=1, microbatch=0))
    """
    return tuple(parse_instruction(word, stage) for word in text.split())
