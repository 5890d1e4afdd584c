"""How a clean latent is made noisy, and what the denoiser shall predict from it.

| prediction | noisy latent | target | source |
|---|---|---|---|
| epsilon | `sqrt(a) x + sqrt(1 - a) e` | `e` | DDPM, https://arxiv.org/abs/2006.11239 |
| v | the same | `sqrt(a) e - sqrt(1 - a) x` | https://arxiv.org/abs/2202.00512 |
| flow | `(1 - t) x + t e` | `e - x` | flow matching, https://arxiv.org/abs/2210.02747 |

`x` is the clean latent, `e` standard normal noise, `a` the cumulated alpha of a time step, `t` in [0, 1].
Everything here is fp32, whatever precision the denoiser runs in: in bf16, which has 8 bits of
mantissa, neighbouring time steps would have the same alpha.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from diffusers import DDPMScheduler, SchedulerMixin
from torch import Tensor

from lightning_diffpipe.errors import ConfigurationError, require_number


@dataclass(frozen=True)
class Noise:
    """Settings of noise: how often each time is trained, and how much it counts.

    Attributes:
        min_snr_gamma: Losses of epsilon and v count as if their signal-to-noise ratio were at most this, often 5.
        logit_mean: Times of flow matching are `sigmoid(logit_mean + logit_std * normal)`, before they are shifted.
        logit_std: See `logit_mean`.
        uniform: Times of flow matching are uniform instead.
        preconditioned: Losses of flow matching are those of the clean latents that a prediction stands for.

    Raises:
        ConfigurationError: A number is negative.

    Source:
        Min-SNR: Hang et al. (2023), https://arxiv.org/abs/2303.09556
        Times: Stable Diffusion 3, Esser et al. (2024), https://arxiv.org/abs/2403.03206
    """

    min_snr_gamma: float | None = None
    logit_mean: float = 0.0
    logit_std: float = 1.0
    uniform: bool = False
    preconditioned: bool = False

    def __post_init__(self) -> None:
        require_number("logit_std", self.logit_std, 0)
        if self.min_snr_gamma is not None:
            require_number("min_snr_gamma", self.min_snr_gamma, 0)


class Corrupted(NamedTuple):
    """Noisy latents `(B, C, h, w)`, their time steps `(B,)` as the denoiser reads them, targets, weights `(B,)`."""

    noisy: Tensor
    timesteps: Tensor
    target: Tensor
    weights: Tensor | None = None

    def loss(self, prediction: Tensor) -> Tensor:
        """Returns the mean squared error, that of each sample by its weight."""
        errors = (prediction - self.target).square()
        if self.weights is not None:
            errors = errors * _per_sample(self.weights, errors)
        return errors.mean()


def _normal(shape: Sequence[int], like: Tensor, generator: torch.Generator | None) -> Tensor:
    return torch.randn(tuple(shape), generator=generator, device=like.device, dtype=like.dtype)


def _per_sample(values: Tensor, like: Tensor) -> Tensor:
    return values.reshape(-1, *(1,) * (like.ndim - 1))


@dataclass(eq=False)
class FlowMatching:
    """Straight lines from data to noise; times are multiples of one over the number of timesteps, shifted.

    Attributes:
        num_timesteps: What the denoiser is told at `t = 1`.
        shift: Times are `shift * t / (1 + (shift - 1) * t)`.
        noise: Which times are drawn how often, and how they count.
    """

    num_timesteps: int = 1000
    shift: float = 1.0
    noise: Noise = Noise()

    def corrupt(self, clean: Tensor, generator: torch.Generator | None = None) -> Corrupted:
        """Draws times, one for each sample, and noise, and mixes them in.

        Args:
            clean: fp32 latents of unit variance, `(B, C, h, w)`.
            generator: Drawn from, on the device of `clean`; `None` for the global one.
        """
        if self.noise.uniform:
            share = torch.rand(len(clean), generator=generator, device=clean.device)
        else:
            logits = _normal((len(clean),), clean, generator)
            share = torch.sigmoid(-(self.noise.logit_mean + self.noise.logit_std * logits))
        # As an index into the timesteps of the scheduler, which fall.
        index = (share * self.num_timesteps).long()
        times = (self.num_timesteps - index).to(clean.dtype) / self.num_timesteps
        times = self.shift * times / (1 + (self.shift - 1) * times)
        noise = _normal(clean.shape, clean, generator)
        t = _per_sample(times, clean)
        return Corrupted(
            (1 - t) * clean + t * noise,
            self.num_timesteps * times,
            noise - clean,
            times.square() if self.noise.preconditioned else None,
        )

    def clean(self, noisy: Tensor, prediction: Tensor, timesteps: Tensor) -> Tensor:
        """Estimates clean latents from what a denoiser predicted for noisy ones; both `(B, C, h, w)`."""
        return noisy - _per_sample(timesteps / self.num_timesteps, noisy) * prediction


@dataclass(eq=False)
class Diffusion:
    """The discrete noise schedule of DDPM, with epsilon or v as the target.

    Attributes:
        alphas_cumprod: Cumulated alphas, falling, fp32, `(num time steps,)`.
        predicts_v: Whether the target is v rather than epsilon.
        min_snr_gamma: See `Noise`.
    """

    alphas_cumprod: Tensor
    predicts_v: bool
    min_snr_gamma: float | None = None

    def corrupt(self, clean: Tensor, generator: torch.Generator | None = None) -> Corrupted:
        """See `FlowMatching.corrupt`."""
        table = self.alphas_cumprod.to(clean.device, non_blocking=True)
        timesteps = torch.randint(
            len(table), (len(clean),), device=clean.device, generator=generator
        )
        noise = _normal(clean.shape, clean, generator)
        alpha = _per_sample(table[timesteps], clean)
        signal, spread = alpha.sqrt(), (1 - alpha).sqrt()
        target = signal * noise - spread * clean if self.predicts_v else noise
        weights = None
        if self.min_snr_gamma is not None:
            # min(snr, gamma) / snr, or / (snr + 1) for v, where snr = alpha / (1 - alpha); epsilon's last may be 0.
            weights = torch.minimum(alpha, self.min_snr_gamma * (1 - alpha)).flatten()
            weights = weights if self.predicts_v else weights / alpha.flatten().clamp_min(1e-12)
        return Corrupted(signal * clean + spread * noise, timesteps, target, weights)

    def clean(self, noisy: Tensor, prediction: Tensor, timesteps: Tensor) -> Tensor:
        """See `FlowMatching.clean`; from epsilon at most four deviations, as noise tells little."""
        table = self.alphas_cumprod.to(noisy.device, non_blocking=True)
        alpha = _per_sample(table[timesteps.long()], noisy)
        signal, spread = alpha.sqrt(), (1 - alpha).sqrt()
        if self.predicts_v:
            return signal * noisy - spread * prediction
        return ((noisy - spread * prediction) / signal).clamp(-4, 4)


NoiseSchedule = FlowMatching | Diffusion


def noise_schedule_of(scheduler: SchedulerMixin, noise: Noise | None = None) -> NoiseSchedule:
    """Chooses the noise schedule a diffusers scheduler samples.

    Schedulers of flow matching are known by their name or `prediction_type`; all others need DDPM's betas.

    Raises:
        ConfigurationError: The scheduler predicts something else, or a setting is given that is for others.
    """
    noise = noise or Noise()
    config = scheduler.config
    prediction = config.get("prediction_type", "epsilon")
    if type(scheduler).__name__.startswith("FlowMatch") or prediction == "flow_prediction":
        if noise.min_snr_gamma is not None:
            raise ConfigurationError(
                f"min_snr_gamma={noise.min_snr_gamma} weighs losses of epsilon and v, but this is flow matching "
                f"({type(scheduler).__name__}); leave it out, and choose times by logit_mean and logit_std"
            )
        # Some may be told another than that of their config. One by the size drawn diffusers' scripts leave out.
        shift = config.get("shift", config.get("flow_shift", 1.0))
        shift = scheduler.shift if hasattr(type(scheduler), "shift") else shift
        shift = 1.0 if config.get("use_dynamic_shifting") else shift
        return FlowMatching(config.num_train_timesteps, shift, noise)
    if noise.preconditioned or noise.uniform:
        raise ConfigurationError(
            f"preconditioned and uniform are for flow matching, and {type(scheduler).__name__} with "
            f"prediction_type={prediction!r} is none; leave them out"
        )
    if prediction not in ("epsilon", "v_prediction") or "beta_schedule" not in config:
        raise ConfigurationError(
            f"cannot train for {type(scheduler).__name__} with prediction_type={prediction!r}; use one "
            "of flow matching (FlowMatchEulerDiscreteScheduler), or a DDPM-like one with epsilon or v_prediction"
        )
    # The scheduler's own where it has some: those of video models are shifted towards noise.
    table = getattr(scheduler, "alphas_cumprod", None)
    if table is None:
        table = DDPMScheduler.from_config(config).alphas_cumprod
    return Diffusion(table.float(), prediction == "v_prediction", noise.min_snr_gamma)
