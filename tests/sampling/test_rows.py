"""Ranks that divide samples give a denoiser their own rows, whatever forms its arguments have."""

import pytest
import torch
from torch import nn

from lightning_diffpipe.errors import ConfigurationError
from lightning_diffpipe.sampling.call import Call, Phase
from lightning_diffpipe.sampling.record import Answer, Controlled


class OfAList(nn.Module):
    """Takes samples and texts as lists, and residuals for each of its layers."""

    def forward(self, x, texts=(), residuals=()):
        out = torch.stack(x)
        for residual in residuals:
            out = out * 2 + residual
        if texts:
            out = out + torch.stack([text.sum() for text in texts])[:, None, None, None]
        return (list(out.unbind()),)


class Control(nn.Module):
    """One residual for each layer."""

    def forward(self, x):
        return [x + 1, x * 3]


def numbers(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def call_with(num_rows, **arguments):
    """A call of three prompts, or as many as there are rows."""
    given = {"x": numbers(num_rows, 3, 4, 4), "listed": "x", **arguments}
    phases = [Phase(("transformer",), given["x"].shape, calls=[[given]])]
    draws = {"generator": [torch.Generator() for _ in range(num_rows)]}
    return Call(None, phases, torch.ones(1), given["x"], None, num_rows, step_arguments=draws)


@pytest.mark.parametrize(
    "arguments",
    [
        {"texts": [numbers(size, 5, seed=size) for size in (4, 2, 3)]},
        {"texts": [numbers(3, 5, seed=size) for size in (4, 2, 3)]},
        {"texts": [numbers(3, 4, 4, seed=size) for size in (4, 2, 3)]},
        {"residuals": [numbers(3, 3, 4, 4, seed=seed) for seed in (1, 2)]},
        {"residuals": [Answer(0, 0), Answer(0, 1)], "controls": [("control", {"x": numbers(3, 3, 4, 4)})]},
        {"residuals": [Answer(0, 0), Answer(0, 1), Answer(0, 0)],
         "controls": [("control", {"x": numbers(3, 3, 4, 4)})]},
    ],
    ids=["texts", "as many tokens as samples", "pictures", "residuals", "answers",
         "as many answers as samples"],
)  # fmt: skip
def test_a_list_of_samples_is_divided_and_one_of_layers_is_not(arguments):
    """History: as many residuals of a ControlNet as there were samples were divided as if they were samples.

    Then texts of as many tokens as there were samples were refused, as they might have been residuals.
    """
    call = call_with(3, **arguments)
    model = Controlled(OfAList(), {"control": Control()})
    [whole] = model(**call.steps[0][0])
    for start, stop in ((0, 1), (1, 3)):
        [found] = call.samples(start, stop)._compute(model, call.steps[0][0])
        assert torch.equal(found[start:stop], whole[start:stop])


@pytest.mark.parametrize(
    ("residuals", "message"),
    [
        ([numbers(2, 3, 4, 4)] * 2, r"residuals, .* a list of 2 \(\(2, 3, 4, 4\)\) for 2 rows"),
        ([0.5, 0.8], r"residuals, .* a list of 2 \(float\) for 2 rows"),
    ],
)
def test_a_list_that_may_be_of_samples_or_of_layers_is_refused(residuals, message):
    """History: it was divided, and layers were left out without a word."""
    call = call_with(2, residuals=residuals)
    with pytest.raises(ConfigurationError, match=message):
        call.samples(0, 1)
    call_with(3, residuals=residuals).samples(0, 1)


def test_a_list_of_nothing_is_not_divided():
    """History: it was refused, as it might be of samples or of layers."""
    call_with(2, residuals=[None, None]).samples(0, 1)


class OfVideos(nn.Module):
    """Predicts four of six channels of pictures that have an axis of frames."""

    def forward(self, hidden_states):
        return (hidden_states[:, :4] * 2 + hidden_states[:, 4:].sum(1, keepdim=True),)


def test_a_pipeline_may_give_latents_an_axis_and_further_channels():
    """History: either was known, and both together ended in an error of torch."""
    latents, more = numbers(2, 4, 8, 8), numbers(2, 2, 8, 8, seed=1)
    seen = torch.cat([torch.zeros_like(latents), more], 1)[:, :, None]
    phases = [Phase(("transformer",), latents.shape, calls=[[{"hidden_states": seen}]])]
    call = Call(None, phases, torch.ones(1), latents, None, 2)
    found = call.denoise(OfVideos())(latents, torch.ones(()))
    assert torch.equal(found, latents * 2 + more.sum(1, keepdim=True))
    phases[0].calls = [[{"hidden_states": seen[:, None]}]]
    with pytest.raises(ConfigurationError, match=r"given \(2, 1, 6, 1, 8, 8\) for latents \(2, 4,"):
        call.denoise(OfVideos())(latents, torch.ones(()))
