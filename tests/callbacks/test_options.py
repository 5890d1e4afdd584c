"""Options of callbacks that cannot be."""

import pytest

from lightning_diffpipe.callbacks import (
    EMA,
    BubbleFilling,
    EncodingCache,
    PipelineMonitor,
    SampleImages,
    SaveLora,
)
from lightning_diffpipe.errors import ConfigurationError


@pytest.mark.parametrize(
    ("callback", "options", "message"),
    [
        (BubbleFilling, {"mode": "both"}, "mode must be one of None, opportunistic, planned; got 'both'"),
        (BubbleFilling, {"lookahead_batches": 0}, "lookahead_batches must be a whole number >= 1 and <= 2; got 0"),
        (BubbleFilling, {"lookahead_batches": 3}, "lookahead_batches must be a whole number >= 1 and <= 2; got 3"),
        (EMA, {"decay": -0.1}, r"decay must be in \[0, 1\)"),
        (EMA, {"decay": 1.0}, r"decay must be in \[0, 1\)"),
        (EncodingCache, {"folder": "any", "max_bytes": -1}, "max_bytes must be a number >= 0; got -1"),
        (PipelineMonitor, {"every_n_steps": 0}, "every_n_steps must be a whole number >= 1; got 0"),
        (PipelineMonitor, {"images_share": 2.0}, "images_share must be a number >= 0 and <= 1; got 2.0"),
        (SampleImages, {"prompts": "a cat"}, "prompts must be a list of texts, or None; got 'a cat'"),
        (SampleImages, {"prompts": []}, r"prompts must be a list of texts, or None; got \[\]"),
        (SampleImages, {"every_n_steps": 0}, "every_n_steps must be a whole number >= 1; got 0"),
        (SampleImages, {"num_inference_steps": 0}, "num_inference_steps must be a whole number >= 1; got 0"),
        (SampleImages, {"seed": None}, "seed must be a whole number; got None"),
        (SaveLora, {"folder": "any", "keep_last": 0}, "keep_last must be a whole number >= 1; got 0"),
    ],
)  # fmt: skip
def test_options_that_cannot_be_are_refused(callback, options, message):
    with pytest.raises(ConfigurationError, match=message):
        callback(**options)
