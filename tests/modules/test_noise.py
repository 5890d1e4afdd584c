import diffusers
import pytest
import torch
from diffusers.training_utils import compute_snr

from lightning_diffpipe.errors import ConfigurationError
from lightning_diffpipe.modules.noise import FlowMatching, Noise, noise_schedule_of


def normal(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("prediction", ["epsilon", "v_prediction"])
def test_noisy_latents_and_targets_equal_those_of_diffusers(prediction):
    scheduler = diffusers.DDPMScheduler(prediction_type=prediction)
    clean = normal(8, 4, 3, 5)
    noisy, timesteps, target, _ = noise_schedule_of(scheduler).corrupt(clean)
    alpha = scheduler.alphas_cumprod[timesteps].view(-1, 1, 1, 1)
    noise = (noisy - alpha.sqrt() * clean) / (1 - alpha).sqrt()
    torch.testing.assert_close(noisy, scheduler.add_noise(clean, noise, timesteps))
    expected = noise if prediction == "epsilon" else scheduler.get_velocity(clean, noise, timesteps)
    torch.testing.assert_close(target, expected, atol=1e-4, rtol=1e-4)


def test_a_flow_leads_straight_from_data_to_noise():
    clean = normal(8, 4, 3, 5)
    noisy, timesteps, target, _ = FlowMatching().corrupt(clean)
    t = (timesteps / 1000).view(-1, 1, 1, 1)
    torch.testing.assert_close(noisy - t * target, clean)
    noise = clean + target
    torch.testing.assert_close(noisy, (1 - t) * clean + t * noise)
    assert ((timesteps > 0) & (timesteps <= 1000)).all()


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
    assert all(torch.equal(a, b) for a, b in zip(first[:3], second[:3], strict=True))


def test_other_predictions_are_refused_with_the_known_ones():
    with pytest.raises(ConfigurationError, match="prediction_type='sample'; use one of flow"):
        noise_schedule_of(diffusers.DDPMScheduler(prediction_type="sample"))


@pytest.mark.parametrize("prediction", ["epsilon", "v_prediction"])
def test_min_snr_weights_are_those_of_diffusers_recipes(prediction):
    scheduler = diffusers.DDPMScheduler(prediction_type=prediction)
    corrupted = noise_schedule_of(scheduler, Noise(min_snr_gamma=5.0)).corrupt(normal(64, 4, 2, 2))
    snr = compute_snr(scheduler, corrupted.timesteps)
    weights = snr.clamp(max=5.0) / (snr + (prediction == "v_prediction"))
    torch.testing.assert_close(corrupted.weights, weights)
    errors = (normal(64, 4, 2, 2).flip(0) - corrupted.target).square().mean((1, 2, 3))
    loss = corrupted.loss(normal(64, 4, 2, 2).flip(0))
    torch.testing.assert_close(loss, (errors * weights).mean())


def test_min_snr_of_a_last_step_without_signal_is_finite():
    scheduler = diffusers.DDIMScheduler(rescale_betas_zero_snr=True)
    schedule = noise_schedule_of(scheduler, Noise(min_snr_gamma=5.0))
    corrupted = schedule.corrupt(normal(10_000, 1, 1, 1))
    assert len(scheduler.alphas_cumprod) - 1 in corrupted.timesteps
    assert corrupted.weights.isfinite().all()


def test_the_alphas_are_the_schedulers_own():
    """Video models shift them, and DDPM's of the same betas are others."""
    scheduler = diffusers.CogVideoXDDIMScheduler(prediction_type="v_prediction")
    clean = normal(8, 4, 3, 5)
    noisy, timesteps, target, _ = noise_schedule_of(scheduler).corrupt(clean)
    alpha = scheduler.alphas_cumprod[timesteps].float().view(-1, 1, 1, 1)
    torch.testing.assert_close(alpha.sqrt() * noisy - (1 - alpha).sqrt() * target, clean)


SHIFTS = {
    "SD3": (diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0), 3.0),
    "set": (diffusers.FlowMatchEulerDiscreteScheduler(), 4.0),
    "Heun": (diffusers.FlowMatchHeunDiscreteScheduler(shift=2.0), 2.0),
    "LCM": (diffusers.FlowMatchLCMScheduler(shift=2.0), 2.0),
    "Flux": (diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True), 1.0),
    "Wan": (
        diffusers.UniPCMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=5.0
        ),
        5.0,
    ),
    "DPM": (
        diffusers.DPMSolverMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=5.0
        ),
        5.0,
    ),
    "none": (diffusers.FlowMatchEulerDiscreteScheduler(), 1.0),
}
SHIFTS["set"][0].set_shift(4.0)


@pytest.mark.parametrize("uniform", [False, True])
@pytest.mark.parametrize("used", [False, True])
@pytest.mark.parametrize("name", SHIFTS)
def test_times_of_a_flow_are_those_of_diffusers_scripts(name, used, uniform):
    """History: the shift was ignored, and SD3 trained at other times than it is drawn with.

    A scheduler that has drawn already has other tables, of its steps.
    """
    scheduler, shift = SHIFTS[name]
    if used:
        scheduler.set_timesteps(5, **({"mu": 1.0} if name == "Flux" else {}))
    schedule = noise_schedule_of(scheduler, Noise(logit_mean=-0.5, logit_std=0.7, uniform=uniform))
    clean = normal(4000, 1, 2)
    noisy, timesteps, target, weights = schedule.corrupt(clean, torch.Generator().manual_seed(1))
    same = torch.Generator().manual_seed(1)
    if uniform:
        u = torch.rand(4000, generator=same)
    else:  # with the other sign, as the script counts from noise
        u = torch.sigmoid(-(-0.5 + 0.7 * torch.randn(4000, generator=same)))
    script = diffusers.FlowMatchEulerDiscreteScheduler(shift=shift)
    indices = (u * script.config.num_train_timesteps).long()
    assert torch.equal(timesteps, script.timesteps[indices])
    sigmas = script.sigmas[indices].reshape(-1, 1, 1)
    noise = torch.randn(clean.shape, generator=same)
    assert torch.equal(noisy, (1.0 - sigmas) * clean + sigmas * noise)
    assert torch.equal(target, noise - clean)
    assert weights is None


def test_times_of_a_flow_are_drawn_as_asked_for():
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler()
    schedule = noise_schedule_of(scheduler, Noise(logit_mean=-1.0, logit_std=0.5))
    logits = torch.logit(schedule.corrupt(torch.zeros(4000, 1, 1)).timesteps / 1000)
    assert logits.mean().item() == pytest.approx(-1.0, abs=0.05)
    assert logits.std().item() == pytest.approx(0.5, abs=0.05)


def test_bad_noise_is_named():
    with pytest.raises(ConfigurationError, match=r"min_snr_gamma=5\.0 weighs losses of epsilon"):
        noise_schedule_of(diffusers.FlowMatchEulerDiscreteScheduler(), Noise(min_snr_gamma=5.0))
    with pytest.raises(
        ConfigurationError, match="uniform are for flow matching, and DDPMScheduler"
    ):
        noise_schedule_of(diffusers.DDPMScheduler(), Noise(uniform=True))
    with pytest.raises(ConfigurationError, match="logit_std"):
        Noise(logit_std=-1.0)
