"""Trained layers over a base whose weights are quantized: the numbers of one process with the same weights.

Run by `make test-tables`, which installs both libraries in a folder of their own.
"""

import copy
import json
import pickle
from dataclasses import replace
from importlib.util import find_spec

import lightning as L
import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from diffusers import BitsAndBytesConfig, DiffusionPipeline, FluxTransformer2DModel, TorchAoConfig
from safetensors.torch import save_file
from torch import nn
from torch.utils.data import DataLoader

from lightning_diffpipe.graph.placement import is_placeholder
from lightning_diffpipe.graph.versions import plain_tensors
from lightning_diffpipe.predictor import Predictor
from lightning_diffpipe.quantization import (
    Weight4Bit,
    _in_4_bits,
    quantization_named,
    quantizations_of,
    quantize_components,
)
from tests.distributed.scenarios import Settings, assert_equal_runs, fit, reference
from tests.distributed.stored import Opened
from tests.distributed.tiny import Images
from tests.predictor import tiny_pipelines as tiny
from tests.ranks import run_ranks

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.skipif(
        not all(map(find_spec, ("torchao", "bitsandbytes"))),
        reason="needs torchao and bitsandbytes",
    ),
]
WIDTH = 64


def int8(layer):
    """Weights of 8 bits, of torchao: a tensor of a class of its own."""
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    quantize_(layer, Int8WeightOnlyConfig())
    return layer


def nf4(layer):
    """Weights of 4 bits, of bitsandbytes: a parameter with a state beside it."""
    import bitsandbytes.nn

    quantized = bitsandbytes.nn.Linear4bit(
        WIDTH, WIDTH, compute_dtype=torch.float32, quant_type="nf4"
    )
    quantized.load_state_dict(layer.state_dict())
    return quantized.to("cpu").requires_grad_(False)


class Quantized(L.LightningModule):
    """Layers that are trained beside those of a base."""

    def __init__(self, quantize):
        super().__init__()
        layers = [nn.Linear(WIDTH, WIDTH).requires_grad_(False) for _ in range(4)]
        self.base = nn.ModuleList(map(quantize, layers))
        self.trained = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def double(self):
        return self  # no kernel multiplies quantized weights in double precision

    def training_step(self, batch, batch_idx):
        x = batch["x"]
        for base, layer in zip(self.base, self.trained, strict=True):
            x = x + F.silu(base(x) + layer(x))
        return F.mse_loss(x, batch["y"])

    def configure_optimizers(self):
        return torch.optim.SGD(self.trained.parameters(), lr=0.1)


class Numbers(L.LightningDataModule):
    def __init__(self, batch_size=4):
        super().__init__()
        self.batch_size = batch_size

    def train_dataloader(self):
        values = torch.randn(12, 2, WIDTH, generator=torch.Generator().manual_seed(0))
        return DataLoader([{"x": x, "y": y} for x, y in values], self.batch_size)


def bytes_of_values(tensor):
    return b"".join(plain.numpy().tobytes() for plain in plain_tensors(tensor))


def fit_and_save(rank, settings, world_size, path):
    """What a run leaves, how many layers of the base a rank has in training, and their bytes after it."""
    seen = []

    class Look(L.Callback):
        def on_train_epoch_end(self, trainer, module):
            seen.extend([module, sum(not is_placeholder(layer.weight) for layer in module.base)])
            trainer.save_checkpoint(path)

    settings.trainer["callbacks"] = [Look()]
    outcome = fit(rank, settings, world_size)
    module, held = seen
    outcome.weights = {n: v for n, v in outcome.weights.items() if n.startswith("trained.")}
    kept = [bytes_of_values(layer.weight.detach()) for layer in module.base]
    return outcome, held, kept


@pytest.mark.parametrize(("quantize", "streaming"), [(int8, "none"), (nf4, "none"), (int8, "all")])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_layers_over_a_quantized_base_learn_what_one_process_learns(quantize, streaming, tmp_path):
    """History: tensors of torchao know neither `view` nor `as_strided`: NotImplementedError."""
    settings = Settings(
        module={"quantize": quantize},
        module_class=Quantized,
        data_class=Numbers,
        data={"batch_size": 4},
        trainer={"max_epochs": 1},
    )
    expected = reference(settings, 2)
    expected.weights = {n: v for n, v in expected.weights.items() if n.startswith("trained.")}
    settings.strategy = {"num_stages": 2, "num_microbatches": 2, "streaming": streaming}
    outcomes, held, kept = zip(
        *run_ranks(fit_and_save, 2, settings, 2, tmp_path / "a.ckpt"), strict=True
    )
    assert_equal_runs(outcomes, expected, 1e-5)
    # The first, which reads the batch, runs on both in bubbles.
    assert held == ((3, 2) if streaming == "none" else (1, 1))
    assert kept[0] == kept[1], "the module is whole again on both"
    assert len(set(kept[0])) == 4
    state = torch.load(tmp_path / "a.ckpt", weights_only=False)["state_dict"]
    assert [bytes_of_values(state[f"base.{i}.weight"]) for i in range(4)] == kept[0]


class QuantizedWhenPlaced(Opened):
    """A pipeline as `from_pretrained(folder, quantization=...)` opens it."""

    def __init__(self, folder, quantization):
        super().__init__(folder, lora=True)
        quantize_components(quantizations_of(quantization, [*self.parts]), self.parts)


def fit_adapters(rank, settings, world_size):
    """What a run leaves, and the bytes that the last step has copied to the device."""
    copied = [0, 0]

    class Look(L.Callback):
        def on_train_batch_end(self, trainer, *_):
            if (stream := trainer.strategy.pipeline.engine.layout.steps.stream) is not None:
                copied.append(stream.num_bytes_copied)

    settings.trainer["callbacks"] = [Look()]
    return of_adapters(fit(rank, settings, world_size)), copied[-1] - copied[-2]


def of_adapters(outcome):
    weights = {name: value for name, value in outcome.weights.items() if ".lora_" in name}
    return replace(outcome, weights=weights)


def settings_of(name):
    """What quantizes: a setting, or a configuration of diffusers or torchao."""
    if name == "torchao":
        from torchao.quantization import Int8WeightOnlyConfig

        return {"transformer": TorchAoConfig(Int8WeightOnlyConfig())}
    if name == "bitsandbytes":
        return {"transformer": BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="fp4")}
    return name


@pytest.mark.parametrize(
    ("name", "streaming"),
    [("nf4", "none"), ("int8", "none"), ("float8", "none"), ("torchao", "none"), ("bitsandbytes", "none"),
     ("nf4", "all"), ("int8", "all"), ("float8", "all")],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_each_rank_quantizes_what_it_holds(name, streaming, tmp_path):
    folder = str(tmp_path / "flux")
    tiny.build("flux", tmp_path / "parts").to(torch.bfloat16).save_pretrained(folder)
    settings = Settings(
        module={"folder": folder, "quantization": settings_of(name)},
        module_class=QuantizedWhenPlaced,
        data_class=Images,
        trainer={"max_steps": 3, "max_epochs": -1, "precision": "bf16-mixed"},
    )
    expected = of_adapters(reference(settings, 2))
    plain = reference(replace(settings, module={"folder": folder, "quantization": None}), 2)
    settings.strategy = {"num_stages": 2, "num_microbatches": 2, "streaming": streaming}
    outcomes, copied = zip(*run_ranks(fit_adapters, 2, settings, 2), strict=True)
    assert_equal_runs(outcomes, expected, 1e-3)
    assert copied == (outcomes[0].plan.planned.copied_bytes or (0, 0))
    assert abs(plain.losses[0] - expected.losses[0]) > 1e-4, "weights were rounded"


@pytest.mark.parametrize("compress_statistics", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_weights_in_4_bits_multiply_as_those_of_bitsandbytes(compress_statistics, dtype):
    """To the bit, forward and backward; and so does a copy that has travelled."""
    import bitsandbytes.nn

    plain = nn.Linear(256, 128, dtype=dtype)
    options = {"compute_dtype": dtype, "quant_type": "nf4"}
    known = bitsandbytes.nn.Linear4bit(256, 128, compress_statistics=compress_statistics, **options)
    known.load_state_dict(plain.state_dict())
    known.to("cpu")
    weight = Weight4Bit.of(plain.weight, "nf4", compress_statistics)
    size = sum(each.nbytes for each in plain_tensors(weight))
    assert size == _in_4_bits("nf4", compress_statistics).num_bytes(plain.weight)
    x = torch.randn(3, 5, 256, dtype=dtype)
    results = []
    for each in (weight, pickle.loads(pickle.dumps(weight)), copy.deepcopy(weight)):
        plain.weight = nn.Parameter(each, requires_grad=False)
        results.append(with_gradient(plain, x))
    results.append(with_gradient(known, x))
    for result in results:
        assert all(map(torch.equal, result, results[-1]))


def with_gradient(layer, x):
    x = x.clone().requires_grad_()
    out = layer(x)
    out.square().sum().backward()
    return out.detach(), x.grad


@pytest.mark.parametrize("name", ["nf4", "int8", "float8"])
@pytest.mark.filterwarnings("ignore")
def test_compiled_layers_multiply_by_quantized_weights_in_one_graph(name):
    """History: what a compiler compares of a weight had a tensor, and every compiled block failed."""
    layer = nn.Sequential(nn.Linear(64, 64), nn.SiLU())
    weight = quantization_named(name).quantize(layer[0].weight)
    layer[0].weight = nn.Parameter(weight, requires_grad=False)
    x = torch.randn(2, 3, 64)
    plain = with_gradient(layer, x)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    layer.compile(backend="aot_eager")
    compiled = with_gradient(layer, x)
    assert all(map(torch.allclose, compiled, plain))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert not torch._dynamo.utils.counters["graph_break"]


def store(layer_class, options, folder):
    """Stores matrices of a transformer's blocks as layers of bitsandbytes do, and returns it with these layers."""
    model = FluxTransformer2DModel.from_pretrained(folder, torch_dtype=torch.bfloat16)
    for name, layer in list(model.named_modules()):
        if type(layer) is nn.Linear and "block" in name:
            size = layer.in_features, layer.out_features
            packed = layer_class(*size, bias=layer.bias is not None, **options)
            packed.load_state_dict(layer.state_dict())
            model.set_submodule(name, packed.to("cpu").requires_grad_(False))
    [file] = folder.glob("*.safetensors")
    save_file({n: x.contiguous() for n, x in model.state_dict().items()}, file, {"format": "pt"})
    return model


def drawn_with(pipeline):
    pipeline.set_progress_bar_config(disable=True)
    generator = torch.Generator().manual_seed(0)
    return pipeline(tiny.prompts_of("flux"), generator=generator, **DRAWING).images


def draw_stored(rank, folder, methods):
    images = []
    for method, options in methods:
        with Predictor.from_pretrained(folder, method, **options) as predictor:
            images.append(predictor(tiny.prompts_of("flux"), **DRAWING))
    return images


DRAWING = {
    "num_inference_steps": 2,
    "height": 32,
    "width": 32,
    "max_sequence_length": 8,
    "output_type": "np",
}


@pytest.mark.parametrize("kind", ["nf4", "int8"])
@pytest.mark.filterwarnings("ignore")
def test_ranks_draw_what_the_packages_that_stored_a_folder_draw(kind, tmp_path):
    """nf4 of bitsandbytes, against its own layers; int8 of torchao, against diffusers."""
    import bitsandbytes.nn

    folder = tmp_path / "flux"
    tiny.build("flux", tmp_path / "parts").to(torch.bfloat16).save_pretrained(folder)
    pipeline = DiffusionPipeline.from_pretrained(folder, torch_dtype=torch.bfloat16)
    if kind == "nf4":
        options = {"quant_type": "nf4", "compute_dtype": torch.bfloat16}
        pipeline.transformer = store(bitsandbytes.nn.Linear4bit, options, folder / "transformer")
        config = {
            "quant_method": "bitsandbytes",
            "load_in_4bit": True,
            "bnb_4bit_compute_dtype": "bfloat16",
        }
        path = folder / "transformer" / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": config}))
    else:
        from torchao.quantization import Int8WeightOnlyConfig

        how = Int8WeightOnlyConfig(version=2)
        for name, cls, config in (
            ("transformer", FluxTransformer2DModel, TorchAoConfig(how)),
            ("text_encoder_2", transformers.T5EncoderModel, transformers.TorchAoConfig(how)),
        ):
            options = {"quantization_config": config, "torch_dtype": torch.bfloat16}
            part = cls.from_pretrained(folder, subfolder=name, **options)
            setattr(pipeline, name, part)
            part.save_pretrained(folder / name)
    expected = drawn_with(pipeline)
    methods = [
        ("single", {"guidance": 1}),
        ("sequence", {}),
        ("pipefusion", {"num_patches": 2, "warmup_steps": 9}),
    ]
    [[images]] = run_ranks(draw_stored, 1, folder, methods[:1])
    assert np.abs(np.asarray(images) - expected).max() < 1e-6
    for images in run_ranks(draw_stored, 2, folder, methods)[0]:
        assert np.abs(np.asarray(images) - expected).max() < 2e-2, "in bfloat16"
