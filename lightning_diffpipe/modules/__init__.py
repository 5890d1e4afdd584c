"""Ready-made LightningModules, plain ones: nothing in them knows about pipelines."""

from lightning_diffpipe.modules.adapters import Lora
from lightning_diffpipe.modules.cascade import CascadedDiffusion
from lightning_diffpipe.modules.controlnet import ControlNetDiffusion
from lightning_diffpipe.modules.latent_diffusion import LatentDiffusion
from lightning_diffpipe.modules.noise import Noise
from lightning_diffpipe.modules.optimization import DAdaptAdam, Muon, Optimization, Prodigy
from lightning_diffpipe.modules.pipeline_diffusion import PipelineDiffusion

__all__ = [
    "CascadedDiffusion",
    "ControlNetDiffusion",
    "DAdaptAdam",
    "LatentDiffusion",
    "Lora",
    "Muon",
    "Noise",
    "Optimization",
    "PipelineDiffusion",
    "Prodigy",
]
