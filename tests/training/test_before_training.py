"""What fits measure; why there is no batch to plan with. What the first one is: tests/distributed/test_data.py."""

import logging
import re
from unittest import mock

import pytest
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch import nn
from torch.utils.data import DataLoader

from lightning_diffpipe.profiling.measure import measure_profile
from lightning_diffpipe.training import preparation
from lightning_diffpipe.training.before_training import autocast_on_host, why_empty
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


def test_autocast_of_gpus_holds_on_the_host_while_a_step_for_one_is_probed_there(monkeypatch):
    """History: a step that relied on the types it would train in failed before training."""
    monkeypatch.setattr(torch.cuda.amp.common, "amp_definitely_not_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: True)
    layer, x = torch.nn.Linear(2, 2), torch.randn(1, 2)
    with autocast_on_host():
        with torch.autocast("cuda", torch.bfloat16):
            assert layer(x).dtype == torch.bfloat16
            with torch.autocast("cuda", enabled=False):
                assert layer(x).dtype == torch.float32
            with pytest.raises(ValueError, match="inside"), torch.autocast("cuda", torch.float16):
                raise ValueError("inside")
            assert layer(x).dtype == torch.bfloat16
        assert layer(x).dtype == torch.float32
    with torch.autocast("cuda", torch.bfloat16):
        assert layer(x).dtype == torch.float32


class Table(nn.Embedding):
    """A frozen layer whose results have one type, whatever that of its weights is."""

    def forward(self, indices):
        return super().forward(indices).double()


@pytest.mark.slow
def test_a_second_fit_takes_the_times_of_the_first_and_says_what_took_how_long(caplog, monkeypatch):
    caplog.set_level(logging.INFO, "lightning_diffpipe")
    monkeypatch.setattr(preparation, "_TOLD_S", 0.0)
    module, counts = TinyDiffusion().double(), []
    module.text = Table.from_pretrained(module.text.weight)
    timed = mock.Mock(side_effect=measure_profile)
    with mock.patch("lightning_diffpipe.training.plan_source.measure_profile", timed):
        for batch_size in (4, 4, 8):
            fit_module(module, 1, Data(batch_size=batch_size), {"profile": "measure"}, max_steps=1)
            counts.append(timed.call_count)
        module.text.float()  # which no graph shows
        fit_module(module, 1, Data(batch_size=8), {"profile": "measure"}, max_steps=1)
    assert [*counts, timed.call_count] == [1, 1, 2, 3]
    lines = [r.getMessage() for r in caplog.records if r.getMessage().startswith("ready in")]
    assert len(lines) == 4
    whole, *parts = map(float, re.findall(r"([0-9.]+) s", lines[0]))
    assert all(part in lines[0] for part in ("probing the step", "profiling layers"))
    assert whole == pytest.approx(sum(parts), abs=0.5)
