"""Which weights are quantized, and when; how training goes on with them is in tests/distributed."""

import pickle
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from lightning_diffpipe import quantization
from lightning_diffpipe.errors import ConfigurationError
from lightning_diffpipe.graph.placement import (
    held_bytes,
    is_placeholder,
    is_quantized_later,
    make_plain,
    place_parameters,
    quantize_all,
)
from lightning_diffpipe.graph.versions import plain_tensors
from lightning_diffpipe.modules import Lora, Optimization, PipelineDiffusion
from lightning_diffpipe.modules.on_paper import ModelOnPaper
from lightning_diffpipe.predictor import Predictor
from lightning_diffpipe.profiling.step_run import placed
from lightning_diffpipe.quantization import (
    Quantization,
    Weight8Bit,
    quantization_named,
    quantizations_of,
    quantize_components,
)
from tests.distributed.scenarios import quiet_trainer
from tests.distributed.stored import IN_8_BITS, ROUNDED, Rounded
from tests.distributed.tiny import Images
from tests.predictor import tiny_pipelines as tiny


class Part(nn.Module):
    """A linear layer, one of a kind that is kept in float32, and one whose weight an embedding reads, too."""

    _keep_in_fp32_modules = ("norm",)

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(6, 4)
        self.norm = nn.Sequential(nn.Linear(4, 4))
        self.linear, self.head = nn.Linear(4, 4), nn.Linear(4, 6)
        self.again, self.conv = nn.Linear(4, 4), nn.Conv2d(4, 4, 1)
        self.head.weight, self.again.weight = self.embedding.weight, self.linear.weight
        self.requires_grad_(False)


def waiting(root):
    return {name for name, p in root.named_parameters() if is_quantized_later(p)}


def test_only_weights_of_linear_layers_are_quantized():
    part = Part()
    quantize_components({"a": ROUNDED}, {"a": part, "tokenizer": object()})
    assert waiting(part) == {"linear.weight"}


@pytest.mark.parametrize("name", ["nf4", "int8", "float8"])
def test_modules_whose_weights_wait_can_be_pickled(name):
    """As launchers do that start processes anew; the package of the quantization is not needed for it."""
    part = Part()
    quantize_components({"a": quantization._NAMED[name][1]()}, {"a": part})
    assert waiting(pickle.loads(pickle.dumps(part))) == {"linear.weight"}


def test_a_rank_quantizes_what_it_holds_and_gives_it_back_plain():
    root = nn.Sequential(Part(), Part())
    quantize_components({"a": ROUNDED, "b": ROUNDED}, {"a": root[0], "b": root[1]})
    plain, value = root[0].linear.weight, root[0].linear.weight.clone()
    assert held_bytes(plain) == 20
    here = {n for n, _ in root.named_parameters() if n.startswith("0.")}
    place_parameters(root, here, "cpu")
    held = root[0].linear.weight
    assert type(held.data) is Rounded
    assert root[0].again.weight is held
    x = torch.randn(2, 4)
    assert torch.allclose(root[0].linear(x), x @ held.dequantize().T + root[0].linear.bias)
    assert is_placeholder(root[1].linear.weight)
    assert waiting(root) == {"1.linear.weight"}, "which is another rank's"
    make_plain(root)
    assert torch.allclose(root[0].linear.weight, value, atol=0.1)
    assert waiting(root) == {"0.linear.weight", "1.linear.weight"}


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("nf5", "quantization='nf5'; choose nf4, int8, float8"),
        ({"unet": "nf4"}, "names the component 'unet'; this model has .*transformer"),
        ({"transformer": {"bits": 4}}, "quantization={'bits': 4}; choose"),
    ],
)
def test_unknown_quantizations_are_refused_before_weights_are_read(setting, says, tmp_path):
    tiny.build("flux", tmp_path / "parts").save_pretrained(tmp_path / "flux")
    for file in tmp_path.glob("flux/*/*.safetensors"):
        file.unlink()
    with pytest.raises(ConfigurationError, match=says):
        PipelineDiffusion.from_pretrained(tmp_path / "flux", quantization=setting)


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setattr("lightning_diffpipe.quantization.find_spec", lambda name: None)
    with pytest.raises(ConfigurationError, match="nf4 needs the package bitsandbytes; run: pip"):
        quantization_named("nf4")
    assert quantization_named("nf4", runs=False).num_bytes(torch.empty(100, 96)) == 6046


def lacking(weight):
    raise RuntimeError(f"{weight.dtype} needs another card")


def test_a_quantization_that_the_device_lacks_is_named_before_weights_are_read(tmp_path):
    """History: it ended in the error of a package, when the first layer was timed or placed."""
    tiny.build("flux", tmp_path / "parts").to(torch.float16).save_pretrained(tmp_path / "flux")
    options = {"call": {"max_sequence_length": 8}, "lora": Lora(rank=2)}
    for name, dtype in (("transformer", torch.float16), ("text_encoder", torch.float32)):
        chosen = {name: Quantization(lacking, ROUNDED.num_bytes)}
        module = PipelineDiffusion.from_pretrained(
            tmp_path / "flux", quantization=chosen, **options
        )
        says = f"cpu cannot quantize .*RuntimeError: {dtype} needs another card. Choose another "
        with pytest.raises(ConfigurationError, match=says):
            quiet_trainer(max_steps=1).fit(module, Images().train_dataloader())
        assert module.text_encoder.dtype == torch.float16, "it was not read"
    says = "cpu cannot quantize .*RuntimeError: torch.float32 needs another card"
    for file in tmp_path.glob("flux/vae/*.safetensors"):
        file.unlink()
    with pytest.raises(ConfigurationError, match=says):
        Predictor.from_pretrained(tmp_path / "flux", "single", quantization=chosen)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_compiled_blocks_with_quantized_weights_train_as_plain_ones(tmp_path):
    """History: torch compiles no block over such weights whose outputs share memory, as of Flux."""
    tiny.build("flux", tmp_path / "parts").save_pretrained(tmp_path / "flux")
    options = {"call": {"max_sequence_length": 8}, "caption_dropout": 0.0}
    options["quantization"] = {"transformer": IN_8_BITS}
    options["optimization"] = Optimization(lr=1.0, warmup_steps=0, optimizer=torch.optim.SGD)
    trained = []
    counters.clear()
    for is_compiled in (False, True):
        torch.manual_seed(0)
        module = PipelineDiffusion.from_pretrained(tmp_path / "flux", lora=Lora(rank=2), **options)
        if is_compiled:
            for block in module.transformer.single_transformer_blocks:
                block.compile(backend="aot_eager")
        trainer = quiet_trainer(max_steps=2)
        torch.manual_seed(1)
        trainer.fit(module, Images().train_dataloader())
        trained.append([p.detach() for p in module.parameters() if p.requires_grad])
    assert counters["stats"]["unique_graphs"]
    moved = [p.abs().max() for p in trained[0] if p.shape[1] == 2]
    assert min(moved) > 1e-4, "these begin at zero"
    for values in zip(*trained, strict=True):
        torch.testing.assert_close(*values)


def test_what_is_trained_as_a_whole_stays_plain(tmp_path):
    tiny.build("flux", tmp_path / "parts").save_pretrained(tmp_path / "flux")
    for name in ("transformer", "vae"):
        chosen = {name: ROUNDED, "text_encoder": ROUNDED}
        says = rf"quantization of {name}: there is no frozen linear layer .* add adapters"
        with pytest.raises(ConfigurationError, match=says):
            PipelineDiffusion.from_pretrained(tmp_path / "flux", quantization=chosen)
    options = {"call": {"max_sequence_length": 8}, "quantization": ROUNDED}
    module = PipelineDiffusion.from_pretrained(tmp_path / "flux", lora=Lora(rank=2), **options)
    names = waiting(module)
    assert {name.partition(".")[0] for name in names} == {
        "transformer", "text_encoder", "text_encoder_2",
    }  # fmt: skip
    assert not any(".lora_" in name for name in names)
    swap = quantize_all(module, torch.device("cpu"))
    assert not waiting(module)
    swap()
    assert waiting(module) == names
    swap()
    assert not waiting(module)


def test_quantized_weights_are_whole_on_the_device_where_they_are_timed():
    """History: only what torch calls their data went there, and what they are made of did not."""
    tensors = {"packed": torch.ones(4, 8, dtype=torch.int8), "scales": torch.ones(4)}
    weight = Weight8Bit(tensors, {}, torch.Size((4, 8)), torch.float32)
    layer = nn.Linear(8, 4, bias=False)
    layer.weight = nn.Parameter(weight, requires_grad=False)
    with placed(layer, torch.device("meta")):
        there = plain_tensors(layer.weight)
        assert len(there) == 2
        assert all(each.is_meta for each in there)
    assert not any(each.is_meta for each in plain_tensors(layer.weight))


def test_settings_of_diffusers_are_taken():
    options = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": False}
    config = SimpleNamespace(load_in_4bit=True, **options)  # BitsAndBytesConfig needs its package
    assert quantizations_of({"a": config, "b": None}, ["a", "b"]).keys() == {"a"}
    size = quantization_named(config).num_bytes(torch.empty(100, 96))
    assert size == 4800 + 600 + 64, "scales of 64 weights are not quantized"


@pytest.mark.table
@pytest.mark.slow
def test_plans_on_paper_count_the_size_of_quantized_weights():
    options = {"lora_rank": 16, "device": "rtx4090"}
    plain, small = (
        ModelOnPaper("sd3", **options, quantization=setting).profile((1,))
        for setting in (None, "nf4")
    )
    assert "quantized (nf4)" in small.name
    assert (plain.quantized, small.quantized) == (False, True), "which no remedy quantizes again"
    for before, after in zip(
        (plain.backbones[0], *plain.encoders), (small.backbones[0], *small.encoders), strict=True
    ):
        sizes = [sum(layer.parameter_bytes for layer in each.layers) for each in (before, after)]
        smallest = 1.0 if before.name == "frozen vae" else 0.25
        assert smallest <= sizes[1] / sizes[0] <= max(smallest, 0.5), before.name
