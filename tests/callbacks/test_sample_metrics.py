"""FID and CLIPScore in training, with small networks of random weights in place of InceptionV3 and CLIP."""

import sys

import lightning as L
import numpy as np
import pytest
import torch
import transformers
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader
from torchmetrics.image.fid import FrechetInceptionDistance
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

from lightning_diffpipe import DiffPipeStrategy
from lightning_diffpipe.callbacks import EMA, FID, ClipScore
from lightning_diffpipe.errors import ConfigurationError
from lightning_diffpipe.modules import Optimization
from tests.distributed.scenarios import quiet_trainer
from tests.modules.tiny_parts import perturbed_latent_diffusion
from tests.predictor.tiny_pipelines import clip_tokenizer
from tests.ranks import run_ranks
from tests.rows import row

SETTINGS = {"num_inference_steps": 2, "guidance_scale": 2.0, "seed": 4, "batch_size": 3}
CAPTIONS = ["a", "b c d e f g h i j k l m n o p", "c", "d", "e", "f", "g", "h"]


class Features(nn.Module):
    """Stands for InceptionV3."""

    num_features = 3

    def __init__(self):
        super().__init__()
        self.register_buffer(
            "weight", torch.randn(192, 3, generator=torch.Generator().manual_seed(0))
        )

    def forward(self, images):
        assert images.shape[1] == 3
        assert 0 <= images.min() <= images.max() <= 1
        return images.flatten(1) @ self.weight


def clip(folder):
    """Writes a CLIP model of random weights, with its processor, and returns the folder."""
    torch.manual_seed(4)
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    text = {
        **sizes,
        "vocab_size": 80,
        "max_position_embeddings": 12,
        "bos_token_id": 72,
        "eos_token_id": 73,
    }
    config = transformers.CLIPConfig(
        text_config={**text, "pad_token_id": 73}, vision_config={**sizes, "image_size": 8, "patch_size": 4},
        projection_dim=8,
    )  # fmt: skip
    transformers.CLIPModel(config).save_pretrained(folder)
    sides = {"size": {"shortest_edge": 8}, "crop_size": {"height": 8, "width": 8}}
    images = CLIPImageProcessorPil(**sides)
    transformers.CLIPProcessor(images, clip_tokenizer(folder)).save_pretrained(folder)
    return str(folder)


def any_clip():
    """A model and a processor that are never called, for configs."""
    return nn.Identity(), None


def images(count):
    return torch.rand(count, 3, 8, 8, generator=torch.Generator().manual_seed(1)) * 2 - 1


def loader(count=8):
    data = [{"image": i, "caption": c} for i, c in zip(images(count), CAPTIONS, strict=False)]
    return DataLoader(data, batch_size=2)


def fit(callbacks, folder, world_size=1, num_stages=1, **options):
    """Trains for four steps, with validations after the second and the last."""
    settings = {
        "num_stages": num_stages,
        "num_replicas": 1,
        "num_microbatches": 2,
        "profile": "flops",
    }
    trainer = quiet_trainer(
        devices=world_size, max_steps=4, max_epochs=None, val_check_interval=2, use_distributed_sampler=True,
        default_root_dir=folder,
        strategy=DiffPipeStrategy(**settings, seed=1, timeout_s=20) if world_size > 1 else "auto",
        log_every_n_steps=1, logger=CSVLogger(folder, "csv", ""), callbacks=callbacks, num_sanity_val_steps=1,
        check_val_every_n_epoch=None, **options,
    )  # fmt: skip
    module = perturbed_latent_diffusion()
    module.optimization = Optimization(lr=0.05, warmup_steps=1)
    trainer.fit(module, DataLoader(loader().dataset, batch_size=2), loader())
    return trainer, module


def wanted(module, seed, pipelines=1, per_pipeline=8):
    """What FID says of the module, whole, in one process."""
    fid, data = FrechetInceptionDistance(Features(), sync_on_compute=False), images(8)
    for place in range(pipelines):
        rows = list(range(8))[place::pipelines][:per_pipeline]
        fid.update(data[rows] / 2 + 0.5, real=True)
        for draw, start in enumerate(range(0, len(rows), SETTINGS["batch_size"])):
            prompts = [CAPTIONS[row] for row in rows[start : start + SETTINGS["batch_size"]]]
            generator = torch.Generator().manual_seed(seed + draw * pipelines + place)
            fid.update(module.sample(prompts, 2, 2.0, generator), real=False)
    return float(fid.compute())


def train(rank, world_size, num_stages, folder, num_samples, **options):
    metric = FID(Features(), num_samples=num_samples, **SETTINGS)
    trainer, module = fit([metric], folder, world_size, num_stages, **options)
    pipelines = world_size // num_stages
    per_pipeline = -(-num_samples // pipelines)
    expected = [wanted(module, seed, pipelines, per_pipeline) for seed in (4, 5)]
    return float(trainer.callback_metrics["val/fid"]), *expected


@pytest.mark.distributed
@pytest.mark.parametrize(("world_size", "num_stages", "num_samples"), [(2, 2, 100), row(4, 2, 6)])
def test_fid_of_a_pipeline_is_that_of_one_process(world_size, num_stages, num_samples, tmp_path):
    """Of the weights after the last step; pipelines side by side draw for their own batches."""
    for logged, same, other in run_ranks(
        train, world_size, world_size, num_stages, tmp_path, num_samples
    ):
        assert logged == pytest.approx(same, rel=1e-4)
        assert abs(other - same) > 1e-2 * same
    lines = (tmp_path / "csv" / "metrics.csv").read_text().splitlines()
    column = lines[0].split(",").index("val/fid")
    values = [float(line.split(",")[column]) for line in lines[1:] if line.split(",")[column]]
    assert len(values) == 2
    assert values[1] == pytest.approx(logged)
    assert values[0] != values[1]


def test_validations_between_are_left_out_and_averages_are_drawn(tmp_path):
    logged, averages = [], EMA(decay=0.5)

    class Noting(FID):
        def on_validation_epoch_end(self, trainer, module):
            super().on_validation_epoch_end(trainer, module)
            weight = module.transformer.proj_out.weight.clone()
            logged.append((trainer.global_step, self._is_due, weight))

    trainer, module = fit([averages, Noting(Features(), every_n_steps=3, **SETTINGS)], tmp_path)
    assert [entry[:2] for entry in logged] == [(0, False), (2, True), (4, False)]
    assert not torch.equal(logged[-1][-1], module.transformer.proj_out.weight)
    (afterwards,) = trainer.validate(module, loader(), verbose=False)
    with averages.averaged(module):
        assert afterwards["val/fid"] == pytest.approx(wanted(module, 4), rel=1e-4)


def test_clip_score_is_the_mean_over_captions_long_ones_cut(tmp_path):
    folder = clip(tmp_path)
    metric = ClipScore(folder, num_samples=5, **SETTINGS)
    trainer, module = fit([metric], tmp_path)
    scores, model = [], transformers.CLIPModel.from_pretrained(folder)
    processor = transformers.CLIPProcessor.from_pretrained(folder)
    for draw, prompts in enumerate((CAPTIONS[:3], CAPTIONS[3:5])):
        drawn = module.sample(prompts, 2, 2.0, torch.Generator().manual_seed(4 + draw))
        pixels = [(255 * image).round().byte() for image in drawn]
        options = {"return_tensors": "pt", "padding": True, "truncation": True}
        found = model(**processor(text=list(prompts), images=pixels, **options))
        scores += (100 * found.image_embeds * found.text_embeds).sum(1).tolist()
    score = float(trainer.callback_metrics["val/clip_score"])
    assert score == pytest.approx(sum(scores) / 5, rel=1e-4)
    assert score > 0


class Classes(L.LightningModule):
    samples_from = "class_labels"

    def sample(self, *args, **settings):
        return torch.zeros(1, 3, 4, 4)


class Editing(L.LightningModule):
    samples_to_conditions = True

    def sample(self, prompts, *, condition, **settings):
        (references,) = condition
        return torch.from_numpy(references).permute(0, 3, 1, 2) / 255


def test_images_are_drawn_to_references_of_one_size_at_once():
    """History: data with references were refused, as they have no conditions."""
    trainer = quiet_trainer()
    metric, module, drawn = FID(Features(), num_samples=4, batch_size=2), Editing(), []
    metric._is_due, metric.log = True, lambda *arguments, **options: None
    metric.add_samples = lambda images, prompts: drawn.append((len(images), prompts))
    metric.metric.compute = lambda: torch.zeros(())
    for sides in ((8, 8, 8, 8), (8, 16)):
        metric._prompts, metric._conditions = [], []
        for i, side in enumerate(sides):
            batch = {"image": images(1), "caption": [str(i)]}
            batch["references"] = [np.zeros((1, side, side, 3), np.uint8)]
            metric.on_validation_batch_end(trainer, module, None, batch, i)
        if len({*sides}) == 1:
            metric.on_validation_epoch_end(trainer, module)
    assert drawn == [(2, ["0", "1"]), (2, ["2", "3"])]
    with pytest.raises(
        ConfigurationError, match=r"of several sizes; sample one .*fid\.batch_size=1"
    ):
        metric.on_validation_epoch_end(trainer, module)


class Animating(L.LightningModule):
    """Fades from the image that a video begins with."""

    samples_to_conditions = True

    def sample(self, prompts, *, condition, **settings):
        fading = torch.linspace(1, 0.5, 3).view(1, 3, 1, 1, 1)
        return condition[:, None] * fading


def test_videos_are_measured_frame_by_frame():
    """History: data of videos were refused."""
    trainer = quiet_trainer()
    videos = torch.stack([images(4), images(4).flip(0), images(4).roll(1, -1)], 2)
    logged, expected = [], FrechetInceptionDistance(Features(), sync_on_compute=False)
    metric = FID(Features(), num_samples=3, batch_size=2)
    metric._is_due, metric.log = True, lambda name, value, **options: logged.append(value)
    batch = {"video": videos, "caption": list("abcd")}
    metric.on_validation_batch_end(trainer, Animating(), None, batch, 0)
    metric.on_validation_epoch_end(trainer, Animating())
    for video in videos[:3]:
        frames = (video.transpose(0, 1) + 1) / 2
        expected.update(frames, real=True)
        expected.update(frames[:1] * torch.linspace(1, 0.5, 3).view(3, 1, 1, 1), real=False)
    assert int(metric.metric.fake_features_num_samples) == 9
    torch.testing.assert_close(logged[0], expected.compute(), rtol=1e-4, atol=0)


def test_what_cannot_be_measured_is_refused_in_a_line(tmp_path, monkeypatch):
    trainer = quiet_trainer()
    with pytest.raises(ConfigurationError, match="Classes samples class_labels; leave it out"):
        ClipScore(clip(tmp_path)).setup(trainer, Classes(), "fit")
    with pytest.raises(ConfigurationError, match="FID samples with the module's own sample"):
        FID(Features()).setup(trainer, L.LightningModule(), "fit")
    monkeypatch.setitem(sys.modules, "torch_fidelity", None)
    with pytest.raises(ModuleNotFoundError, match="torch_fidelity"):
        FID()
    metric = FID(Features(), num_samples=4)
    metric._is_due = True
    with pytest.raises(ConfigurationError, match="which have no 'image' but audio; leave it"):
        metric.on_validation_batch_end(trainer, Classes(), None, {"audio": torch.zeros(1)}, 0)
    with pytest.raises(ConfigurationError, match="there are none for anybody; take a larger"):
        metric.on_validation_epoch_end(trainer, Classes())
