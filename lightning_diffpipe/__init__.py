"""Pipelines for diffusion models: a Lightning strategy that keeps every rank busy.

    import lightning as L
    import lightning_diffpipe                      # registers "diffpipe"

    trainer = L.Trainer(accelerator="gpu", devices=4, strategy="diffpipe")
    trainer.fit(module, datamodule)                # an ordinary LightningModule

The journey of a batch: `training_step` is probed once (`graph`), its layers are timed (`profiling`) and
cut into stages with a schedule (`planning`); then for every batch this rank's program of instructions
runs microbatch by microbatch (`runtime`), and Lightning steps the optimizer as always (`strategy`).
`docs/architecture.md` walks the same way with file names.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from lightning.pytorch.strategies import StrategyRegistry

from lightning_diffpipe.planning.plan import PipelinePlan
from lightning_diffpipe.planning.profile import ModelProfile
from lightning_diffpipe.planning.search import find_plan
from lightning_diffpipe.planning.simulator import simulate
from lightning_diffpipe.strategy import DiffPipeStrategy

if TYPE_CHECKING:
    from lightning_diffpipe.callbacks import EMA, BubbleFilling, PipelineMonitor
    from lightning_diffpipe.modules import ControlNetDiffusion, LatentDiffusion
    from lightning_diffpipe.predictor import Predictor
    from lightning_diffpipe.profiling import profile

__all__ = [
    "EMA",
    "BubbleFilling",
    "ControlNetDiffusion",
    "DiffPipeStrategy",
    "LatentDiffusion",
    "ModelProfile",
    "PipelineMonitor",
    "PipelinePlan",
    "Predictor",
    "find_plan",
    "profile",
    "simulate",
]

# Imported when first used: diffusers and transformers take seconds to import.
_LAZY = {
    "BubbleFilling": "lightning_diffpipe.callbacks",
    "EMA": "lightning_diffpipe.callbacks",
    "PipelineMonitor": "lightning_diffpipe.callbacks",
    "ControlNetDiffusion": "lightning_diffpipe.modules",
    "LatentDiffusion": "lightning_diffpipe.modules",
    "Predictor": "lightning_diffpipe.predictor",
    "profile": "lightning_diffpipe.profiling",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


if "diffpipe" not in StrategyRegistry:
    StrategyRegistry.register(
        "diffpipe",
        DiffPipeStrategy,
        description="Trains diffusion models as a pipeline with frozen encoders shared by all ranks",
    )
