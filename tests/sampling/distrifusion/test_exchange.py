"""Messages of displaced steps, and texts that stay the same: mechanisms on their own."""

import gc
import re
import weakref
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from lightning_diffpipe.comm import loopback
from lightning_diffpipe.comm.links import Alone
from lightning_diffpipe.comm.loopback import LoopbackNetwork
from lightning_diffpipe.comm.packing import TensorShape
from lightning_diffpipe.errors import GraphError
from lightning_diffpipe.sampling.distrifusion import emulate
from lightning_diffpipe.sampling.distrifusion.exchange import Constants, Exchange
from tests.sampling.distrifusion.models import request_for


def exchange_of(links, calls_per_message=2):
    return Exchange(links, calls_per_message)


def swap(exchange, links, call, value, kind="statistics", **options):
    """Hands a number to the other of two ranks, and returns the one it gave, if any."""
    x = torch.full((call + 1,), float(value))
    got = exchange.swap(
        kind, call, {1 - links.rank: x}, {1 - links.rank: TensorShape.of(x)}, TensorShape.of(x),
        **options,
    )  # fmt: skip
    return None if got is None else float(got[1 - links.rank].mean())


def run(function, num_ranks=2):
    return LoopbackNetwork(num_ranks, timeout_s=5).run(function)


def test_a_synchronous_step_reads_itself_and_displaced_steps_the_one_before():
    def rank(links):
        exchange, seen = exchange_of(links), []
        for step, synchronous in enumerate([True, False, False, False]):
            exchange.start_step(step, synchronous, keep=step < 3)
            seen.append([swap(exchange, links, call, 10 * step + call) for call in range(5)])
            exchange.stop_step()
        return seen, dict(links.traffic.messages_sent)

    for seen, messages in run(rank):
        before = [[0, 1, 2, 3, 4], [10, 11, 12, 13, 14], [20, 21, 22, 23, 24]]
        assert seen == [before[0], *before]
        assert messages == {"statistics": 5 + 2 * 3}, "five calls make three messages of up to two"


def test_without_a_step_before_there_is_nothing_to_read():
    def rank(links):
        exchange = exchange_of(links)
        exchange.start_step(0, synchronous=False, keep=True)
        return swap(exchange, links, 0, 1.0)

    assert run(rank) == [None, None]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "warmup_steps", "kept"),
    [
        ("synchronous", 0, [False, False, False, False]),
        ("naive", 2, [False, False, False, False]),
        (
            "displaced",
            2,
            [False, True, False, False],
        ),  # later messages are under way at the end of a step
        ("displaced", 4, [False, False, False, False]),
        ("displaced", "auto", [True, True, True, False]),
    ],
)
def test_only_what_a_next_step_may_read_is_kept(mode, warmup_steps, kept, monkeypatch):
    """History: synchronous steps held keys, values and halos of all other bands, which nobody read."""
    received, alive = [], []
    wait = loopback._FromThread.wait

    def waits(self):
        tensor = wait(self)
        # Moments of groups are small, and rules of later steps read them.
        if self.links.rank == 0 and self.kind not in ("prediction", "statistics"):
            received.append(weakref.ref(tensor))
        return tensor

    def on_step(step):
        gc.collect()
        alive.append(any(ref() is not None for ref in received))

    monkeypatch.setattr(loopback._FromThread, "wait", waits)
    request = request_for("sd", num_steps=4)
    emulate(request, 2, on_step=on_step, mode=mode, warmup_steps=warmup_steps, warmup_threshold=0.0)
    assert received
    assert alive == kept


def test_what_all_peers_get_is_put_together_once():
    """History: a rank held one copy of its own keys and values for each other rank, as many as all bands have."""
    sent = []

    class Recording(Alone):
        num_ranks = 4

        def send(self, tensor, to, kind):
            sent.append((kind, to, tensor))

        def receive(self, shape, source, kind):
            return None

    exchange, x = exchange_of(Recording(), calls_per_message=2), torch.arange(6.0).view(2, 3)
    exchange.start_step(0, synchronous=False, keep=True)
    for call, key in enumerate((x, x + 1)):
        exchange.swap("key_value", call, dict.fromkeys((1, 2, 3), key), {}, TensorShape.of(x))
    for call, (up, down) in enumerate(((x, x + 1), (x, x + 2)), start=2):
        exchange.swap("halo", call, {1: up, 2: down}, {}, TensorShape.of(x))
    keys = [tensor.view(x.dtype) for kind, _, tensor in sent if kind == "key_value"]
    assert len({tensor.data_ptr() for tensor in keys}) == 1 < len(keys) == 3
    assert keys[0].tolist() == [*range(6), *range(1, 7)]
    up, down = (tensor.view(x.dtype) for kind, _, tensor in sent if kind == "halo")
    assert up.tolist() == [*range(6), *range(6)]
    assert down.tolist() == [*range(1, 7), *range(2, 8)]


def test_kinds_and_dtypes_do_not_share_messages():
    def rank(links):
        exchange = exchange_of(links, calls_per_message=9)
        exchange.start_step(0, synchronous=False, keep=True)
        swap(exchange, links, 0, 1.0, "statistics")
        swap(exchange, links, 1, 1.0, "halo")
        exchange.stop_step()
        return dict(links.traffic.messages_sent)

    assert run(rank)[0] == {"statistics": 1, "halo": 1}


@pytest.mark.parametrize(
    ("second_step", "message"),
    [
        (lambda e, links: swap(e, links, 0, 1.0, "halo"), "was statistics of (1,) in the first"),
        (lambda e, links: swap(e, links, 7, 1.0), "has no data of the step before"),
        # A call left out in one step would have been answered with data two steps old in the next.
        (lambda e, links: (e.start_step(2, synchronous=False, keep=True), swap(e, links, 0, 1.0)),
         "of step 2 would read step 0"),
    ],
)  # fmt: skip
def test_another_course_is_refused(second_step, message):
    def rank(links):
        exchange = exchange_of(links)
        exchange.start_step(0, synchronous=True, keep=True)
        swap(exchange, links, 0, 1.0)
        exchange.start_step(1, synchronous=False, keep=True)
        second_step(exchange, links)

    with pytest.raises(GraphError, match=re.escape(message)):
        run(rank)


class Counting:
    """A linear layer that counts its calls."""

    def __init__(self):
        self.weight, self.num_calls = torch.randn(4, 4), 0

    def __call__(self, x):
        self.num_calls += 1
        return F.linear(x, self.weight)


def same(text, step):
    return text


def hidden_of(x, hidden, step):
    return hidden


@pytest.mark.parametrize(
    ("text_of", "between", "num_calls"),
    [
        (same, hidden_of, (1, 1)),
        (same, lambda x, hidden, step: x, (1, 1)),
        (same, lambda x, hidden, step: hidden.view(2, 4, 4), (1, 1)),
        (same, lambda x, hidden, step: hidden[:, 1:], (1, 1)),
        # Others are computed, though they may be equal.
        (same, lambda x, hidden, step: hidden * 1.0, (1, 3)),
        (lambda text, step: text.clone(), hidden_of, (3, 3)),
        (same, lambda x, hidden, step: hidden + step, (1, 3)),
        (same, lambda x, hidden, step: hidden[:, step:], (1, 3)),
        (lambda text, step: text.fill_(step > 1), hidden_of, (3, 3)),
        # History: other tensors over the same memory were taken for the one that had been copied.
        (lambda text, step: text.fill_(step).data, hidden_of, (3, 3)),
        (lambda text, step: torch.from_numpy(text.fill_(step).numpy()), hidden_of, (3, 3)),
        # The model may write into what it is given, and into what it gets.
        (same, lambda x, hidden, step: hidden.zero_(), (3, 3)),
        (same, lambda x, hidden, step: hidden.add_(step), (3, 3)),
        (lambda text, step: text.clone(), lambda x, hidden, step: x.add_(step), (3, 3)),
        # In inference mode nothing tells whether a tensor has been written to.
        (torch.inference_mode()(lambda text, step: text.clone() + step), hidden_of, (3, 3)),
    ],
)
def test_what_is_stored_is_what_layers_would_compute(text_of, between, num_calls):
    first, second, text = Counting(), Counting(), torch.randn(1, 8, 4)
    constants = Constants(frozenset({"0", "1"}))
    for step in range(3):
        x = text_of(text, step)
        hidden = constants.get("0", x, partial(first, x))
        assert (hidden == F.linear(x, first.weight)).all()
        y = between(x, hidden, step)
        found = constants.get("1", y, partial(second, y))
        torch.testing.assert_close(found, F.linear(y, second.weight), rtol=0, atol=1e-5)
    assert (first.num_calls, second.num_calls) == num_calls


def test_layers_of_the_image_are_always_computed():
    layer, constants, x = Counting(), Constants(frozenset()), torch.ones(1, 5, 4)
    for _ in range(3):
        constants.get("0", x, lambda: layer(x))
    assert layer.num_calls == 3
