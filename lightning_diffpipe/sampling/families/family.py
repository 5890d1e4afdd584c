"""The few facts of a diffusers pipeline that its own code does not tell: how one step uses the denoiser.

Everything before the denoising loop and behind it is left to the pipeline's own `__call__`
(`interception.py`). What happens inside the loop has to be repeatable, since PipeFusion runs it once per
patch. It differs between pipelines in three small formulas, written here next to each other:

    in       the timestep as the denoiser wants it; the latents, if they are doubled already
    call     the denoiser, with arguments that stay the same in all steps (intercepted)
    out      guidance, and dropping a predicted variance

A test compares every family with its pipeline bit for bit, so that a formula that drifts in another
version of diffusers is noticed. Another pipeline is admitted by `register(Family(...))`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_diffpipe.errors import ConfigurationError

Guidance = Mapping[str, float]


def _as_it_is(latents: Tensor, guidance: Guidance) -> Tensor:
    return latents


def _once(guidance: Guidance) -> int:
    return 1


def _scalar(timestep: Tensor, inputs: Tensor) -> Tensor:
    return timestep


def _per_row(timestep: Tensor, inputs: Tensor) -> Tensor:
    return torch.as_tensor(timestep, device=inputs.device).reshape(-1).expand(inputs.shape[0])


@dataclass(frozen=True)
class Family:
    """How one step of a kind of pipeline uses its denoiser.

    Attributes:
        name: Short name.
        pipelines: `_class_name` in `model_index.json` of the pipelines of this kind.
        denoiser: Part that is made parallel, `"unet"` or `"transformer"`.
        guide: (outputs of the denoiser, latents, guidance) -> prediction for the scheduler.
        needed: (output of the denoiser, latents) -> what `guide` looks at, in the same place; all that halves of
            guidance send each other.
        latents_name: Argument of the denoiser that takes the latents.
        timestep: (timestep, inputs) -> argument `timestep`.
        latents: (inputs, guidance) -> argument `latents_name`.
        doubled: Copies of every sample in the latents themselves.
        shared: Arguments of the denoiser without a row per sample, whatever their size.
        option: Argument of the pipeline's `__call__` that takes the prompts.
        absent: Entries of `model_index.json` that must be empty, since they make steps unlike each other.
    """

    name: str
    pipelines: tuple[str, ...]
    denoiser: str
    guide: Callable[[list[Tensor], Tensor, Guidance], Tensor]
    latents_name: str = "hidden_states"
    timestep: Callable[[Tensor, Tensor], Tensor] = _per_row
    latents: Callable[[Tensor, Guidance], Tensor] = _as_it_is
    doubled: Callable[[Guidance], int] = _once
    shared: frozenset[str] = frozenset()
    option: str = "prompt"
    needed: Callable[[Tensor, Tensor], Tensor] = lambda output, latents: output
    absent: tuple[str, ...] = ()


# ------------------------------------------------------------------------------- the formulas


def classifier_free(outputs: list[Tensor], latents: Tensor, guidance: Guidance) -> Tensor:
    """`free + scale * (conditional - free)`, both in one batch, the free half first.

    Source: Ho & Salimans (2022), https://arxiv.org/abs/2207.12598
    """
    (output,) = outputs
    if len(output) == len(latents):
        return output
    free, conditional = output.chunk(2)
    guided = free + guidance["scale"] * (conditional - free)
    if guidance.get("rescale", 0.0) > 0.0:
        guided = _rescaled(guided, conditional, guidance["rescale"])
    return guided


def _rescaled(guided: Tensor, conditional: Tensor, share: float) -> Tensor:
    """Gives the guided prediction the spread of the conditional one: Lin et al. (2023), section 3.4."""
    axes = list(range(1, conditional.ndim))
    wanted, present = (x.std(dim=axes, keepdim=True) for x in (conditional, guided))
    return share * (guided * (wanted / present)) + (1 - share) * guided


def _without_variance(prediction: Tensor, latents: Tensor) -> Tensor:
    learned = prediction.shape[1] // 2 == latents.shape[1]
    return prediction.chunk(2, dim=1)[0] if learned else prediction


def _channels_of_latents(output: Tensor, latents: Tensor) -> Tensor:
    return output[:, : latents.shape[1]]


def _pixart(outputs: list[Tensor], latents: Tensor, guidance: Guidance) -> Tensor:
    return _without_variance(classifier_free(outputs, latents, guidance), latents)


def _dit(outputs: list[Tensor], latents: Tensor, guidance: Guidance) -> Tensor:
    """The conditional half first, and both halves of the latents go on with the same prediction."""
    (output,) = outputs
    if guidance["scale"] > 1:
        channels = latents.shape[1]
        noise, rest = output[:, :channels], output[:, channels:]
        conditional, free = torch.split(noise, len(noise) // 2, dim=0)
        half = free + guidance["scale"] * (conditional - free)
        output = torch.cat([torch.cat([half, half], dim=0), rest], dim=1)
    return _without_variance(output, latents)


def _first_half_twice(inputs: Tensor, guidance: Guidance) -> Tensor:
    if guidance["scale"] <= 1:
        return inputs
    half = inputs[: len(inputs) // 2]
    return torch.cat([half, half], dim=0)


def _flux(outputs: list[Tensor], latents: Tensor, guidance: Guidance) -> Tensor:
    """Guidance is distilled into the model; with a negative prompt, two calls and the usual formula."""
    if len(outputs) == 1:
        return outputs[0]
    conditional, free = outputs
    return free + guidance["true_scale"] * (conditional - free)


def _wan(outputs: list[Tensor], latents: Tensor, guidance: Guidance) -> Tensor:
    """Two calls, the one with the prompt first."""
    if len(outputs) == 1:
        return outputs[0]
    conditional, free = outputs
    return free + guidance["scale"] * (conditional - free)


def _latent_diffusion(outputs: list[Tensor], latents: Tensor, guidance: Guidance) -> Tensor:
    (output,) = outputs
    prediction = _channels_of_latents(output, latents).float()
    return classifier_free([prediction], latents, guidance)


# ------------------------------------------------------------------------------- the table


_FAMILIES: dict[str, Family] = {}


def register(family: Family) -> Family:
    """Admits a kind of pipeline; a name already known is replaced."""
    _FAMILIES[family.name] = family
    return family


def family_named(name: str) -> Family:
    """A registered family by its own name."""
    return _FAMILIES[name]


def family_of(pipeline: str) -> Family:
    """The family of a pipeline class.

    Args:
        pipeline: `_class_name` in `model_index.json`.

    Raises:
        ConfigurationError: No family is registered for it.
    """
    for family in _FAMILIES.values():
        if pipeline in family.pipelines:
            return family
    known = sorted(p for family in _FAMILIES.values() for p in family.pipelines)
    raise ConfigurationError(
        f"cannot sample with a {pipeline}; known are {', '.join(known)}. Another one is admitted by "
        "lightning_diffpipe.sampling.families.register(Family(...)), see docs/sampling.md"
    )


register(
    Family(
        "stable_diffusion",
        ("StableDiffusionPipeline", "StableDiffusionXLPipeline"),
        "unet",
        classifier_free,
        latents_name="sample",
        timestep=_scalar,
    )
)
register(
    Family(
        "pixart",
        ("PixArtAlphaPipeline", "PixArtSigmaPipeline"),
        "transformer",
        _pixart,
        needed=_without_variance,
    )
)
register(Family("sd3", ("StableDiffusion3Pipeline",), "transformer", classifier_free))
register(
    Family(
        "flux",
        ("FluxPipeline",),
        "transformer",
        _flux,
        timestep=lambda t, inputs: t.expand(inputs.shape[0]).to(inputs.dtype) / 1000,
        shared=frozenset({"img_ids", "txt_ids"}),
    )
)
register(
    Family(
        "dit",
        ("DiTPipeline",),
        "transformer",
        _dit,
        latents=_first_half_twice,
        doubled=lambda guidance: 2 if guidance["scale"] > 1 else 1,
        option="class_labels",
    )
)
register(
    Family(
        "wan",
        ("WanPipeline",),
        "transformer",
        _wan,
        absent=("transformer_2", "boundary_ratio", "expand_timesteps"),
    )
)
# The project's own module, with a U-Net or a PixArt transformer. Its parts are in `modules`.
for _name, _latents in (("unet", "sample"), ("transformer", "hidden_states")):
    register(
        Family(
            f"latent_diffusion_{_name}",
            (),
            _name,
            _latent_diffusion,
            latents_name=_latents,
            needed=_channels_of_latents,
        )
    )
