"""A model that computes something else in patches is refused before its first request."""

import copy

import pytest
import torch
from torch import nn

from lightning_diffpipe.errors import ConfigurationError, LayoutError
from lightning_diffpipe.sampling.pipefusion import PipeFusion, SequenceParallel, sampler
from lightning_diffpipe.sampling.pipefusion import sampler as pipefusion
from lightning_diffpipe.sampling.rehearsal import tolerance_of
from tests.sampling.models import STEPS, build, knowing, request_for, sample_plainly, too_large
from tests.sampling.ranks_in_threads import sample_together


class CountsTokens(nn.Module):
    """Numbers its tokens from 0, however many it is given; no value tells."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x) + torch.linspace(0, 1, x.shape[1], dtype=x.dtype)[:, None]


def counting():
    return with_feedforward(CountsTokens, 2)


def with_feedforward(kind, block):
    tiny = build("sd3")
    model = copy.deepcopy(tiny.model)
    model.transformer_blocks[block].ff = kind(model.transformer_blocks[block].ff)
    return tiny._replace(model=model)


class TakesTheLargest(nn.Module):
    """Turns the token that a gate likes best: others decide which, but no value of theirs comes with it.

    The gate sees a constant, too, as gates do of the timestep, and must not be blamed.
    """

    def __init__(self, inner):
        super().__init__()
        self.inner, self.gate = inner, nn.Linear(32, 1, dtype=torch.float64)

    def forward(self, x):
        out = self.inner(x)
        liked = self.gate(torch.cat([out, torch.ones_like(out)], -1))
        best = liked.topk(1, dim=1).indices
        return out * (1 - 2 * torch.zeros_like(liked).scatter(1, best, 1.0))


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize(
    ("kind", "block", "message"),
    [
        (CountsTokens, 2, r"relative error \d\.\de-\d\d.* no operator was found"),
        (TakesTheLargest, 3, r"mixes tokens is topk in transformer_blocks\.3\.ff \(TakesTheLargest\)"),
    ],
)  # fmt: skip
def test_what_patches_change_is_refused_with_the_operator_that_mixes_tokens(
    kind, block, message, num_ranks
):
    """On two ranks, each of which has nothing but its own blocks; rank 0 lacks those with the fault."""
    with pytest.raises(LayoutError, match=f"in 2 patches .* {message}"):
        sample_together(
            "sd3", with_feedforward(kind, block), num_ranks,
            lambda m, links: PipeFusion(m, links, num_patches=2), free_foreign=num_ranks > 1,
        )  # fmt: skip


@pytest.mark.slow
def test_memory_that_does_not_suffice_is_no_fault_of_the_model():
    """History: a LayoutError said that a block expects all tokens, after which auto left PipeFusion out."""
    for patches, where in ((None, "while it is probed"), (96, "in 2 patches")):
        tiny = too_large(patches)
        said = f"more memory {where} than there is: CUDA out of memory; take more stages"
        with pytest.raises(ConfigurationError, match=said):
            PipeFusion(tiny.model, num_patches=2).sample(request_for("sd3", tiny=tiny))


def test_numbers_made_of_shapes_are_refused_where_ranks_share_tokens():
    """History: nothing was compared there, and images were wrong without a word."""
    with pytest.raises(
        LayoutError, match=r"shared by 2 ranks .* relative error \d\.\de-\d\d.* method=single"
    ):
        sample_together("sd3", counting(), 2, SequenceParallel)


@pytest.mark.slow
def test_shared_tokens_are_rehearsed_once_for_each_layout(monkeypatch):
    rehearsals, rehearse = [], sampler.rehearse_sharing
    monkeypatch.setattr(
        sampler, "rehearse_sharing", lambda *args: (rehearsals.append(args), rehearse(*args))
    )

    class Twice(SequenceParallel):
        def sample(self, request, on_step=None):
            first = super().sample(request)
            assert torch.equal(first, super().sample(request))
            return first

    _, samplers = sample_together("sd3", build("sd3"), 2, Twice)
    assert len(rehearsals) == 2, "one on each rank"
    assert [len(each._rehearsed) for each in samplers] == [1, 1], "all know"


@pytest.mark.slow
def test_they_would_give_another_image():
    tiny = counting()
    sampler = PipeFusion(tiny.model, num_patches=2, verify=False)
    found = knowing(sampler, "sd3", tiny).sample(request_for("sd3", tiny=tiny))
    exact = sample_plainly(request_for("sd3", tiny=tiny))
    good = build("sd3")
    sampler = PipeFusion(good.model, num_patches=2)
    stale = knowing(sampler, "sd3", good).sample(request_for("sd3", tiny=good))
    staleness = (stale - sample_plainly(request_for("sd3", tiny=good))).norm()
    assert (found - exact).norm() > 3 * staleness


def test_an_overflow_is_not_taken_for_another_result():
    """History: such a model was refused for making positions by itself, with a relative error of nan."""
    tiny = build("sd3")
    model = copy.deepcopy(tiny.model)
    model.proj_out.bias.data.fill_(torch.inf)
    tiny = tiny._replace(model=model)
    sampler = knowing(PipeFusion(model, num_patches=2), "sd3", tiny)
    assert not sampler.sample(request_for("sd3", tiny=tiny)).isfinite().all()


def test_the_coarsest_type_says_what_rounding_is():
    latents, model = torch.zeros(1), nn.Linear(1, 1)
    model.register_parameter("whole", nn.Parameter(torch.zeros(1).char(), requires_grad=False))
    assert tolerance_of(model, latents) < 2e-3
    assert tolerance_of(model.bfloat16(), latents) == 0.1


@pytest.mark.parametrize(
    ("options", "num_rehearsals"),
    [
        ({"num_patches": 2}, 1),
        ({"num_patches": 2, "warmup_steps": "auto"}, 1),
        ({"num_patches": 2, "verify": False}, 0),
        ({"num_patches": 2, "warmup_steps": STEPS}, 0),
        ({"num_patches": 1, "warmup_steps": "auto"}, 0),
    ],
)
def test_once_for_each_layout_if_patches_flow(options, num_rehearsals, monkeypatch):
    rehearsals, tiny = [], build("sd3")
    rehearse = pipefusion.rehearse
    monkeypatch.setattr(
        pipefusion, "rehearse", lambda *args: (rehearsals.append(args), rehearse(*args))
    )
    sampler = knowing(PipeFusion(tiny.model, **options), "sd3", tiny)
    first, second = (sampler.sample(request_for("sd3", tiny=tiny)) for _ in range(2))
    assert len(rehearsals) == num_rehearsals
    assert torch.equal(first, second)
    assert len(sampler.statistics.step_s) == STEPS
