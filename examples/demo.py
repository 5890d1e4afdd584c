"""`make demo`: what this package does, shown by one short run (`examples/conf/experiment/demo.yaml`).

Samples prompts with the model as it is, trains it as a pipeline on two processes while showing the plan
and its timeline, samples the same prompts again with both processes together, and lays the images side by side.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_only
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from lightning_diffpipe.callbacks.sample_images import image_grid
from lightning_diffpipe.data.glyphs import GlyphDataset, font_files
from lightning_diffpipe.files import write_atomically
from lightning_diffpipe.modules import LatentDiffusion
from lightning_diffpipe.predictor import Predictor

_LABEL_WIDTH = 110


def wanted_images(captions: Sequence[str], resolution: int) -> Tensor:
    """Draws what captions ask for with the fonts themselves.

    Args:
        captions: Captions of glyphs.
        resolution: Width and height, in pixels.

    Returns:
        `(len(captions), 3, H, W)` in [0, 1]; black where a caption names no glyph.
    """
    dataset = GlyphDataset("all", resolution, alphabets=["all"], shifts_per_axis=1)
    places = {glyph.caption: place for place, glyph in enumerate(dataset.glyphs)}
    black = torch.zeros(3, resolution, resolution)
    return torch.stack(
        [
            dataset[places[caption]]["image"] / 2 + 0.5 if caption in places else black
            for caption in captions
        ]
    )


def labelled_rows(rows: dict[str, Tensor], scale: int = 2) -> Image.Image:
    """Lays rows of images under each other, each with its label on the left.

    Args:
        rows: `(N, 3, H, W)` in [0, 1] by label.
        scale: Enlargement.
    """
    strips = [image_grid(images, columns=len(images)) for images in rows.values()]
    width, height = strips[0].width * scale, strips[0].height * scale
    page = Image.new("RGB", (_LABEL_WIDTH + width, height * len(strips)), "white")
    pen, font = ImageDraw.Draw(page), ImageFont.truetype(str(font_files()["sans"]), 16)
    for place, (label, strip) in enumerate(zip(rows, strips, strict=True)):
        enlarged = strip.resize((width, height), Image.Resampling.NEAREST)
        page.paste(enlarged, (_LABEL_WIDTH, place * height))
        pen.text((8, (place + 0.5) * height), label, fill="black", font=font, anchor="lm")
    return page


class DemoStory(L.Callback):
    """Narrates a training run: plan, timeline, loss, images before and after.

    Args:
        folder: Where images go.
        prompts: What to sample.
        sampler: Options of `Predictor.from_pretrained` for the images after training.
        num_inference_steps: Denoising steps.
        guidance_scale: Strength of classifier-free guidance.
    """

    def __init__(
        self,
        folder: str | Path,
        prompts: Sequence[str],
        sampler: Mapping[str, Any],
        num_inference_steps: int = 25,
        guidance_scale: float = 4.0,
    ) -> None:
        self.folder = Path(folder)
        self.prompts, self.sampler = list(prompts), dict(sampler)
        self.num_inference_steps = num_inference_steps
        self.guidance_scale = guidance_scale
        self._losses: list[Tensor] = []
        self._before: Tensor | None = None
        self._start_s = self._stop_s = 0.0
        self._num_samples = 0

    def _sample(self, module: LatentDiffusion) -> Tensor:
        return module.sample(
            self.prompts,
            num_inference_steps=self.num_inference_steps,
            guidance_scale=self.guidance_scale,
            generator=torch.Generator().manual_seed(0),
        )

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Samples the prompts before training, while the first process has the whole model."""
        if not trainer.is_global_zero:
            return
        print(f"1. Sampling {len(self.prompts)} prompts with the model as it is.", flush=True)
        self._before = self._sample(pl_module)
        print("2. Looking at the model, timing its layers, planning the pipeline.", flush=True)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Explains the timeline that the strategy has just printed, and stores the plan."""
        self._start_s = time.perf_counter()
        plan = getattr(trainer.strategy, "plan", None)
        if not trainer.is_global_zero:
            return
        if plan is not None:
            print(
                "F forward, B backward, E frozen encoders, . bubble, -- goes on; one row per rank"
            )
            write_atomically(self.folder / "plan.json", plan.to_json())
        print(f"3. Training for {trainer.max_steps} steps.", flush=True)

    def on_train_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Remembers the loss, without reading it."""
        self._losses.append(outputs["loss"].detach())
        self._num_samples += len(batch["caption"])
        self._stop_s = time.perf_counter()

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Samples the prompts with the trained checkpoint on all ranks, and says where everything is."""
        from matplotlib.figure import Figure

        # That of rank 0: processes of a launcher compose their folders, and the second may have changed.
        checkpoint = trainer.strategy.broadcast(self.folder / "checkpoints" / "final.ckpt")
        rank_zero_only(print)("4. Sampling the same prompts on all processes together.", flush=True)
        settings = (self.prompts, self.num_inference_steps, self.guidance_scale)
        with Predictor.from_pretrained(checkpoint, **self.sampler) as predictor:
            images = predictor(*settings, seed=0)
        if images is None:  # rank 0 narrates
            return
        print("\nSampled with the trained checkpoint, all processes together:")
        print(predictor.report, flush=True)
        after = torch.stack([torch.from_numpy(np.array(p)).permute(2, 0, 1) / 255 for p in images])
        rows = {"font": wanted_images(self.prompts, after.shape[-1])}
        if self._before is not None:
            rows["before"] = self._before
        rows["after"] = after
        labelled_rows(rows).save(self.folder / "before_after.png")
        image_grid(after, columns=min(8, len(after))).save(self.folder / "samples.png")
        losses = torch.stack(self._losses).float().cpu()
        figure = Figure(figsize=(6, 3), layout="constrained")
        axes = figure.subplots()
        axes.plot(losses, color="0.8", label="loss")
        window = max(1, len(losses) // 20)
        smooth = losses.unfold(0, window, 1).mean(1)
        axes.plot(range(window - 1, len(losses)), smooth, label=f"mean of {window} steps")
        axes.set(xlabel="step", ylabel="loss")
        axes.legend()
        figure.savefig(self.folder / "loss.png", dpi=120)
        self._say_goodbye(losses, checkpoint)

    def _say_goodbye(self, losses: Tensor, checkpoint: Path) -> None:
        elapsed_s = self._stop_s - self._start_s
        some = min(50, len(losses))
        print(
            f"""
trained      {len(losses)} steps, {self._num_samples} samples in {elapsed_s:.0f} s \
({self._num_samples / elapsed_s:.1f} samples/s)
loss         {losses[:some].mean():.4f} over the first {some} steps, \
{losses[-some:].mean():.4f} over the last {some}
images       {self.folder / "before_after.png"}   what was asked for, before, after
             {self.folder / "samples.png"}, {self.folder / "loss.png"}
plan         {self.folder / "plan.json"}
checkpoint   {checkpoint}

To try next:
  diffpipe sample sampler={self.sampler["method"]} trainer.devices=2 path={checkpoint} \
'prompts=["digit six, serif italic"]'
  make demo ARGS="model=pretrained_unet data=glyphs sampler=distrifusion"  # a U-Net, sampled in bands of rows
  make demo ARGS="model=glyph_unet data=glyphs sampler=distrifusion trainer.max_steps=900"  # from nothing
  diffpipe train experiment=glyphs strategy.num_stages=2 trainer.max_steps=200 logger=wandb
  diffpipe train --help"""
        )
