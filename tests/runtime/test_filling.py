"""Filling, piece by piece: how far a wait is filled, who takes which share, what is recorded of a step."""

import itertools
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from lightning_diffpipe.clock import Clock, CudaClock
from lightning_diffpipe.comm.mesh import Mesh, RankLayout
from lightning_diffpipe.errors import ConfigurationError, GraphError
from lightning_diffpipe.planning.filling import encode_parts, num_groups_of
from lightning_diffpipe.planning.instruction import (
    Backward,
    Encode,
    Forward,
    ReduceGradients,
    ShareResults,
    Wait,
)
from lightning_diffpipe.planning.schedule import Placement
from lightning_diffpipe.runtime import upcoming
from lightning_diffpipe.runtime.bubbles import Filler, FillingTimes
from lightning_diffpipe.runtime.recording import Recording
from lightning_diffpipe.runtime.upcoming import (
    Filling,
    GroupShares,
    PreparedBatches,
    _content,
    _Prepared,
)
from tests.runtime.loopback import Loopback

WAIT = Wait("activation", 1, 0, 0)


class FakeClock:
    """Time that passes only when it is set."""

    def __init__(self):
        self.now_s = 100.0

    def stamp(self):
        return self.now_s

    def wait_for(self, stamp):
        pass

    def is_past(self, stamp):
        return True

    def seconds(self, start, stop):
        return stop - start

    def sleep(self, seconds):
        self.now_s += seconds


class FakeDeviceClock(FakeClock):
    """Knows times of a GPU only when it has waited for it."""

    past_s = 0.0

    def wait_for(self, stamp):
        self.past_s = max(self.past_s, stamp)

    def is_past(self, stamp):
        return stamp <= self.past_s

    def seconds(self, start, stop):
        assert self.is_past(stop)
        return stop - start


class FakeRun:
    """Four layers of one second each after half a second of other code."""

    def __init__(self, clock, num_layers=4):
        self._clock, self._left, self.done = clock, num_layers, False
        self.results, self._begun = {"all": num_layers}, False

    def advance_while(self, goes_on):
        if not self._begun:
            self._clock.now_s += 0.5
            self._begun = True
        while self._left and goes_on(f"layer {self._left}"):
            self._clock.now_s += 1.0
            self._left -= 1
        self.done = not self._left
        return self.done


class FakePart:
    index = 7


class FakeFrozen:
    """One part, no tensors."""

    def __init__(self, clock):
        self.own_parts, self.results, self.ran, self._clock = [FakePart()], {}, [], clock

    def start(self, index):
        return FakeRun(self._clock)

    def add_results(self, index, results):
        self.results[index] = results


def filled(mode, message_at_s, steps=1, last_at_s=None, clock_class=FakeClock):
    """Seconds until the wait is left, and until all is done, after some steps with the same wait."""
    clock = clock_class()
    filler = Filler(FillingTimes(mode, clock))
    for step in range(steps):
        recording, frozen = Recording(0, clock), FakeFrozen(clock)
        filler.add(frozen)
        start_s = clock.now_s
        at_s = last_at_s if last_at_s and step == steps - 1 else message_at_s
        arrives_s = start_s + at_s
        filler.fill(WAIT, lambda arrives_s=arrives_s: clock.now_s >= arrives_s, recording)
        inside_s = clock.now_s - start_s
        clock.now_s = max(clock.now_s, arrives_s)
        recording.add(WAIT, start_s)
        filler.learn(recording)
        filler.finish(frozen, recording)
        assert frozen.results == {7: {"all": 4}}
    return inside_s, clock.now_s - start_s


@pytest.mark.parametrize(
    ("mode", "waits", "inside_s", "total_s"),
    [
        # Nothing is known yet of this wait: the layer under way ends late.
        ("opportunistic", {"message_at_s": 2.0}, 2.5, 4.5),
        # History: over gloo, a GPU was asked for a time it had not come by, which is an error.
        ("opportunistic", {"message_at_s": 2.0, "clock_class": FakeDeviceClock}, 2.5, 4.5),
        # A layer that would end more than half its time after the message is not started; 1.5 s are at work.
        ("opportunistic", {"message_at_s": 1.9, "steps": 30}, 1.9, 1.9 + 3.0),
        # History: on a busy machine a rank idled for 40 % of a step beside work that was left over.
        ("opportunistic", {"message_at_s": 1.9, "steps": 30, "last_at_s": 10.0}, None, 10.0),
        ("opportunistic", {"message_at_s": 50.0}, 4.5, 50.0),  # all fits into a long wait
        ("planned", {"message_at_s": 3.0}, 0.0, 3.0 + 4.5),  # nothing is known in the first step
        ("planned", {"message_at_s": 3.9, "steps": 12}, 3.5, 3.9 + 1.0),
    ],
)
def test_how_far_a_wait_is_filled(mode, waits, inside_s, total_s):
    found_inside_s, found_total_s = filled(mode, **waits)
    assert inside_s is None or found_inside_s == pytest.approx(inside_s, abs=1e-3)
    assert found_total_s == pytest.approx(total_s, abs=1e-2)


def test_a_rank_that_is_done_goes_on_with_the_batch_behind():
    """A share takes 4.5 s and every step waits for 6 s. With one batch ahead the rest would be idle."""
    clock = FakeClock()
    filler, worked = Filler(FillingTimes("opportunistic", clock)), []
    works = [FakeFrozen(clock) for _ in range(6)]
    filler.add(works[0])
    for now, following in itertools.pairwise(works):
        filler.add(following)
        recording, arrives_s = Recording(0, clock), clock.now_s + 6.0
        filler.fill(WAIT, lambda arrives_s=arrives_s: clock.now_s >= arrives_s, recording)
        clock.now_s = max(clock.now_s, arrives_s)
        filler.finish(now, recording)
        assert now.results == {7: {"all": 4}}
        worked.append(recording.encode_s)
    assert worked[0] == pytest.approx(6.0, abs=0.5), "until the message, and no further"
    assert sum(worked) == pytest.approx(5 * 4.5 + 4.5), "then all of the last is done ahead"
    assert filler.done


def test_what_is_ahead_is_finished_in_order_and_given_up_together():
    clock = FakeClock()
    filler = Filler(FillingTimes("opportunistic", clock))
    works = [FakeFrozen(clock), FakeFrozen(clock)]
    for work in works:
        filler.add(work)
    recording = Recording(0, clock)
    filler.finish(works[1], recording)
    assert (works[0].results, works[1].results) == ({}, {}), (
        "only the batch that is due is finished"
    )
    filler.finish(works[0], recording)
    assert (works[0].results, works[1].results) == ({7: {"all": 4}}, {})
    assert recording.encode_s == pytest.approx(4.5)
    assert sum(stop - start for start, stop in works[0].ran) == pytest.approx(4.5)
    filler.cancel()
    assert filler.done
    assert works[1].results == {}


class OtherSequence(FakeFrozen):
    """Frozen work of a step that has the call sequence it was prepared with only when its batch is due."""

    is_due = False

    def start(self, index):
        run = FakeRun(self._clock)
        if not self.is_due:

            def advance_while(goes_on):
                assert goes_on("layer 4")
                raise GraphError("the step ended after 1 layer call, the probe saw 4")

            run.advance_while = advance_while
        return run


def test_a_batch_with_another_call_sequence_too_early_runs_when_it_is_due():
    """History: a counter chose the calls, and a batch prepared two steps ahead but begun in one ended training."""
    clock = FakeClock()
    filler = Filler(FillingTimes("opportunistic", clock))
    early, after = OtherSequence(clock), FakeFrozen(clock)
    filler.add(early)
    filler.add(after)
    recording = Recording(0, clock)
    arrives_s = clock.now_s + 20.0
    filler.fill(WAIT, lambda: clock.now_s >= arrives_s, recording)
    assert (early.results, after.results) == ({}, {7: {"all": 4}})
    assert filler.done
    early.is_due = True
    filler.finish(early, recording)
    assert early.results == {7: {"all": 4}}


def test_a_step_that_differs_from_its_probe_when_it_is_due_ends_training():
    filler, work = Filler(FillingTimes("opportunistic", FakeClock())), OtherSequence(FakeClock())
    filler.add(work)
    with pytest.raises(GraphError, match="the probe saw 4"):
        filler.finish(work, Recording(0, FakeClock()))


def test_what_lies_between_steps_is_timed_on_the_device():
    """History: a GPU's own work counted as time between steps, as the host had gone on long before."""
    clock = FakeDeviceClock()
    earlier = Recording(1, clock)
    clock.now_s = 107.0
    earlier.add(Forward(1, 0), 100.0)
    clock.now_s = 109.0
    later = Recording(1, clock)
    assert later.begins_after_s(earlier) == pytest.approx(2)


def test_a_step_waits_for_points_of_its_stream_and_never_for_the_device(monkeypatch):
    """History: asked for the time in the middle of a step, a GPU was waited for with all messages under way."""
    clock = CudaClock(torch.device("cuda"))
    passed, now = [], itertools.count()

    class Event:
        def __init__(self):
            self.at_s = next(now)

        def synchronize(self):
            passed.append(self)

        def elapsed_time(self, later):
            assert later.at_s <= passed[-1].at_s
            return 1e3 * (later.at_s - self.at_s)

    monkeypatch.setattr(clock, "stamp", Event)
    monkeypatch.setattr(clock, "settle", lambda: pytest.fail("waits for the device"))
    recording = Recording(1, clock)
    recording.add(Forward(1, 0), recording.stamp())
    assert recording.compute_s == pytest.approx(1)
    assert Recording(1, clock).begins_after_s(recording) == pytest.approx(1)


def test_a_recording_tells_where_frozen_work_ran():
    clock = FakeClock()
    recording = Recording(1, clock)

    def note(instruction, start_s, stop_s):
        clock.now_s = 100 + stop_s
        recording.add(instruction, 100 + start_s)

    note(Encode(0), 0, 1)  # of this batch, not known before
    note(Encode(1), 1, 3)
    note(WAIT, 1, 4)
    note(Forward(1, 0), 4, 6)
    note(Backward(1, 0), 6, 9)
    note(Encode(1), 9, 9.25)
    note(ReduceGradients(), 9, 9.5)
    note(Encode(1), 9.5, 10)
    note(ShareResults(), 9.5, 10.5)
    note(Encode(1), 10.5, 12)
    assert recording.filled_s == pytest.approx(2.75)
    assert recording.waiting_s == pytest.approx(1.5)
    assert recording.compute_s == pytest.approx(5)
    assert recording.encode_s == pytest.approx(5.25)
    inside = [str(span.instruction) for span in recording.spans]
    assert inside.index(str(WAIT)) < inside.index("E1"), "a wait comes before what lies in it"


def gathered_from(*rows):
    """What every rank of a pipeline would gather."""
    return lambda own: [list(row) for row in rows]


@pytest.mark.parametrize(
    ("step_s", "busy_s", "group_s", "num_steps", "counts"),
    [
        (6.0, (4.0, 2.0), 0.5, 4, (2, 6)),  # so 8 groups end together
        (8.0, (4.0, 3.9), 1.0, 32, (4, 4)),  # little can be won
    ],
)
def test_shares_move_to_the_rank_that_idles(step_s, busy_s, group_s, num_steps, counts):
    rows = [(step_s, own_busy_s, group_s) for own_busy_s in busy_s]
    shares = GroupShares(2, gathered_from(*rows))
    assert shares.counts(8) == (4, 4)
    for _ in range(num_steps):
        shares.observe(step_s, busy_s[0], 4 * group_s, 4, 8)
    assert shares.counts(8) == counts


def test_shares_that_prove_slower_are_left_for_good():
    """History: with large groups, shares went to and fro between two divisions for many steps."""
    now = {"step_s": 6.0}
    gather = lambda own: [[now["step_s"], 4.0, 0.5], [now["step_s"], 2.0, 0.5]]
    shares, seen = GroupShares(2, gather), []
    for _ in range(40):
        now["step_s"] = 7.0 if shares.counts(8) == (2, 6) else 6.0
        shares.observe(now["step_s"], 4.0, 2.0, 4, 8)
        seen.append(shares.counts(8))
    assert seen.count((2, 6)) == 4, "from one look to the next"
    assert seen[-1] == (4, 4)


def test_what_happens_between_steps_now_and_then_moves_no_shares():
    """History: a rank that waited for the others at a barrier counted as busy, and lost samples."""
    asked = []

    def gather(own):
        asked.append(list(own))
        return [own, own]

    shares = GroupShares(2, gather)
    for step in range(16):
        pause_s = 30.0 if step % 2 else 0.0  # a validation, a checkpoint, another benchmark's turn
        shares.observe(6.0 + pause_s, 4.0 + pause_s, 2.0, 4, 8)
    assert asked == [[6.0, 4.0, 0.5]] * 4


def test_planned_shares_are_kept_when_asked_for():
    def never(numbers):
        raise AssertionError("nobody may be asked")

    shares = GroupShares(3, never, adapts=False, planned=(1, 2, 1))
    for _ in range(32):
        shares.observe(2.0, 1.0, 1.0, 1, 8)
    assert shares.counts(8) == (2, 4, 2)


def test_shares_are_finer_than_a_group_where_work_runs_ahead():
    """Busy 4 s and 3.5 s, a second for a group: half a group more, every other batch a whole one."""
    gather = gathered_from((8.0, 4.0, 1.0), (8.0, 3.5, 1.0))
    coarse, fine = GroupShares(2, gather), GroupShares(2, gather, period=4)
    for shares in (coarse, fine):
        for _ in range(4):
            shares.observe(8.0, 4.0, 4.0, 4, 8)
    assert [coarse.counts(8, batch_index) for batch_index in range(4)] == [(4, 4)] * 4
    counts = [fine.counts(8, batch_index) for batch_index in range(4)]
    assert [sum(of_rank) for of_rank in zip(*counts, strict=True)] == [15, 17]
    assert set(counts) == {(4, 4), (3, 5)}


@given(
    st.lists(st.floats(0, 9), min_size=1, max_size=6).filter(lambda w: sum(w) > 0),
    st.integers(0, 40),
    st.sampled_from([1, 4, 16]),
)
def test_counts_add_up(weights, total, period):
    """Of every batch, and every rank's to its share of the period; a rank's batches differ by a group at most."""
    shares = GroupShares(len(weights), list, planned=weights, period=period)
    counts = [shares.counts(total, batch_index) for batch_index in range(period)]
    assert all(sum(of_batch) == total and min(of_batch) >= 0 for of_batch in counts)
    for of_rank, weight in zip(zip(*counts, strict=True), weights, strict=True):
        assert abs(sum(of_rank) - weight / sum(weights) * total * period) < 1
        assert max(of_rank) - min(of_rank) <= 1


def test_what_a_share_leaves_is_spread_evenly():
    """History: groups dealt out at even distances by rank fell 1 to 4 to a batch with four ranks."""
    halves = GroupShares(2, list, planned=[1, 1], period=16)
    assert [halves.counts(1, batch_index) for batch_index in range(16)] == [(1, 0), (0, 1)] * 8
    quarters = GroupShares(3, list, planned=[8, 4, 4], period=16)
    owners = [quarters.counts(1, batch_index).index(1) for batch_index in range(16)]
    assert owners == [0, 1, 0, 2] * 4


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=4),
    st.integers(1, 4),
    st.integers(1, 5),
    st.data(),
)
def test_groups_do_not_depend_on_shares(sizes, num_ranks, group_size, data):
    """History: shares in samples would let kernels see other batch sizes, and change the last bits."""
    total = num_groups_of(sizes, group_size)
    cuts = sorted(data.draw(st.integers(0, total)) for _ in range(num_ranks - 1))
    bounds = [0, *cuts, total]
    groups = [stop - start for start, stop in itertools.pairwise(bounds)]
    parts = encode_parts(sizes, num_ranks, True, group_size, groups)
    for number, size in enumerate(sizes):
        own = [part for part in parts if part.microbatch == number]
        assert [part.start for part in own] == [0, *(part.stop for part in own[:-1])]
        assert own[-1].stop == size
        assert all(part.start % group_size == 0 for part in own)
    of_rank = [
        sum(-(-part.num_samples // group_size) for part in parts if part.rank == rank)
        for rank in range(num_ranks)
    ]
    assert of_rank == groups


def lookahead_batches(filling, backend):
    layout = RankLayout(2, Placement.of_replicas([1, 1]))
    mesh = SimpleNamespace(backend=backend, layout=layout, gathered=lambda numbers: [numbers] * 2)
    layout = SimpleNamespace(
        mesh=mesh, num_encoding=None, still_has_its_sequences=lambda step: True,
        steps=SimpleNamespace(frozen_values=[torch.ones(2)]),
    )  # fmt: skip
    return PreparedBatches(filling, layout, Clock())


def test_filling_until_a_message_arrives_is_refused_where_no_host_sees_it():
    """History: over NCCL every message seemed to be there, and with three stages nobody went on."""
    with pytest.raises(ConfigurationError, match=r"over NCCL.*use mode='planned' or None"):
        lookahead_batches(Filling(mode="opportunistic"), "nccl")
    for mode, backend in [("opportunistic", "gloo"), ("planned", "nccl"), (None, "nccl")]:
        lookahead_batches(Filling(mode=mode), backend)


def test_pipelines_wait_for_each_other_once_for_each_batch_they_train_on(monkeypatch):
    """History: whenever a batch was laid out, which each pipeline does as often as its own calls want it."""
    asked = []

    def summed(mesh, number):
        asked.append(number)
        return 2 * number

    monkeypatch.setattr(Mesh, "summed_over_pipelines", summed)
    batch = {"image": torch.ones(4, 3)}
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    step = lambda module, batch: module(batch["image"]).mean()
    with Loopback(module, step, batch, num_stages=2, num_microbatches=2) as pipeline:
        layout = pipeline.ranks[0].engine.layout
        step = layout.lay_out(batch, 0)
        assert asked == []
        layout.weigh(step.works, accumulate=2)
    assert asked == [4]
    assert [work.loss_scale for work in step.works] == [1 / 8, 1 / 8]


@pytest.mark.parametrize(
    "change",
    [
        lambda batch: batch["image"].mul_(2),
        lambda batch: batch["image"][0].zero_(),
        lambda batch: batch.update(image=batch["image"].clone()),
        lambda batch: batch.update(caption=["a", "b", "c", "e"]),
        lambda batch: batch["caption"].append("e"),
        lambda batch: batch.pop("scale"),
    ],
)
def test_a_batch_that_was_changed_after_its_frozen_layers_ran_is_refused(change):
    batch = {"image": torch.rand(4, 3), "caption": ["a", "b", "c", "d"], "scale": 2.0}
    step = SimpleNamespace(frozen_values=[torch.ones(2)])
    for changed in (False, True):
        ahead = lookahead_batches(Filling(), "gloo")
        ahead._prepared.append(_Prepared(0, _content(batch), step))
        if not changed:
            assert ahead.take(dict(batch), 0) is step
            continue
        change(batch)
        with pytest.raises(ConfigurationError, match="batch 0 was changed after frozen layers"):
            ahead.take(batch, 0)


def test_a_gpu_says_in_the_next_batch_that_frozen_layers_would_have_got_something_else(monkeypatch):
    """Nobody waits for it in the batch itself."""
    waited = []
    event = SimpleNamespace(synchronize=lambda: waited.append(1))
    monkeypatch.setattr(upcoming, "begin_copy_to_host", lambda value: (value, event))
    ahead, batch = lookahead_batches(Filling(), "gloo"), {"image": torch.rand(4, 3)}
    for number, values in enumerate((torch.ones(2), torch.zeros(2), torch.ones(2))):
        step = SimpleNamespace(frozen_values=[values])
        ahead._prepared.append(_Prepared(number, _content(batch), step))
    ahead.take(batch, 0)
    assert not waited
    ahead.take(batch, 1)
    assert waited == [1]
    with pytest.raises(ConfigurationError, match=r"layers of batch 1 was changed .*filling=none"):
        ahead.take(batch, 2)
