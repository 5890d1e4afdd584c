"""Noise schedules for training: noisy latents, and the target that the denoiser predicts from them.

| prediction | noisy latent | target | source |
|---|---|---|---|
| epsilon | `sqrt(a) x + sqrt(1 - a) e` | `e` | DDPM, https://arxiv.org/abs/2006.11239 |
| v | the same | `sqrt(a) e - sqrt(1 - a) x` | https://arxiv.org/abs/2202.00512 |
| flow | `(1 - t) x + t e` | `e - x` | flow matching, https://arxiv.org/abs/2210.02747 |

`x` is the clean latent, `e` standard normal noise, `a` the cumulated alpha of a time step, `t` in [0, 1].
Everything here is fp32, whatever precision the denoiser runs in: in bf16, which has 8 bits of
mantissa, neighbouring time steps would have the same alpha.
"""

import functools
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, Literal, NamedTuple, get_args

import torch
import torch.nn.functional as F
from diffusers import DDPMScheduler, SchedulerMixin
from torch import Tensor

from lightning_diffpipe.errors import ConfigurationError, require_choice, require_number

Loss = Literal["mse", "huber", "smooth_l1"]
HuberSchedule = Literal["constant", "exponential", "snr"]

Span = tuple[float, float]
"""Timesteps from the first number on, below the second."""

LOSS_BY_TIME = "loss_by_time_"
"""Beginning of the names under which sums of losses are logged, for the callback `LossByTime`."""


@dataclass(frozen=True)
class Noise:
    """Settings of noise and loss: the distribution of the trained times, their weights, and the error function.

    Attributes:
        min_snr_gamma: Losses of epsilon and v count as if their signal-to-noise ratio were at most this, often 5.
        debiased: Losses of epsilon count by the root of noise to signal, of v by noise to all.
        logit_mean: Times of flow matching are `sigmoid(logit_mean + logit_std * normal)`, before they are shifted.
        logit_std: See `logit_mean`.
        uniform: Times of flow matching are uniform instead.
        mode_scale: Times of flow matching have a mode in the middle instead, sharper if higher; 1.29 in the paper.
        shift: Times of flow matching are shifted by this factor; None for that of the scheduler, and by none where
            it depends on the size; `"size"` for that, as sampling does, with tokens of 2 x 2 latents.
        preconditioned: Losses of flow matching are those of the clean latents that a prediction stands for.
        offset: Noise has a part that is the same all over a channel, of this deviation.
        loss: For an error d, `"mse"` is its square; `"huber"` `2 c (sqrt(d d + c c) - c)`, its square if small,
            and `"smooth_l1"` `2 (sqrt(d d + c c) - c)`.
        huber_c: The `c` of these.
        huber_schedule: `"constant"`; `"exponential"`: c falls from 1 without noise to `huber_c` in pure noise; or
            `"snr"`: `c = huber_c + (1 - huber_c) / (1 + s)**2` for noise of s times the signal's deviation.
        pyramid_levels: To noise are added so many levels of it, each 2 to 4 times coarser than the one before, and
            all is divided by its deviation in a sample; 0 for plain noise, 6 is usual.
        pyramid_discount: Factor of each level by the one before.
        input_perturbation: In training, noise of this deviation is added to that of the noisy latents, and not to
            the target's; 0.1 in the paper.
        min_timestep: Only timesteps from this one on are trained, as often relative to each other as without it.
        max_timestep: Only timesteps below this one are trained; None for all.

    Raises:
        ConfigurationError: A number is negative, a name is not known, or two settings exclude each other.

    Source:
        Min-SNR: Hang et al. (2023), https://arxiv.org/abs/2303.09556
        Debiased estimation: Yu et al. (2023), https://arxiv.org/abs/2310.08442
        Times: Stable Diffusion 3, Esser et al. (2024), https://arxiv.org/abs/2403.03206
        Offset: https://www.crosslabs.org/blog/diffusion-with-offset-noise
        Multi-resolution ("pyramid") noise: https://wandb.ai/johnowhitaker/multires_noise/reports
        Input perturbation: Ning et al. (2023), https://arxiv.org/abs/2301.11706
        Scheduled pseudo-Huber: Khrapov et al. (2024), https://arxiv.org/abs/2403.16728
    """

    min_snr_gamma: float | None = None
    debiased: bool = False
    logit_mean: float = 0.0
    logit_std: float = 1.0
    uniform: bool = False
    mode_scale: float | None = None
    shift: float | Literal["size"] | None = None
    preconditioned: bool = False
    offset: float = 0.0
    loss: Loss = "mse"
    huber_c: float = 0.1
    huber_schedule: HuberSchedule = "constant"
    pyramid_levels: int = 0
    pyramid_discount: float = 0.3
    input_perturbation: float = 0.0
    min_timestep: int = 0
    max_timestep: int | None = None

    def __post_init__(self) -> None:
        for name in ("logit_std", "offset", "input_perturbation"):
            require_number(name, getattr(self, name), 0)
        require_number("huber_c", self.huber_c, above=0)
        require_number("pyramid_levels", self.pyramid_levels, 0, whole=True)
        require_number("pyramid_discount", self.pyramid_discount, 0, 1)
        require_number("min_timestep", self.min_timestep, 0, whole=True)
        if self.max_timestep is not None:
            require_number("max_timestep", self.max_timestep, above=self.min_timestep, whole=True)
        if self.min_snr_gamma is not None:
            require_number("min_snr_gamma", self.min_snr_gamma, 0)
        if self.shift not in (None, "size"):
            require_number("shift", self.shift, above=0)
        if self.mode_scale is not None:  # beyond, one time stands for several numbers
            require_number("mode_scale", self.mode_scale, -1, 2 / (math.pi - 2))
        for name, kind in (("loss", Loss), ("huber_schedule", HuberSchedule)):
            require_choice(name, getattr(self, name), get_args(kind))
        for one, other in (("min_snr_gamma", "debiased"), ("uniform", "mode_scale")):
            values = getattr(self, one), getattr(self, other)
            if all(value not in (None, False) for value in values):
                raise ConfigurationError(
                    f"{one}={values[0]} and {other}={values[1]} exclude each other; take one of them"
                )

    def trained(self, span: Span | None) -> Span | None:
        """Returns the part of a span that is trained; None stands for all timesteps."""
        if span is None and self.min_timestep == 0 and self.max_timestep is None:
            return None
        low, high = span or (0, math.inf)
        most = math.inf if self.max_timestep is None else self.max_timestep
        low = max(low, self.min_timestep)
        return low, max(low, min(high, most))

    def sample_times(
        self,
        like: Tensor,
        generator: torch.Generator | None,
        quantiles: tuple[float, float] | None = None,
    ) -> Tensor:
        """Samples a share of the way from noise to data for each sample of `like`, before any shift; `(B,)`.

        Args:
            like: Its length and device count.
            generator: Generator of the times; None for the global one.
            quantiles: Sample only between these two quantiles of the distribution.
        """
        is_logit_normal = not self.uniform and self.mode_scale is None
        if is_logit_normal and quantiles is None:
            logits = _normal((len(like),), like, generator)
            return torch.sigmoid(-(self.logit_mean + self.logit_std * logits))
        low, high = quantiles or (0.0, 1.0)
        u = low + (high - low) * torch.rand(len(like), generator=generator, device=like.device)
        if is_logit_normal:
            return torch.sigmoid(self.logit_std * torch.special.ndtri(u) - self.logit_mean)
        if self.mode_scale is None:
            return u
        if quantiles is not None:  # the density below falls as its argument rises
            u = 1 - u
        return 1 - u - self.mode_scale * ((math.pi / 2 * u).cos().square() - 1 + u)

    def probability(self, share: float) -> float:
        """Returns the probability that `sample_times` without quantiles returns less than a share.

        Example:
            >>> Noise().probability(0.5), Noise(uniform=True).probability(0.25)
            (0.5, 0.25)
        """
        if not 0 < share < 1:
            return float(share >= 1)
        if self.uniform:
            return share
        if self.mode_scale is None:
            spread = NormalDist(-self.logit_mean, self.logit_std or 1e-9)
            return spread.cdf(math.log(share / (1 - share)))
        low, high = 0.0, 1.0
        for _ in range(50):  # by bisection: twice as many digits as the times have
            u = (low + high) / 2
            sampled = 1 - u - self.mode_scale * (math.cos(math.pi / 2 * u) ** 2 - 1 + u)
            low, high = (u, high) if sampled >= share else (low, u)
        return 1 - low

    def draw(self, like: Tensor, generator: torch.Generator | None) -> Tensor:
        """Samples noise for latents."""
        noise = _normal(like.shape, like, generator)
        if self.offset:
            shape = (*like.shape[:2], *(1,) * (like.ndim - 2))
            noise = noise + self.offset * _normal(shape, like, generator)
        return self._pyramid(noise, generator) if self.pyramid_levels else noise

    def of_input(self, noise: Tensor, generator: torch.Generator | None) -> Tensor:
        """Returns the noise of noisy latents for that of their target: the same in validation (a `generator`)."""
        if not self.input_perturbation or generator is not None:
            return noise
        return noise + self.input_perturbation * torch.randn_like(noise)

    def _pyramid(self, noise: Tensor, generator: torch.Generator | None) -> Tensor:
        """Adds coarser noise, to each frame of videos; its scales are random, but for validation."""
        if noise.ndim < 4:
            raise ConfigurationError(
                f"pyramid_levels={self.pyramid_levels} is for latents with rows and columns; these are "
                f"{tuple(noise.shape)}"
            )
        *_, height, width = noise.shape
        planes, total = noise.flatten(1, -3), noise
        for level in range(self.pyramid_levels):
            # Python's coin, for which nobody waits.
            ratio = (3.0 if generator is not None else 2 + 2 * random.random()) ** level
            rows, columns = max(1, int(height / ratio)), max(1, int(width / ratio))
            coarse = _normal((*planes.shape[:2], rows, columns), noise, generator)
            enlarged = F.interpolate(coarse, (height, width), mode="bilinear")
            total = total + self.pyramid_discount**level * enlarged.view_as(noise)
            if 1 in (rows, columns):
                break
        return total / _per_sample(total.flatten(1).std(1), total)


class Corrupted(NamedTuple):
    """Noisy latents `(B, C, h, w)`, their time steps `(B,)` as the denoiser reads them, targets, weights `(B,)`."""

    noisy: Tensor
    timesteps: Tensor
    target: Tensor
    weights: Tensor | None = None


def _normal(shape: Sequence[int], like: Tensor, generator: torch.Generator | None) -> Tensor:
    return torch.randn(tuple(shape), generator=generator, device=like.device, dtype=like.dtype)


class _Schedule:
    """Base class of both kinds of noise schedule."""

    noise: Noise
    num_timesteps: int
    num_quantiles = 0  # of the timesteps, with one sum of losses each
    inverted = False

    def noise_by_signal(self, timesteps: Tensor) -> Tensor:
        """Returns the deviation of the noise by the signal's at timesteps, `(B,)`; infinite for pure noise."""
        raise NotImplementedError

    def losses(
        self, corrupted: Corrupted, prediction: Tensor, batch: Mapping[str, Any] | None = None
    ) -> dict[str, Tensor]:
        """Returns the mean loss of a prediction, `loss`; with `num_quantiles` also sums by timestep.

        Of a quantile k, `loss_by_time_sum_k` is the sum of the losses of samples with timesteps in it, and
        `loss_by_time_count_k` their number. The first quantile has the timesteps with least noise.

        That of a sample is `weight * sum(mask * errors) / sum(mask)`: a mean over what the mask shows, so that a
        small subject is trained as much as a large one. Samples count by their times, too (see `Noise`).

        Args:
            corrupted: Noisy latents that the denoiser was given, with their target.
            prediction: Output of the denoiser, of the shape of the target.
            batch: May have `weight`, `(B,)`, and `mask`, `(B, 1, H, W)` in [0, 1], averaged over a latent's pixels.
        """
        batch, difference = batch or {}, prediction - corrupted.target
        rising = self._rising(corrupted.timesteps)
        if self.noise.loss == "mse":
            errors = difference.square()
        else:
            c: Any = self.noise.huber_c
            if self.noise.huber_schedule == "exponential":
                c = _per_sample(c ** (rising / self.num_timesteps), difference)
            elif self.noise.huber_schedule == "snr":
                spread = self.noise_by_signal(corrupted.timesteps)
                c = _per_sample(c + (1 - c) / (1 + spread).square(), difference)
            errors = 2 * ((difference.square() + c * c).sqrt() - c)
            errors = errors * c if self.noise.loss == "huber" else errors
        if (mask := batch.get("mask")) is not None:
            size = tuple(errors.shape[-2:])
            mask = F.interpolate(mask.to(errors.dtype), size, mode="area")
            mask = mask.reshape(len(mask), *(1,) * (errors.ndim - 3), *size).expand_as(errors)
            share = mask.flatten(1).mean(1).clamp_min(torch.finfo(mask.dtype).tiny)
            errors = errors * mask / _per_sample(share, errors)
        for weights in (corrupted.weights, batch.get("weight")):
            if weights is not None:
                errors = errors * _per_sample(weights.to(errors.dtype), errors)
        sums: dict[str, Tensor] = {}
        if self.num_quantiles:
            each = errors.detach().flatten(1).mean(1)
            quantiles = (rising * self.num_quantiles / self.num_timesteps).long()
            for k in range(self.num_quantiles):
                # The timestep of pure noise may be `num_timesteps` itself.
                is_in = quantiles.clamp(max=self.num_quantiles - 1) == k
                sums[f"{LOSS_BY_TIME}sum_{k}"] = (each * is_in).sum()
                sums[f"{LOSS_BY_TIME}count_{k}"] = is_in.sum().to(each.dtype)
        return {"loss": errors.mean(), **sums}

    def _rising(self, timesteps: Tensor) -> Tensor:
        """Returns timesteps counted from data to noise, whichever way the denoiser's are."""
        return self.num_timesteps - timesteps if self.inverted else timesteps

    def logged_sums(self, metrics: Mapping[str, Tensor]) -> Tensor | None:
        """Returns sums and counts by quantile, `(2, num_quantiles)`, of logged `losses`; None if there are none."""
        quantiles = range(self.num_quantiles)
        names = [[f"{LOSS_BY_TIME}{n}_{k}" for k in quantiles] for n in ("sum", "count")]
        if names[0][0] not in metrics:
            return None
        return torch.stack([torch.stack([metrics[name] for name in row]) for row in names])


@functools.lru_cache(maxsize=64)  # a training asks for each microbatch
def _indices_in(span: Span, count: int, shift: float, inverted: bool) -> range:
    """Returns the indices of shifted timesteps that are in a span."""
    times = [1 - i / count for i in range(count)]
    # Rounded, as the end of a span may be a timestep itself: 0.7, shifted by 3, is 0.875.
    steps = [round(count * shift * t / (1 + (shift - 1) * t), 6) for t in times]
    if inverted:
        return range(*(sum(count - step < end for step in steps) for end in span))
    return range(*(sum(step >= end for step in steps) for end in reversed(span)))


def _per_sample(values: Tensor, like: Tensor) -> Tensor:
    return values.reshape(-1, *(1,) * (like.ndim - 1))


@dataclass(eq=False)
class FlowMatching(_Schedule):
    """Straight lines from data to noise; times are multiples of one over the number of timesteps, shifted.

    Attributes:
        num_timesteps: Timestep that the denoiser is given at `t = 1`.
        shift: Times are `shift * t / (1 + (shift - 1) * t)`.
        noise: Distribution of the trained times, and their weights in the loss.
        line: Two points, numbers of tokens and logarithms of the shift, of a line that gives the shift instead.
        inverted: Timesteps, and the lines, lead from noise to data (`invert_sigmas`, Mochi's).
    """

    num_timesteps: int = 1000
    shift: float = 1.0
    noise: Noise = Noise()
    line: tuple[tuple[float, float], tuple[float, float]] | None = None
    inverted: bool = False

    def corrupt(
        self, clean: Tensor, generator: torch.Generator | None = None, span: Span | None = None
    ) -> Corrupted:
        """Samples times, one for each sample, and noise, and mixes them in.

        Args:
            clean: fp32 latents of unit variance, `(B, C, h, w)`.
            generator: Generator of times and noise, on the device of `clean`; `None` for the global one.
            span: Sample only times of this span, as often as without it relative to each other.

        Raises:
            ConfigurationError: Next to no time is sampled from the span.
        """
        steps, quantiles = range(self.num_timesteps), None
        if (span := self.noise.trained(span)) is not None:
            steps, quantiles = self._steps_of(span, clean.shape)
            if quantiles[1] - quantiles[0] < 1e-4:
                raise ConfigurationError(
                    f"of all times {quantiles[1] - quantiles[0]:.2g} are from {span[0]:g} to {span[1]:g}, where a "
                    "denoiser is trained; sample others (model.noise), or train the other one only (model.expert)"
                )
        share = self.noise.sample_times(clean, generator, quantiles)
        # As an index into the timesteps of the scheduler, which fall.
        index = (share * self.num_timesteps).long().clamp(steps.start, steps.stop - 1)
        times = (self.num_timesteps - index).to(clean.dtype) / self.num_timesteps
        shift = self._shift_of(clean.shape)
        times = shift * times / (1 + (shift - 1) * times)
        noise = self.noise.draw(clean, generator)
        t = _per_sample(times, clean)
        return Corrupted(
            (1 - t) * clean + t * self.noise.of_input(noise, generator),
            self.num_timesteps * (1 - times if self.inverted else times),
            clean - noise if self.inverted else noise - clean,
            times.square() if self.noise.preconditioned else None,
        )

    def share_of(self, span: Span, shape: Sequence[int]) -> float:
        """Returns the probability that a sampled time is in a span, for latents of a shape."""
        low, high = self._steps_of(self.noise.trained(span) or span, shape)[1]
        return high - low

    def _shift_of(self, shape: Sequence[int]) -> float:
        if self.line is None:
            return self.shift
        (least, low), (most, high) = self.line
        num_tokens = shape[-2] * shape[-1] / 4
        return math.exp(low + (high - low) * (num_tokens - least) / (most - least))

    def _steps_of(self, span: Span, shape: Sequence[int]) -> tuple[range, tuple[float, float]]:
        """Returns the indices of timesteps in a span, and the quantiles between which they are sampled."""
        count = self.num_timesteps
        steps = _indices_in(span, count, self._shift_of(shape), self.inverted)
        low, high = (self.noise.probability(n / count) for n in (steps.start, steps.stop))
        return steps, (low, high)

    def noise_by_signal(self, timesteps: Tensor) -> Tensor:
        """See `_Schedule`."""
        share = self._noise_share(timesteps)
        return share / (1 - share)

    def clean(self, noisy: Tensor, prediction: Tensor, timesteps: Tensor) -> Tensor:
        """Estimates clean latents from what a denoiser predicted for noisy ones; both `(B, C, h, w)`."""
        change = _per_sample(self._noise_share(timesteps), noisy) * prediction
        return noisy + change if self.inverted else noisy - change

    def _noise_share(self, timesteps: Tensor) -> Tensor:
        return self._rising(timesteps) / self.num_timesteps


@dataclass(eq=False)
class Diffusion(_Schedule):
    """The discrete noise schedule of DDPM, with epsilon or v as the target.

    Attributes:
        alphas_cumprod: Cumulated alphas, falling, fp32, `(num time steps,)`.
        predicts_v: Whether the target is v rather than epsilon.
        noise: Weights of times in the loss, and distribution of the noise.
    """

    alphas_cumprod: Tensor
    predicts_v: bool
    noise: Noise = Noise()

    @property
    def num_timesteps(self) -> int:  # type: ignore[override]
        """Number of time steps."""
        return len(self.alphas_cumprod)

    def corrupt(
        self, clean: Tensor, generator: torch.Generator | None = None, span: Span | None = None
    ) -> Corrupted:
        """See `FlowMatching.corrupt`."""
        table = self.alphas_cumprod.to(clean.device, non_blocking=True)
        low, high = self.noise.trained(span) or (0, math.inf)
        if not (steps := self._steps_of((low, high))):
            raise ConfigurationError(
                f"none of {self.num_timesteps} timesteps is from {low:g} to {high:g}, where a denoiser is trained; "
                "choose others (min_timestep and max_timestep of model.noise)"
            )
        timesteps = torch.randint(
            steps.start, steps.stop, (len(clean),), device=clean.device, generator=generator
        )
        noise = self.noise.draw(clean, generator)
        alpha = _per_sample(table[timesteps], clean)
        signal, spread = alpha.sqrt(), (1 - alpha).sqrt()
        target = signal * noise - spread * clean if self.predicts_v else noise
        weights, gamma, a = None, self.noise.min_snr_gamma, alpha.flatten()
        # Of snr = a / (1 - a); that of epsilon's last time may be 0.
        if gamma is not None:  # min(snr, gamma) / snr, or / (snr + 1) for v
            weights = torch.minimum(a, gamma * (1 - a))
            weights = weights if self.predicts_v else weights / a.clamp_min(1e-12)
        elif self.noise.debiased:  # 1 / sqrt(snr), or 1 / (snr + 1) for v
            weights = 1 - a if self.predicts_v else ((1 - a) / a.clamp_min(1e-12)).sqrt()
        noise = self.noise.of_input(noise, generator)
        return Corrupted(signal * clean + spread * noise, timesteps, target, weights)

    def share_of(self, span: Span, shape: Sequence[int]) -> float:
        """See `FlowMatching.share_of`."""
        return len(self._steps_of(self.noise.trained(span) or span)) / self.num_timesteps

    def _steps_of(self, span: Span) -> range:
        return range(*(math.ceil(min(end, self.num_timesteps)) for end in span))

    def noise_by_signal(self, timesteps: Tensor) -> Tensor:
        """See `_Schedule`."""
        alpha = self.alphas_cumprod.to(timesteps.device, non_blocking=True)[timesteps]
        return ((1 - alpha) / alpha).sqrt()

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
        for name in ("min_snr_gamma", "debiased"):
            if (value := getattr(noise, name)) not in (None, False):
                raise ConfigurationError(
                    f"{name}={value} weighs losses of epsilon and v, but this is flow matching "
                    f"({type(scheduler).__name__}); leave it out, and choose times by logit_mean and logit_std"
                )
        # Some take another shift than their config's. diffusers' training scripts leave out the one by image size.
        shift = config.get("shift", config.get("flow_shift", 1.0))
        shift = scheduler.shift if hasattr(type(scheduler), "shift") else shift
        shift = 1.0 if config.get("use_dynamic_shifting") else shift
        count, inverted = config.num_train_timesteps, config.get("invert_sigmas", False)
        if noise.shift != "size":
            return FlowMatching(count, noise.shift or shift, noise, inverted=inverted)
        if not config.get("use_dynamic_shifting"):
            raise ConfigurationError(
                f"shift='size' is for schedulers that shift by the size (use_dynamic_shifting); this "
                f"{type(scheduler).__name__} shifts by {shift}: leave it out, or give a number"
            )
        line = tuple((config[f"{n}_image_seq_len"], config[f"{n}_shift"]) for n in ("base", "max"))
        return FlowMatching(count, noise=noise, line=line, inverted=inverted)  # type: ignore[arg-type]
    for name in ("preconditioned", "uniform", "mode_scale", "shift"):
        if (value := getattr(noise, name)) not in (None, False):
            raise ConfigurationError(
                f"{name}={value} is for flow matching, and {type(scheduler).__name__} with "
                f"prediction_type={prediction!r} is none; leave it out"
            )
    kind = config.get("timestep_type", "discrete")
    times = "" if kind == "discrete" else f" and {kind} times"
    if times or prediction not in ("epsilon", "v_prediction") or "beta_schedule" not in config:
        raise ConfigurationError(
            f"cannot train for {type(scheduler).__name__} with prediction_type={prediction!r}{times}; use one of "
            "flow matching (FlowMatchEulerDiscreteScheduler), or a DDPM-like one with epsilon or v_prediction, if "
            "the denoiser predicts that; what consistency models learn of a teacher (SCMScheduler) is up to a "
            "LightningModule of your own"
        )
    # The scheduler's own where it has some: those of video models are shifted towards noise.
    table = getattr(scheduler, "alphas_cumprod", None)
    if table is None:
        table = DDPMScheduler.from_config(config).alphas_cumprod
    return Diffusion(table.float(), prediction == "v_prediction", noise)
