"""PipeFusion equals one process where it should, its emulator always, and costs what the formulas say."""

import contextlib
import copy
import itertools

import pytest
import torch

from lightning_diffpipe.errors import ConfigurationError, LayoutError, PartitionError
from lightning_diffpipe.graph.calltree import forward_replaced
from lightning_diffpipe.sampling.pipefusion import PipeFusion
from lightning_diffpipe.sampling.pipefusion.kv_cache import KvCache
from lightning_diffpipe.sampling.tracing.attention import AttentionIntercepted
from lightning_diffpipe.sampling.tracing.layout import Part
from tests.sampling.models import (
    MAIN,
    MODELS,
    STEPS,
    Tiny,
    build,
    knowing,
    qwen,
    request_for,
    sample_plainly,
)
from tests.sampling.ranks_in_threads import sample_together
from tests.sampling.traffic import assert_traffic_is_as_planned, output_bytes

FAST = ("sd3",)
ALL = [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in MODELS]
SOME = [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in MAIN]
FEW = ["pixart", "sd3"]


@pytest.fixture(scope="module")
def tiny_models():
    known: dict[str, Tiny] = {}
    return lambda name: known.setdefault(name, build(name))


def emulate(name: str, tiny: Tiny, num_patches: int, warmup_steps: int, **options):
    sampler = PipeFusion(
        tiny.model, num_patches=num_patches, warmup_steps=warmup_steps, axis=tiny.axis,
        verify=True, **options,
    )  # fmt: skip
    return knowing(sampler, name, tiny).sample(request_for(name, tiny=tiny))


@pytest.mark.parametrize("name", ALL)
def test_one_patch_or_only_synchronous_steps_are_one_process(name, tiny_models):
    tiny = tiny_models(name)
    expected = sample_plainly(request_for(name, tiny=tiny))
    assert torch.equal(emulate(name, tiny, 1, 0), expected)
    assert torch.equal(emulate(name, tiny, 4, STEPS), expected)


def test_keys_of_others_are_selected_only_where_they_are_read_apart(tiny_models, monkeypatch):
    """History: a ring reads them so, and all calls of attention made the selection: seconds for long sequences."""
    keys_of = KvCache._keys_of

    def checked(cache, call, visible):
        assert len(cache._buffers[call.place].written) < len(cache._patches), "none is unseen"
        return keys_of(cache, call, visible)

    monkeypatch.setattr(KvCache, "_keys_of", checked)
    emulate("sd3", tiny_models("sd3"), 4, 1)


@pytest.mark.parametrize("name", ALL)
def test_any_number_of_ranks_gives_the_same_bits(name, tiny_models):
    tiny = tiny_models(name)
    expected = emulate(name, tiny, 4, 1)
    for num_ranks in (2, 4) if name in ("pixart, two calls", "sd3") else (4,):
        results, samplers = sample_together(
            name, tiny, num_ranks,
            lambda m, links: PipeFusion(
                m, links, num_patches=4, warmup_steps=1, axis=tiny.axis, verify=True
            ),
            free_foreign=True,
        )  # fmt: skip
        assert all(torch.equal(result, expected) for result in results)
        assert_traffic_is_as_planned(samplers, request_for(name, tiny=tiny))


@pytest.mark.slow
@pytest.mark.parametrize("warmup_steps", [0, 2])
@pytest.mark.parametrize(
    ("name", "microbatches"),
    [("sd3", 2), ("sd3", 3), ("dit", 2), ("pixart, two calls", 1)],  # "sd3" of four samples
)
def test_synchronous_steps_in_microbatches(name, warmup_steps, microbatches, tiny_models):
    tiny = tiny_models(name)
    options = {"warmup_microbatches": microbatches}
    expected = emulate(name, tiny, 2, warmup_steps, **options)
    results, samplers = sample_together(
        name, tiny, 2,
        lambda m, links: PipeFusion(
            m, links, num_patches=2, warmup_steps=warmup_steps, verify=True, **options
        ),
    )  # fmt: skip
    assert all(torch.equal(result, expected) for result in results)
    assert_traffic_is_as_planned(samplers, request_for(name, tiny=tiny))
    # One sample after the other multiplies matrices of other heights: the last bits may differ.
    whole = emulate(name, tiny, 2, warmup_steps, warmup_microbatches=1)
    torch.testing.assert_close(expected, whole, rtol=0, atol=1e-9)


@pytest.mark.slow
def test_unequal_shares_of_samples_with_masks_of_their_own(monkeypatch):
    """One sample, then two, each with a prompt of another length. History: shares had to be equal."""
    monkeypatch.setitem(MODELS, "qwen, three", lambda: qwen((5, 7, 3)))
    tiny = build("qwen, three")
    whole, shares = (emulate("qwen, three", tiny, 2, 1, warmup_microbatches=n) for n in (1, 2))
    torch.testing.assert_close(shares, whole, rtol=0, atol=1e-9)


@pytest.mark.parametrize(
    ("num_patches", "warmup_steps", "microbatches"),
    [(2, 1, 2), (2, 0, 2), (2, "auto", 2), (1, 1, 1), (2, STEPS, 1)],
)
def test_branches_of_guidance_follow_each_other_unless_the_image_is_exact(
    num_patches, warmup_steps, microbatches, tiny_models
):
    """Nothing is cut where the bits of one process are promised, whatever the number of ranks."""
    request = request_for("pixart", tiny=tiny_models("pixart"))
    sampler = PipeFusion(request.model, num_patches=num_patches, warmup_steps=warmup_steps)
    knowing(sampler, "pixart", tiny_models("pixart"))
    assert sampler.prepare(request).plan.warmup_microbatches == microbatches


@pytest.mark.slow
@pytest.mark.parametrize(
    ("warmup_threshold", "found", "num_ranks"), [(10.0, 1, 1), (None, 3, 3), (0.0, 5, 2)]
)
def test_an_automatic_warmup_ends_on_all_ranks_alike(
    warmup_threshold, found, num_ranks, tiny_models
):
    """At the first decision, at a later one, never: the bits of as many synchronous steps."""
    tiny, steps = tiny_models("pixart"), 5
    if warmup_threshold is None:  # between the third change and those before it
        changes = changes_of(tiny, steps)
        warmup_threshold = (changes[:2].min() + changes[2]) / 2
        assert warmup_threshold < changes[:2].min()
    options = {
        "warmup_steps": "auto",
        "warmup_threshold": float(warmup_threshold),
        "warmup_microbatches": 2,
    }
    request = {"num_steps": steps}
    alone = PipeFusion(tiny.model, num_patches=2, warmup_steps=found, warmup_microbatches=2)
    expected = knowing(alone, "pixart", tiny).sample(request_for("pixart", tiny=tiny, **request))
    results, samplers = sample_together(
        "pixart", tiny, num_ranks,
        lambda m, links: PipeFusion(m, links, num_patches=2, verify=True, **options), **request,
    )  # fmt: skip
    assert all(torch.equal(result, expected) for result in results)
    assert {sampler.statistics.num_synchronous for sampler in samplers} == {found}
    assert_traffic_is_as_planned(samplers, request_for("pixart", tiny=tiny, **request))


def changes_of(tiny, num_steps):
    """Relative changes of what the model is given from step to step, as one process sees them."""
    request, seen = request_for("pixart", tiny=tiny, num_steps=num_steps), []
    inner = request.denoise
    request.denoise = lambda x, t: (seen.append(x), inner(x, t))[1]
    sample_plainly(request)
    return torch.stack([(b - a).norm() / b.norm() for a, b in itertools.pairwise(seen)])


@pytest.mark.parametrize("name", ["pixart", "sd3"])
def test_what_crosses_a_cut(name, tiny_models):
    """Tokens of the image, and with joint attention of the text: e B (p + T) h, however many patches."""
    tiny = tiny_models(name)
    sampler = knowing(PipeFusion(tiny.model, num_patches=2), name, tiny)
    layout = sampler.prepare(request_for(name, tiny=tiny)).layout
    tokens = 16 * 6 + (7 if name == "sd3" else 0)
    assert output_bytes(layout.blocks[0]) == 8 * 4 * tokens * 16


@pytest.mark.slow
def test_long_skips_travel_along_the_chain(tiny_models):
    """HunyuanDiT reads the first block's result again in the last one, on the other side of every cut."""
    tiny = tiny_models("hunyuandit")
    sampler = knowing(PipeFusion(tiny.model, num_patches=2), "hunyuandit", tiny)
    request = request_for("hunyuandit", tiny=tiny)
    layout = sampler.prepare(request).layout
    stages = sampler.setting(layout, (1, 2, 3), request).stages
    assert [stage.outgoing for stage in stages.stages] == [((0,),), ((0, 1),), ((0, 2),), ((),)]


@pytest.mark.parametrize("name", SOME)
@pytest.mark.parametrize("warmup_steps", [0, 1])
def test_the_emulator_is_what_the_paper_says(name, warmup_steps, tiny_models):
    """Against the definition: all tokens are computed for every patch, only keys and values are swapped."""
    tiny = tiny_models(name)
    expected = by_definition(name, tiny, 2, warmup_steps)
    result = emulate(name, tiny, 2, warmup_steps, hide_unseen=False)
    torch.testing.assert_close(result, expected, rtol=1e-9, atol=1e-9)


@torch.inference_mode()
def by_definition(name: str, tiny: Tiny, num_patches: int, warmup_steps: int):
    """The whole model runs for every patch; each attention call sees the newest keys and values there are."""
    request = request_for(name, tiny=tiny)
    sampler = PipeFusion(tiny.model, num_patches=num_patches, axis=tiny.axis)
    knowing(sampler, name, tiny)
    setting = sampler.prepare(request)
    layout, patches = setting.layout, setting.patches
    x, newest = request.latents.clone(), {}
    schedulers = [copy.deepcopy(request.scheduler) for _ in patches]
    for i, t in enumerate(request.timesteps):
        for m in (None,) if i < warmup_steps else range(num_patches):
            part = Part() if m is None else patches[m]
            with _keys_swapped(tiny.model, layout, part, newest):
                out = request.denoise(x, t)
            for j in range(num_patches) if m is None else (m,):
                rows, predicted = (layout.take_rows(y, patches[j].units) for y in (x, out))
                stepped = schedulers[j].step(predicted, t, rows)
                layout.put_rows(x, patches[j].units, stepped.prev_sample)
    return x


@contextlib.contextmanager
def _keys_swapped(model, layout, part, newest):
    calls = iter(range(len(layout.blocks)))

    def make(name, forward):
        def wrapped(*args, **kwargs):
            call = next(calls)
            block, numbers = layout.blocks[call], iter(range(9))

            def handler(attend, q, k, v, **options):
                number = next(numbers)
                tokens = block.attention[number]
                if tokens is None:
                    return attend(q, k, v, **options)
                before = newest.get((call, number), (torch.zeros_like(k), torch.zeros_like(v)))
                own = torch.zeros(tokens.size, dtype=torch.bool)
                index = tokens.owned(part).index
                own[slice(None) if index is None else index] = True
                k, v = (
                    torch.where(own[:, None], a, b) for a, b in zip((k, v), before, strict=True)
                )
                newest[call, number] = k, v
                return attend(q, k, v, **options)

            with AttentionIntercepted(handler):
                return forward(*args, **kwargs)

        return wrapped

    with forward_replaced(model, layout.block_names, make):
        yield


@pytest.mark.slow
@pytest.mark.parametrize("name", FEW)
def test_two_requests_in_a_row_are_two_fresh_ones(name, tiny_models):
    """Caches of peers survive a request, so that the second image depends on the first."""
    tiny = tiny_models(name)
    sampler = knowing(PipeFusion(tiny.model, num_patches=2, warmup_steps=0), name, tiny)
    first = sampler.sample(request_for(name, tiny=tiny))
    other = tiny._replace(latents=tiny.latents.flip(0) * 0.5)
    second = sampler.sample(request_for(name, tiny=other))
    assert torch.equal(sampler.sample(request_for(name, tiny=tiny)), first)
    fresh = knowing(PipeFusion(tiny.model, num_patches=2, warmup_steps=0), name, tiny)
    assert torch.equal(fresh.sample(request_for(name, tiny=other)), second)
    assert first.is_inference()


@pytest.mark.slow
def test_other_shapes_get_a_layout_of_their_own(tiny_models):
    tiny = tiny_models("pixart")
    sampler = PipeFusion(tiny.model, num_patches=2)
    sampler.sample(request_for("pixart", tiny=tiny))
    larger = tiny._replace(latents=torch.cat([tiny.latents, tiny.latents], -1))
    result = sampler.sample(request_for("pixart", tiny=larger))
    assert result.shape == larger.latents.shape


def test_nothing_is_left_on_the_model(tiny_models):
    tiny = tiny_models("pixart")
    before = {name: set(m.__dict__) for name, m in tiny.model.named_modules()}
    emulate("pixart", tiny, 2, 1)
    assert {name: set(m.__dict__) for name, m in tiny.model.named_modules()} == before


@pytest.mark.slow
def test_hidden_keys_are_better_than_zeros(tiny_models):
    """Without a synchronous step, nothing is known of later patches: attending to zeros is worse."""
    tiny = tiny_models("sd3")
    exact = sample_plainly(request_for("sd3", tiny=tiny))
    hidden = emulate("sd3", tiny, 4, 0, hide_unseen=True)
    zeros = emulate("sd3", tiny, 4, 0, hide_unseen=False)
    assert not torch.equal(hidden, zeros)
    assert (hidden - exact).square().mean() < (zeros - exact).square().mean()


def test_steps_are_reported(tiny_models):
    tiny = tiny_models("pixart")
    sampler, seen = knowing(PipeFusion(tiny.model, num_patches=2), "pixart", tiny), []
    sampler.sample(request_for("pixart", tiny=tiny), seen.append)
    assert seen == list(range(STEPS))
    statistics = sampler.statistics
    assert len(statistics.step_s) == STEPS
    assert statistics.total_s >= sum(statistics.step_s)


@pytest.mark.parametrize(
    ("rank", "kind", "num_messages"), [(1, "hidden", 4 * STEPS), (0, "latents", 4 * (STEPS - 1))]
)
def test_receives_are_posted_one_patch_ahead(rank, kind, num_messages, tiny_models):
    """Before a rank waits for a patch, and so before it computes it, the receive of the next one is posted."""
    events = []

    def noting(model, links):
        post = links.receive

        def receive(shape, source, of_kind):
            incoming = post(shape, source, of_kind)
            return Noting(incoming, events) if of_kind == kind else incoming

        if links.rank == rank:
            links.receive = receive
        return PipeFusion(model, links, num_patches=4, warmup_steps=0, verify=False)

    sample_together("sd3", tiny_models("sd3"), 2, noting)
    assert events.count("post") == events.count("wait") == num_messages
    waits = [i for i, event in enumerate(events) if event == "wait"]
    for taken, i in enumerate(waits, 1):
        assert events[:i].count("post") == min(taken + 1, num_messages), (taken, events)


class Noting:
    """A receive that notes when it was posted, and when it is waited for."""

    def __init__(self, incoming, events):
        self.incoming, self.events = incoming, events
        events.append("post")

    def wait(self):
        self.events.append("wait")
        return self.incoming.wait()


# ------------------------------------------------------------------------------------------ refusals


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"num_patches": 17}, ConfigurationError, "between 1 and 16"),
        ({"num_patches": 2, "warmup_steps": "automatic"}, ConfigurationError, "0 or more, or auto"),
        ({"num_patches": 0}, ConfigurationError, "whole number >= 1; got 0"),
        ({"num_patches": 2, "split": (1,)}, ConfigurationError, "1 ranks"),
        ({"num_patches": 2, "warmup_microbatches": 5}, ConfigurationError,
         "warmup_microbatches=5, but the model is given 4 samples in a step, .*; choose at most 4"),
    ],
)  # fmt: skip
def test_settings_that_cannot_be(options, error, words, tiny_models):
    tiny = tiny_models("pixart")
    with pytest.raises(error, match=words):
        PipeFusion(tiny.model, **options).sample(request_for("pixart", tiny=tiny))


def test_more_ranks_than_blocks(tiny_models):
    tiny = tiny_models("pixart")
    with pytest.raises(PartitionError, match="4 blocks over 5 ranks"):
        sample_together("pixart", tiny, 5, lambda m, links: PipeFusion(m, links, num_patches=2))


def test_a_split_that_leaves_a_rank_without_blocks(tiny_models):
    tiny = tiny_models("pixart")
    with pytest.raises(PartitionError, match="every rank needs at least one"):
        sample_together(
            "pixart", tiny, 2, lambda m, links: PipeFusion(m, links, num_patches=2, split=(4,))
        )


@pytest.mark.slow
def test_a_request_that_changes_its_mind_is_noticed(tiny_models):
    """A closure that calls the model once in one step and twice in the next has no layout."""
    tiny = tiny_models("sd3")
    request = request_for("sd3", tiny=tiny)
    inner, last = request.denoise, request.timesteps[-1]
    request.denoise = lambda x, t: inner(x, t) + (inner(x, t) if t == last else 0)
    with pytest.raises(LayoutError, match="another sequence of calls"):
        PipeFusion(tiny.model, num_patches=2).sample(request)
