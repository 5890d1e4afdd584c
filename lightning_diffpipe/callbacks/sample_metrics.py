"""Quality of samples in training: a metric of torchmetrics over images sampled for captions of validation batches.

    validation batch    real images -> metric; captions are kept         each pipeline those of its own batches
    end of validation   captions -> samples, as of `SampleImages`, -> metric               all ranks together
    logged              the metric, over the pipelines side by side

Ranks of a pipeline have the same batches and get the same samples, so that each computes the same state, and one
of each pipeline counts (`training/metric_sync.py`). Pipelines sample as often as the one with most captions.

Sources:
    FID, Heusel et al. (2017), https://arxiv.org/abs/1706.08500
    CLIPScore, Hessel et al. (2021), https://arxiv.org/abs/2104.08718
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import huggingface_hub
import lightning as L
import numpy as np
import torch
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torchmetrics import Metric
from torchmetrics.image.fid import FrechetInceptionDistance
from torchmetrics.multimodal.clip_score import CLIPScore

from lightning_diffpipe.callbacks.monitor import pipeline_of
from lightning_diffpipe.callbacks.sample_images import (
    SamplingCallback,
    prompts_and_conditions,
    samples_from,
    samples_to_conditions,
)
from lightning_diffpipe.errors import ConfigurationError, require_number


class SampleMetric(SamplingCallback):
    """Logs a metric of samples for validation batches, by the model in training; for subclasses.

    Videos are measured frame by frame: each of their frames counts as an image.

    Args:
        name: Name of the metric, which is logged as `val/NAME`.
        metric: On the device while it is computed, on the host else.
        num_samples: Images or videos that all pipelines sample together, or as many as validation has.
        batch_size: Images or videos that a pipeline samples at once.
        every_n_steps: Optimizer steps between two measurements, which begin with a validation; None for all of
            them, as `Trainer.val_check_interval` says. `trainer.validate` always measures.
        sampling: Arguments of `SamplingCallback`. The start noise is the same each time, so that values compare.

    Raises:
        ConfigurationError: A number is none that can be; the module cannot sample; or validation has no images, or
            nothing to sample.
    """

    def __init__(
        self,
        name: str,
        metric: Metric,
        num_samples: int = 1000,
        batch_size: int = 16,
        every_n_steps: int | None = None,
        **sampling: Any,
    ) -> None:
        super().__init__(**sampling)
        require_number("num_samples", num_samples, 2, whole=True)
        require_number("batch_size", batch_size, 1, whole=True)
        if every_n_steps is not None:
            require_number("every_n_steps", every_n_steps, 1, whole=True)
        self.name, self.metric, self.every_n_steps = name, metric, every_n_steps
        self.num_samples, self.batch_size = num_samples, batch_size
        self._next_step, self._is_due = 0, False
        self._prompts, self._conditions = list[Any](), list[Any]()

    def add_real(self, images: Tensor) -> None:
        """Adds images of the data to the metric, `(N, 3, H, W)` in [0, 1]."""

    def add_samples(self, images: Tensor, prompts: list[Any]) -> None:
        """Adds samples to the metric, `(N, 3, H, W)` in [0, 1], with their prompts."""
        raise NotImplementedError

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Refuses a module that cannot sample."""
        self._next_step = 0
        if stage in ("fit", "validate"):
            self.require_sample(pl_module)

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Begins a measurement, if this validation is to have one."""
        if trainer.state.fn == TrainerFn.FITTING:
            self._is_due = not trainer.sanity_checking and trainer.global_step >= self._next_step
        else:
            self._is_due = trainer.state.fn == TrainerFn.VALIDATING
        if self._is_due:
            self._next_step = trainer.global_step + (self.every_n_steps or 0)
            self._prompts, self._conditions = [], []
            self.metric.reset()
            self.metric.to(trainer.strategy.root_device)

    @torch.no_grad()
    def on_validation_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, *args: Any
    ) -> None:
        """Takes the images of a batch, and their prompts and conditions."""
        left = -(-self.num_samples // pipeline_of(trainer)[1]) - len(self._prompts)
        if not self._is_due or left <= 0:
            return
        entries = batch if isinstance(batch, Mapping) else {}
        seen = "video" if "video" in entries else "image"
        prompts, conditions = prompts_and_conditions(pl_module, batch)
        needed = {seen: entries.get(seen), samples_from(pl_module): prompts or None}
        needed |= {"condition": conditions} if samples_to_conditions(pl_module) else {}
        if missing := [name for name, value in needed.items() if value is None]:
            raise ConfigurationError(
                f"{type(self).__name__} compares sampled images with those of validation batches, which have no "
                f"{missing[0]!r} but {', '.join(entries)}; leave it out (callbacks.{self.name}=null)"
            )
        real = entries[seen][:left].transpose(1, 2) if seen == "video" else entries[seen][:left]
        self.add_real((real.flatten(0, -4) / 2 + 0.5).clamp(0, 1))
        self._prompts += prompts[:left]
        if "condition" in needed:
            is_tensor = isinstance(conditions, Tensor)
            rows = conditions.cpu() if is_tensor else zip(*conditions, strict=True)
            self._conditions += [*rows][:left]

    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Samples, and logs the metric; every rank takes part."""
        if not self._is_due:
            return
        device, reduce = trainer.strategy.root_device, trainer.strategy.reduce
        count = torch.tensor(float(len(self._prompts)), device=device)
        least, most = (int(reduce(count.clone(), reduce_op=op)) for op in ("min", "max"))
        if least == 0:
            raise ConfigurationError(
                f"{type(self).__name__} samples captions of validation batches, and there are none for "
                f"{'a pipeline' if most else 'anybody'}; take a larger data.validation_share, or leave it out "
                f"(callbacks.{self.name}=null)"
            )
        pipeline_index, num_pipelines = pipeline_of(trainer)
        for batch_index, start in enumerate(range(0, most, self.batch_size)):
            rows = slice(start, start + self.batch_size)
            prompts = self._prompts[rows]
            # Where others have more, one is sampled again, with them.
            conditions = (self._conditions[rows] or self._conditions[:1]) or None
            stacked = conditions and self._stacked(conditions, device)
            seed = self.seed + batch_index * num_pipelines + pipeline_index
            images = self.sample_for(
                trainer, pl_module, prompts or self._prompts[:1], stacked, seed
            )
            if prompts:
                with torch.no_grad():
                    frames = images.to(device).clamp(0, 1).flatten(0, -4)
                    number_of_frames = len(frames) // len(prompts)
                    self.add_samples(frames, [p for p in prompts for _ in range(number_of_frames)])
        self.log(f"val/{self.name}", self.metric.compute(), sync_dist=True)
        self.metric.cpu()

    def _stacked(self, rows: list[Any], device: torch.device) -> Tensor | list[np.ndarray]:
        """Returns conditions, or references, several for each row, in the layout of a batch."""
        is_condition = isinstance(rows[0], Tensor)
        if len({row.shape if is_condition else tuple(x.shape for x in row) for row in rows}) > 1:
            raise ConfigurationError(
                f"{type(self).__name__} samples {self.batch_size} images at once, to conditions or references of "
                f"several sizes; sample one (callbacks.{self.name}.batch_size=1)"
            )
        if is_condition:
            return torch.stack(rows).to(device)
        return [np.stack(column) for column in zip(*rows, strict=True)]


class FID(SampleMetric):
    """Logs `val/fid`, the Frechet distance between features of samples and of validation images.

    Small sets give larger distances: compare those of one `num_samples` only.

    Args:
        feature: Width of the features of InceptionV3 (64, 192, 768 or 2048), or a network of your own, which gets
            `(N, 3, H, W)` in [0, 1] and returns `(N, D)`.
        weights: File with the weights of InceptionV3; None to download them once.
        options: Further arguments of `SampleMetric`.

    Raises:
        ModuleNotFoundError: The package torch-fidelity is missing.
        ConfigurationError: Weights are missing, and downloads are off.
    """

    def __init__(
        self, feature: int | nn.Module = 2048, weights: str | None = None, **options: Any
    ) -> None:
        if not isinstance(feature, nn.Module):
            _require_weights(weights)
        settings = {"normalize": True, "feature_extractor_weights_path": weights}
        super().__init__("fid", FrechetInceptionDistance(feature, **settings), **options)

    def add_real(self, images: Tensor) -> None:
        """See `SampleMetric`."""
        self.metric.update(images.float(), real=True)

    def add_samples(self, images: Tensor, prompts: list[Any]) -> None:
        """See `SampleMetric`."""
        self.metric.update(images.float(), real=False)


def _require_weights(weights: str | None) -> None:
    from torch_fidelity.feature_extractor_inceptionv3 import URL_INCEPTION_V3

    default = Path(torch.hub.get_dir()) / "checkpoints" / URL_INCEPTION_V3.rsplit("/", 1)[-1]
    path = default if weights is None else Path(weights)
    if not path.is_file() and (weights is not None or huggingface_hub.constants.HF_HUB_OFFLINE):
        raise ConfigurationError(
            f"the weights of InceptionV3 are not at {path}; allow to download them (offline=false), or put "
            f"{URL_INCEPTION_V3} there"
        )


class _Clip(nn.Module):
    """CLIP as torchmetrics calls it: transformers 5 returns more than embeddings.

    Its processor cuts long captions before torchmetrics does, which takes their end token off.
    """

    def __init__(self, model: Any, processor: Any) -> None:
        super().__init__()
        self.model, self._processor = model, processor
        self.config = None  # nothing is left to be cut

    def process(self, text: Any = None, images: Any = None, **options: Any) -> Any:
        options |= {} if text is None else {"text": text, "truncation": True}
        return self._processor(**options, **({} if images is None else {"images": images}))

    def get_image_features(self, *inputs: Tensor) -> Tensor:
        output = self.model.get_image_features(*inputs)
        return getattr(output, "pooler_output", output)

    def get_text_features(self, *inputs: Tensor) -> Tensor:
        output = self.model.get_text_features(*inputs)
        return getattr(output, "pooler_output", output)


class ClipScore(SampleMetric):
    """Logs `val/clip_score`, 100 times the cosine between CLIP's embeddings of samples and of their captions.

    Args:
        model: A folder or hub id with a CLIP model and its processor, or a function that returns both. Captions
            that are too long for it are cut.
        options: Further arguments of `SampleMetric`.

    Raises:
        OSError: There is no such model.
        ConfigurationError: The module samples classes.
    """

    def __init__(
        self,
        model: str | Callable[[], tuple[Any, Any]] = "openai/clip-vit-base-patch16",
        **options: Any,
    ) -> None:
        if isinstance(model, str):
            from transformers import CLIPModel, CLIPProcessor  # takes its time

            clip = _Clip(CLIPModel.from_pretrained(model), CLIPProcessor.from_pretrained(model))
        else:
            clip = _Clip(*model())
        metric = CLIPScore(lambda: (clip, clip.process))
        super().__init__("clip_score", metric, **options)

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Refuses a module that samples no captions."""
        super().setup(trainer, pl_module, stage)
        if samples_from(pl_module) != "caption":
            raise ConfigurationError(
                f"ClipScore compares images with captions, and {type(pl_module).__name__} samples "
                f"{samples_from(pl_module)}; leave it out (callbacks.clip_score=null), or take fid"
            )

    def add_samples(self, images: Tensor, prompts: list[Any]) -> None:
        """See `SampleMetric`."""
        self.metric.update((255 * images).round().byte(), prompts)
