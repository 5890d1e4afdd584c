"""What the first request runs before its own first step: at most what three steps run."""

import contextlib
import json
from pathlib import Path
from unittest import mock

import diffusers
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lightning_diffpipe.sampling.distrifusion import DistriFusion
from lightning_diffpipe.sampling.pipefusion import PipeFusion, SequenceParallel
from lightning_diffpipe.sampling.pipefusion.patch import measured_costs
from lightning_diffpipe.sampling.request import Request
from lightning_diffpipe.sampling.tracing.probe import probe
from tests.sampling import models
from tests.sampling.models import Tiny, normal, scheduler_for
from tests.sampling.ranks_in_threads import sample_together

RANKS = 2
DEPTH = {"num_layers": 19, "num_single_layers": 38}  # Flux's
BLOCKS = {
    "flux": ("transformer_blocks.", "single_transformer_blocks."),
    "glyphs": ("resnets.", "attentions."),
}


def glyphs():
    """The built-in U-Net, but for its weights."""
    folder = Path(__file__).parents[2] / "examples" / "glyphs" / "unet"
    config = json.loads((folder / "config.json").read_text())
    model = diffusers.UNet2DConditionModel.from_config(config).double().eval()
    text = normal(1, 8, config["cross_attention_dim"], seed=2)

    def denoise(m):
        return lambda x, t: m(x, t, encoder_hidden_states=text, return_dict=False)[0]

    return Tiny(
        model.requires_grad_(False),
        denoise,
        normal(1, config["in_channels"], config["sample_size"], config["sample_size"]),
    )


def flux(**depth):
    torch.manual_seed(0)
    tiny = models.flux(**depth or DEPTH)
    return tiny._replace(model=tiny.model.double().eval().requires_grad_(False))


def is_block(name, kind):
    """Whether a module is one of those that a model has many of, as `blocks.3` or `down_blocks.0.resnets.1`."""
    head, _, number = name.rpartition(".")
    return number.isdigit() and f"{head}.".endswith(BLOCKS[kind])


@contextlib.contextmanager
def counting(model, kind):
    """Counts the runs of blocks, whoever answers their calls meanwhile."""
    runs = []
    types = {type(module) for name, module in model.named_modules() if is_block(name, kind)}
    with contextlib.ExitStack() as stack:
        for block in types:

            def forward(self, *args, plain=block.forward, **kwargs):
                runs.append(type(self).__name__)
                return plain(self, *args, **kwargs)

            stack.enter_context(mock.patch.object(block, "forward", forward))
        yield runs


LOOKS = {
    "pipefusion": ("flux", lambda m, links: PipeFusion(m, links, num_patches=2, verify=False), 1),
    "sequence": ("flux", lambda m, links: SequenceParallel(m, links, verify=False), RANKS),
    "bands, flux": ("flux", lambda m, links: DistriFusion(m, links, verify=False), RANKS),
    "bands, glyphs": ("glyphs", lambda m, links: DistriFusion(m, links, verify=False), RANKS),
}
"""By method: the model, its sampler, and how often all ranks together run a block in a step."""


def runs_before(method, monkeypatch, **depth):
    """Counts runs of blocks by all ranks before their first step, and the blocks."""
    kind, make, runs_of_step = LOOKS[method]
    tiny = {"flux": flux, "glyphs": glyphs}[kind](**depth)
    num_blocks = sum(is_block(name, kind) for name, _ in tiny.model.named_modules())
    monkeypatch.setattr("tests.sampling.ranks_in_threads.knowing", lambda *args: None)
    with counting(tiny.model, kind) as runs:
        latents, _ = sample_together(kind, tiny, RANKS, make, timeout_s=120.0, num_steps=1)
    assert all(x.isfinite().all() for x in latents)
    return len(runs) - runs_of_step * num_blocks, num_blocks


@pytest.mark.parametrize("method", LOOKS)
def test_a_look_runs_no_more_blocks_than_three_steps(method, monkeypatch):
    """History: the probe ran every block of the model for each bit of a code word, and timed each three times."""
    before, num_blocks = runs_before(method, monkeypatch)
    assert 0 < before <= 3 * num_blocks


class Tupled(nn.Module):
    """Attention whose result is a tuple, or not."""

    def __init__(self, is_tuple):
        super().__init__()
        self.qkv, self.is_tuple = nn.Linear(8, 24), is_tuple

    def forward(self, x):
        q, k, v = (y[:, None] for y in self.qkv(x).chunk(3, -1))
        out = x + F.scaled_dot_product_attention(q, k, v)[:, 0]
        return (out,) if self.is_tuple else out


class Chain(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Tupled(i > 3) for i in range(6))

    def forward(self, x, t):
        for block in self.blocks:
            x = block(x)
            if block.is_tuple:
                (x,) = x
        return x


def test_results_in_another_tree_are_of_another_kind():
    """History: blocks got each other's results where these differed by a tuple around them only."""
    model, scheduler = Chain().double().eval(), scheduler_for("")
    request = Request(model, model, scheduler, scheduler.timesteps, normal(2, 12, 8))
    assert len(measured_costs(probe(request, 1), request)) == len(model.blocks)
