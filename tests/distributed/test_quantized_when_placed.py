"""Frozen weights that each rank quantizes for itself: the numbers of one process with the same quantized weights.

With a quantization that needs no package; those of bitsandbytes and torchao are in `test_quantized.py`.
"""

import weakref
from dataclasses import replace

import diffusers
import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.loggers.logger import DummyLogger
from safetensors.torch import load_file, save_file

from lightning_diffpipe.callbacks import EncodingCache, SampleImages
from lightning_diffpipe.errors import ConfigurationError
from lightning_diffpipe.graph.placement import (
    is_placeholder,
    is_quantized_later,
    stored_value,
)
from lightning_diffpipe.modules import PipelineDiffusion
from lightning_diffpipe.quantization import (
    QuantizedWeight,
    Weight8Bit,
    quantize_components,
)
from tests.distributed.scenarios import (
    Settings,
    assert_equal_runs,
    build,
    fit,
    quick_strategy,
    quiet_trainer,
    reference,
)
from tests.distributed.stored import LINUX, ROUNDED, Opened, Rounded, store_in_8_bits
from tests.distributed.tiny import Images
from tests.predictor import tiny_pipelines as tiny
from tests.ranks import run_ranks
from tests.rows import row

pytestmark = [pytest.mark.distributed, LINUX]
UNEVEN = {"num_stages": 2, "num_replicas": (2, 1), "num_microbatches": 2}


class QuantizedWhenPlaced(Opened):
    """A pipeline as `from_pretrained(folder, quantization=...)` opens it."""

    def __init__(self, folder, quantize=True):
        super().__init__(folder, lora=True)
        chosen = dict.fromkeys(self.parts, ROUNDED) if quantize else {}
        quantize_components(chosen, self.parts)
        self._note_base(folder, self.parts)


class StoredQuantized(Opened):
    """A pipeline as `from_pretrained` opens it."""

    def __init__(self, folder):
        super().__init__(folder, lora=True)
        self._note_base(folder, self.parts)


class InDouble(StoredQuantized):
    """In double precision."""

    double = L.LightningModule.double


class Look(L.Callback):
    """Counts weights to quantize: all, those that are quantized, those that are mapped from their file."""

    def __init__(self):
        self.counts, self.module = [], None

    def on_train_epoch_end(self, trainer, module):
        self.module = module
        self.count()

    def count(self):
        weights = self.module.parameters()
        weights = [
            p
            for p in weights
            if hasattr(p, "_diffpipe_quantized")
            or isinstance(stored_value(p), QuantizedWeight)
            or type(p) is Weight8Bit
            or type(p) is Rounded
        ]
        here = [p for p in weights if not (is_placeholder(p) or is_quantized_later(p))]
        self.counts += [len(weights), len(here), sum(stored_value(p) is not None for p in weights)]


def fit_and_look(rank, settings, world_size):
    look = Look()
    settings.trainer["callbacks"] = [*settings.trainer.get("callbacks", []), look]
    outcome = fit(rank, settings, world_size)
    outcome.weights = adapters_of(outcome)
    look.count()
    return outcome, look.counts


def adapters_of(outcome):
    return {name: value for name, value in outcome.weights.items() if ".lora_" in name}


@pytest.fixture
def settings(tmp_path):
    tiny.build("flux", tmp_path / "parts").to(torch.bfloat16).save_pretrained(tmp_path / "flux")
    return Settings(
        module={"folder": str(tmp_path / "flux")},
        module_class=QuantizedWhenPlaced,
        data_class=Images,
        trainer={"max_steps": 3, "max_epochs": -1},
    )


@pytest.mark.parametrize(
    ("strategy", "encodes_first"),
    [
        ({"num_stages": 2, "num_microbatches": 2}, False),
        row({"num_stages": 2, "num_microbatches": 2, "checkpointing": "all"}, True),
        row(
            {"num_stages": 2, "num_microbatches": 2, "filling": "none", "profile": "measure"}, False
        ),
        row({"num_stages": 1, "num_microbatches": 2, "data_parallel": 1}, False),
        row({"num_stages": 2, "num_microbatches": 2, "streaming": "all"}, True),
        row({"num_stages": 1, "num_microbatches": 2, "streaming": "all"}, False),
        row({**UNEVEN, "checkpointing": "all"}, True),
        row({**UNEVEN, "streaming": "all"}, False),
    ],
)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_each_rank_quantizes_what_it_holds(strategy, encodes_first, settings, tmp_path):
    """Weights are mapped plain from their file before and after training."""
    expected = reference(settings, 2)
    expected.weights = adapters_of(expected)
    plain = reference(replace(settings, module=settings.module | {"quantize": False}), 2)
    if encodes_first:
        cache = EncodingCache(tmp_path / "cache", encode_first=True, min_flops_per_byte=0.0)
        settings.trainer["callbacks"] = [cache]
    settings.strategy = strategy
    num_ranks = sum(strategy.get("num_replicas", [1] * strategy["num_stages"]))
    outcomes, counts = zip(*run_ranks(fit_and_look, num_ranks, settings, num_ranks), strict=True)
    # Measured times cut differently each time, and what is in bfloat16 rounds by the samples it takes at a time.
    assert_equal_runs(outcomes, expected, 2e-3 if "profile" in strategy else 1e-4)
    assert abs(plain.losses[0] - expected.losses[0]) > 1e-3 * plain.losses[0]
    for total, quantized, mapped, *after in counts:
        assert 0 < quantized < total + (num_ranks == 1)
        assert mapped == total
        assert after == [total, 0, total]


class LookFromAfar(L.Callback):
    """Keeps no quantized weight alive; references hinder other strategies, which swap weights when they end."""

    def on_train_epoch_end(self, trainer, module):
        self.quantized = [weakref.ref(p) for p in module.parameters() if type(p) is Rounded]


def fit_and_leave(rank, settings):
    """Returns how many quantized weights there were in training, and are after it, without a search for garbage."""
    look = LookFromAfar()
    settings.trainer["callbacks"] = [look]
    fit(rank, settings, 1)
    return len(look.quantized), sum(weight() is not None for weight in look.quantized)


def test_quantized_weights_leave_memory_when_training_ends(settings):
    """History: as much as the stages took until Python searched for garbage, while samples were drawn, say."""
    settings.strategy = {"num_stages": 1, "num_microbatches": 2}
    settings.trainer["max_steps"] = 1
    [(before, after)] = run_ranks(fit_and_leave, 1, settings)
    assert before > after == 0


class Shown(DummyLogger):
    """A logger that keeps the images."""

    def __init__(self):
        super().__init__()
        self.images = []

    def log_image(self, key, images, step, caption):
        self.images += [np.asarray(image, dtype=float) for image in images]


class Saves(L.Callback):
    def __init__(self, path):
        self.path = path

    def on_train_batch_end(self, trainer, module, *_):
        if trainer.global_step == 2:
            trainer.save_checkpoint(self.path)


def fit_and_save(rank, settings, world_size, path, ckpt_path=None, streaming="auto"):
    """Trains with images and a checkpoint on the way, and returns the adapters and the images."""
    module, logger = build(settings), Shown()
    images = SampleImages(["a cat"], every_n_steps=2, num_inference_steps=2)
    callbacks = [images] if ckpt_path else [images, Saves(path)]
    options = {**settings.trainer, "max_steps": 4, "callbacks": callbacks, "logger": logger}
    options["default_root_dir"] = path.parent
    strategy = quick_strategy(num_stages=world_size, num_microbatches=2, streaming=streaming)
    trainer = quiet_trainer(devices=world_size, strategy=strategy, **options)
    trainer.fit(module, datamodule=settings.data_class(), ckpt_path=ckpt_path)
    if rank == 0:
        module.save_lora(path.with_name("lora"))
    state = module.state_dict()
    return {n: value for n, value in state.items() if ".lora_" in n}, logger.images


@pytest.mark.table
@pytest.mark.parametrize("streaming", ["none", "all"])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_checkpoints_and_images_over_a_quantized_base(streaming, settings, tmp_path):
    """Checkpoints have adapters alone, and are gone on from where the base is opened plain and quantized again.

    Also on one stage, and by diffusers, which opens the file of adapters over the plain base.
    """
    path = tmp_path / "adapters.ckpt"
    [(_, expected)] = run_ranks(fit_and_save, 1, settings, 1, path)
    (whole, images), _ = run_ranks(fit_and_save, 2, settings, 2, path, None, streaming)
    assert len(images) == len(expected) == 4  # at two steps: of the step, and of all so far
    for image, other in zip(images, expected, strict=True):
        assert np.abs(image - other).max() <= 2
        assert image.std() > 5
    state = torch.load(path, weights_only=False)["state_dict"]
    assert all(".lora_" in name for name in state), sorted(state)[:3]
    (resumed, _), _ = run_ranks(fit_and_save, 2, settings, 2, path, path, streaming)
    assert whole.keys() == resumed.keys()
    for name, value in whole.items():
        assert torch.equal(resumed[name], value), name
    saved = load_file(path.with_name("lora") / "pytorch_lora_weights.safetensors")
    assert sorted(map(bytes_of, saved.values())) == sorted(map(bytes_of, whole.values()))
    diffusers.FluxPipeline.from_pretrained(tmp_path / "flux").load_lora_weights(tmp_path / "lora")
    [(alone, _)] = run_ranks(fit_and_save, 1, settings, 1, path, path, streaming)
    for name, value in whole.items():
        torch.testing.assert_close(alone[name], value, rtol=0, atol=1e-4)


def bytes_of(tensor):
    return tensor.numpy().tobytes()


class SavesWhole(L.Callback):
    """Saves when training has ended, but not the run."""

    def __init__(self, folder):
        self.folder = folder

    def on_train_end(self, trainer, module):
        module.save_pretrained(self.folder)


def evaluate_fit_and_export(rank, settings, world_size, folder):
    """Evaluates, trains and saves a whole pipeline; returns the adapters, and types of weights in between."""
    module, look = build(settings), Look()
    strategy = quick_strategy(num_stages=2, num_microbatches=2) if world_size > 1 else "auto"
    callbacks = [look, SavesWhole(folder.with_name("during"))]
    options = {**settings.trainer, "callbacks": callbacks[: 3 - world_size]}
    trainer = quiet_trainer(devices=world_size, strategy=strategy, **options)
    data = settings.data_class().train_dataloader()
    if world_size > 1:
        trainer.validate(module, data, verbose=False)
    trainer.fit(module, data)
    look.count()
    module.save_pretrained(folder)
    return {n: p for n, p in module.named_parameters() if ".lora_" in n}, look.counts


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_after_training_adapters_are_merged_into_the_plain_base(world_size, settings, tmp_path):
    """History: other strategies left the base quantized, and evaluation did for the training after it."""
    folder = tmp_path / "merged"
    adapters, counts = run_ranks(evaluate_fit_and_export, world_size, settings, world_size, folder)[
        0
    ]
    total, quantized, _, *after = counts
    assert 0 < quantized <= total
    assert after == [total, 0, total]
    merged, base = (
        load_file(next((path / "transformer").glob("*.safetensors")))
        for path in (folder, tmp_path / "flux")
    )
    assert merged.keys() == base.keys()
    if world_size == 1:
        during = load_file(next((tmp_path / "during" / "transformer").glob("*.safetensors")))
        assert all(torch.equal(during[name], value) for name, value in merged.items())
    for name, value in base.items():
        layer, _, end = name.rpartition(".")
        a, b = (adapters.get(f"transformer.{layer}.lora_{x}.default.weight") for x in "AB")
        if end == "weight" and a is not None:
            value = value + (b @ a).to(value.dtype)
            assert not torch.equal(value, base[name])
        assert torch.allclose(merged[name].float(), value.float(), atol=1e-2), name


def fit_over_stored(rank, settings, world_size, path):
    """Trains and saves; returns what is left of it, and how many quantized weights were here, and are after it."""
    settings.trainer["callbacks"] = [Saves(path), look := Look()]
    outcome = fit(rank, settings, world_size)
    outcome.weights = adapters_of(outcome)
    look.count()
    module = look.module
    if rank == 0:
        module.save_pretrained(path.with_name("merged"))
    return outcome, look.counts


@pytest.mark.parametrize(
    ("module_class", "tolerance"),
    [(StoredQuantized, 1e-3), pytest.param(InDouble, 1e-7, marks=pytest.mark.table)],
)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_ranks_train_over_what_is_stored_quantized(module_class, tolerance, tmp_path):
    """As plain weights of the same values train; each rank holds its own layers.

    Gradients in double precision are equal to 1e-9, but losses are reported in single precision.
    """
    folders = {name: tmp_path / name for name in ("flux", "flux_plain")}
    for folder in folders.values():
        tiny.build("flux", tmp_path / "parts").save_pretrained(folder)
    for name in ("transformer", "text_encoder_2"):
        values = store_in_8_bits(folders["flux"] / name)
        [file] = (folders["flux_plain"] / name).glob("*.safetensors")
        save_file(load_file(file) | values, file, {"format": "pt"})
    settings = Settings(
        module={"folder": str(folders["flux"])},
        module_class=module_class,
        data_class=Images,
        trainer={"max_steps": 3, "max_epochs": -1},
        strategy={"num_stages": 2, "num_microbatches": 2},
    )
    expected = reference(replace(settings, module={"folder": str(folders["flux_plain"])}), 2)
    expected.weights = adapters_of(expected)
    path = tmp_path / "adapters.ckpt"
    outcomes, counts = zip(*run_ranks(fit_over_stored, 2, settings, 2, path), strict=True)
    assert_equal_runs(outcomes, expected, tolerance)
    for total, here, mapped, *after in counts:
        is_mapped = total * (module_class is StoredQuantized)
        assert 0 < here <= (total if module_class is InDouble else total - 1)
        assert mapped == is_mapped
        assert after[1:] == [after[0], is_mapped]
        assert after[0] >= total
    state = torch.load(path, weights_only=True)["state_dict"]
    assert all(".lora_" in name for name in state)
    again = PipelineDiffusion.from_checkpoint(path)
    assert isinstance(
        again.transformer.single_transformer_blocks[0].proj_mlp.weight, QuantizedWeight
    )
    opened = PipelineDiffusion.from_pretrained(tmp_path / "merged")
    assert not any(isinstance(p, QuantizedWeight) for p in opened.parameters())
    with pytest.raises(ConfigurationError, match="only adapters can be trained over it: set lora"):
        PipelineDiffusion.from_pretrained(folders["flux"])
