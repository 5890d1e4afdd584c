"""Compiled blocks: the images of plain ones, and no graph after the second step."""

from unittest import mock

import pytest
import torch
from torch._dynamo.utils import counters

from lightning_diffpipe.errors import ConfigurationError
from lightning_diffpipe.predictor import Predictor
from lightning_diffpipe.sampling.tracing.attention import repeated_blocks
from tests.modules.tiny_parts import perturbed_latent_diffusion
from tests.predictor.scenarios import final_latents
from tests.predictor.tiny_pipelines import options_of, prompts_of
from tests.ranks import run_ranks
from tests.rows import row

COMPILED = {"compile": "blocks", "compile_backend": "eager"}


def latents_of(path, name, options):
    """Final latents of two equal requests, with how many graphs there were after each step of both."""
    torch.compiler.reset()  # else blocks of an earlier one have graphs already
    counters.clear()
    graphs = []
    settings = {"num_inference_steps": 4, "guidance_scale": 3.0, **options_of(name)}
    settings["on_step"] = lambda *_: graphs.append(counters["stats"]["unique_graphs"])
    requests = [(prompts_of(name)[:1], settings)] * 2
    found = final_latents(path, requests, dtype=torch.float64, **options)
    return found, graphs, dict(counters["graph_break"])


def draw_each(rank, path, several):
    """By each method with compiled blocks, and plainly."""
    return [
        (latents_of(path, name, options | COMPILED), latents_of(path, name, options)[0])
        for name, options in several
    ]


PATCHES = {"method": "pipefusion", "num_patches": 4}


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("name", "several"),
    [
        ("flux", [PATCHES, {"method": "sequence"}]),
        row("flux", [{"method": "sequence", "mode": "ring"}]),
        row("wan", [PATCHES | {"warmup_steps": 2}, {"method": "single", "guidance": 2}]),
        row("stable_diffusion", [{"method": "single", "guidance": 2}]),
        row("sd3", [PATCHES, {"method": "sequence"}]),
        row("pixart", [PATCHES]),
    ],
)
def test_ranks_draw_with_compiled_blocks_what_they_draw_without(name, several, folder_of):
    """Attention over ranks, with keys a step old, is one operator of the graph; the backend changes no bit."""
    jobs = [(name, options) for options in several]
    for drawn in run_ranks(draw_each, 2, folder_of(name), jobs):
        for (found, graphs, breaks), plain in drawn:
            for latents, expected in zip(found, plain, strict=True):
                torch.testing.assert_close(latents, expected, rtol=0, atol=0)
            assert graphs[0] > 0
            assert set(graphs[1:]) == {graphs[1]}
            assert not breaks


@pytest.mark.slow
def test_patches_read_keys_of_the_step_before_in_graphs_too(folder_of):
    """Else patches and compiled blocks would be equal to each other and to one process."""
    path = folder_of("flux")
    (found, _), _, _ = latents_of(path, "flux", PATCHES | COMPILED)
    (exact, _), _, _ = latents_of(path, "flux", {"method": "single"} | COMPILED)
    assert (found - exact).abs().max() > 1e-6


@pytest.mark.slow
def test_blocks_that_others_have_compiled_run_plainly_in_patches(folder_of):
    """History: their graphs took attention answered from outside for code of the block, and the request crashed."""
    plain, _, _ = latents_of(folder_of("flux"), "flux", PATCHES)
    opened = Predictor.from_pretrained

    def compiled(*args, **options):
        predictor = opened(*args, **options)
        predictor.source.denoiser.compile_repeated_blocks(backend="eager")
        return predictor

    with mock.patch.object(Predictor, "from_pretrained", compiled):
        found, _, _ = latents_of(folder_of("flux"), "flux", PATCHES)
    torch.testing.assert_close(found, plain, rtol=0, atol=0)


@pytest.mark.parametrize("method", [row("single"), row("pipefusion")])
def test_kernels_of_inductor_draw_the_same_to_rounding(method, folder_of):
    path, options = folder_of("flux"), {"method": method}
    found, graphs, breaks = latents_of(path, "flux", options | {"compile": "blocks"})
    plain, _, _ = latents_of(path, "flux", options)
    torch.testing.assert_close(found, plain, rtol=1e-12, atol=1e-12)
    assert len(set(graphs[1:])) == 1
    assert not breaks


@pytest.mark.parametrize(
    ("name", "options", "reason"),
    [
        ("stable_diffusion", {"method": "distrifusion"}, "inside blocks, where compilers leave"),
        ("flux", {"method": "single", "compile": "all"}, "compile='all'; choose None or blocks"),
    ],
)
def test_what_cannot_be_compiled_is_refused(name, options, reason, folder_of):
    with pytest.raises(ConfigurationError, match=reason):
        Predictor.from_pretrained(folder_of(name), **COMPILED | options)


class Repeating(torch.nn.Module):
    """A list of blocks of one class, in which there is another; and lists of others, and of single layers."""

    def __init__(self):
        super().__init__()
        block, layer = (lambda: Repeating.Block()), (lambda: torch.nn.Linear(2, 2))
        self.mixed = torch.nn.ModuleList([torch.nn.Sequential(layer()), block()])
        self.layers = torch.nn.ModuleList([layer(), layer()])
        self.inside = torch.nn.ModuleDict({"blocks": torch.nn.ModuleList([block(), block()])})

    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            parts = (torch.nn.Sequential(torch.nn.Linear(2, 2)) for _ in range(2))
            self.parts = torch.nn.ModuleList(parts)


def test_blocks_are_the_entries_of_the_outermost_lists_of_one_class():
    model = Repeating()
    in_mixed = [*model.mixed[1].parts]
    assert repeated_blocks(model) == [*in_mixed, *model.inside["blocks"]]
    model._repeated_blocks = ["Linear"]
    assert {type(block) for block in repeated_blocks(model)} == {torch.nn.Linear}
    with pytest.raises(ConfigurationError, match="a Linear has no list of blocks of one class"):
        repeated_blocks(torch.nn.Linear(2, 2))


def test_a_module_in_memory_is_not_changed():
    with pytest.raises(ConfigurationError, match="would change the module"):
        Predictor.from_module(perturbed_latent_diffusion(), "single", compile="blocks")
