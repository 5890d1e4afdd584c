"""The engine: one loop over instructions. It obeys the plan and decides nothing.

`Executor.run` is a generator that yields before every wait. Whoever drives it decides how to spend the
time until the message is there:

    for wait in executor.run(program, works, frozen):   # between processes: just block,
        filler.fill(wait, executor.recording)           # or run frozen layers of coming batches
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import assert_never

from lightning_diffpipe.clock import Clock
from lightning_diffpipe.comm.transport import MessageKey, PendingWork, Transport
from lightning_diffpipe.errors import PipelineTimeoutError
from lightning_diffpipe.graph.streaming import WeightStream
from lightning_diffpipe.planning.instruction import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Encode,
    ExchangeFrozen,
    Forward,
    ForwardNoGrad,
    Instruction,
    Program,
    Receive,
    ReduceGradients,
    Send,
    ShareResults,
    UpdateWeights,
    Wait,
)
from lightning_diffpipe.planning.memory import streamed_runs
from lightning_diffpipe.runtime.bubbles import Filler, FrozenWork
from lightning_diffpipe.runtime.recording import Recording
from lightning_diffpipe.runtime.stage import MicrobatchWork, StageRunner

Works = Sequence[MicrobatchWork] | Mapping[int, MicrobatchWork]
"""Microbatches by the numbers that a program gives them."""


@dataclass(frozen=True, slots=True)
class PendingWait:
    """A rank at a wait.

    Attributes:
        instruction: The instruction it is at.
        is_ready: Returns whether it could go on at once.
    """

    instruction: Instruction
    is_ready: Callable[[], bool]


@dataclass(eq=False)
class Executor:
    """Runs one rank's program.

    Attributes:
        local_rank: This rank's position in its pipeline.
        runner: Forwards and backwards of the stages it holds.
        transport: Carries the messages.
        start_reduction: Callback that begins to sum gradients over the holders of each parameter; `None` if
            there is nothing to wait for.
        gather_ends: Callback that begins to bring what the loss reads of several chains to one rank; or `None`.
        share_results: Callback that begins to bring loss and metrics to all ranks; or `None`.
        clock: Clock of the measured timeline.
        recording: Start and stop of the instructions of the running, or last, program.
        position: The instruction it stands at.
        flushes: Whether nothing is under way when a program has ended.
        update: Callback that steps the optimizers, with the gradients of a batch that ends with this microbatch.
        stream: Weights of streamed layers, of which the program tells the order.
    """

    local_rank: int
    runner: StageRunner
    transport: Transport
    start_reduction: Callable[[], PendingWork | None]
    gather_ends: Callable[[Sequence[MicrobatchWork]], PendingWork | None]
    share_results: Callable[[Sequence[MicrobatchWork]], PendingWork | None]
    clock: Clock
    position: int = 0
    flushes: bool = True
    update: Callable[[MicrobatchWork], None] | None = None
    stream: WeightStream | None = None

    def __post_init__(self) -> None:
        self.recording = self.begin()

    def begin(self) -> Recording:
        """Returns a new recording, for the program that runs next."""
        self.recording = Recording(self.local_rank, self.clock)
        return self.recording

    def run(
        self, program: Program, works: Works, frozen: FrozenWork | None
    ) -> Iterator[PendingWait]:
        """Runs a program to its end; `begin` comes before it.

        Args:
            program: This rank's instructions, lowered.
            works: The microbatches of the step, and others under way.
            frozen: The frozen parts of the step, if the plan encodes any.

        Yields:
            Before every wait: what it stands at, and a function that returns whether it may go on.
        """
        recording = self.recording
        if self.stream is not None:
            self.stream.follow(streamed_runs(program, self.stream.stages))
        try:
            start = recording.stamp()
            for self.position, instruction in enumerate(program):
                self.transport.come_to(instruction)
                yield from self._execute(instruction, works, frozen)
                start = recording.add(instruction, start)  # a stamp is an event of a GPU
            if self.flushes:
                self.transport.finish()
                self.runner.stash.check_empty()
        except BaseException:
            self.runner.stash.clear()
            raise
        finally:
            if self.stream is not None:
                self.stream.rest()

    def _execute(
        self, instruction: Instruction, works: Works, frozen: FrozenWork | None
    ) -> Iterator[PendingWait]:
        runner, transport = self.runner, self.transport
        match instruction:
            case Forward(stage, microbatch):
                runner.forward(stage, works[microbatch])
            case Backward(stage, microbatch):
                runner.backward(stage, works[microbatch])
            case BackwardInput(stage, microbatch):
                runner.backward_input(stage, works[microbatch])
            case BackwardWeight(stage, microbatch):
                runner.backward_weight(stage, works[microbatch])
            case Send(kind, stage, microbatch, to_rank):
                buffer = runner.outgoing_buffer(kind, stage, works[microbatch])
                transport.send(MessageKey(kind, stage, microbatch), buffer, to_rank)
            case Receive(kind, stage, microbatch, from_rank):
                buffer = runner.incoming_buffer(kind, stage, works[microbatch])
                transport.receive(MessageKey(kind, stage, microbatch), buffer, from_rank)
            case Wait(kind, stage, microbatch):
                key = MessageKey(kind, stage, microbatch)
                yield PendingWait(instruction, lambda: transport.is_ready(key))
                runner.unpack(kind, stage, works[microbatch], transport.wait(key))
            case Encode(part):
                assert frozen is not None
                frozen.encode(part)
            case ExchangeFrozen():
                assert frozen is not None
                exchange = frozen.exchange(transport)
                yield PendingWait(instruction, exchange.is_ready)
                exchange.wait()
                frozen.deliver()
            case ReduceGradients():
                yield from self._wait_for(self.start_reduction(), instruction)
            case ShareResults():
                yield from self._wait_for(self.gather_ends(works), instruction)
                yield from self._wait_for(self.share_results(works), instruction)
            case ForwardNoGrad(stage, microbatch):
                runner.forward_no_grad(stage, works[microbatch])
            case UpdateWeights(_, microbatch):
                assert self.update is not None
                self.update(works[microbatch])
            case _:
                assert_never(instruction)

    @staticmethod
    def _wait_for(pending: PendingWork | None, instruction: Instruction) -> Iterator[PendingWait]:
        if pending is not None:
            yield PendingWait(instruction, pending.is_ready)
            pending.wait()


def run_alone(
    executor: Executor,
    program: Program,
    works: Works,
    frozen: FrozenWork | None = None,
    filler: Filler | None = None,
    image: Callable[[int], str] | None = None,
) -> None:
    """Drives one rank of many processes: a wait blocks when there is nothing to fill it with.

    Args:
        executor: This rank.
        program: Instructions of this rank.
        works: The microbatches.
        frozen: The frozen parts.
        filler: Frozen work of coming batches; what it has of this one is done first.
        image: Callback that draws the plan with a mark at an instruction, for the error of a timeout.

    Raises:
        PipelineTimeoutError: A message did not come in time; names the instruction, and shows where
            in the plan this rank stands.
    """
    recording = executor.begin()
    try:
        if filler is not None and frozen is not None:
            filler.finish(frozen, recording)
        for waiting in executor.run(program, works, frozen):
            if filler is not None:
                filler.fill(waiting.instruction, waiting.is_ready, recording)
        if filler is not None:
            filler.learn(recording)
    except PipelineTimeoutError as error:
        position = executor.position
        standing = f"{error}; it stands at instruction {position + 1} of {len(program)}"
        name = f" ({program[position]})" if position < len(program) else ""
        drawing = f"\n\n{image(position)}" if image else ""
        raise PipelineTimeoutError(f"{standing}{name}{drawing}") from error
