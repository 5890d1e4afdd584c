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
from typing import NamedTuple, Protocol

import torch
from diffusers import DDPMScheduler, SchedulerMixin
from torch import Tensor

from lightning_diffpipe.errors import ConfigurationError


class Corrupted(NamedTuple):
    """Noisy latents `(B, C, h, w)`, their time steps `(B,)` as the denoiser reads them, targets."""

    noisy: Tensor
    timesteps: Tensor
    target: Tensor


class NoiseSchedule(Protocol):
    """Makes clean latents noisy, at times drawn per sample."""

    def corrupt(self, clean: Tensor, generator: torch.Generator | None = None) -> Corrupted:
        """Draws times and noise, and mixes them in.

        Args:
            clean: fp32 latents of unit variance, `(B, C, h, w)`.
            generator: Drawn from, on the device of `clean`; `None` for the global one.
        """


def _normal(shape: Sequence[int], like: Tensor, generator: torch.Generator | None) -> Tensor:
    return torch.randn(tuple(shape), generator=generator, device=like.device, dtype=like.dtype)


def _per_sample(values: Tensor, like: Tensor) -> Tensor:
    return values.reshape(-1, *(1,) * (like.ndim - 1))


class FlowMatching:
    """Straight lines from data to noise; times are `sigmoid(mean + std * normal)`.

    Middle times, where there is most to learn, are drawn most often.

    Args:
        num_timesteps: What the denoiser is told at `t = 1`.
        mean: Mean of the logit of the time.
        std: Standard deviation of the logit of the time.

    Source:
        Times: Stable Diffusion 3, Esser et al. (2024), https://arxiv.org/abs/2403.03206
    """

    def __init__(self, num_timesteps: int = 1000, mean: float = 0.3, std: float = 1.0) -> None:
        self.num_timesteps = num_timesteps
        self.mean = mean
        self.std = std

    def corrupt(self, clean: Tensor, generator: torch.Generator | None = None) -> Corrupted:
        """See `NoiseSchedule.corrupt`."""
        logits = _normal((len(clean),), clean, generator)
        times = torch.sigmoid(self.mean + self.std * logits)
        noise = _normal(clean.shape, clean, generator)
        t = _per_sample(times, clean)
        return Corrupted((1 - t) * clean + t * noise, self.num_timesteps * times, noise - clean)


class Diffusion:
    """The discrete noise schedule of DDPM, with epsilon or v as the target.

    Args:
        alphas_cumprod: Cumulated alphas, falling, `(num time steps,)`.
        predicts_v: Whether the target is v rather than epsilon.
    """

    def __init__(self, alphas_cumprod: Tensor, predicts_v: bool) -> None:
        self.alphas_cumprod = alphas_cumprod.float()
        self.predicts_v = predicts_v

    def corrupt(self, clean: Tensor, generator: torch.Generator | None = None) -> Corrupted:
        """See `NoiseSchedule.corrupt`."""
        table = self.alphas_cumprod.to(clean.device, non_blocking=True)
        timesteps = torch.randint(
            len(table), (len(clean),), device=clean.device, generator=generator
        )
        noise = _normal(clean.shape, clean, generator)
        alpha = _per_sample(table[timesteps], clean)
        signal, spread = alpha.sqrt(), (1 - alpha).sqrt()
        target = signal * noise - spread * clean if self.predicts_v else noise
        return Corrupted(signal * clean + spread * noise, timesteps, target)


def noise_schedule_of(scheduler: SchedulerMixin) -> NoiseSchedule:
    """Chooses the noise schedule a diffusers scheduler samples.

    Args:
        scheduler: One of flow matching, by its name or by its `prediction_type`, or one with DDPM's betas.

    Raises:
        ConfigurationError: The scheduler predicts something else.
    """
    config = scheduler.config
    prediction = config.get("prediction_type", "epsilon")
    if type(scheduler).__name__.startswith("FlowMatch") or prediction == "flow_prediction":
        return FlowMatching(config.num_train_timesteps)
    if prediction not in ("epsilon", "v_prediction") or "beta_schedule" not in config:
        raise ConfigurationError(
            f"cannot train for {type(scheduler).__name__} with prediction_type={prediction!r}; use one "
            "of flow matching (FlowMatchEulerDiscreteScheduler), or a DDPM-like one with epsilon or v_prediction"
        )
    table = DDPMScheduler.from_config(config).alphas_cumprod
    return Diffusion(table, predicts_v=prediction == "v_prediction")
