"""Peaks of devices by the names that drivers give them.

The table of docs/memory.md is what is planned today.
"""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.utils._pytree as pytree
from diffusers.pipelines.wan import pipeline_wan_i2v
from torch import nn

from benchmarks.memory.plans import CARDS, MODELS, TRAINED, cell
from lightning_diffpipe.errors import ConfigurationError
from lightning_diffpipe.graph.placement import held_bytes
from lightning_diffpipe.graph.probe import probe
from lightning_diffpipe.modules import PipelineDiffusion, on_paper
from lightning_diffpipe.modules.on_paper import PUBLISHED, ModelOnPaper, OnPaper
from lightning_diffpipe.pipelines.one_step import DENOISERS as DENOISER_NAMES
from lightning_diffpipe.planning.profile import ModelProfile
from lightning_diffpipe.profiling.modelled import (
    DEVICES,
    DeviceModel,
    ModelledClock,
    device_named,
    flops_per_sample,
    fused_attention,
    peak_of_name,
)
from lightning_diffpipe.quantization import quantization_named
from tests.predictor.tiny_pipelines import wan_experts
from tests.profiling.toys import CONTROLNET, DENOISERS, check_known, tiny_configs
from tests.rows import row
from tests.zoo.pipelines import PIPELINES, SEEN, build

ROUND = DeviceModel(
    "round numbers",
    {"float32": 1e12},
    bandwidth_bytes_per_s=1e12,
    latency_s=0.0,
    efficiency={"matmul": 0.5, "convolution": 0.25, "attention": 0.2, "memory": 1.0},
)


def meta(*shape):
    return torch.empty(shape, device="meta")


def modelled_s(function):
    with fused_attention(), ModelledClock(ROUND) as clock:
        function()
    return clock.stamp()


@pytest.mark.parametrize(
    ("a", "b", "expected_s"),
    [
        (
            meta(1000, 2000),
            meta(2000, 4000),
            2 * 1000 * 2000 * 4000 / 0.5e12,
        ),  # bound by operations
        (meta(1, 4000), meta(4000, 4000), 4 * (4000 + 16e6 + 4000) / 1e12),  # by bytes
        # History: the view after the product of a batch counted as reading and writing it once more.
        (meta(8, 100, 2000), meta(2000, 4000), 2 * 800 * 2000 * 4000 / 0.5e12),
    ],
)
def test_products_are_bound_by_operations_or_bytes(a, b, expected_s):
    assert modelled_s(lambda: a @ b) == pytest.approx(expected_s)


def test_an_elementwise_operator_reads_and_writes():
    x, bias = meta(1000, 1000), meta(1000)
    assert modelled_s(lambda: x + bias) == pytest.approx(4 * (2e6 + 1000) / 1e12)
    assert modelled_s(lambda: x.view(-1)) == 0.0
    assert modelled_s(lambda: x + meta(1, 1).expand(1000, 1000)) == pytest.approx(
        8e6 / 1e12, rel=1e-3
    )


def test_attention_is_one_operator_and_its_backward_costs_two_and_a_half_times_as_much():
    query = meta(2, 8, 1024, 64).requires_grad_()
    forward_s = 4 * 2 * 8 * 1024 * 1024 * 64 / 0.2e12
    attend = lambda: torch.nn.functional.scaled_dot_product_attention(query, query, query)
    assert modelled_s(attend) == pytest.approx(forward_s)
    whole = modelled_s(lambda: attend().sum().backward())
    assert whole == pytest.approx(3.5 * forward_s, rel=0.1)


def test_latency_counts_for_every_kernel():
    slow = DeviceModel("slow", {"float32": 1e30}, 1e30, latency_s=1.0)
    with ModelledClock(slow) as clock:
        x = meta(3) + 1
        (x * 2).view(1, 3)
    assert clock.stamp() == pytest.approx(2.0)


def test_each_use_of_a_quantized_weight_reads_it_and_writes_a_plain_one():
    layer, x = nn.Linear(2000, 4000, device="meta").requires_grad_(False), meta(8, 2000)
    how = quantization_named("nf4", runs=False)
    use_s = (how.num_bytes(layer.weight) + layer.weight.nbytes) / 1e12

    def forward():
        return layer(x.requires_grad_())

    def forward_and_backward():
        torch.autograd.grad(forward(), x, meta(8, 4000))

    forward_s, both_s = modelled_s(forward), modelled_s(forward_and_backward)
    layer.weight = nn.Parameter(how.quantize(layer.weight), requires_grad=False)
    assert held_bytes(layer.weight) == how.num_bytes(layer.weight)
    assert modelled_s(forward) == pytest.approx(forward_s + use_s)
    assert modelled_s(forward_and_backward) == pytest.approx(both_s + 2 * use_s)


def test_an_operator_that_is_called_again_takes_as_long_and_gives_new_tensors():
    a, b, c = meta(8, 4), meta(4, 4), meta(4, 4).t()
    with ModelledClock(ROUND) as clock:
        first, once_s = a @ b, clock.stamp()
        second, twice_s = a @ b, clock.stamp()
        assert (second.shape, second.stride(), second.dtype) == ((8, 4), (4, 1), torch.float32)
        assert second.untyped_storage()._cdata != first.untyped_storage()._cdata
    assert twice_s == 2 * once_s > 0
    sums = [lambda: b + b, lambda: b + meta(4, 4), lambda: c + c, lambda: b + 1]
    alone = [modelled_s(run) for run in sums]
    with ModelledClock(ROUND) as clock:
        for run, expected_s in zip(2 * sums, 2 * alone, strict=True):
            start_s = clock.stamp()
            assert run().stride() == ((1, 4) if run is sums[2] else (4, 1))
            assert clock.stamp() - start_s == pytest.approx(expected_s)
        before = b.untyped_storage()._cdata
        assert b.add_(1) is b
        assert b.view(2, 8).untyped_storage()._cdata == before, "a view is of the same memory again"
        assert b.view(2, 8).untyped_storage()._cdata == before


def test_types_without_a_peak_of_their_own_run_as_single_precision():
    assert DEVICES["v100"].peak_of(torch.bfloat16) == DEVICES["v100"].peak_of(torch.float32)
    assert DEVICES["h100"].peak_of(torch.bfloat16) == 989e12


@pytest.mark.slow
def test_unknown_names_are_refused_with_the_known_ones():
    with pytest.raises(ConfigurationError, match="h100"):
        device_named("h1000")
    with pytest.raises(
        ConfigurationError,
        match=", flux, flux2, flux2_klein, flux_kontext, pixart, qwen_image, sd21, sd3, sd35, sdxl, wan, wan14b",
    ):
        ModelOnPaper("sd15")
    with pytest.raises(ConfigurationError, match="bfloat16"):
        ModelOnPaper("sd21", dtype="fp8")
    with pytest.raises(ConfigurationError, match="divisible by 8 but are 500"):
        ModelOnPaper("sd21", resolution=500).profile()


@pytest.mark.slow
def test_a_tiny_model_is_modelled_like_the_large_ones(monkeypatch):
    monkeypatch.setattr(on_paper, "read_configs", lambda path: tiny_configs())
    profile = ModelOnPaper("sd21", ROUND, "float32").profile((1, 4))
    assert profile.name == "sd21 at 64 in float32, modelled on round numbers"
    unet = OnPaper("sd21", torch.float32).module.unet
    trained = 4 * sum(p.numel() for p in unet.parameters())
    layers = profile.backbones[0].layers
    assert sum(layer.parameter_bytes for layer in layers) == trained
    assert sum(layer.gradient_bytes for layer in layers) == trained
    assert [e.name for e in profile.encoders] == ["frozen vae", "frozen text_encoder"]
    forward_s = sum(layer.forward_s.at(4) for layer in layers)
    backward_s = sum(layer.backward_s.at(4) for layer in layers)
    assert 1.5 * forward_s < backward_s < 3 * forward_s
    assert sum(layer.activation_bytes_per_sample for layer in layers) > 0


@pytest.mark.parametrize(
    "name",
    [
        row(name)
        if name in ("flux_kontext", "wan22_i2v")
        else pytest.param(name, marks=() if name in ("sd21", "pixart") else pytest.mark.slow)
        for name in PUBLISHED
    ],
)
def test_published_configurations_have_the_published_number_of_parameters(name, monkeypatch):
    if name == "wan22_i2v":  # which cleans prompts by a package
        fixing = SimpleNamespace(fix_text=str)
        monkeypatch.setattr(pipeline_wan_i2v, "ftfy", fixing, raising=False)
    module = OnPaper(name, torch.bfloat16).module
    count = lambda part: sum(p.numel() for p in part.parameters())
    assert all(p.is_meta and p.dtype == torch.bfloat16 for p in module.parameters())
    denoiser = module.parts.get("unet", module.parts.get("transformer"))
    assert count(denoiser) == DENOISERS[name]
    sizes = [count(part) for n, part in module.parts.items() if n.startswith("text_encoder")]
    published = {
        "sd21": [340_387_840], "controlnet": [340_387_840], "sdxl": [123_060_480, 694_659_840],
        "sd3": [123_650_304, 694_659_840, 4_762_310_656], "flux": [123_060_480, 4_762_310_656],
        "pixart": [4_762_310_656], "wan": [5_680_910_336], "sd35": [123_650_304, 694_659_840, 4_762_310_656],
        "wan14b": [5_680_910_336], "qwen_image": [8_292_166_656],
        "wan22": [5_680_910_336], "wan22_5b": [5_680_910_336], "wan22_i2v": [5_680_910_336],
        "flux_kontext": [123_060_480, 4_762_310_656],
        "flux2": [24_011_361_280], "flux2_klein": [4_022_468_096],
    }  # fmt: skip
    assert sorted(sizes) == published[name]
    of_4_channels = 83_653_863
    video = dict.fromkeys(("wan", "wan14b", "wan22", "wan22_i2v", "qwen_image"), 126_892_531)
    others = {"wan22_5b": 704_688_668, "flux2": 84_046_115, "flux2_klein": 84_046_115}
    vaes = video | others | dict.fromkeys(("sd3", "sd35", "flux", "flux_kontext"), 83_819_683)
    assert count(module.vae) == vaes.get(name, of_4_channels)
    if name in ("wan22", "wan22_i2v"):
        assert count(module.transformer_2) == DENOISERS[name]
    if name == "controlnet":
        assert count(module.controlnet) == CONTROLNET


def folder_of_configs(name, folder):
    """A tiny pipeline of diffusers in a folder, and no weights."""
    pipeline = build(name, folder / "vocabularies")
    pipeline.save_pretrained(folder / "model")
    for weights in (folder / "model").rglob("*.safetensors"):
        weights.unlink()
    return pipeline, str(folder / "model")


ANIMATED = (
    "WanImageToVideoPipeline", "LTXImageToVideoPipeline", "CogVideoXImageToVideoPipeline",
    "HunyuanVideoImageToVideoPipeline",
)  # fmt: skip

NOT_ON_PAPER = {
    "StableDiffusionSAGPipeline", "StableDiffusionPanoramaPipeline", "StableDiffusionParadigmsPipeline",
    "StableDiffusionGLIGENPipeline", "Kandinsky3Pipeline", "DreamLitePipeline", "ScoreSdeVePipeline",
    "KarrasVePipeline", "ConsistencyModelPipeline", "BriaPipeline", "BriaFiboPipeline", "ErnieImagePipeline",
    "HiDreamImagePipeline", "HunyuanImagePipeline", "Ideogram4Pipeline", "Kandinsky5T2IPipeline", "LuminaPipeline",
    "NucleusMoEImagePipeline", "QwenImagePipeline", "SanaSprintPipeline", "ZImagePipeline",
    "HunyuanVideo15Pipeline", "HunyuanVideo15ImageToVideoPipeline",
    "Kandinsky5T2VPipeline", "MochiPipeline", "SkyReelsV2DiffusionForcingPipeline",
    "QwenImageEditPipeline", "QwenImageEditPlusPipeline", *ANIMATED,
}  # fmt: skip


def on_paper_pipelines():
    """Every pipeline of the zoo that can be trained by its own call without weights."""
    fast = ("WanPipeline", "DiTPipeline", "QwenImagePipeline")
    return [name if name in fast else row(name) for name in PIPELINES if name not in NOT_ON_PAPER]


@pytest.mark.slow
@pytest.mark.parametrize("name", on_paper_pipelines())
def test_any_pipeline_is_modelled_by_its_configuration_files_alone(name, tmp_path):
    pipeline, path = folder_of_configs(name, tmp_path)
    entry = PIPELINES[name]
    frames = entry.pixels[1] if len(entry.pixels) == 4 else None
    model = ModelOnPaper(path, ROUND, "float32", entry.pixels[-1], frames, entry.call)
    profile = model.profile((1, 2))
    denoiser = next(p for n, p in pipeline.components.items() if n in DENOISER_NAMES)
    trained = 4 * sum(p.numel() for p in denoiser.parameters())
    assert sum(layer.parameter_bytes for layer in profile.layers) == trained
    assert profile.trained_s(2) > profile.trained_s(1) > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "batch"),
    [
        ("FluxKontextPipeline", {"image": (3, 64, 64), "condition": (3, 64, 64)}),
        ("LTXImageToVideoPipeline", {"video": (3, 17, 64, 64)}),
        row("WanImageToVideoPipeline", {"video": (3, 9, 64, 64)}),
        row("CogVideoXImageToVideoPipeline", {"video": (3, 9, 64, 64)}),
        row("HunyuanVideoImageToVideoPipeline", {"video": (3, 9, 64, 64)}),
        row("StableDiffusionInstructPix2PixPipeline", {"image": (3, 64, 64), "condition": (3, 64, 64)}),
    ],
)  # fmt: skip
def test_models_that_read_an_image_are_given_on_paper_what_they_are_given(name, batch, tmp_path):
    """The shapes of all that denoiser and autoencoder read, of a longer sequence with a reference."""
    pipeline, path = folder_of_configs(name, tmp_path)
    edits = "condition" in batch
    call = {"max_sequence_length": 8} if "Stable" not in name else None
    if "Hunyuan" in name:
        call = {"max_sequence_length": 24, "prompt_template": SEEN}
    paper = OnPaper(path, torch.float32, call=call, with_reference=edits)
    paper.size = {"height": 64, "width": 64, "num_frames": batch.get("video", (0, 1))[1]}
    on_paper_shapes = shapes_read(paper.module, lambda: paper.step(paper.module, paper.batch(2)))
    module = PipelineDiffusion(pipeline, caption_dropout=0.0, call=call)
    module.setup("fit")
    tensors = {key: torch.rand(2, *shape) for key, shape in batch.items()}
    losses = lambda: module.losses(tensors | {"caption": ["a", "b"]})
    assert on_paper_shapes == shapes_read(module, losses)
    if edits and "Kontext" in name:
        flops = [
            sum(layer.flops_per_sample for layer in model.profile((1, 2)).layers)
            for model in (
                ModelOnPaper(path, ROUND, "float32", 64, call=call, with_reference=has_one)
                for has_one in (False, True)
            )
        ]
        assert flops[1] > 1.8 * flops[0]


def shapes_read(module, run):
    """Shapes of the tensors that the denoiser and the encoder of the autoencoder are given."""
    shapes = []

    def note(part, args, options):
        tensors = pytree.tree_leaves((args, dict(sorted(options.items()))))
        shapes.append([tuple(x.shape) for x in tensors if isinstance(x, torch.Tensor)])

    parts = module.denoiser, module.vae.encoder
    hooks = [part.register_forward_pre_hook(note, with_kwargs=True) for part in parts]
    run()
    for hook in hooks:
        hook.remove()
    return shapes


def test_references_that_cannot_be_planned_for_are_refused(tmp_path):
    _, path = folder_of_configs("PixArtSigmaPipeline", tmp_path)
    with pytest.raises(ConfigurationError, match="PixArtSigmaPipeline edits no images, so that"):
        ModelOnPaper(path, ROUND, "float32", 32, with_reference=True).profile((1, 2))


def test_a_processor_of_references_is_named_on_paper(tmp_path):
    """History: it ended in 'NoneType' object has no attribute 'size', as if its call could not be trained."""
    _, path = folder_of_configs("QwenImageEditPlusPipeline", tmp_path)
    with pytest.raises(
        ConfigurationError,
        match=r"EditPlusPipeline cannot be planned .* its processor prepares images",
    ):
        ModelOnPaper(path, ROUND, "float32", 32).profile((1, 2))


@pytest.mark.parametrize("expert", [None, "low"])
def test_experts_count_as_they_are_trained(expert, tmp_path):
    pipeline = wan_experts(tmp_path)
    pipeline.save_pretrained(tmp_path / "model")
    size = {"resolution": 32, "num_frames": 5}
    model = ModelOnPaper(str(tmp_path / "model"), ROUND, "float32", **size, expert=expert)
    profile = model.profile((1, 2))
    names = ("transformer_2",) if expert else ("transformer", "transformer_2")
    trained = {n: 4 * sum(p.numel() for p in getattr(pipeline, n).parameters()) for n in names}
    counted = {n: [x for x in profile.layers if x.name.split(".")[0] == n] for n in names}
    assert {n: sum(x.gradient_bytes for x in rows) for n, rows in counted.items()} == trained
    assert sum(map(len, counted.values())) == len(profile.layers)
    forward_s = [sum(x.forward_s.at(2) for x in rows) for rows in counted.values()]
    assert forward_s == pytest.approx([forward_s[0]] * len(names), rel=0.01), (
        "each sample goes through each"
    )
    (encoder,) = (e for e in profile.encoders if e.name == "frozen text_encoder")
    assert sum(x.parameter_bytes for x in encoder.layers) == 4 * sum(
        p.numel() for p in pipeline.text_encoder.parameters()
    )


def test_a_pipeline_that_cannot_be_trained_so_says_why(tmp_path):
    _, path = folder_of_configs("ConsistencyModelPipeline", tmp_path)
    with pytest.raises(ConfigurationError, match="cannot train for CMStochasticIterative"):
        ModelOnPaper(path).profile()


def check_block_of_pixart(layers):
    """One transformer block and the cut after it, counted by hand; two bytes a number."""
    tokens, width, words, heads = (1024 // 8 // 2) ** 2, 1152, 300, 16
    hidden, text = 2 * tokens * width, 2 * words * width
    (block,) = (x for x in layers if x.name == "transformer.transformer_blocks.7")
    weights = 4 * width**2 + 4 * width**2 + 2 * width * 4 * width  # two attentions, two linears
    biases = 4 * width + 4 * width + 4 * width + width
    assert block.parameter_bytes == block.gradient_bytes == 2 * (weights + biases + 6 * width)
    # Hidden states and the projected text; six modulations and the timestep they come from.
    assert block.boundary_bytes_per_sample == hidden + text + 2 * 7 * width
    kept = {
        "norms: input, output, modulated": 6 * hidden,
        "their means and deviations, in float32": 2 * 2 * 4 * tokens,
        "query, key, value and result of self-attention; what the gate scales": 5 * hidden,
        "states, query and result of cross-attention": 3 * hidden,
        "key and value of the text": 2 * text,
        "sums of exponentials, in float32": 2 * 4 * heads * tokens,
        "linears: before and after GELU; what the gate scales": (4 + 4 + 1) * hidden,
        "six modulations; twice one plus a scale": 2 * (6 + 2) * width,
        "seeds and offsets of two attentions, half of them a sample's": 2 * 2 * 8 // 2,
    }
    assert block.activation_bytes_per_sample == sum(kept.values())
    products = 2 * (4 + 2 + 8) * tokens * width**2 + 2 * 2 * words * width**2
    attention = 4 * tokens * (tokens + words) * width
    written = block.flops_per_sample - products - attention
    assert 0 < written < 40 * tokens * width  # by everything else, an operation for each element


@pytest.mark.slow
def test_a_well_known_model_is_modelled_whole():
    """The others are modelled for their recipes, in `test_recipes.py`."""
    profile = ModelOnPaper("pixart", "a100").profile((8,))
    assert ModelProfile.from_json(profile.to_json()) == profile
    check_known("pixart", profile)
    check_block_of_pixart(profile.backbones[0].layers)


@pytest.mark.parametrize(
    ("name", "teraflops"),
    [
        ("Tesla T4", 65),
        ("Tesla V100-SXM2-16GB", 125),
        ("Tesla V100-SXM3-32GB", 125),
        ("Tesla V100-PCIE-32GB", 112),
        ("NVIDIA A10G", 70),
        ("NVIDIA GeForce RTX 4090", 165),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("A100-SXM4-40GB", 312),
        ("NVIDIA A100-PCIE-40GB", 312),
        ("NVIDIA A100 80GB PCIe", 312),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H200", 989),
        ("NVIDIA GH200 480GB", 989),
    ],
)
def test_half_precision_of_known_devices(name, teraflops):
    """History: any part of a name counted, and the card for a PCIe slot as the faster one."""
    assert peak_of_name(name, "16-mixed") == teraflops * 1e12


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA RTX A1000 Laptop GPU",
        "NVIDIA RTX A1000",
        "NVIDIA T400 4GB",
        "NVIDIA T4G",
        "NVIDIA A10",
        "NVIDIA H20",
        "Tesla V100S-PCIE-32GB",
        "Tesla V100-FHHL-16GB",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA GeForce RTX 4080",
        "NVIDIA A100-SXM4-40GB MIG 3g.20gb",
        "GRID A100-10C",
        "NVIDIA H100 NVL",
        "NVIDIA H200 NVL",
        "AMD Instinct MI300X",
        "",
    ],
)
def test_devices_that_are_not_known_have_no_peak(name):
    """History: an RTX A1000 counted as an A100, for the letters that their names share."""
    assert peak_of_name(name, "bf16-mixed") is None


def test_types_that_a_device_has_no_units_for_count_as_single_precision():
    assert peak_of_name("Tesla V100-PCIE-16GB", "bf16-mixed") == 14e12
    assert peak_of_name("NVIDIA H100 PCIe", "32-true") == 378e12


def test_layers_that_no_gradient_reaches_cost_their_forward_only():
    """History: an estimate under `no_grad` counted as trained, which doubled self-conditioning."""
    module, batch = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), torch.ones(4, 8)

    def estimates_first(module, batch):
        with torch.no_grad():
            estimate = module(batch)
        return module(batch + estimate).mean()

    once = flops_per_sample(probe(module, lambda module, batch: module(batch).mean(), batch))
    assert flops_per_sample(probe(module, estimates_first, batch)) == once * 4 / 3


TABLE = (Path(__file__).parents[2] / "docs" / "memory.md").read_text()


def test_every_model_is_in_the_table():
    assert all(f"\n| {title} |" in TABLE for title in MODELS.values())


@pytest.mark.table
@pytest.mark.parametrize(
    ("name", "trained"),
    [
        ("sdxl", "adapters"), ("flux", "adapters"), ("flux", "adapters, 4 bits"), ("sd35", "adapters"),
        ("sd35", "all weights"), ("flux2_klein", "adapters"),
    ],
)  # fmt: skip
def test_rows_are_planned_again(name, trained):
    start, (rank, quantization) = f"| {MODELS[name]} | {trained} | ", TRAINED[trained]
    (line,) = [line for line in TABLE.splitlines() if line.startswith(start)]
    written = line.removeprefix(start).removesuffix(" |").split(" | ")
    cards = [each for each in CARDS if each.device == CARDS[0].device]
    model = ModelOnPaper(name, CARDS[0].device, lora_rank=rank, quantization=quantization)
    profile = model.profile()
    assert [cell(profile, each) for each in cards] == written[: len(cards)]
