"""Frozen layers run in advance: at once, in pieces beside a stage, for some of the samples."""

import contextlib
import itertools
import os
import random
import signal
import threading
import time

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lightning_diffpipe import coroutine
from lightning_diffpipe.coroutine import Coroutine
from lightning_diffpipe.errors import GraphError
from lightning_diffpipe.graph.cut import cut
from lightning_diffpipe.graph.frozen import FrozenView, join_samples
from lightning_diffpipe.graph.probe import fold, probe
from lightning_diffpipe.graph.view import StageView
from tests.graph.emulate import foreign_parameters_nan, intercepted, take_gradients
from tests.graph.steps import Block, Tower, build, image_batch, rows, step
from tests.modules.tiny_parts import tiny_clip
from tests.zoo import in_double


class Encoder(nn.Module):
    def __init__(self, dropout=0.0):
        super().__init__()
        self.blocks = nn.Sequential(*[Block(dropout=dropout) for _ in range(4)])

    def forward(self, x):
        return self.blocks(x)


class Encoded(Tower):
    """Noise, an encoder, noise on its result, a tower."""

    num_blocks = 3

    def __init__(self, dropout=0.0):
        super().__init__()
        self.encoder = Encoder(dropout).requires_grad_(False)

    def training_step(self, batch, batch_idx):
        latents = self.encoder(batch + torch.randn_like(batch))
        return F.mse_loss(self.run(latents + torch.randn_like(latents)), latents)


def folded(root, batch=None, positions=(1,)):
    batch = rows() if batch is None else batch
    graph = probe(root, step, batch, max_share=1 / 6)
    return fold(root, step, batch, graph, positions)


def views(root, graph, positions, interception):
    pieces = cut(graph, positions)
    frozen = FrozenView(root, graph, pieces.frozen, interception)
    stages = [StageView(root, graph, s, interception) for s in pieces.stages]
    return pieces, frozen, stages


@contextlib.contextmanager
def frozen_view(root, batch=None):
    graph, positions = folded(root, batch)
    with intercepted(root) as interception:
        yield views(root, graph, positions, interception)[1]


def advance(run, num_layers):
    """Runs at most so many layers of the fine graph; says whether all is done."""
    left = iter(range(num_layers))
    return run.advance_while(lambda name: next(left, None) is not None)


def finish(run):
    """Runs what is left."""
    run.advance_while(lambda name: True)
    return run.results


def test_a_paused_run_gives_the_results_of_a_whole_one():
    root = Encoded(dropout=0.3)
    graph, positions = folded(root)
    assert graph.layer_names[0] == "encoder"  # one layer, but it pauses inside
    with intercepted(root) as interception:
        _, view, _ = views(root, graph, positions, interception)
        call = lambda: step(root, rows())
        whole = view.whole(call, seed=7)
        run, pauses = view.start(call, seed=7), 0
        while not advance(run, 1):
            pauses += 1
            torch.rand(pauses)  # whoever runs in between must not matter
        assert pauses == 3
        assert run.results.keys() == whole.keys()
        assert all(torch.equal(run.results[key], whole[key]) for key in whole)
        assert torch.equal(finish(view.start(call, seed=7))[0, 0], whole[0, 0])


def test_a_paused_run_stops_before_a_layer():
    root = Encoded()
    with frozen_view(root) as view:
        run, asked = view.start(lambda: step(root, rows()), seed=7), []
        advance(run, 2)
        assert not run.advance_while(lambda name: asked.append(name))
        assert asked == ["encoder.blocks.2"]
        with pytest.raises(GraphError, match="is not done"):
            _ = run.results
        run.cancel()
        with pytest.raises(GraphError, match="was cancelled"):
            _ = run.results


def test_a_paused_run_leaves_random_numbers_alone():
    root = Encoded(dropout=0.3)
    with frozen_view(root) as view:
        run = view.start(lambda: step(root, rows()), seed=7)
        torch.manual_seed(1)
        numbers = []
        while not advance(run, 1):
            numbers.append(torch.rand(2))
        run.cancel()
    torch.manual_seed(1)
    assert torch.equal(torch.stack(numbers), torch.stack([torch.rand(2) for _ in numbers]))


def test_a_paused_run_beside_stages_of_another_batch_is_bit_exact():
    """The paused run of batch t + 1 advances between the passes of batch t, in random places."""
    root = Encoded(dropout=0.2)
    for block in root.blocks:
        block.dropout.p = 0.2
    graph, positions = folded(root)
    choice = random.Random(0)

    def train(interception, beside):
        _, view, stages = views(root, graph, positions, interception)
        batches = [torch.randn(5, 16, generator=torch.Generator().manual_seed(s)) for s in range(4)]
        calls = [lambda b=b: step(root, b) for b in batches]
        frozen, losses = view.whole(calls[0], seed=0), []
        for t, call in enumerate(calls):
            following = calls[(t + 1) % 4]
            run = view.start(following, seed=t + 1) if beside else None
            go_on = (lambda run=run: advance(run, choice.randint(0, 2))) if beside else lambda: None
            go_on()
            first = stages[0].forward(call, seed=t, received=frozen)
            go_on()
            received = {k: v.detach() for k, v in first.outputs.items()}
            last = stages[1].forward(call, seed=t, received={**received, **frozen})
            go_on()
            back = last.backward()
            go_on()
            first.backward(back)
            losses.append(last.loss)
            frozen = finish(run) if beside else view.whole(following, seed=t + 1)
        return torch.stack(losses), take_gradients(root)

    with intercepted(root) as interception:
        losses, gradients = train(interception, beside=False)
        got_losses, got = train(interception, beside=True)
    assert torch.equal(got_losses, losses)
    assert all(torch.equal(got[name], gradients[name]) for name in gradients)


def test_the_thread_of_a_run_inherits_autocast_but_no_gradients():
    class Looks(Encoder):
        seen = []  # noqa: RUF012

        def forward(self, x):
            state = torch.is_autocast_enabled("cpu"), torch.is_grad_enabled()
            self.seen.append((*state, threading.current_thread() is threading.main_thread()))
            return super().forward(x).float()

    root = Encoded()
    root.encoder = Looks().requires_grad_(False)
    with frozen_view(root) as view:
        Looks.seen.clear()
        with torch.autocast("cpu", torch.bfloat16):
            finish(view.start(lambda: step(root, rows()), seed=1))
        finish(view.start(lambda: step(root, rows()), seed=1))
    assert Looks.seen == [(True, False, False), (False, False, False)]


def test_the_default_dtype_of_a_run_is_its_own():
    """History: with bf16-true, losses were logged in bfloat16 while a frozen run was paused."""
    root, batch, ends = Encoded(), rows(), []
    graph, positions = folded(root)

    def in_bfloat16():
        torch.set_default_dtype(torch.bfloat16)
        try:
            return step(root, batch)
        finally:
            ends.append(torch.get_default_dtype())
            torch.set_default_dtype(torch.float32)

    with intercepted(root) as interception:
        _, view, _ = views(root, graph, positions, interception)
        run = view.start(in_bfloat16, seed=1)
        advance(run, 2)
        assert torch.get_default_dtype() == torch.float32
        finish(run)
    assert ends == [torch.bfloat16]


class Adapted(Block):
    """A block with an adapter, as peft has it: turning it off freezes its weights."""

    def __init__(self):
        super().__init__()
        self.linear.requires_grad_(False)
        self.adapter = nn.Parameter(torch.randn(16, 16) / 16)
        self.enabled = True

    def enable(self, enabled):
        self.enabled = enabled
        self.adapter.requires_grad_(enabled)

    def forward(self, x):
        x = super().forward(x)
        return x + x @ self.adapter if self.enabled else x


class Preferences(Tower):
    """A pass with adapters, and as reference one without: frozen, though the modules are the same."""

    block, num_blocks = Adapted, 4

    def training_step(self, batch, batch_idx):
        self.scale = batch.abs().mean()
        chosen = self.run(batch)
        for block in self.blocks:
            block.enable(False)
        self.eval()
        with torch.no_grad():
            reference = self.run(batch * self.scale)
        self.train()
        for block in self.blocks:
            block.enable(True)
        return F.mse_loss(chosen, reference * self.scale)


def test_what_a_step_sets_for_a_while_stays_in_its_own_run():
    """History: a paused run left adapters off, and after the last frozen layer nobody turned them on again."""
    root = Preferences()
    graph = probe(root, step, rows(), max_share=1 / 8)
    assert graph.frozen == (0, 4, 5, 6, 7)  # the first layer of the pass with adapters, too
    batches = [torch.randn(5, 16, generator=torch.Generator().manual_seed(s)) for s in (1, 2)]
    now, later = (lambda: step(root, batches[0])), (lambda: step(root, batches[1]))

    def as_before():
        flags = [(b.enabled, b.adapter.requires_grad, b.training) for b in root.blocks]
        return flags == [(True, True, True)] * 4 and root.training and not hasattr(root, "scale")

    with intercepted(root) as interception:
        _, view, stages = views(root, graph, (2,), interception)
        expected = view.whole(later, seed=2)
        assert as_before()
        run = view.start(later, seed=2)
        advance(run, 2)
        assert as_before()
        frozen = view.whole(now, seed=1)
        first = stages[0].forward(now, seed=1, received=frozen)
        advance(run, 1)
        received = {k: v.detach() for k, v in first.outputs.items()}
        last = stages[1].forward(now, seed=1, received={**received, **frozen})
        del root.scale
        got = finish(run)
        assert as_before()
        assert all(torch.equal(got[key], expected[key]) for key in expected)
        first.backward(last.backward())
        gradients = take_gradients(root)
    root.zero_grad()
    loss = step(root, batches[0])
    loss.backward()
    assert torch.equal(loss, last.loss)
    assert gradients.keys() == {f"blocks.{i}.adapter" for i in range(4)}
    for name, gradient in gradients.items():
        torch.testing.assert_close(root.get_parameter(name).grad, gradient, rtol=1e-4, atol=1e-6)


def test_an_error_in_a_paused_run_reaches_the_owner_with_the_layer():
    class Breaks(Encoder):
        broken = False

        def forward(self, x):
            x = self.blocks[:2](x)
            if self.broken:
                raise RuntimeError("no more memory")
            return self.blocks[2:](x)

    root = Encoded()
    root.encoder = Breaks().requires_grad_(False)
    with frozen_view(root) as view:
        root.encoder.broken = True
        run = view.start(lambda: step(root, rows()), seed=1)
        with pytest.raises(RuntimeError, match="no more memory") as caught:
            finish(run)
        assert caught.value.__notes__ == ["in a frozen run, at layer encoder.blocks.1"]
        root.encoder.broken = False
        finish(view.start(lambda: step(root, rows()), seed=1))


@pytest.mark.parametrize("split", [(0, 2, 5), (0, 1, 2, 3, 4, 5)])
def test_parts_of_a_microbatch_add_up(split):
    root = Encoded().double()
    graph, positions = folded(root, rows().double())
    with intercepted(root) as interception:
        _, view, _ = views(root, graph, positions, interception)
        assert view.is_splittable
        call = lambda: step(root, rows().double())
        whole = view.whole(call, seed=3)
        ranges = list(itertools.pairwise(split))
        parts = [view.whole(call, seed=3, samples=samples) for samples in ranges]
        assert [part[0, 0].shape[0] for part in parts] == [b - a for a, b in ranges]
        joined = join_samples(graph, parts)
        assert joined.keys() == whole.keys()
        assert all(torch.allclose(joined[k], whole[k], rtol=0, atol=1e-12) for k in whole)
        paused = finish(view.start(call, seed=3, samples=ranges[0]))
        assert torch.equal(paused[0, 0], parts[0][0, 0])


@pytest.mark.parametrize("split", [(0, 2, 5), (0, 4, 5), (0, 2, 4, 5)])
def test_groups_give_the_same_bits_whoever_runs_them(split):
    """Parts begin at multiples of the group size, so kernels see the same batch sizes in each."""
    root = Encoded()
    graph, positions = folded(root, rows())
    with intercepted(root) as interception:
        _, view, _ = views(root, graph, positions, interception)
        call = lambda: step(root, rows())
        whole = view.whole(call, seed=3, group_size=2)
        parts = [
            finish(view.start(call, seed=3, samples=samples, group_size=2))
            for samples in itertools.pairwise(split)
        ]
        joined = join_samples(graph, parts)
    assert all(torch.equal(joined[key], whole[key]) for key in whole)


class Reads(Tower):
    """Hidden states of a text encoder, as for SDXL; transformers collects them with hooks of its own."""

    num_blocks = 3

    def __init__(self):
        super().__init__()
        encoder = tiny_clip(intermediate_size=8, vocab_size=20, num_hidden_layers=3, eos_token_id=2)
        self.encoder = encoder.requires_grad_(False).eval()

    def training_step(self, batch, batch_idx):
        states = self.encoder(batch, output_hidden_states=True).hidden_states
        return self.run(states[-2].mean(1)).square().mean()


def test_an_encoder_that_gives_its_hidden_states_runs_again_and_again():
    """History: its note that it has hooks was taken back, the hooks were not, and it got them twice."""
    tokens = torch.randint(3, 20, (5, 6), generator=torch.Generator().manual_seed(0))
    root = Reads()
    with frozen_view(root, tokens) as view:
        call = lambda: step(root, tokens)
        whole, again = (view.whole(call, seed=3, group_size=2) for _ in range(2))
    assert all(torch.equal(again[key], whole[key]) for key in whole)
    assert len(root.encoder(tokens, output_hidden_states=True).hidden_states) == 4


@pytest.mark.slow
def test_encoders_of_stable_diffusion_run_on_some_of_the_samples():
    with in_double():
        root = build("Stable Diffusion")
        graph = probe(root, step, image_batch(3), mode="real")
        graph, positions = fold(root, step, image_batch(3), graph, [4])
        with intercepted(root) as interception:
            pieces, view, _ = views(root, graph, positions, interception)
            assert view.why_not_splittable == ""
            call = lambda: step(root, image_batch(3))
            with foreign_parameters_nan(root, pieces.frozen.parameters):
                whole = view.whole(call, seed=3)
                parts = [view.whole(call, seed=3, samples=part) for part in ((0, 1), (1, 3))]
    joined = join_samples(graph, parts)
    assert all(torch.allclose(joined[k], whole[k], rtol=1e-10, atol=1e-12) for k in whole)


class Centres(Encoder):
    def forward(self, x):
        return super().forward(x - x.mean(0))


def test_encoders_that_mix_samples_are_refused():
    root = Encoded()
    with frozen_view(root) as view:
        assert view.mixing(lambda: step(root, rows()), seed=1) == frozenset()
    root.encoder = Centres().requires_grad_(False)
    with frozen_view(root) as view:
        assert view.mixing(lambda: step(root, rows()), seed=1) == {"encoder"}
        with pytest.raises(GraphError, match="encoder mixes samples"):
            view.whole(lambda: step(root, rows()), seed=1, samples=(0, 2))


class Compared(Encoded):
    """A frozen layer reads what another gives of all samples and then of all again, or of the sample before."""

    def __init__(self, how):
        super().__init__()
        self.how, self.judge = how, Encoder().requires_grad_(False)

    def training_step(self, batch, batch_idx):
        latents = self.encoder(batch)
        other = latents.roll(1, 0) if self.how == "before" else torch.cat([latents, 0.5 * latents])
        return F.mse_loss(self.run(latents), latents) + self.judge(other).mean()


@pytest.mark.parametrize("how", ["before", "all again"])
def test_code_between_layers_that_mixes_samples_is_found(how):
    """History: groups were compared together, where none is missing; a pair's other half was then zeros."""
    with frozen_view(root := Compared(how)) as view:
        assert view.mixing(lambda: step(root, rows()), seed=1) == {"judge"}
        with pytest.raises(GraphError, match="judge mixes samples, or what it reads does"):
            view.whole(lambda: step(root, rows()), seed=1, samples=(0, 2))


class OfItsSize(Encoder):
    """Rounds as bfloat16 does, otherwise for every number of samples, and makes float32 of it."""

    def forward(self, x):
        return super().forward(x).float() * (1 + 2**-8 * (len(x) == 1))


@pytest.mark.parametrize("half", [True, False])
def test_samples_may_differ_by_the_rounding_of_the_coarsest_type(half):
    """History: under bf16-mixed a text encoder that ends with a norm in float32 was said to mix samples."""
    root = Encoded()
    root.encoder = OfItsSize().requires_grad_(False)

    def under_autocast(module, batch):
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            return step(module, batch).float()

    graph = probe(root, under_autocast, rows().float())
    graph, positions = fold(root, under_autocast, rows().float(), graph, [1])
    with intercepted(root) as interception:
        _, view, _ = views(root, graph, positions, interception)
        call = lambda: under_autocast(root, rows().float())
        mixing = view.mixing(call, seed=1)
        assert mixing == (frozenset() if half else {"encoder"})


def test_encoders_that_cannot_be_split_say_why():
    reason = "draws random numbers"
    root = Encoded()
    root.encoder = Encoder(dropout=0.1).requires_grad_(False)
    with frozen_view(root) as view:
        assert not view.is_splittable
        assert reason in view.why_not_splittable
        with pytest.raises(GraphError, match=reason):
            view.whole(lambda: step(root, rows()), seed=1, samples=(0, 2))


def test_the_thread_that_does_the_work_of_another_is_known():
    """History: of a rank whose encoder hung an error could tell only that it waited for a lock."""
    threads = []

    def look():
        threads.append((coroutine.thread_at_work(owner), threading.get_ident()))

    def outer():
        look()
        Coroutine(look).resume()
        first.pause()

    owner, first = threading.get_ident(), Coroutine(outer)
    first.resume()
    assert all(at_work == here != owner for at_work, here in threads)
    assert len({here for _, here in threads}) == 2
    assert coroutine.thread_at_work(owner) == owner, "it is paused"
    first.resume()
    assert coroutine.thread_at_work(owner) == owner


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_process_has_coroutines_of_its_own():
    """History: it gave them to a thread that only its parent has, and waited for ever."""
    Coroutine(lambda: None).resume()
    until_s = time.monotonic() + 10.0
    while not coroutine._Worker._idle:
        assert time.monotonic() < until_s
        time.sleep(0.01)
    child = os.fork()
    if not child:
        signal.alarm(10)
        Coroutine(lambda: None).resume()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
