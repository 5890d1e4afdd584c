"""Sampling with weights that each rank quantizes for itself: the images of one process with equal weights."""

import json
import shutil

import diffusers
import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from lightning_diffpipe.errors import ConfigurationError
from lightning_diffpipe.graph.placement import held_bytes, is_placeholder
from lightning_diffpipe.modules import Lora, PipelineDiffusion
from lightning_diffpipe.predictor import Predictor
from lightning_diffpipe.quantization import Quantization, QuantizedWeight
from tests.distributed.stored import Rounded, store_in_8_bits
from tests.modules.tiny_parts import perturb_adapters
from tests.predictor.tiny_pipelines import build, images_of, options_of, prompts_of
from tests.ranks import run_ranks

SETTINGS = {"num_inference_steps": 4, "guidance_scale": 4.0, "output_type": "np"}
# A function without a name, which has another address on each rank.
ROUNDED = Quantization(lambda weight: Rounded.of(weight), lambda weight: weight.numel() + 4)


@pytest.fixture(scope="module", params=["flux", "stable_diffusion"])
def saved(request, tmp_path_factory):
    """Name, folder and images: drawn by diffusers with plain weights of the values of quantized ones."""
    folder, name = tmp_path_factory.mktemp(request.param), request.param
    pipeline = build(name, folder / "parts")
    pipeline.save_pretrained(folder / "pipeline")
    for component in pipeline.components.values():
        if isinstance(component, nn.Module) and not hasattr(component, "decode"):
            kept = {"wo"}  # of T5
            for path, layer in component.named_modules():
                if type(layer) is nn.Linear and path.rpartition(".")[2] not in kept:
                    layer.weight.data = Rounded.of(layer.weight).dequantize()
    return name, folder / "pipeline", drawn(pipeline, name)


def drawn(pipeline, name):
    pipeline.set_progress_bar_config(disable=True)
    generator = torch.Generator().manual_seed(0)
    options = {**SETTINGS, **options_of(name)}
    return np.asarray(images_of(pipeline(prompts_of(name), generator=generator, **options)))


def draw_and_count(rank, name, path, method, options, quantization=ROUNDED):
    """Images, and how many weights of the denoiser are here, and how many of these quantized."""
    with Predictor.from_pretrained(path, method, quantization=quantization, **options) as predictor:
        settings = {**SETTINGS, **options_of(name)}
        images = predictor(prompts_of(name), **settings)
        weights = [p for p in predictor.source.denoiser.parameters() if not is_placeholder(p)]
    return images, len(weights), sum(isinstance(p, Rounded | QuantizedWeight) for p in weights)


@pytest.mark.slow
def test_one_process_draws_what_diffusers_draws(saved):
    name, path, expected = saved
    plain = drawn(diffusers.DiffusionPipeline.from_pretrained(path), name)
    images, _, quantized = draw_and_count(0, name, path, "single", {})
    assert np.abs(np.asarray(images) - expected).max() < 1e-5
    assert np.abs(plain - expected).max() > 1e-2, "weights were rounded"
    assert quantized > 20


@pytest.mark.distributed
def test_two_ranks_draw_what_one_process_draws(saved):
    name, path, expected = saved
    methods = [("sequence", {}), ("pipefusion", {"num_patches": 2, "warmup_steps": 9})]
    if name != "flux":
        methods = [("distrifusion", {"warmup_steps": 9}), ("single", {"guidance": 2})]
    for method, options in methods:
        (images, here, quantized), second = run_ranks(
            draw_and_count, 2, name, path, method, options
        )
        assert np.abs(np.asarray(images) - expected).max() < 1e-4, method
        if method == "pipefusion":
            total = len(list(build(name, path / "again").transformer.parameters()))
            assert here + second[1] < 1.4 * total, "each rank reads its own layers"
        assert min(quantized, second[2]) > 5


def test_a_component_that_is_given_stays_as_it_is(saved):
    name, path, _ = saved
    given = diffusers.DiffusionPipeline.from_pretrained(path).text_encoder
    with Predictor.from_pretrained(
        path, "single", quantization=ROUNDED, text_encoder=given
    ) as predictor:
        predictor(prompts_of(name), **{**SETTINGS, **options_of(name)})
    assert not any(isinstance(p, Rounded) for p in given.parameters())


def test_a_checkpoint_of_this_project_is_not_quantized(tmp_path):
    with pytest.raises(ConfigurationError, match=r"quantization=\.\.\. is of diffusers folders"):
        Predictor.from_pretrained("examples/glyphs", "single", quantization=ROUNDED)


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """A folder whose transformer and T5 are stored in 8 bits, and images with plain weights of their values."""
    root = tmp_path_factory.mktemp("stored")
    pipeline = build("flux", root / "parts")
    pipeline.save_pretrained(root / "flux")
    for name in ("transformer", "text_encoder_2"):
        plain = store_in_8_bits(root / "flux" / name)
        assert len(plain) > 5
        getattr(pipeline, name).load_state_dict(plain, strict=False)
    return root / "flux", drawn(pipeline, "flux")


def bytes_of_denoiser(path, **options):
    """Bytes that a rank is expected to hold, by weight: before and after it is placed."""
    with Predictor.from_pretrained(path, "single", **options) as predictor:
        named = dict(predictor.source.denoiser.named_parameters())
        assert all(map(is_placeholder, named.values()))
        expected = {name: held_bytes(p) for name, p in named.items()}
        predictor(
            prompts_of("flux"), **{**SETTINGS, "num_inference_steps": 1}, **options_of("flux")
        )
        placed = predictor.source.denoiser.named_parameters()
        return expected, {name: held_bytes(p) for name, p in placed}


def test_methods_are_chosen_by_the_bytes_that_are_stored(stored, tmp_path):
    path, _ = stored
    expected, placed = bytes_of_denoiser(path)
    assert expected == placed
    adapted = "transformer.transformer_blocks.0.attn.to_q"
    weight = f"{adapted.partition('.')[2]}.weight"
    assert expected[weight] == 16 * 16 + 4 * 16, "a byte for each number, and a scale for each row"
    shapes = {"lora_A": (1, 16), "lora_B": (16, 1)}
    lora = {f"{adapted}.{name}.weight": torch.ones(shape) for name, shape in shapes.items()}
    save_file(lora, tmp_path / "lora.safetensors")
    with_lora, placed = bytes_of_denoiser(path, loras={tmp_path / "lora.safetensors": 1.0})
    assert with_lora == placed == {**expected, weight: 4 * 16 * 16}


def draw_each_way(rank, path):
    """Images, and numbers of weights here and of quantized ones, by method."""
    ways = {
        "single": {"guidance": 1},
        "sequence": {},
        "pipefusion": {"num_patches": 2, "warmup_steps": 9},
    }
    return {m: draw_and_count(rank, "flux", path, m, o, None) for m, o in ways.items()}


@pytest.mark.distributed
def test_ranks_read_what_is_stored_quantized(stored):
    """To rounding the images of diffusers, and a rank of PipeFusion holds its own layers."""
    path, expected = stored
    (images, everything, all_quantized) = draw_and_count(0, "flux", path, "single", {}, None)
    assert np.abs(np.asarray(images) - expected).max() < 1e-5
    assert all_quantized > 20
    first, second = run_ranks(draw_each_way, 2, path)
    for method, (images, here, quantized) in first.items():
        assert np.abs(np.asarray(images) - expected).max() < 1e-4, method
        is_divided = method == "pipefusion"
        assert (here < everything) == (quantized < all_quantized) == is_divided
    assert first["pipefusion"][2] + second["pipefusion"][2] == all_quantized


def test_lora_files_are_added_to_the_values_of_what_is_stored_quantized(stored, tmp_path):
    """As the adapters are merged where a pipeline is written plain."""
    path, plain = stored
    options = {"lora": Lora(rank=2), "call": {"max_sequence_length": 8}}
    module = PipelineDiffusion.from_pretrained(path, **options)
    perturb_adapters(module)
    module.save_lora(tmp_path / "lora")
    module.save_pretrained(tmp_path / "merged")
    images = [
        draw_and_count(0, "flux", folder, "single", {"loras": loras}, None)[0]
        for folder, loras in ((path, {tmp_path / "lora": 1.0}), (tmp_path / "merged", None))
    ]
    assert np.abs(np.asarray(images[0]) - images[1]).max() < 1e-4
    assert np.abs(np.asarray(images[0]) - plain).max() > 1e-2


@pytest.mark.parametrize(
    ("method", "says"),
    [
        ("gguf", "stored quantized by gguf.* Open the folder"),
        ("torchao", "the package torchao; run: pip"),
    ],
)
def test_what_cannot_be_read_is_named_before_weights_are(
    method, says, stored, tmp_path, monkeypatch
):
    monkeypatch.setattr("lightning_diffpipe.sampling.skeleton.find_spec", lambda name: None)
    path = shutil.copytree(stored[0], tmp_path / "flux")
    config = json.loads((path / "transformer" / "config.json").read_text())
    config["quantization_config"] = {"quant_method": method}
    (path / "transformer" / "config.json").write_text(json.dumps(config))
    for file in path.glob("*/*.safetensors"):
        file.unlink()
    with pytest.raises(ConfigurationError, match=says):
        Predictor.from_pretrained(path, "single")
