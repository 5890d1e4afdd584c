"""What the choice of a method is based on, measured on one rank."""

from __future__ import annotations

import diffusers
import pytest

from lightning_diffpipe.errors import ConfigurationError
from lightning_diffpipe.graph.placement import place_parameters
from lightning_diffpipe.planning.sampling_choice import MIN_STEPS
from lightning_diffpipe.sampling.auto import profile_request
from lightning_diffpipe.sampling.distrifusion import emulate
from tests.sampling.distrifusion import models as bands
from tests.sampling.models import B, build, request_for, too_large


@pytest.mark.slow
def test_a_profile_counts_attention_however_it_is_called():
    """Flux gives query, key and value by name, which once ended in a TypeError."""
    profile = profile_request(request_for("flux", num_steps=MIN_STEPS), B, 1)
    assert (profile.num_attention, profile.num_blocks) == (5, 5)
    key = B * 2 * (96 + 7) * 16 * 8  # samples, heads, tokens, head size, bytes
    assert (profile.key_value_bytes, profile.sequence_bytes) == (5 * 2 * key, 5 * 4 * key)
    assert (profile.num_heads, profile.num_key_heads) == (2, 2)
    assert 0 <= profile.call_s <= profile.step_s
    assert profile.refusal == ""


def test_a_scheduler_that_looks_at_all_rows_keeps_patches_out_of_the_choice():
    scheduler = diffusers.DDPMScheduler(thresholding=True, sample_max_value=100.0)
    scheduler.set_timesteps(MIN_STEPS)
    profile = profile_request(request_for("dit", scheduler, tiny=build("dit")), 2 * B, 1)
    assert profile.num_blocks == 0
    assert "DDPMScheduler looks at all rows" in profile.refusal


def test_a_scheduler_that_cannot_be_tried_keeps_patches_out_of_the_choice():
    """History: its error ended the request, though one process could have drawn it."""
    scheduler = diffusers.DDPMScheduler(variance_type="learned_range")  # wants twice the channels
    scheduler.set_timesteps(MIN_STEPS)
    request = request_for("dit", scheduler, tiny=build("dit"))
    said = (
        "DDPMScheduler fails when it steps a prediction of the latents' shape, in parts or at once"
    )
    assert profile_request(request, 2 * B, 1).refusal == said


@pytest.mark.slow
def test_patches_that_do_not_fit_beside_each_other_stay_in_the_choice():
    """One rank keeps keys of all blocks there. History: PipeFusion was left out, as if the model had refused."""
    request = request_for("sd3", num_steps=MIN_STEPS, tiny=too_large(num_tokens=96))
    profile = profile_request(request, B, 1)
    assert (profile.refusal, profile.num_blocks, profile.call_s) == ("", 4, 0.0)


def test_a_step_that_does_not_fit_is_known_to_all_ranks():
    """What is raised for rank 0 alone has to be an error that ranks share."""
    request = request_for("sd3", num_steps=MIN_STEPS, tiny=too_large())
    with pytest.raises(ConfigurationError, match=r"method=auto measures .* name a method and its"):
        profile_request(request, B, 1)


@pytest.mark.slow
def test_weights_that_are_yet_to_be_loaded_are_counted():
    request = request_for("flux", num_steps=MIN_STEPS)
    held = profile_request(request, B, 1)
    assert (held.weight_bytes, held.block_bytes) == (0, 0)
    weights = sum(p.numel() * p.element_size() for p in request.model.parameters())
    place_parameters(request.model, (), "cpu")
    profile = profile_request(request, B, 1)
    assert profile.weight_bytes == weights
    assert 0.5 * weights < profile.block_bytes < weights
    assert profile.activation_bytes == 0  # hosts do not count it


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sd", "unet2d, padding 0", "sd, two calls", "pixart"])
def test_a_profile_counts_what_bands_tell_each_other(name):
    """History: messages of convolutions were not counted, of which a U-Net has more than of any other kind."""
    request = bands.request_for(name, num_steps=1)
    profile = profile_request(request, B, 1)
    _, samplers = emulate(request, 2, mode="synchronous", verify=False)
    first, second = (sampler.statistics.traffic.messages_sent for sampler in samplers)
    sent = first | second  # the most of each kind: padding below asks the lower band only
    counted = (profile.num_attention, profile.num_norms, profile.num_halos)
    assert counted == (sent["key_value"], sent["statistics"], sent["halo"])
    assert (profile.halo_bytes > 0) == (profile.num_halos > 0) == (name != "pixart")
