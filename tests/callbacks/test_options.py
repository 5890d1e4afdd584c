"""Options of callbacks that cannot be."""

from types import SimpleNamespace

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
        (BubbleFilling, {"mode": "both"}, "mode='both'; choose None, opportunistic or planned"),
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


def test_the_latest_adapters_stay_also_of_a_run_that_goes_on(tmp_path):
    module = SimpleNamespace(save_lora=lambda folder, names, state: folder.mkdir())
    strategy = SimpleNamespace(lightning_module_state_dict=dict)
    others = {"step=000099", "step=000002 good"}  # another run's, and a copy
    for name in others:
        (tmp_path / name).mkdir()
    for steps in (range(7), range(6, 11)):
        callback = SaveLora(tmp_path, every_n_steps=2, keep_last=2)
        callback._last_step = steps[0]
        for step in steps:
            trainer = SimpleNamespace(
                global_step=step, callbacks=[], strategy=strategy, is_global_zero=True
            )
            callback.on_train_batch_end(trainer, module)
            kept = {path.name for path in tmp_path.iterdir()} - others
            latest = list(range(2, step + 1, 2))[-2:]
            assert kept == {f"step={n:06}" for n in latest}
