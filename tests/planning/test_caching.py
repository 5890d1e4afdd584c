"""Cache or fill: what is predicted follows from the plans, and the advice from what is predicted."""

from dataclasses import replace

import pytest

from lightning_diffpipe.errors import ConfigurationError
from lightning_diffpipe.planning.caching import advise
from lightning_diffpipe.planning.cluster import Cluster
from lightning_diffpipe.planning.options import PlanOptions
from lightning_diffpipe.planning.profile import EncoderLayerProfile, EncoderProfile, Seconds
from lightning_diffpipe.planning.search import find_plan

from .profiles import equal_profile

OPTIONS = PlanOptions(global_batch_size=8, num_stages=2, num_microbatches=4)
TWO = Cluster(2)


def profile_of(frozen_share, output_bytes=1000):
    profile = equal_profile(8, forward_s=0.01, backward_s=0.02)
    frozen_s = frozen_share * 8 * 0.03
    layer = EncoderLayerProfile("whole", Seconds.per_sample(frozen_s), 0, output_bytes)
    encoder = EncoderProfile("vae", (layer,))
    return replace(profile, encoders=(encoder,))


def test_both_ways_are_what_the_planner_promises():
    profile = profile_of(0.9)
    advice = advise(profile, TWO, OPTIONS, num_samples=800, num_passes=10)
    filled = find_plan(profile, TWO, replace(OPTIONS, filling="auto"))
    bare = find_plan(replace(profile, encoders=()), TWO, OPTIONS)
    assert advice.filled_step_s == pytest.approx(filled.planned.iteration_s)
    assert advice.cached_step_s == pytest.approx(bare.planned.iteration_s + 4 * 1000 / 200e6)
    assert advice.disk_bytes == 800_000


def test_frozen_work_that_fits_the_bubbles_is_not_worth_a_disk():
    """With two stages and four microbatches a fifth of the time is bubble; 5% of frozen work is free."""
    advice = advise(profile_of(0.05), TWO, OPTIONS, num_samples=800, num_passes=100)
    assert not advice.use_cache


def test_much_frozen_work_on_a_small_fixed_set_is_cached():
    advice = advise(profile_of(0.9), TWO, OPTIONS, num_samples=800, num_passes=10)
    assert advice.use_cache
    assert advice.saved_share > 0.2
    assert 1 < advice.break_even_passes < 1.1


@pytest.mark.parametrize(
    ("passes", "disk_bytes_per_s"), [(1, 200e6), (10, 2e3)], ids=["one pass", "slow disk"]
)
def test_one_pass_or_a_slow_disk_is_filled(passes, disk_bytes_per_s):
    advice = advise(profile_of(0.9), TWO, OPTIONS, 800, passes, disk_bytes_per_s=disk_bytes_per_s)
    assert not advice.use_cache


def test_encoders_that_follow_noise_stay():
    profile = profile_of(0.4)
    locked = EncoderProfile("locked", profile.encoders[0].layers, needs=("vae",))
    profile = replace(profile, encoders=(*profile.encoders, locked))
    advice = advise(profile, TWO, OPTIONS, 800, 10, cacheable={"vae"})
    everything = advise(profile, TWO, OPTIONS, 800, 10)
    assert advice.cached == ("vae",)
    assert advice.cached_step_s > everything.cached_step_s
    nothing = advise(profile, TWO, OPTIONS, 800, 10, cacheable=set())
    assert not nothing.use_cache


@pytest.mark.parametrize(
    ("bad", "named"),
    [({"cacheable": {"clip"}}, "clip"), ({"num_passes": 0}, "num_passes"),
     ({"disk_bytes_per_s": 0}, "disk_bytes_per_s")],
)  # fmt: skip
def test_refused(bad, named):
    given = {"num_samples": 8, "num_passes": 1, **bad}
    with pytest.raises(ConfigurationError, match=named):
        advise(profile_of(0.1), TWO, OPTIONS, **given)
