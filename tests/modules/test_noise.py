import math
import random

import diffusers
import pytest
import torch
from diffusers.pipelines.flux.pipeline_flux import calculate_shift
from diffusers.training_utils import compute_density_for_timestep_sampling, compute_snr

from lightning_diffpipe.errors import ConfigurationError
from lightning_diffpipe.modules.noise import FlowMatching, Noise, noise_schedule_of


def diffusion_of(noise):
    return noise_schedule_of(diffusers.DDPMScheduler(), noise)


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


@pytest.mark.parametrize("invert_sigmas", [False, True])
def test_a_perfect_flow_is_sampled_exactly_by_diffusers_scheduler(invert_sigmas):
    """History: Mochi, whose times lead from noise to data, learnt the other way round."""
    options = {"shift": 3.0, "invert_sigmas": invert_sigmas}
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(**options)
    schedule = noise_schedule_of(scheduler)
    clean = normal(2, 4, 3, 5)
    noisy, timesteps, target, _ = schedule.corrupt(clean)
    torch.testing.assert_close(schedule.clean(noisy, target, timesteps), clean)
    noise = clean - target if invert_sigmas else clean + target
    scheduler.set_timesteps(5)
    latents = noise
    for timestep in scheduler.timesteps:
        latents = scheduler.step(target, timestep, latents).prev_sample
    torch.testing.assert_close(latents, clean)
    every = diffusers.FlowMatchEulerDiscreteScheduler(**options)
    every.set_timesteps(sigmas=(torch.arange(1000, 0, -1) / 1000).numpy())
    for sample, told in enumerate(timesteps):  # what it is told of this much noise
        (step,) = (every.timesteps - told).abs().lt(1e-2).nonzero()[:, 0]
        share = 1 - every.sigmas[step] if invert_sigmas else every.sigmas[step]
        expected = (1 - share) * clean[sample] + share * noise[sample]
        torch.testing.assert_close(noisy[sample], expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(
        schedule.noise_by_signal(timesteps),
        torch.stack([((n - c) / (x - n)).mean() for n, c, x in zip(noisy, clean, noise, strict=True)]),
        rtol=1e-3, atol=1e-3,
    )  # fmt: skip


def test_a_scheduler_of_other_times_is_refused():
    """History: Stable Video Diffusion's, of logarithms of the noise, trained at numbers of steps."""
    scheduler = diffusers.EulerDiscreteScheduler(
        timestep_type="continuous", prediction_type="v_prediction"
    )
    with pytest.raises(ConfigurationError, match=r"EulerDiscreteScheduler .*and continuous times"):
        noise_schedule_of(scheduler)


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
    schedule = noise_schedule_of(scheduler, Noise(min_snr_gamma=5.0))
    loss = schedule.losses(corrupted, normal(64, 4, 2, 2).flip(0))["loss"]
    torch.testing.assert_close(loss, (errors * weights).mean())


def test_min_snr_of_a_last_step_without_signal_is_finite():
    scheduler = diffusers.DDIMScheduler(rescale_betas_zero_snr=True)
    schedule = noise_schedule_of(scheduler, Noise(min_snr_gamma=5.0))
    corrupted = schedule.corrupt(normal(10_000, 1, 1, 1))
    assert len(scheduler.alphas_cumprod) - 1 in corrupted.timesteps
    assert corrupted.weights.isfinite().all()


def test_zero_terminal_snr_is_that_of_its_paper():
    """Algorithm 1 of https://arxiv.org/abs/2305.08891: the last step is noise alone."""
    betas = {"beta_schedule": "scaled_linear", "beta_start": 0.00085, "beta_end": 0.012}
    scheduler = diffusers.DDPMScheduler(
        prediction_type="v_prediction", rescale_betas_zero_snr=True, **betas
    )
    roots = (1 - torch.linspace(0.00085**0.5, 0.012**0.5, 1000) ** 2).cumprod(0).sqrt()
    roots = (roots - roots[-1]) * roots[0] / (roots[0] - roots[-1])
    clean = normal(10_000, 1, 1, 1)
    noisy, timesteps, target, _ = noise_schedule_of(scheduler).corrupt(clean)
    signal = roots[timesteps].view(-1, 1, 1, 1)
    rest = (1 - signal**2).sqrt()
    noise = signal * target + rest * noisy  # of v and the input, a rotation
    torch.testing.assert_close(noisy, signal * clean + rest * noise, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(target, signal * noise - rest * clean, atol=1e-4, rtol=1e-4)
    last = timesteps == 999
    assert last.any()
    assert torch.equal(target[last], -clean[last])


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
    """History: the shift was ignored, and SD3 trained at other times than it is drawn with."""
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


@pytest.mark.parametrize("mode_scale", [0.0, 1.29])
def test_times_with_a_mode_are_those_of_diffusers_scripts(mode_scale):
    schedule = noise_schedule_of(
        diffusers.FlowMatchEulerDiscreteScheduler(), Noise(mode_scale=mode_scale)
    )
    times = schedule.corrupt(torch.zeros(4000, 1, 1), torch.Generator().manual_seed(1)).timesteps
    script = diffusers.FlowMatchEulerDiscreteScheduler()
    u = compute_density_for_timestep_sampling(
        "mode", 4000, mode_scale=mode_scale, generator=torch.Generator().manual_seed(1)
    )
    assert torch.equal(times, script.timesteps[(u * 1000).long()])


def flux_scheduler():
    return diffusers.FlowMatchEulerDiscreteScheduler(
        use_dynamic_shifting=True, base_shift=0.5, max_shift=1.15, shift=3.0
    )


@pytest.mark.parametrize("size", [(32, 32), (128, 128), (64, 192)])
def test_times_shifted_by_the_size_are_those_of_sampling(size):
    plain, shifted = (
        noise_schedule_of(flux_scheduler(), Noise(shift=shift))
        .corrupt(torch.zeros(50, 1, *size), torch.Generator().manual_seed(1))
        .timesteps
        for shift in (None, "size")
    )
    sampling = flux_scheduler()
    mu = calculate_shift(size[0] * size[1] // 4)
    sampling.set_timesteps(sigmas=(plain / 1000).tolist(), mu=mu)
    torch.testing.assert_close(shifted, sampling.timesteps)


def test_a_shift_that_is_given_counts_for_that_of_the_scheduler():
    schedule = noise_schedule_of(
        diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0), Noise(shift=2.0)
    )
    assert schedule.shift == 2.0
    with pytest.raises(
        ConfigurationError, match=r"this FlowMatchEulerDiscreteScheduler shifts by 3\.0"
    ):
        noise_schedule_of(diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0), Noise(shift="size"))


@pytest.mark.parametrize("prediction", ["epsilon", "v_prediction"])
def test_weights_of_debiased_estimation(prediction):
    scheduler = diffusers.DDPMScheduler(prediction_type=prediction)
    corrupted = noise_schedule_of(scheduler, Noise(debiased=True)).corrupt(normal(64, 4, 2, 2))
    snr = compute_snr(scheduler, corrupted.timesteps)
    weights = 1 / snr.sqrt() if prediction == "epsilon" else 1 / (snr + 1)
    torch.testing.assert_close(corrupted.weights, weights, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("schedule", [FlowMatching, diffusion_of])
def test_an_offset_is_the_same_all_over_a_channel(schedule):
    clean = normal(8, 4, 3, 5)
    plain, offset = (
        (schedule(noise=Noise(offset=value)).corrupt(clean, torch.Generator().manual_seed(1)))
        for value in (0.0, 0.1)
    )
    generator = torch.Generator().manual_seed(1)
    generator.set_state(_state_after(schedule, clean))
    expected = 0.1 * torch.randn(8, 4, 1, 1, generator=generator)
    torch.testing.assert_close(offset.target - plain.target, expected.expand_as(clean))


@pytest.mark.parametrize("loss", ["huber", "smooth_l1"])
def test_huber_by_signal_to_noise_is_that_of_kohyas_scripts(loss):
    scheduler = diffusers.DDPMScheduler()
    schedule = noise_schedule_of(scheduler, Noise(loss=loss, huber_schedule="snr", huber_c=0.1))
    corrupted = schedule.corrupt(normal(8, 4, 3, 5))
    prediction = normal(8, 4, 3, 5).flip(0)
    alpha = scheduler.alphas_cumprod[corrupted.timesteps]
    c = ((1 - 0.1) / (1 + ((1 - alpha) / alpha) ** 0.5) ** 2 + 0.1).view(-1, 1, 1, 1)
    expected = LOSSES[loss](prediction - corrupted.target, c).mean()
    torch.testing.assert_close(schedule.losses(corrupted, prediction)["loss"], expected)


def test_pyramid_noise_is_that_of_kohyas_scripts():
    """But that the deviation is that of each sample, so that none depends on the others of its batch."""
    torch.manual_seed(0)
    random.seed(0)
    found = Noise(pyramid_levels=4, pyramid_discount=0.4).draw(normal(3, 4, 24, 16), None)
    torch.manual_seed(0)
    random.seed(0)
    expected = torch.randn(3, 4, 24, 16)
    for i in range(4):
        r = random.random() * 2 + 2
        high, wide = max(1, int(24 / r**i)), max(1, int(16 / r**i))
        enlarge = torch.nn.Upsample(size=(24, 16), mode="bilinear")
        expected += enlarge(torch.randn(3, 4, high, wide)) * 0.4**i
        if 1 in (high, wide):
            break
    expected = torch.stack([sample / sample.std() for sample in expected])
    torch.testing.assert_close(found, expected)
    assert i > 1


def test_pyramid_noise_of_videos_and_of_validation():
    noise = Noise(pyramid_levels=6, pyramid_discount=0.8)
    drawn = [noise.draw(normal(2, 4, 3, 8, 8), torch.Generator().manual_seed(1)) for _ in range(2)]
    assert torch.equal(*drawn)
    torch.testing.assert_close(drawn[0].flatten(1).std(1), torch.ones(2))
    near = (drawn[0][..., 1:] * drawn[0][..., :-1]).mean()
    assert near > 0.1, "neighbours are alike"
    with pytest.raises(ConfigurationError, match="pyramid_levels=6 is for latents with rows"):
        noise.draw(normal(2, 4, 8), None)


@pytest.mark.parametrize("schedule", [FlowMatching, diffusion_of])
def test_perturbed_inputs_are_those_of_kohyas_scripts(schedule):
    """Ning et al., algorithm 1; `ip_noise_gamma` there, and `input_perturbation` in diffusers' script."""
    clean, noise = normal(8, 4, 3, 5), Noise(input_perturbation=0.1)
    torch.manual_seed(0)
    plain = schedule(noise=Noise()).corrupt(clean)
    further = torch.randn(clean.shape)
    torch.manual_seed(0)
    found = schedule(noise=noise).corrupt(clean)
    torch.testing.assert_close(found.target, plain.target, rtol=0, atol=0)
    assert torch.equal(found.timesteps, plain.timesteps)
    shares = found.timesteps / 1000
    if schedule is diffusion_of:
        shares = (1 - diffusers.DDPMScheduler().alphas_cumprod[found.timesteps]).sqrt()
    expected = plain.noisy + 0.1 * shares.view(-1, 1, 1, 1) * further
    torch.testing.assert_close(found.noisy, expected)
    seeded = [
        schedule(noise=each).corrupt(clean, torch.Generator().manual_seed(1)).noisy
        for each in (Noise(), noise)
    ]
    assert torch.equal(*seeded), "validation"


def _state_after(schedule, clean):
    generator = torch.Generator().manual_seed(1)
    schedule(noise=Noise()).corrupt(clean, generator)
    return generator.get_state()


LOSSES = {
    "mse": lambda d, c: d**2,
    "huber": lambda d, c: 2 * c * ((d**2 + c**2) ** 0.5 - c),
    "smooth_l1": lambda d, c: 2 * ((d**2 + c**2) ** 0.5 - c),
}


def noise_share(clean, noisy, target, inverted):
    """Returns t of `(1 - t) clean + t noise`, whatever the denoiser is told."""
    towards_noise = -target if inverted else target
    return float(((noisy - clean) * towards_noise).sum() / towards_noise.square().sum())


@pytest.mark.parametrize("schedule", ["constant", "exponential", "snr"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("shape", [(6, 4, 3, 5), (6, 4, 2, 3, 5)])
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("inverted", [False, True])
def test_losses_equal_a_loop_over_samples(inverted, loss, shape, masked, weighted, schedule):
    noise = Noise(preconditioned=True, loss=loss, huber_c=0.2, huber_schedule=schedule)
    flow, batch = FlowMatching(noise=noise, inverted=inverted), {}
    corrupted = flow.corrupt(normal(*shape), torch.Generator().manual_seed(1))
    prediction = normal(*shape).flip(0)
    mask, weight = (
        torch.rand(6, 1, 24, 40, generator=torch.Generator().manual_seed(2)),
        torch.arange(6.0),
    )
    mask[0, :, :12] = 0
    batch = {"mask": mask} if masked else {}
    batch |= {"weight": weight} if weighted else {}
    losses = []
    for i in range(6):
        t = noise_share(normal(*shape)[i], corrupted.noisy[i], corrupted.target[i], inverted)
        c = {"constant": 0.2, "exponential": 0.2**t, "snr": 0.8 * (1 - t) ** 2 + 0.2}[schedule]
        errors = LOSSES[loss](prediction[i] - corrupted.target[i], c)
        if masked:  # each latent stands for 8 x 8 pixels
            shown = mask[i].reshape(3, 8, 5, 8).mean((1, 3))
            errors = (errors * shown).sum() / shown.expand_as(errors).sum()
        losses.append(errors.mean() * corrupted.weights[i] * (weight[i] if weighted else 1))
    torch.testing.assert_close(
        flow.losses(corrupted, prediction, batch)["loss"], torch.stack(losses).mean()
    )
    halves = [
        flow.losses(
            type(corrupted)(*(each[part] for each in corrupted)),
            prediction[part],
            {key: value[part] for key, value in batch.items()},
        )["loss"]
        for part in (slice(3), slice(3, 6))
    ]
    torch.testing.assert_close(torch.stack(halves).mean(), torch.stack(losses).mean())


@pytest.mark.parametrize("prediction", ["flow_prediction", "epsilon"])
def test_losses_are_summed_by_quantile_of_the_timesteps(prediction):
    schedule = noise_schedule_of(diffusers.DDPMScheduler(prediction_type=prediction))
    corrupted, guess = schedule.corrupt(normal(16, 4, 3, 5)), normal(16, 4, 3, 5).flip(0)
    last = 1000 if prediction == "flow_prediction" else 999
    ends = torch.tensor([0, 249, 250, last, *corrupted.timesteps[4:]]).to(corrupted.timesteps)
    corrupted = corrupted._replace(timesteps=ends)
    alone = schedule.losses(corrupted, guess)
    schedule.num_quantiles = 4
    losses = schedule.losses(corrupted, guess)
    assert alone.keys() == {"loss"}
    assert torch.equal(losses["loss"], alone["loss"])
    each = (guess - corrupted.target).square().mean((1, 2, 3))
    for k in range(4):
        rows = [n for n, t in enumerate(ends.tolist()) if min(t // 250, 3) == k]
        assert losses[f"loss_by_time_count_{k}"] == len(rows) > 0
        torch.testing.assert_close(losses[f"loss_by_time_sum_{k}"], each[rows].sum())


@pytest.mark.parametrize("inverted", [False, True])
def test_the_first_quantile_has_least_noise(inverted):
    """History: of schedulers that tell inverted times (Mochi's) it had most."""
    schedule, clean = FlowMatching(inverted=inverted), normal(64, 4, 3, 5)
    corrupted, schedule.num_quantiles = schedule.corrupt(clean), 3
    losses = schedule.losses(corrupted, normal(64, 4, 3, 5).flip(0))
    each = zip(clean, corrupted.noisy, corrupted.target, strict=True)
    shares = torch.tensor([noise_share(*tensors, inverted) for tensors in each])
    found = [int(losses[f"loss_by_time_count_{k}"]) for k in range(3)]
    assert found == torch.histc(shares, 3, 0, 1).int().tolist()
    assert found[0] != found[2]


def test_a_mask_that_shows_nothing_trains_nothing():
    flow = FlowMatching()
    corrupted, prediction = flow.corrupt(normal(2, 4, 3, 5)), normal(2, 4, 3, 5).requires_grad_()
    mask = torch.stack([torch.zeros(1, 24, 40), torch.ones(1, 24, 40)])
    flow.losses(corrupted, prediction, {"mask": mask})["loss"].backward()
    assert prediction.grad[0].abs().max() == 0
    assert prediction.grad[1].abs().max() > 0


def test_bad_noise_is_named():
    with pytest.raises(ConfigurationError, match=r"min_snr_gamma=5\.0 weighs losses of epsilon"):
        noise_schedule_of(diffusers.FlowMatchEulerDiscreteScheduler(), Noise(min_snr_gamma=5.0))
    with pytest.raises(
        ConfigurationError, match="uniform=True is for flow matching, and DDPMScheduler"
    ):
        noise_schedule_of(diffusers.DDPMScheduler(), Noise(uniform=True))
    with pytest.raises(ConfigurationError, match="logit_std"):
        Noise(logit_std=-1.0)
    for settings, said in (
        ({"loss": "l2"}, "loss='l2'; choose mse, huber or smooth_l1"),
        ({"shift": "large"}, "shift must be"),
        ({"shift": 0}, "shift must be"),
        ({"mode_scale": 3.0}, "mode_scale must be"),
        ({"huber_schedule": "linear"}, "huber_schedule='linear'; choose constant, exponential"),
        ({"pyramid_levels": -1}, "pyramid_levels must be"),
        ({"pyramid_discount": 2.0}, "pyramid_discount must be"),
        ({"min_timestep": 0.5}, "min_timestep must be a whole number"),
        ({"min_timestep": 500, "max_timestep": 500}, "max_timestep must be a whole number > 500"),
        ({"min_snr_gamma": 5.0, "debiased": True}, "exclude each other; take one"),
    ):
        with pytest.raises(ConfigurationError, match=said):
            Noise(**settings)


@pytest.mark.parametrize(
    "noise", [Noise(logit_mean=0.5, logit_std=1.5), Noise(uniform=True), Noise(mode_scale=1.29)]
)
@pytest.mark.parametrize(("shift", "inverted"), [(1.0, False), (5.0, False), (5.0, True)])
def test_times_of_two_spans_are_all_times(noise, shift, inverted):
    """As many of each as of all that are drawn, in each tenth of them."""
    schedule = FlowMatching(shift=shift, noise=noise, inverted=inverted)
    torch_state = torch.manual_seed(0)
    clean = torch.zeros(200_000, 1, 1, 1)
    every = schedule.corrupt(clean, torch_state).timesteps
    spans = [(875.0, math.inf), (0.0, 875.0)]
    shares = [schedule.share_of(span, clean.shape) for span in spans]
    assert sum(shares) == pytest.approx(1)
    assert shares[0] == pytest.approx((every > 874.9).double().mean().item(), abs=5e-3)
    for (start, stop), share in zip(spans, shares, strict=True):
        times = schedule.corrupt(clean, torch_state, (start, stop)).timesteps
        assert ((times > start - 1e-3) & (times < stop)).all()
        for low in range(0, 1000, 100):
            parts = [
                ((x > low) & (x <= low + 100) & (x > start - 1e-3) & (x < stop))
                for x in (times, every)
            ]
            got, expected = (part.double().mean().item() for part in parts)
            assert share * got == pytest.approx(expected, abs=5e-3)


def test_discrete_times_of_a_span_are_those_in_it():
    schedule = noise_schedule_of(diffusers.DDPMScheduler())
    times = schedule.corrupt(torch.zeros(5000, 1, 1, 1), None, (875.5, math.inf)).timesteps
    assert set(times.tolist()) == set(range(876, 1000))
    assert schedule.share_of((875.5, math.inf), (1,)) == pytest.approx(0.124)


@pytest.mark.parametrize("scheduler", ["DDPMScheduler", "FlowMatchEulerDiscreteScheduler"])
def test_trained_times_are_a_part_of_every_span(scheduler):
    """Of the first and the second of two experts, and of a denoiser of all times."""
    bounds = Noise(min_timestep=200, max_timestep=600)
    every, some = (noise_schedule_of(getattr(diffusers, scheduler)(), n) for n in (Noise(), bounds))
    clean = torch.zeros(500, 1, 1, 1)
    for span, part in ((None, (200, 600)), ((0, 400), (200, 400)), ((400, math.inf), (400, 600))):
        found, expected = (
            schedule.corrupt(clean, torch.Generator().manual_seed(1), of)
            for schedule, of in ((some, span), (every, part))
        )
        assert torch.equal(found.timesteps, expected.timesteps)
        assert torch.equal(found.noisy, expected.noisy)
        assert some.share_of(span or (0, math.inf), clean.shape) == every.share_of(
            part, clean.shape
        )
    with pytest.raises(ConfigurationError, match="600 to 600, where a denoiser is trained"):
        some.corrupt(clean, None, (600, math.inf))
