"""Decoding on all ranks: the images of one rank, bit for bit, with the decoder's calls divided."""

import shutil
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import diffusers
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from lightning_diffpipe.errors import ConfigurationError, DiffPipeError
from lightning_diffpipe.predictor import Predictor
from lightning_diffpipe.sampling.decoding import Decoding, divide
from lightning_diffpipe.sampling.world import join_world
from tests.modules.tiny_parts import perturbed_latent_diffusion
from tests.predictor.tiny_pipelines import options_of, prompts_of
from tests.ranks import run_ranks
from tests.zoo import pipelines as zoo
from tests.zoo.case import perturb

LTX = zoo.PIPELINES["LTXPipeline"].parts["vae"]


def tiles(side, stride):
    """Arguments by which most autoencoders of videos turn tiles on."""
    sizes = {"min": side, "stride": stride}
    return {f"tile_sample_{n}_{axis}": s for n, s in sizes.items() for axis in ("height", "width")}


def of_pipeline(name):
    return zoo.PIPELINES[f"{name}Pipeline"].parts["vae"]


AUTOENCODERS = {
    "AutoencoderKL": (zoo.VAE["vae"], (1, 4, 32, 32), {}, [3, 3, 3]),
    "CogVideoX": (
        of_pipeline("CogVideoX"),
        (1, 4, 5, 12, 12),
        {"tile_sample_min_height": 48, "tile_sample_min_width": 48},
        [6, 6, 6],
    ),
    "DC": (zoo.DC["vae"], (1, 4, 40, 40), tiles(32, 24), [6, 5, 5]),
    "HunyuanImage": (of_pipeline("HunyuanImage"), (1, 4, 32, 24), {}, [2, 2, 2]),
    "HunyuanVideo": (zoo.HUNYUAN_VIDEO_VAE["vae"], (1, 4, 7, 9, 8), tiles(32, 24), [9, 9, 9]),
    "frames of HunyuanVideo": (zoo.HUNYUAN_VIDEO_VAE["vae"], (1, 4, 7, 4, 4), None, [1, 1, 1]),
    "HunyuanVideo15": (
        of_pipeline("HunyuanVideo15"),
        (1, 4, 3, 16, 16),
        {"tile_latent_min_height": 8, "tile_latent_min_width": 8},
        [3, 3, 3],
    ),
    "LTX": (LTX, (1, 4, 3, 12, 12), tiles(32, 24), [1, 2, 1]),
    "Mochi": (of_pipeline("Mochi"), (1, 12, 3, 8, 8), tiles(32, 24), [3, 3, 3]),
    "QwenImage": (zoo.QWEN_VAE["vae"], (1, 4, 3, 9, 8), tiles(16, 12), [9, 9, 9]),
    "Wan": (zoo.WAN_VAE["vae"], (2, 16, 3, 9, 8), tiles(32, 24), [9, 9, 9]),
}
"""How each is made, latents, what turns its tiles on, calls of the decoder by rank: frames of a tile are of one."""


def made(make, tiling=None):
    torch.manual_seed(0)
    vae = make(Path()).eval()
    perturb(vae, torch.Generator().manual_seed(1))
    if tiling is not None:
        vae.enable_tiling(**tiling)
    return vae


def latents(shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(3))


def nothing(*_):
    pass


def decode_each(rank, names):
    """Whether images of all ranks equal those of one, with the decoder's calls by rank; on rank 0."""
    world = join_world(torch.device("cpu"), 60.0)
    found = {}
    for name in names:
        make, shape, tiling, _ = AUTOENCODERS[name]
        part = lambda _, make=make: made(make)  # whose tiles are those of rank 0
        decoding = Decoding(world, part, nothing, nullcontext, torch.device("cpu"), {})
        if rank:
            decoding.follow()
            continue
        vae, z = made(make, tiling), latents(shape)
        pipeline = SimpleNamespace(parts={"vae": vae}, needed=())
        decoding.divide_in(pipeline)
        decoding.others_wait = True
        with torch.inference_mode():
            images = pipeline.parts["vae"].decode(z, return_dict=False)[0]
            decoding.end()
            found[name] = torch.equal(images, vae.decode(z).sample), decoding.num_calls
    return found


@pytest.mark.table
@pytest.mark.distributed
def test_three_ranks_decode_what_one_does_bit_for_bit():
    """Features that a frame leaves for the next stay on the rank that has the tile."""
    found, *_ = run_ranks(decode_each, 3, list(AUTOENCODERS))
    assert found == {name: (True, calls) for name, (*_, calls) in AUTOENCODERS.items()}


def divided(vae, z, num_ranks=2, **kwargs):
    return divide(vae, {"args": (z,), "kwargs": kwargs}, num_ranks, {})


def noisy_ltx(folder):
    config = dict(LTX(folder).config)
    known = {name: value for name, value in config.items() if not name.startswith("_")}
    return diffusers.AutoencoderKLLTXVideo(**known | {"decoder_inject_noise": (True,) * 5})


def magvit(_):
    levels = {"block_out_channels": (8,) * 4, "norm_num_groups": 4, "layers_per_block": 1}
    return diffusers.AutoencoderKLMagvit(**levels, latent_channels=4)


def svd(_):
    blocks = ("DownEncoderBlock2D",) * 2
    return diffusers.AutoencoderKLTemporalDecoder(
        block_out_channels=(32, 32), down_block_types=blocks
    )


def test_what_cannot_be_divided_is_left_to_one_rank():
    """Noise is drawn for one tile after the other, modules remember the frames before, frames read each other."""
    assert divided(made(LTX, tiles(32, 24)), latents((1, 4, 3, 12, 12))) is not None
    assert divided(made(noisy_ltx, tiles(32, 24)), latents((1, 4, 3, 12, 12))) is None
    sizes = {"tile_sample_min_height": 128, "tile_sample_min_width": 128}
    assert divided(made(magvit, sizes), latents((1, 4, 5, 40, 40))) is None
    assert divided(made(svd), latents((3, 4, 8, 8)), num_frames=3) is None
    assert divided(made(zoo.VAE["vae"]), latents((3, 4, 8, 8))) is None


class Halved(torch.nn.Module):
    def forward(self, x, kept=None):
        return x / 2


class Chained(torch.nn.Module):
    """An autoencoder whose decoder goes on from what it has decoded, or from two lists; or is called if it fits."""

    def __init__(self, which):
        super().__init__()
        self.which, self.decoder = which, Halved()

    def decode(self, z):
        if self.which == "result":
            return self.decoder(self.decoder(z) * 2)
        if self.which == "value":
            return self.decoder(z) if self.decoder(z).max() > 1 else z
        one, other = [], []
        return self.decoder(z, one) + self.decoder(z, other) + self.decoder(z, (one, other))


@pytest.mark.parametrize("which", ["result", "value", "lists"])
def test_calls_that_depend_on_what_others_gave_are_not_divided(which):
    assert divided(Chained(which), torch.randn(2, 4)) is None


def test_the_largest_tiles_are_dealt_first():
    """Nine tiles of 12 rows and columns: four of 16 x 16, four cut at one side to 8, one at both."""
    found = divided(made(zoo.VAE["vae"], {}), latents((1, 4, 32, 32)), 4)
    sizes = np.multiply.outer([16, 16, 8], [16, 16, 8]).ravel()
    loads = np.bincount(found.owners, sizes)
    assert sorted(loads) == [384, 384, 384, 448]


# ---------------------------------------------------------------------------------------- requests


def draw_each(rank, jobs):
    """Images of each job as an array, with the report; of rank 0."""
    found = []
    for path, prompts, settings, options, tiling in jobs:
        with Predictor.from_pretrained(path, **options) as predictor:
            if rank == 0 and tiling is not None:
                predictor.source.outline().vae.enable_tiling(**tiling)
            drawn = predictor(prompts, **settings, num_inference_steps=2, output_type="np")
            found.append(None if rank else (drawn, predictor.report))
    return found


LARGE = {"height": 64, "width": 64}


@pytest.mark.distributed
def test_requests_are_decoded_on_all_ranks_and_say_so(folder_of):
    """SDXL decodes in another type than its weights have, in half precision: on every rank."""
    names = {"stable_diffusion": {}, "sdxl": {}, "pixart": None, "wan": tiles(32, 24)}
    options = {name: {"method": "single"} for name in names} | {
        "sdxl": {"method": "single", "dtype": torch.float16},
        "pixart": {"method": "pipefusion", "num_patches": 1, "vae_slicing": True},
    }
    prompts = {name: prompts_of(name)[:1] for name in names} | {"pixart": ["a", "b", "c"]}
    sizes = {"stable_diffusion": LARGE, "sdxl": LARGE, "wan": {"height": 64, "width": 48}}
    jobs = [
        (folder_of(n), prompts[n], options_of(n) | sizes.get(n, {}), options[n], tiling)
        for n, tiling in names.items()
    ]
    undivided = [(*job[:3], job[3] | {"decoding": "rank_0"}, job[4]) for job in jobs[:1]]
    found = run_ranks(draw_each, 2, jobs + undivided)[0]
    expected = draw_each(0, [*jobs, jobs[0]])
    for (images, _), (other, _) in zip(found, expected, strict=True):
        assert np.array_equal(images, other)
    reports = [report for _, report in found]
    assert [r.decoder_calls for r in reports] == [[5, 4], [5, 4], [2, 1], [6, 6], []]
    # Rank 1 has two whole tiles and two that are cut at one side; the decoder doubles rows and columns.
    assert reports[0].bytes_sent["images"] == 4 * 3 * 4 * (2 * 16 * 16 + 2 * 16 * 8)
    assert "decoder calls rank 0: 5, rank 1: 4" in str(reports[0])
    assert "decoder calls" not in str(reports[-1])


def fail_in_turn(rank, path, prompts, settings):
    """What each request says or draws: a decoder without memory, rank 0 after decoding, then whole ones."""
    said = []
    options = {"method": "single", "vae_tiling": True}
    with Predictor.from_pretrained(path, **options) as predictor:

        def request(**options):
            try:
                drawn = predictor(prompts, **settings, **options)
                said.append(None if drawn is None else np.asarray(drawn[0]))
            except (DiffPipeError, torch.OutOfMemoryError, KeyError) as error:
                said.append(f"{type(error).__name__}: {error}")

        request()
        if rank == 1:
            decoder = predictor.source.part("vae").decoder
            error = torch.OutOfMemoryError("CUDA out of memory")
            with mock.patch.object(decoder, "forward", side_effect=error):
                request()
        else:
            request()
        postprocess = "diffusers.image_processor.VaeImageProcessor.postprocess"
        with mock.patch(postprocess, side_effect=KeyError("no such type")):
            request()
        request()
    return said


@pytest.mark.distributed
def test_a_rank_that_fails_to_decode_ends_the_request_on_all_and_the_next_one_is_whole(folder_of):
    settings = {"num_inference_steps": 2, **LARGE}
    job = folder_of("stable_diffusion"), prompts_of("stable_diffusion")[:1], settings
    lead, other = run_ranks(fail_in_turn, 2, *job)
    assert np.array_equal(lead[0], lead[3])
    assert "rank 1" in lead[1]
    assert "CUDA out of memory" in lead[1]
    assert lead[2] == "KeyError: 'no such type'"
    assert [other[n] for n in (0, 2, 3)] == [None, None, None]
    assert "OutOfMemoryError" in other[1]


def draw_module(rank, path):
    """Images of a module in memory, with those of a folder on which ranks do not agree."""
    module = perturbed_latent_diffusion()
    module.vae.enable_tiling()
    found = []
    options = [{}] if path is None else [{}, {"decoding": "rank_0"}]
    for each in options:
        with Predictor.from_module(module, "single", **each) as predictor:
            images = predictor(["a"], num_inference_steps=2, seed=3, **LARGE)
            found.append(None if rank else (np.asarray(images[0]), predictor.report.decoder_calls))
    if path is not None:
        with (
            Predictor.from_pretrained(path[rank], "single", vae_tiling=True) as predictor,
            pytest.raises(ConfigurationError, match=r"rank 1 has vae\.decoder") as said,
        ):
            predictor(["a"], num_inference_steps=2, **LARGE)
        found.append(str(said.value))
    return found


@pytest.mark.distributed
def test_modules_in_memory_are_decoded_on_all_ranks_and_other_autoencoders_are_refused(
    folder_of, tmp_path
):
    [(alone, _)] = draw_module(0, None)
    path = folder_of("stable_diffusion")
    changed = shutil.copytree(path, tmp_path / "changed")
    file = changed / "vae" / "diffusion_pytorch_model.safetensors"
    weights = load_file(file)
    weights["decoder.conv_in.bias"] += 1
    save_file(weights, file)
    (all_ranks, rank_0, _), (*_, refusal) = run_ranks(draw_module, 2, [path, changed])
    assert np.array_equal(all_ranks[0], alone)
    assert np.array_equal(rank_0[0], alone)
    assert all_ranks[1] == [5, 4]
    assert rank_0[1] == []
    assert "decoder.conv_in.bias" in refusal
    with pytest.raises(ConfigurationError, match="decoding='all'; choose auto or rank_0"):
        Predictor.from_pretrained(path, "single", decoding="all")
