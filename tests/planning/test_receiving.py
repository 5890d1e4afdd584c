"""Where receives begin on devices: hosts that wait for their devices anywhere never wait for each other."""

import itertools
from collections import defaultdict
from itertools import pairwise

import pytest

from lightning_diffpipe.planning.instruction import Receive, Send, Wait
from lightning_diffpipe.planning.lowering import lower, lower_for_devices, receive_starts
from lightning_diffpipe.planning.passes import widened
from lightning_diffpipe.planning.schedule import Placement
from lightning_diffpipe.planning.schedules import SCHEDULES
from lightning_diffpipe.planning.schedules.interleaved import interleaved
from lightning_diffpipe.planning.schedules.one_f_one_b import one_f_one_b
from tests.rows import row

from .profiles import ALL, placement_of

RUNNABLE = [n for n in SCHEDULES if not SCHEDULES[n].place]
INTERLEAVED = [(R, v, R * k) for R in range(1, 7) for v in (2, 3, 4) for k in (1, 2, 3, 5)]


def schedules(name):
    if name == "interleaved":
        return [interleaved(Placement.round_robin(R * v, R), M) for R, v, M in INTERLEAVED]
    spec = SCHEDULES[name]
    if spec.place:
        return [spec(spec.place(2 * R, R), M) for R in range(2, 7) for M in (1, R, 2 * R, 9)]
    return [spec(placement_of(size), M) for size, M in ALL]


def message(i):
    return i.kind, i.stage, i.microbatch


def stuck_at(lowered, due):
    """What ranks stand at for ever if hosts wait for their devices before every instruction.

    A message is over when it is sent and its receive has started; till then both devices are occupied.
    """
    sent, started = set(), set()
    positions = [0] * lowered.num_ranks
    occupied = [set() for _ in positions]

    def advance(rank):
        instruction = lowered.programs[rank][positions[rank]]
        for receive in due[rank].get(instruction, ()):
            if message(receive) not in started:
                started.add(message(receive))
                occupied[rank].add(message(receive))
        if any(m not in sent or m not in started for m in occupied[rank]):
            return False
        occupied[rank].clear()
        if isinstance(instruction, Send):
            sent.add(message(instruction))
            occupied[rank].add(message(instruction))
        assert not isinstance(instruction, Wait) or message(instruction) in started
        positions[rank] += 1
        return True

    def running():
        return [r for r, program in enumerate(lowered.programs) if positions[r] < len(program)]

    for _ in range(2 * sum(map(len, lowered.programs))):  # beginning a receive is progress, too
        for rank in running():
            while positions[rank] < len(lowered.programs[rank]) and advance(rank):
                pass
        if not running():
            break
    return [str(lowered.programs[rank][positions[rank]]) for rank in running()]


@pytest.mark.slow
@pytest.mark.parametrize("name", [*RUNNABLE, "interleaved", "v", "zero_bubble_v"])
def test_receives_begin_once_in_the_order_of_the_sends_and_any_rank_may_wait_anywhere(name):
    """History: receives began where they are posted, before what they depend on; see the test below."""
    for schedule in schedules(name):
        lowered, due = lower_for_devices(schedule)
        assert stuck_at(lowered, due) == []
        assert_started_in_order(lowered, due)


def test_receives_that_begin_when_they_are_posted_hang():
    lowered = lower(one_f_one_b(2, 2))
    at_once = [
        {behind: [i] for i, behind in pairwise(program) if isinstance(i, Receive)}
        for program in lowered.programs
    ]
    assert stuck_at(lowered, at_once) == ["0F0", "1a0?0"]


def assert_started_in_order(lowered, due_of_ranks):
    sent, started = defaultdict(list), defaultdict(list)
    for rank, (program, due) in enumerate(zip(lowered.programs, due_of_ranks, strict=True)):
        place = {instruction: k for k, instruction in enumerate(program)}
        for instruction in program:
            for receive in due.get(instruction, ()):
                assert place[receive] < place[instruction]  # its buffer is there
                started[receive.from_rank, rank].append(message(receive))
            if isinstance(instruction, Send):
                sent[rank, instruction.to_rank].append(message(instruction))
    assert sent == started


def cut_down(name, most):
    """Schedules for fewer microbatches than planned, and for microbatches that leave out the first pass or not."""
    spec = SCHEDULES[name]
    for num_ranks, num_microbatches in itertools.product((2, 3), (2, 4, 8)):
        if num_microbatches > most or (name == "interleaved" and num_microbatches % num_ranks):
            continue
        place = spec.place(2 * num_ranks, num_ranks) if spec.place else placement_of(num_ranks)
        schedule = spec(place, num_microbatches)
        for size in range(1, num_microbatches):
            yield schedule.of_first_microbatches(size)
        stages = place.num_stages
        for no_grad in (frozenset(range(stages)), frozenset[int]()):
            twice = Placement(place.stage_ranks * 2, no_grad=no_grad)
            both = widened(schedule, twice, stages)
            for starts in itertools.product((0, stages), repeat=num_microbatches):
                yield both.starting_at(starts)
                yield both.of_first_microbatches(num_microbatches - 1).starting_at(starts[:-1])


@pytest.mark.slow
@pytest.mark.parametrize("most", [4, row(8)])
@pytest.mark.parametrize("name", [*RUNNABLE, "interleaved", "v", "zero_bubble_v"])
def test_smaller_batches_and_those_of_several_sequences_receive_in_order_and_wait_anywhere(
    name, most
):
    """History: receives began as the full schedule has them, where instructions are missing not at all."""
    number = 0
    for schedule in cut_down(name, most):
        lowered, due = lower_for_devices(schedule)
        assert_started_in_order(lowered, due)
        assert stuck_at(lowered, due) == []
        number += 1
    assert number > 30


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNNABLE)
def test_one_stage_on_each_rank_receives_in_front_of_the_wait(name):
    """As late as it can: nothing is occupied for longer than it has to."""
    for schedule in schedules(name):
        for due in receive_starts(lower(schedule)):
            assert all(isinstance(at, Wait) for at in due)
