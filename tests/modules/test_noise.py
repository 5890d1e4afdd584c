import diffusers
import pytest
import torch

from lightning_diffpipe.errors import ConfigurationError
from lightning_diffpipe.modules.noise import FlowMatching, noise_schedule_of


def normal(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("prediction", ["epsilon", "v_prediction"])
def test_noisy_latents_and_targets_equal_those_of_diffusers(prediction):
    scheduler = diffusers.DDPMScheduler(prediction_type=prediction)
    clean = normal(8, 4, 3, 5)
    noisy, timesteps, target = noise_schedule_of(scheduler).corrupt(clean)
    alpha = scheduler.alphas_cumprod[timesteps].view(-1, 1, 1, 1)
    noise = (noisy - alpha.sqrt() * clean) / (1 - alpha).sqrt()
    torch.testing.assert_close(noisy, scheduler.add_noise(clean, noise, timesteps))
    expected = noise if prediction == "epsilon" else scheduler.get_velocity(clean, noise, timesteps)
    torch.testing.assert_close(target, expected, atol=1e-4, rtol=1e-4)


def test_a_flow_leads_straight_from_data_to_noise():
    clean = normal(8, 4, 3, 5)
    noisy, timesteps, target = FlowMatching().corrupt(clean)
    t = (timesteps / 1000).view(-1, 1, 1, 1)
    torch.testing.assert_close(noisy - t * target, clean)
    noise = clean + target
    torch.testing.assert_close(noisy, (1 - t) * clean + t * noise)
    assert ((timesteps > 0) & (timesteps < 1000)).all()


def test_a_perfect_flow_is_sampled_exactly_by_diffusers_scheduler():
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler()
    clean, noise = normal(2, 4, 3, 5), normal(2, 4, 3, 5).flip(0)
    scheduler.set_timesteps(5)
    latents = noise
    for timestep in scheduler.timesteps:
        latents = scheduler.step(noise - clean, timestep, latents).prev_sample
    torch.testing.assert_close(latents, clean)


@pytest.mark.parametrize("prediction", ["flow", "epsilon"])
def test_the_noise_schedule_is_fp32_also_when_the_default_is_bf16(prediction):
    scheduler = (
        diffusers.FlowMatchEulerDiscreteScheduler()
        if prediction == "flow"
        else diffusers.DDPMScheduler()
    )
    schedule = noise_schedule_of(scheduler)
    torch.set_default_dtype(torch.bfloat16)
    try:
        corrupted = schedule.corrupt(normal(4, 4, 3, 5).float())
    finally:
        torch.set_default_dtype(torch.float32)
    assert corrupted.noisy.dtype == corrupted.target.dtype == torch.float32


def test_a_generator_fixes_times_and_noise():
    schedule, clean = FlowMatching(), normal(4, 4, 3, 5)
    first, second = (schedule.corrupt(clean, torch.Generator().manual_seed(3)) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_other_predictions_are_refused_with_the_known_ones():
    with pytest.raises(ConfigurationError, match="prediction_type='sample'; use one of flow"):
        noise_schedule_of(diffusers.DDPMScheduler(prediction_type="sample"))
