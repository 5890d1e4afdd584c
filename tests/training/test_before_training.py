"""What fits measure; why there is no batch to plan with. What the first one is: tests/distributed/test_data.py."""

import logging
import re
from unittest import mock

import pytest
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader

from lightning_diffpipe.profiling.measure import measure_profile
from lightning_diffpipe.training import preparation
from lightning_diffpipe.training.before_training import why_empty
from tests.distributed.scenarios import fit_module
from tests.distributed.tiny import Data, Stream, TinyDiffusion


@pytest.mark.parametrize("shuffle", [True, False])
def test_fewer_samples_than_a_batch_make_none_where_the_rest_is_dropped(shuffle):
    """History: a plan was made for ten samples, nothing was trained, and the run ended without an error."""
    loader = DataLoader(range(10), 16, shuffle=shuffle, drop_last=True)
    for loaders in (loader, [loader], CombinedLoader({"a": loader})):
        assert why_empty(loaders) == (
            "10 training samples make no batch of 16, and smaller ones are left out (drop_last=True); set the "
            "batch size (data.batch_size) to 10 or less"
        )
    assert (
        why_empty(DataLoader(Stream(torch.arange(5.0)), 2))
        == "the training data loader is empty: it yields no batch"
    )


@pytest.mark.slow
def test_a_second_fit_takes_the_times_of_the_first_and_says_what_took_how_long(caplog, monkeypatch):
    caplog.set_level(logging.INFO, "lightning_diffpipe")
    monkeypatch.setattr(preparation, "_TOLD_S", 0.0)
    module, counts = TinyDiffusion().double(), []
    timed = mock.Mock(side_effect=measure_profile)
    with mock.patch("lightning_diffpipe.training.plan_source.measure_profile", timed):
        for batch_size in (4, 4, 8):
            fit_module(module, 1, Data(batch_size=batch_size), {"profile": "measure"}, max_steps=1)
            counts.append(timed.call_count)
    assert counts == [1, 1, 2]
    lines = [r.getMessage() for r in caplog.records if r.getMessage().startswith("ready in")]
    assert len(lines) == 3
    whole, *parts = map(float, re.findall(r"([0-9.]+) s", lines[0]))
    assert all(part in lines[0] for part in ("probing the step", "profiling layers"))
    assert whole == pytest.approx(sum(parts), abs=0.5)
