"""The Predictor draws with IP-Adapters, files that the tests write, as diffusers does."""

import re
import shutil

import diffusers
import numpy as np
import pytest
import safetensors.torch
import torch
import transformers
from diffusers.models.attention_processor import SD3IPAdapterJointAttnProcessor2_0
from diffusers.models.embeddings import IPAdapterTimeImageProjection
from PIL import Image

from lightning_diffpipe.predictor import Predictor
from tests.command import call
from tests.predictor import tiny_pipelines as tiny
from tests.predictor.scenarios import (
    BothBands,
    as_array,
    failure_of_each,
    failure_of_each_rank,
    latents_of_each,
)
from tests.predictor.tiny_pipelines import random_image
from tests.ranks import run_ranks

WIDTH, TOKENS = 12, 4  # of what image encoders answer; of one image
FILE = "ip-adapter.safetensors"
SETTINGS = {"num_inference_steps": 3, "guidance_scale": 4.0}


def save_image_encoder(folder):
    config = transformers.CLIPVisionConfig(
        hidden_size=16, intermediate_size=16, projection_dim=WIDTH, num_hidden_layers=2,
        num_attention_heads=2, image_size=32, patch_size=8,
    )  # fmt: skip
    torch.manual_seed(5)
    encoder = transformers.CLIPVisionModelWithProjection(config)
    encoder.save_pretrained(folder)
    transformers.CLIPImageProcessor(size=32, crop_size=32).save_pretrained(folder)


def save_adapter(pipeline, file, seed=0, tokens=TOKENS):
    """An adapter whose layers are those of a pipeline's denoiser, of random numbers large enough to be seen."""
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(shape, generator=generator) * 0.4
    if hasattr(pipeline, "unet"):
        width = pipeline.unet.config.cross_attention_dim
        layers = [m for n, m in pipeline.unet.named_modules() if n.endswith("attn2")]
        named = {f"{2 * i + 1}.to_{x}_ip.weight": draw(layer.to_k.out_features, width)
                 for i, layer in enumerate(layers) for x in "kv"}  # fmt: skip
    elif isinstance(pipeline, diffusers.FluxPipeline):
        transformer = pipeline.transformer
        width, inner = transformer.config.joint_attention_dim, transformer.inner_dim
        named = {}
        for i in range(transformer.config.num_layers):
            for x in "kv":
                named[f"{i}.to_{x}_ip.weight"] = draw(inner, width)
                named[f"{i}.to_{x}_ip.bias"] = draw(inner)
    else:
        config, named = pipeline.transformer.config, {}
        inner = config.num_attention_heads * config.attention_head_dim
        layer = SD3IPAdapterJointAttnProcessor2_0(inner, inner, config.attention_head_dim, 64)
        for i in range(config.num_layers):
            named |= {f"{i}.{name}": draw(*x.shape) for name, x in layer.state_dict().items()}
    tensors = {f"ip_adapter.{name}": value for name, value in named.items()}
    if isinstance(pipeline, diffusers.StableDiffusion3Pipeline):
        resampler = IPAdapterTimeImageProjection(16, inner, 64, heads=1, num_queries=tokens)
        projection = {name: draw(*x.shape) for name, x in resampler.state_dict().items()}
    else:
        projection = {
            "proj.weight": draw(tokens * width, WIDTH),
            "proj.bias": draw(tokens * width),
            "norm.weight": torch.ones(width),
            "norm.bias": draw(width),
        }
    tensors |= {f"image_proj.{name}": value for name, value in projection.items()}
    file.parent.mkdir(parents=True, exist_ok=True)
    safetensors.torch.save_file(tensors, file)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A pipeline's folder, and that of an adapter and an image encoder, by the pipeline's name."""
    made = {}

    def saved(name):
        if name not in made:
            folder = tmp_path_factory.mktemp(name)
            pipeline = tiny.build(name, folder / "words")
            pipeline.save_pretrained(folder / "model")
            save_adapter(pipeline, folder / "adapters" / FILE)
            save_adapter(pipeline, folder / "adapters" / "second.safetensors", seed=1)
            save_image_encoder(folder / "adapters" / "image_encoder")
            made[name] = folder / "model", folder / "adapters"
        return made[name]

    return saved


def by_diffusers(saved, scales, **options):
    """What diffusers alone draws, as its users load adapters."""
    path, folder = saved
    pipeline = diffusers.DiffusionPipeline.from_pretrained(str(path))
    pipeline.set_progress_bar_config(disable=True)
    if scales:
        files = list(scales) if len(scales) > 1 else FILE
        extra = {"subfolder": "", "weight_name": files}
        encoder = transformers.CLIPVisionModelWithProjection.from_pretrained(
            folder / "image_encoder"
        )
        processor = transformers.CLIPImageProcessor.from_pretrained(folder / "image_encoder")
        pipeline.register_modules(image_encoder=encoder, feature_extractor=processor)
        pipeline.load_ip_adapter(str(folder), **extra)
        values = list(scales.values())
        pipeline.set_ip_adapter_scale(values if len(values) > 1 else values[0])
    generator = torch.Generator().manual_seed(0)
    drawn = pipeline(
        prompt=tiny.prompts_of("any"), generator=generator, output_type="pil", **options
    )
    return as_array(drawn.images)


def adapters(saved, scales):
    return {saved[1] / name: scale for name, scale in scales.items()}


def images_of(saved, scales, **options):
    with Predictor.from_pretrained(
        saved[0], "single", ip_adapters=adapters(saved, scales), alone=True
    ) as predictor:
        return as_array(predictor(tiny.prompts_of("any"), **options))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["stable_diffusion", "sdxl", "flux", "sd3"])
def test_images_as_prompts_draw_as_in_diffusers(name, saved):
    """By an image through the image encoder, which one without the adapter does not."""
    own = {**SETTINGS, **tiny.options_of(name)}
    options = {**own, "ip_adapter_image": random_image()}
    expected = by_diffusers(saved(name), {FILE: 0.7}, **options)
    assert (images_of(saved(name), {FILE: 0.7}, **options) == expected).all()
    assert (by_diffusers(saved(name), {}, **own) != expected).mean() > 0.3


@pytest.mark.slow
def test_several_adapters_with_an_image_and_a_scale_for_each(saved):
    """One of the scales is by blocks of the U-Net."""
    both = {FILE: {"down": 0.2, "up": 1.1}, "second.safetensors": 0.5}
    images = [random_image(), random_image(1)]
    options = {**SETTINGS, **tiny.options_of("sdxl"), "ip_adapter_image": images}
    found = images_of(saved("sdxl"), both, **options)
    assert (found == by_diffusers(saved("sdxl"), both, **options)).all()
    other = images_of(saved("sdxl"), both | {FILE: 0.5}, **options)
    assert (found != other).mean() > 0.3


def test_embeddings_take_the_place_of_images(saved, tmp_path):
    """No image encoder is needed then; the first half is that of images that are not wanted."""
    path, folder = saved("stable_diffusion")
    embeddings = torch.randn(2, 1, WIDTH, generator=torch.Generator().manual_seed(3))
    options = {**SETTINGS, **tiny.options_of("any"), "ip_adapter_image_embeds": [embeddings]}
    alone = shutil.copy(folder / FILE, tmp_path)
    with Predictor.from_pretrained(path, "single", ip_adapters={alone: 0.7}) as predictor:
        found = as_array(predictor(tiny.prompts_of("any"), **options))
    assert (found == by_diffusers((path, folder), {FILE: 0.7}, **options)).all()


@pytest.mark.table
@pytest.mark.distributed
def test_two_ranks_draw_with_adapters_what_one_process_draws(saved, monkeypatch):
    """Prompts, halves of guidance, bands, tokens or layers are divided; displaced bands equal the emulator."""
    double = {"dtype": torch.float64}
    cases = [
        ("sd3", {"method": "single", **double}), ("sd3", {"method": "single", "guidance": 2, **double}),
        ("sd3", {"method": "pipefusion", "num_patches": 2, "warmup_steps": 9, **double}),
        ("sd3", {"method": "pipefusion", "num_patches": 1, **double}),
        ("sd3", {"method": "distrifusion", "warmup_steps": 9, **double}),
        ("stable_diffusion", {"method": "single"}),
        ("stable_diffusion", {"method": "distrifusion", "warmup_steps": 9}),
        ("sdxl", {"method": "single", "guidance": 2}), ("sdxl", {"method": "distrifusion", "warmup_steps": 9}),
        ("flux", {"method": "single"}), ("flux", {"method": "sequence"}),
        ("flux", {"method": "pipefusion", "num_patches": 1}), ("flux", {"method": "pipefusion", "num_patches": 2}),
        ("stable_diffusion", {"method": "distrifusion", "warmup_steps": 1}),
    ]  # fmt: skip
    jobs = []
    for name, options in cases:
        images = random_image() if name == "sd3" else [[random_image(), random_image(1)]]
        settings = {**SETTINGS, **tiny.options_of(name), "ip_adapter_image": images}
        options["ip_adapters"] = adapters(saved(name), {FILE: 0.7})
        jobs.append((saved(name)[0], tiny.prompts_of("any"), settings, options))
    found = run_ranks(latents_of_each, 2, jobs)
    shared = lambda options: {n: x for n, x in options.items() if n in ("ip_adapters", "dtype")}
    alone = [(*job[:3], {"method": "single", **shared(job[3])}) for job in jobs]
    exact = latents_of_each(0, alone[:-2])
    for i, expected in enumerate(exact):
        # Latents of prompts that are divided are gathered on rank 0.
        for rank in found[: 1 if cases[i][1]["method"] == "single" else 2]:
            error = (rank[i] - expected).abs().max()
            allowed = 1e-12 if expected.dtype == torch.float64 else 1e-5
            assert error <= allowed * expected.abs().max(), (cases[i], error)
    [patches] = latents_of_each(0, [jobs[-2]])
    assert all(torch.equal(rank[-2], patches) for rank in found)
    assert not torch.equal(patches, exact[-1]), "staleness does not show"
    monkeypatch.setattr("lightning_diffpipe.sampling.methods.make_sampler", BothBands)
    [bands] = latents_of_each(0, alone[-1:])
    assert all(torch.equal(rank[-1], bands) for rank in found)
    of_unet = [name for name, _ in cases].index("stable_diffusion")
    assert not torch.equal(bands, exact[of_unet]), "staleness does not show"


@pytest.mark.slow
def test_the_command_takes_ip_adapters(saved, tmp_path, capsys, monkeypatch):
    path, folder = saved("stable_diffusion")
    random_image().save(tmp_path / "photo.png")
    sizes = [f"{key}={value}" for key, value in tiny.options_of("any").items()]
    arguments = [f"path={path}", "prompts=[a cat 1, dog b]", "num_inference_steps=3"]
    arguments += [f"ip_adapters={{{folder / FILE}: 0.7}}", f"output={tmp_path / 'output'}", *sizes]
    images = f"images={{ip_adapter_image: {tmp_path / 'photo.png'}}}"
    code, out, err = call(capsys, monkeypatch, "sample", *arguments, images)
    assert code == 0, out + err
    found = [np.asarray(Image.open(file)) for file in sorted((tmp_path / "output").glob("0*.png"))]
    options = {**SETTINGS, **tiny.options_of("any"), "ip_adapter_image": random_image()}
    assert (np.stack(found) == images_of(saved("stable_diffusion"), {FILE: 0.7}, **options)).all()
    code, out, err = call(capsys, monkeypatch, "sample", *arguments)
    assert code == 2, out + err
    assert "which read an image; give ip_adapter_image=" in out + err


@pytest.mark.slow
def test_bad_adapters_are_refused(saved, tmp_path):
    """Of another model, larger ones of which a part would fit, too; no adapters; images that none reads."""
    path, folder = saved("stable_diffusion")
    tensors = safetensors.torch.load_file(folder / FILE)

    def written(name, values):
        safetensors.torch.save_file(values, tmp_path / name)
        return tmp_path / name

    faces = {"ip_adapter.0.to_k_lora.down.weight": torch.zeros(2, 8)}
    truncated = tmp_path / "truncated.safetensors"
    truncated.write_bytes((folder / FILE).read_bytes()[:500])
    more = {"ip_adapter.99.to_k_ip.weight": torch.zeros(8, 16)}
    lacking = {name: x for name, x in tensors.items() if name != "image_proj.norm.bias"}
    image = {"ip_adapter_image": random_image()}
    own = {"ip_adapters": {folder / FILE: 0.7}}
    alone = {"ip_adapters": {shutil.copy(folder / FILE, tmp_path): 0.7}}
    several = {"ip_adapter_image": [random_image(), random_image(1)]}
    cases = [
        ({"ip_adapters": {saved("sdxl")[1] / FILE: 1.0}}, image, "is it of another model?"),
        ({"ip_adapters": {written("more.safetensors", tensors | more): 1.0}}, image, "of another model: of"),
        ({"ip_adapters": {written("lacking.safetensors", lacking): 1.0}}, image, "is it of another model?"),
        ({"ip_adapters": {written("faces.safetensors", tensors | faces): 1.0}}, image, "faces.safetensors into"),
        ({"ip_adapters": {written("x.safetensors", {"a.b": torch.ones(1)}): 1.0}}, image, "x.safetensors into"),
        ({"ip_adapters": {truncated: 1.0}}, image, "truncated.safetensors into the UNet2DC"),
        ({"ip_adapters": {tmp_path / "missing.bin": 1.0}}, image, "there is no IP-Adapter"),
        ({"ip_adapters": str(folder / FILE)}, image, "must be a mapping of files to their scales"),
        ({"ip_adapters": {folder / FILE: "strong"}}, image, "must be a number"),
        ({"ip_adapters": {folder / FILE: float("nan")}}, image, "must be a number"),
        ({}, image, "ip_adapter_image needs an IP-Adapter: open the pipeline with ip_adapters="),
        (own, {}, "which read an image; give ip_adapter_image="),
        (own, several, "must have same length as the number of IP Adapters"),
        (alone, image, "ip_adapter_image needs an image encoder"),
    ]  # fmt: skip
    sizes = {**SETTINGS, **tiny.options_of("any")}
    jobs = [(path, ["a"], sizes | given, {"method": "single", **more}) for more, given, _ in cases]
    jobs.append((tiny_dit(tmp_path), [1], {**SETTINGS}, {"method": "single", **own}))
    messages = [*(message for _, _, message in cases), "takes no IP-Adapter; leave ip_adapters out"]
    for said, message in zip(failure_of_each(0, jobs), messages, strict=True):
        assert message in said


def tiny_dit(folder):
    tiny.build("dit", folder / "words").save_pretrained(folder / "dit")
    return folder / "dit"


@pytest.mark.distributed
def test_ranks_with_another_adapter_are_refused(saved):
    """Adapters are compared by content, not by path, and by scale."""
    path, folder = saved("stable_diffusion")
    settings = {**SETTINGS, **tiny.options_of("any"), "ip_adapter_image": random_image()}
    job = lambda name, scale: (
        path,
        ["a"],
        settings,
        {"method": "single", "ip_adapters": {folder / name: scale}},
    )
    cases = [[job(FILE, 0.7), job("second.safetensors", 0.7)], [job(FILE, 0.7), job(FILE, 0.6)]]
    first, second = run_ranks(failure_of_each_rank, 2, cases)
    assert first == second
    assert "rank 1 has IP-Adapter 0." in first[0]
    assert "rank 1 has ip_adapters=[0.6], but rank 0 ip_adapters=[0.7]" in first[1]


def test_a_pipeline_of_one_adapter_refuses_several_and_other_scales(saved):
    """History: both were taken, and ended in errors of diffusers, as if a file were of another model."""
    _, folder = saved("sd3")
    image = {**SETTINGS, **tiny.options_of("sd3"), "ip_adapter_image": random_image()}
    cases = [
        (
            {folder / FILE: 0.7, folder / "second.safetensors": 0.5},
            "takes one IP-Adapter at a time",
        ),
        ({folder / FILE: {"down": 0.2}}, "StableDiffusion3Pipeline takes no such scales"),
    ]
    jobs = [
        (saved("sd3")[0], ["a"], image, {"method": "single", "ip_adapters": x}) for x, _ in cases
    ]
    for said, (_, message) in zip(failure_of_each(0, jobs), cases, strict=True):
        assert message in said


@pytest.mark.distributed
def test_ranks_do_not_divide_keys_of_images_that_do_not_attend(saved):
    """Those of an image as prompt stand behind those of the latents: history, an error of torch was named."""
    path, folder = saved("sd3")
    settings = {**SETTINGS, **tiny.options_of("sd3"), "ip_adapter_image": random_image()}
    ways = [
        {"method": "sequence"},
        {"method": "sequence", "mode": "ring"},
        {"method": "pipefusion", "sequence": 2, "num_patches": 2},
    ]
    jobs = [(path, ["a"], settings, {**way, "ip_adapters": {folder / FILE: 0.7}}) for way in ways]
    for rank in run_ranks(failure_of_each, 2, jobs):
        for said in rank:
            assert re.search(
                "LayoutError: transformer_blocks.0 attends from .* some of which do not attend",
                said,
            )


@pytest.mark.distributed
def test_a_ring_divides_keys_of_an_image_that_are_as_many_as_those_of_the_text(saved):
    """They are numbered as text is: 12 tokens of CLIP and 8 of T5."""
    path, folder = saved("sd3")
    file = folder / "as_many.safetensors"
    save_adapter(diffusers.DiffusionPipeline.from_pretrained(path), file, tokens=12 + 8)
    settings = {**SETTINGS, **tiny.options_of("sd3"), "ip_adapter_image": random_image()}
    patches = {"method": "pipefusion", "sequence": 2, "num_patches": 2, "warmup_steps": 9}
    ways = [
        {"method": "sequence", "mode": "ring"},
        {**patches, "sequence_mode": "ring"},
        {"method": "single"},
    ]
    own = {"ip_adapters": {file: 0.7}, "dtype": torch.float64}
    jobs = [(path, ["a"], settings, {**way, **own}) for way in ways]
    [expected] = latents_of_each(0, jobs[-1:])
    for rank in run_ranks(latents_of_each, 2, jobs[:-1]):
        for found in rank:
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)
