"""From `fit` to the end of the first step: seconds, and how often the user's step runs before, for what.

Flux's depth (19 + 38 blocks) at a tiny width with adapters, trained by its pipeline's own call, and the U-Net of
the built-in glyphs; by plain Lightning, and by the strategy on one and two ranks. A run of `training_step` belongs
to the innermost function of `PURPOSES` that called it.

    python benchmarks/host_time/main.py --json out.json
    python benchmarks/host_time/main.py --model flux --ranks 2 --profile folder   # cProfile, by rank
"""

from __future__ import annotations

import argparse
import cProfile
import functools
import logging
import os
import sys
import tempfile
import time
import warnings
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch.utils.data import DataLoader

sys.path.insert(0, str(Path(__file__).parents[2]))
from benchmarks.harness import main, on_ranks
from benchmarks.memory.main import write_pipeline
from lightning_diffpipe import DiffPipeStrategy, LatentDiffusion
from lightning_diffpipe.data.glyphs import GlyphDataset
from lightning_diffpipe.modules import Lora, PipelineDiffusion
from lightning_diffpipe.modules.parts import built_in

PURPOSES = {
    "_call_tree": "layers by cost",
    "_followed": "values followed",
    "_dims_of_more_samples": "one sample more",
    "with_observed_strides": "strides",
    "survey": "coins",
    "find_chains": "chains",
    "_rounds": "timing",
    "repeatable": "storable results",
    "mixing": "samples apart",
    "difference": "mean of the loss",
    "_known_sequences": "known call sequences",
    "of": "calls of a microbatch",
    "run_step": "first step",
}
"""By the function that runs the step: what for."""


class Said(logging.Handler):
    """Keeps what the strategy says about the time before training."""

    text = ""

    def emit(self, record: logging.LogRecord) -> None:
        """Keeps the line."""
        if "ready in" in record.getMessage():
            self.text = record.getMessage()


class Counted(L.Callback):
    """Counts runs of a module's step until the first one of training has ended, and the seconds that they take."""

    def __init__(self, module: L.LightningModule) -> None:
        self.runs: Counter[str] = Counter()
        self.run_s: defaultdict[str, float] = defaultdict(float)
        self.started_s, self.seconds = time.perf_counter(), 0.0
        original = type(module).training_step

        @functools.wraps(original)
        def counted(*args: Any, **kwargs: Any) -> Any:
            what, begun_s = self._purpose(), time.perf_counter()
            try:
                return original(*args, **kwargs)
            finally:
                if not self.seconds:
                    self.runs[what] += 1
                    self.run_s[what] += time.perf_counter() - begun_s

        type(module).training_step = counted

    def _purpose(self) -> str:
        frame = sys._getframe(2)
        while frame.f_back is not None:
            own = "lightning_diffpipe" in frame.f_code.co_filename
            if own and (what := PURPOSES.get(frame.f_code.co_name)):
                return what
            frame = frame.f_back
        return "training"

    def on_train_batch_end(self, *arguments: Any) -> None:
        """Stops the clock."""
        self.seconds = self.seconds or time.perf_counter() - self.started_s


def flux(folder: str) -> tuple[L.LightningModule, Any]:
    """Flux's depth at a tiny width, with adapters; images with captions."""
    module = PipelineDiffusion.from_pretrained(
        folder, lora=Lora(rank=4), call={"max_sequence_length": 16}
    )
    images = torch.randn(32, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    return module, [{"image": x, "caption": f"a cat {i}"} for i, x in enumerate(images)]


def glyphs(folder: str) -> tuple[L.LightningModule, Any]:
    """The built-in U-Net and the data that it was made for."""
    return LatentDiffusion.from_pretrained(built_in("glyphs")), GlyphDataset("train", 64)


MODELS = {"flux": flux, "glyphs": glyphs}


def measure(rank: int, name: str, ranks: int, folder: str, profile: str | None) -> dict[str, Any]:
    """Fits for two steps; ranks = 0 is plain Lightning."""
    warnings.simplefilter("ignore")
    said = Said()
    logging.getLogger("lightning_diffpipe").setLevel(logging.INFO)
    logging.getLogger("lightning_diffpipe.training.preparation").addHandler(said)
    world_size = max(ranks, 1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    torch.manual_seed(0)
    module, data = MODELS[name](folder)
    counted = Counted(module)
    strategy: Any = "auto" if not ranks else DiffPipeStrategy(num_stages=ranks, num_microbatches=4)
    trainer = L.Trainer(
        accelerator="cpu", devices=world_size, max_steps=2, logger=False, enable_progress_bar=False,
        enable_model_summary=False, enable_checkpointing=False, strategy=strategy, callbacks=[counted],
    )  # fmt: skip
    tracer = cProfile.Profile() if profile else None
    counted.started_s = time.perf_counter()
    if tracer:
        tracer.enable()
    trainer.fit(module, DataLoader(data, 8, shuffle=True))
    if tracer:
        tracer.disable()
        tracer.dump_stats(f"{profile}/{name}_{ranks}_{rank}.pstats")
    parts = (f"{what} {n} ({counted.run_s[what]:.1f} s)" for what, n in counted.runs.items())
    return {
        "model": name,
        "ranks": ranks or "plain Lightning",
        "to the end of the first step, s": counted.seconds,
        "runs of the step": counted.runs.total(),
        "of which": ", ".join(parts),
        "before training": said.text,
    }


def run(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """One row for each model and number of ranks."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ.update(OMP_NUM_THREADS="1")
        write_pipeline(Path(folder), "tiny", torch.float32)
        return [
            on_ranks(max(ranks, 1), measure, name, ranks, folder, arguments.profile)
            for name in arguments.model
            for ranks in arguments.ranks
        ]


def options(parser: argparse.ArgumentParser) -> None:
    """Adds what is measured."""
    parser.add_argument("--model", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--ranks", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--profile", help="folder for files of cProfile")


if __name__ == "__main__":
    main(run, __doc__, options)
