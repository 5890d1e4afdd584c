"""Names and types of the verbs' own settings, as structured configs in Hydra's store.

Each config of a verb begins with its one (`defaults: [settings_train, ...]`): Hydra refuses values of other types.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf


@dataclass
class Process:
    """What holds for a whole process."""

    seed: int | None
    offline: bool
    num_threads: int | None


@dataclass
class Train(Process):
    """Of `diffpipe train`."""

    name: str | None
    output_dir: str
    ckpt_path: str | None
    save_to: str | None
    save_lora: str | None
    save_dtype: str


@dataclass
class Sample(Process):
    """Of `diffpipe sample`."""

    path: str
    num_inference_steps: int
    guidance_scale: float | None
    height: int | None
    width: int | None
    pipeline_class: str | None
    output_type: str
    video_format: str
    fps: int
    vae_tiling: bool
    vae_slicing: bool
    report: bool
    dtype: str
    base: str | None
    variant: str | None
    timeout_s: float
    progress: bool
    output: str | None


@dataclass
class Profile(Process):
    """Of `diffpipe profile`."""

    output: str | None
    cluster_output: str
    name: str | None
    sample_counts: list[int] | None
    repeats: int | None
    budget_s: float
    max_share: float
    precision: str
    device: str
    progress: bool


@dataclass
class Plan:
    """Of `diffpipe plan`."""

    profile: str | None
    output: str | None
    explain: bool
    explain_s: float


@dataclass
class Paper:
    """Of the group `model`, where it is for `diffpipe plan`: arguments of `ModelOnPaper`."""

    path: str | None
    device: str
    dtype: str
    resolution: int | None
    num_frames: int | None
    call: Any


@dataclass
class Show:
    """Of `diffpipe show`."""

    plan: str
    profile: str | None
    output: str | None
    max_columns: int
    samples: int


@dataclass
class Diff:
    """Of `diffpipe diff`."""

    before: str
    after: str


for _settings in (Train, Sample, Profile, Plan, Show, Diff):
    _node = OmegaConf.structured(_settings)
    OmegaConf.set_struct(_node, False)  # groups stand beside them
    ConfigStore.instance().store(name=f"settings_{_settings.__name__.lower()}", node=_node)
ConfigStore.instance().store(group="model", name="settings_on_paper", node=Paper)
