"""What need not run for every patch is found by trying, and never changes the result."""

import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.functional import scaled_dot_product_attention as attention_taken_early

from lightning_diffpipe.errors import LayoutError
from lightning_diffpipe.graph.placement import is_placeholder, placeholder_of
from lightning_diffpipe.sampling.pipefusion import PipeFusion
from lightning_diffpipe.sampling.request import Request
from lightning_diffpipe.sampling.tracing.attention import AttentionByName
from lightning_diffpipe.sampling.tracing.layout import BETWEEN
from lightning_diffpipe.sampling.tracing.marks import finite_placeholders
from lightning_diffpipe.sampling.tracing.probe import fits, probe
from tests.sampling.models import build, normal, request_for, scheduler_for


class Block(nn.Module):
    """Attention with a modulation made of the embedding of the timestep."""

    def __init__(self, takes_early: bool):
        super().__init__()
        self.modulation, self.qkv = nn.Linear(8, 8), nn.Linear(8, 24)
        self.attend = attention_taken_early if takes_early else None

    def forward(self, x, embedding):
        q, k, v = (x * self.modulation(embedding)[:, None]).matmul(self.qkv.weight.mT).chunk(3, -1)
        attend = self.attend or F.scaled_dot_product_attention
        return x + attend(q[:, None], k[:, None], v[:, None])[:, 0]


class Denoiser(nn.Module):
    """Latents are tokens; options say what its glue does."""

    def __init__(
        self, adds=False, changes=False, compares=False, takes_early=False,
        embeds=lambda t: t.double() / 1000,
    ):  # fmt: skip
        super().__init__()
        self.embeds = embeds
        self.embed, self.enter = nn.Linear(1, 8), nn.Linear(8, 8)
        self.blocks = nn.ModuleList(Block(takes_early) for _ in range(4))
        self.tail, self.gate = nn.Linear(8, 8), nn.Linear(8, 8)
        self.adds, self.changes, self.compares = adds, changes, compares

    def forward(self, x, t):
        embedding = self.embed(self.embeds(t).reshape(1, 1))
        signs = (x > 0).double().mean((0, 1)) if self.compares else torch.ones(8).double()
        gate = self.gate(signs)
        y = self.enter(x)
        for block in self.blocks:
            y = block(y, embedding)
            if self.adds:
                y = y + 0.1
        if self.changes:
            embedding += 1.0
        return self.tail(y) * gate + embedding[:, None]


def request_of(**options) -> Request:
    torch.manual_seed(0)
    model, scheduler = Denoiser(**options).double().eval(), scheduler_for("")
    return Request(model, model, scheduler, scheduler.timesteps, normal(1, 12, 8))


def found(**options):
    return probe(request_of(**options))


def test_results_that_are_only_passed_on_need_no_memory():
    assert found().passed == {(call, 0) for call in range(3)}, "the tail reads the last one"
    assert found(adds=True).passed == frozenset()


def test_the_timestep_is_embedded_once_per_step():
    layout = found()
    assert {place[1] for place in layout.constants} == {"gate"}
    assert layout.step_constants.keys() == {
        (BETWEEN, "embed", 0), *((call, f"blocks.{call}.modulation", 0) for call in range(4))
    }  # fmt: skip


def test_a_module_that_blocks_share_keeps_its_name():
    request = request_of()
    for block in request.model.blocks[1:]:
        block.modulation = request.model.blocks[0].modulation
    assert probe(request).step_constants.keys() == {
        (BETWEEN, "embed", 0), *((call, "blocks.0.modulation", 0) for call in range(4))
    }  # fmt: skip


def rounded(t):
    """Differs by less than rounding, as what weights of one number for all make of it in bfloat16."""
    return (1 + t.double() / 1e6).bfloat16().double()


def looked_up(t):
    """A table has no place for NaN."""
    return torch.linspace(0, 1, 1001).double()[t.long()]


@pytest.mark.parametrize("embeds", [rounded, looked_up])
def test_what_is_made_of_the_timestep_is_never_kept_for_all_steps(embeds):
    """History: of placeholders for weights, which a probe has, bfloat16 made one embedding for two timesteps."""
    layout = found(embeds=embeds)
    assert (BETWEEN, "embed", 0) in layout.step_constants
    assert "embed" not in {place[1] for place in layout.constants}


@pytest.mark.parametrize(
    ("index_of", "looked_up_as_nan"),
    [
        (lambda t: t.long(), torch.tensor(float("nan")).long()),
        (lambda t: t.to(torch.int32), torch.tensor(float("nan")).to(torch.int32)),
        (lambda t: torch.bucketize(t, torch.arange(1001.0)), torch.tensor(1001)),
    ],
)
def test_no_index_is_made_of_nan(index_of, looked_up_as_nan):
    """History: on a GPU, looking up a timestep of NaN in a table ended the CUDA context, and the process."""
    indices = []

    def embeds(t):
        indices.append(index_of(t))
        return looked_up(indices[-1])

    layout = found(embeds=embeds)
    assert indices
    assert all(not torch.equal(index.reshape(()), looked_up_as_nan) for index in indices)
    assert {place[1] for place in layout.constants} == set()


class Coded(nn.Module):
    """Adds what a table has for the code of its input."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.indices = inner, []

    def forward(self, x, *arguments):
        self.indices.append((16 * x.sigmoid()).long())
        return self.inner(x + torch.eye(17).double()[self.indices[-1], :8].mean(-2), *arguments)


@pytest.mark.parametrize("place", ["enter", "blocks.1"])
def test_no_index_is_made_of_marked_latents(place):
    """On a GPU a lookup of their code would end the CUDA context, too."""
    request = request_of()
    coded = Coded(request.model.get_submodule(place))
    request.model.set_submodule(place, coded)
    with pytest.raises(LayoutError, match="whole numbers, such as an index into a codebook"):
        probe(request)
    assert all(bool((index >= 0).all()) for index in coded.indices[:-1])


class CallsMoreWithoutTime(Denoiser):
    """Makes one more call where the timestep is NaN."""

    def forward(self, x, t):
        if t.isnan():
            self.gate(torch.ones(8).double())
        return super().forward(x, t)


def test_calls_that_only_nan_leads_to_stand_for_no_others():
    """History: they were taken for those of the same number, and a timestep's embedding was kept for all steps."""
    request = request_of(embeds=rounded)
    request.model.__class__ = CallsMoreWithoutTime
    assert "embed" not in {place[1] for place in probe(request).constants}


@pytest.mark.parametrize(("option", "name"), [("changes", "embed"), ("compares", "gate")])
def test_what_is_changed_later_or_depends_on_latents_by_a_comparison_is_not_kept(option, name):
    layout = found(**{option: True})
    places = layout.constants.keys() | layout.step_constants.keys()
    assert name not in {place[1] for place in places}


def test_attention_that_was_taken_out_of_its_module_early_is_seen_otherwise():
    assert found().attention_by_name
    assert not found(takes_early=True).attention_by_name


@pytest.mark.parametrize("option", [None, "adds", "takes_early"])
def test_two_ways_through_the_glue_give_one_result(option):
    """With nothing kept or passed on, and every function looked at: the slow way of the beginning."""
    request = request_of(**({option: True} if option else {}))
    sampler = PipeFusion(request.model, num_patches=3, warmup_steps=1, verify=True)
    result = sampler.sample(request)
    plain = PipeFusion(request.model, num_patches=3, warmup_steps=1, verify=True)
    layout = plain.prepare(request).layout
    layout.constants, layout.step_constants, layout.attention_by_name = {}, {}, False
    layout.passed = frozenset()
    plain.layouts.layout_for = lambda request: layout
    torch.testing.assert_close(result, plain.sample(request), rtol=1e-12, atol=1e-12)


def test_a_known_layout_does_not_fit_other_code_between_blocks():
    """Shapes are the same, but what was only passed on is looked into now."""
    request, other = request_of(), request_of(adds=True)
    layout = probe(request)
    assert fits(layout, request)
    assert not fits(layout, other)


@pytest.mark.slow
def test_flux_looks_into_the_image_of_its_last_block_only():
    layout = probe(request_for("flux", tiny=build("flux")))
    results = {(call, leaf) for call in range(len(layout.blocks)) for leaf in (0, 1)}
    assert results - layout.passed == {(len(layout.blocks) - 1, 1)}


def test_attention_has_its_name_back_afterwards():
    before, x, seen = F.scaled_dot_product_attention, torch.ones(1, 1, 2, 4), []

    def other_thread():
        seen.append(F.scaled_dot_product_attention(x, x, x))

    with AttentionByName(lambda attend, q, k, v, **options: -q):
        thread = threading.Thread(target=other_thread)
        thread.start()
        thread.join()
        with AttentionByName(lambda attend, q, k, v, **options: 0 * q):
            assert torch.equal(F.scaled_dot_product_attention(x, x, x), 0 * x)
        assert torch.equal(F.scaled_dot_product_attention(x, x, x), -x)
    assert torch.equal(seen[0], x)  # of ones, in a thread that stands in for nothing
    assert F.scaled_dot_product_attention is before


@pytest.mark.slow
def test_numbers_of_placeholders_do_not_grow_with_width_and_depth():
    """History: through 17 blocks 3072 wide they grew to 1e21, and a norm's variance was infinite."""
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(3072, 3072) for _ in range(24)))
    for layer in model:
        layer.weight = placeholder_of(layer.weight, torch.device("cpu"))
        layer.bias = placeholder_of(layer.bias, torch.device("cpu"))
    with finite_placeholders(model), torch.no_grad():
        assert 0 < model(torch.ones(1, 3072)).abs().max() < 10
    assert all(is_placeholder(p) and p.data.isnan().all() for p in model.parameters())
