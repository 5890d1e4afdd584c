"""What is recorded of how old keys, halos and statistics are, against the closed forms."""

from __future__ import annotations

import math

import pytest
import torch

from lightning_diffpipe.sampling.distrifusion import emulate
from lightning_diffpipe.sampling.pipefusion import PipeFusion
from lightning_diffpipe.sampling.statistics import Freshness
from tests.sampling.distrifusion import models as banded
from tests.sampling.models import STEPS, build, knowing, request_for
from tests.sampling.ranks_in_threads import sample_together

M = 4


def patched(name, num_ranks=1, warmup_steps=1, **options):
    """Freshness of PipeFusion with M patches, of all ranks."""
    tiny = build(name)
    _, samplers = sample_together(
        name, tiny, num_ranks,
        lambda m, links: PipeFusion(
            m, links, num_patches=M, warmup_steps=warmup_steps, record_freshness=True, **options
        ),
    )  # fmt: skip
    return Freshness.joined(sampler.statistics.freshness for sampler in samplers)


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_patch_m_reads_m_plus_1_of_M_fresh_keys(num_ranks):
    freshness = patched("pixart", num_ranks)
    for step, reads in freshness.by("step").items():
        assert set(reads.by("layer")) == {f"transformer_blocks.{i}" for i in range(4)}
        for layer in reads.by("layer").values():
            shares = [patch.fresh_share for patch in layer.by("reader").values()]
            assert shares == [1.0 if step < 1 else (m + 1) / M for m in range(M)]
            assert layer.fresh_share == (1.0 if step < 1 else (M + 1) / (2 * M))
    assert set(freshness.ages) == {0, 1}, "nothing may be older than one step"
    # The synchronous step is computed in two microbatches, but counts once.
    assert freshness.fresh_share == (1 + (STEPS - 1) * (M + 1) / (2 * M)) / STEPS


def test_texts_are_fresh_for_every_patch():
    """Seven tokens of text are computed with patch 0, before the others read them."""
    for reader, reads in patched("sd3").of(step=2).by("reader").items():
        assert {read.fresh_share for read in reads.reads} == {(7 + 96 * (reader + 1) / M) / 103}


def test_without_a_synchronous_step_later_patches_are_unseen():
    freshness = patched("pixart", warmup_steps=0)
    for m, reads in freshness.of(step=0).by("reader").items():
        assert reads.fresh_share == (m + 1) / M
        assert set(reads.ages) == ({0, None} if m < M - 1 else {0})
    assert set(freshness.of(step=1).ages) == {0, 1}


def bands_of(name, num_bands, **options):
    tiny = banded.build(name)
    request = banded.request_for(name, tiny, num_steps=STEPS)
    latents, samplers = emulate(request, num_bands, record_freshness=True, verify=False, **options)
    return latents, Freshness.joined(sampler.statistics.freshness for sampler in samplers)


@pytest.mark.slow
@pytest.mark.parametrize("num_bands", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_a_band_reads_its_own_share_fresh(num_bands):
    """Keys and statistics: 1 / N, of even bands and of the mean over uneven ones. Halos: all but the border."""
    _, freshness = bands_of("sd", num_bands, warmup_steps=1)
    rows = {2: [16, 16], 3: [12, 12, 8]}[num_bands]
    for step, reads in freshness.by("step").items():
        by_kind = reads.by("kind")
        assert set(by_kind) == {"halo", "statistics", "key_value"}
        for kind in ("key_value", "statistics"):
            for layer in by_kind[kind].by("layer").values():
                shares = [band.fresh_share for band in layer.by("reader").values()]
                assert shares == [1.0 if step < 1 else size / 32 for size in rows]
                assert math.isclose(layer.fresh_share, 1.0 if step < 1 else 1 / num_bands)
    displaced = freshness.of(step=2)
    first, conv = (displaced.of(layer=name, reader=0) for name in ("conv_in", "conv_out"))
    assert first.ages == {0: rows[0] + 1}, "every rank has the whole latents"
    assert conv.ages == {0: rows[0], 1: 1}
    assert displaced.of(layer="down_blocks.0.attentions.0.transformer_blocks.0.attn1").reads
    assert set(freshness.ages) == {0, 1}


@pytest.mark.parametrize(
    ("options", "share", "age"),
    [
        ({"mode": "synchronous"}, 1.0, 0),
        ({"mode": "naive", "warmup_steps": 0}, 0.5, None),
        ({"warmup_steps": STEPS}, 1.0, 0),
    ],
)
def test_other_modes_of_bands(options, share, age):
    _, freshness = bands_of("pixart", 2, **options)
    assert {read.fresh_share for read in freshness.of(kind="key_value").reads} == {share}
    assert set(freshness.ages) == {0, age}


@pytest.mark.slow
def test_rules_of_group_norm_are_distinguished():
    for rule, ages in {"separate": {0, None}, "synchronous": {0}, "stale": {0, 1}}.items():
        _, freshness = bands_of("unet2d", 2, warmup_steps=1, group_norm=rule)
        assert set(freshness.of(kind="statistics").ages) == ages, rule


@pytest.mark.slow
def test_nothing_is_recorded_unasked_and_recording_changes_nothing():
    tiny = banded.build("sd3")
    request = banded.request_for("sd3", tiny, num_steps=STEPS)
    plain, samplers = emulate(request, 2, warmup_steps=1, verify=False)
    assert samplers[0].statistics.freshness is None
    assert torch.equal(bands_of("sd3", 2, warmup_steps=1)[0], plain)
    sampler = knowing(PipeFusion(tiny.model, num_patches=M), "sd3", tiny)
    sampler.sample(request_for("sd3", tiny=tiny))
    assert sampler.statistics.freshness is None
