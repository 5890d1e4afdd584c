"""Pipelines of diffusers are trained and sampled by their own call, as many as can be built.

Each is built in tiny. Its step runs plainly, and cut into two stages that are emulated one after the other in
double precision; it is saved, opened by diffusers alone, and both draw. The Predictor draws with it in one process
and with two ranks, by each method, and is compared with diffusers alone. `docs/models.md` prints the same facts;
after a change run `python -m tests.zoo.write_table Pipeline`.
"""

import math

import diffusers
import pytest

from lightning_diffpipe import LatentDiffusion
from lightning_diffpipe.errors import ConfigurationError
from tests.zoo.pipelines import PIPELINES
from tests.zoo.sample_pipelines import measure as sample
from tests.zoo.train_pipelines import measure as train
from tests.zoo.train_pipelines import refused_by_class
from tests.zoo.write_table import (
    PATH,
    pipeline_row,
    refused_pipelines,
    sampling_facts,
    training_facts,
)

FAST = ("FluxPipeline", "DDPMPipeline", "StableDiffusionPanoramaPipeline", "ErnieImagePipeline")
"""Packed, of pixels, refused, and told one time."""

COMMON = ("StableDiffusionPipeline", "WanPipeline")
"""A U-Net, and a video; files of tests for training and sampling try their relatives."""

NAMES = [
    pytest.param(
        name,
        marks=()
        if name in FAST
        else [pytest.mark.slow, *[pytest.mark.table] * (name not in COMMON)],
    )
    for name in PIPELINES
]


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_pipeline_is_trained_by_its_own_call_or_refused_by_name(name, tmp_path):
    trained = train(name, tmp_path)
    if trained.refusal is None:
        assert math.isfinite(trained.loss)
        assert trained.loss_error <= 1e-12
        assert trained.gradient_error <= 1e-9, f"{trained.worst} differs"
        assert trained.same, "the saved pipeline draws something else"
    assert training_facts(pipeline_row(name, trained, {})) == training_facts(written_row(name))


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_pipeline_is_sampled_by_its_own_call_or_refused(name, tmp_path):
    """If it fails because more can be sampled now: run python -m tests.zoo.write_table Pipeline."""
    assert list(sample(name, tmp_path).values()) == sampling_facts(written_row(name))


def written_row(name):
    [row] = [line for line in PATH.read_text().splitlines() if line.startswith(f"| `{name}` |")]
    return row


def test_the_table_of_pipelines_is_large_enough():
    lines = PATH.read_text().splitlines()
    rows = [line for line in lines for name in PIPELINES if line.startswith(f"| `{name}` |")]
    assert len(rows) == len(PIPELINES)
    assert sum("| refused: " not in row for row in rows) >= 60
    assert refused_pipelines() in PATH.read_text(), "run python -m tests.zoo.write_table Pipeline"


@pytest.mark.parametrize("name", refused_by_class())
def test_pipelines_that_draw_from_images_are_refused_before_weights_are_read(name, tmp_path):
    (tmp_path / "model_index.json").write_text(f'{{"_class_name": "{name}"}}')
    assert hasattr(diffusers, name)
    with pytest.raises(ConfigurationError, match=f"{name} samples from "):
        LatentDiffusion.from_pretrained(tmp_path)
