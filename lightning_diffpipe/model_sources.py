"""Models the Predictor can open: a diffusers folder, a folder or checkpoint of this project, a module.

    open_source(path)         looks what is there
    source_of_module(module)  takes what is in memory

`sampling/source.py` has the protocol and the folders of diffusers.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import diffusers
import torch
from torch import nn

from lightning_diffpipe.checkpoint_files import require_file
from lightning_diffpipe.errors import CheckpointError, ConfigurationError
from lightning_diffpipe.graph.placement import is_placeholder
from lightning_diffpipe.modules.adapters import refuse_adapted
from lightning_diffpipe.modules.latent_diffusion import LatentDiffusion, latent_size, pictures
from lightning_diffpipe.modules.parts import (
    checkpoint_part,
    checkpoint_part_weights,
    checkpoint_parts,
    folder_of_part,
    read_checkpoint,
)
from lightning_diffpipe.pipelines.stand_ins import checked_arguments
from lightning_diffpipe.sampling.skeleton import (
    SafetensorsFolder,
    StateDict,
    Weights,
    check_weights,
    skeleton,
)
from lightning_diffpipe.sampling.source import (
    DiffusersFolder,
    Sample,
    Settings,
    Source,
    call_arguments,
    drawn_by,
    refuse_prompts,
)

_DENOISERS = ("unet", "transformer")
_DEFAULTS = {"num_inference_steps": 25, "guidance_scale": 4.0}


def open_source(
    path: str | Path,
    leads: bool,
    device: torch.device,
    dtype: torch.dtype,
    ema: bool = True,
    variant: str | None = None,
    parts: Mapping[str, Any] | None = None,
    vae: Collection[str] = (),
    loras: Mapping[str | Path, float] | None = None,
    pipeline_class: str | None = None,
) -> Source:
    """Opens the model at a path.

    Args:
        path: A diffusers folder, a hub id that is on this machine, or a training checkpoint.
        leads: Whether this rank encodes prompts and decodes latents.
        device: Where to compute.
        dtype: Of all weights.
        ema: Take averaged weights of a checkpoint.
        variant: Of the files in a diffusers folder, such as `"fp16"`.
        parts: To take in place of those in a diffusers folder; None leaves one out.
        vae: What the autoencoder of a diffusers folder shall do for memory: `"tiling"`, `"slicing"`.
        loras: Scale of each LoRA file, for a diffusers folder.
        pipeline_class: To draw with in place of the one that a diffusers folder names.

    Raises:
        ConfigurationError: There is no such model, or of no known kind.
        CheckpointError: Its weights are missing or cannot be read.
    """
    if str(path).endswith(".ckpt") or "://" in str(path):
        require_file(path)
        _refuse_loras(loras, path)
        _refuse_variant(variant, path, parts or {}, vae, pipeline_class)
        return _checkpoint(Path(path), leads, device, dtype, ema)
    folder = model_folder(str(path))
    try:
        index = json.loads((folder / "model_index.json").read_text())
    except ValueError as error:
        raise ConfigurationError(f"{folder}/model_index.json is no JSON: {error}") from error
    if index.get("_class_name") == "LatentDiffusion":
        _refuse_loras(loras, path)
        _refuse_variant(variant, path, parts or {}, vae, pipeline_class)
        return _latent_diffusion_folder(folder, index, leads, device, dtype)
    return DiffusersFolder(
        folder, leads, device, dtype, variant, parts or {}, vae, loras, pipeline_class
    )


def _present(index: dict[str, Any]) -> list[str]:
    """Returns the parts of an index that decide what can be drawn."""
    return [n for n in (*_DENOISERS, "controlnet") if (index.get(n) or [None])[0]]


def _refuse_loras(loras: Mapping[str | Path, float] | None, path: str | Path) -> None:
    if loras:
        raise ConfigurationError(
            f"loras={list(map(str, loras))} are for diffusers folders; {path} was written by this project, and "
            "draws with the adapters it was trained with"
        )


def _refuse_variant(
    variant: str | None,
    path: str | Path,
    parts: Mapping[str, Any],
    vae: Collection[str],
    pipeline_class: str | None,
) -> None:
    others = ["pipeline_class"] if pipeline_class is not None else []
    for name in [*parts, *(f"vae_{each}" for each in vae), *others]:
        value = "None" if parts.get(name, name) is None else "..."
        raise ConfigurationError(
            f"{name}={value} is of diffusers folders; {path} was written by this project, and all its parts are "
            "needed"
        )
    if variant is not None:
        raise ConfigurationError(
            f"variant={variant!r} is of diffusers folders; {path} was written by this project and has one only, "
            "leave it out"
        )


def refuse_module(module: Any) -> None:
    """Raises ConfigurationError for what is no module of this project that draws from prompts alone."""
    if not isinstance(module, LatentDiffusion):
        raise ConfigurationError(
            f"module must be a LatentDiffusion; got a {type(module).__name__}. Save a pipeline of diffusers to a "
            "folder and open that: Predictor.from_pretrained(path)"
        )
    _refuse_controlnet(module.parts, f"this {type(module).__name__}")
    _refuse_self_conditioning(module.hparams, "this module")


def _refuse_self_conditioning(hparams: Mapping[str, Any], origin: str) -> None:
    """Raises ConfigurationError for a denoiser that no loop of a Predictor can feed."""
    if hparams.get("self_conditioning") is not None:
        raise ConfigurationError(
            f"the denoiser of {origin} also takes its own estimate (self_conditioning), which no pipeline "
            "of diffusers gives it, and so no Predictor. Draw in one process: module.sample(prompts), or "
            "trainer.predict"
        )


def _refuse_controlnet(parts: Collection[str], origin: str) -> None:
    """Refuses to leave a ControlNet out silently.

    Raises:
        ConfigurationError: There is one.
    """
    if "controlnet" in parts:
        raise ConfigurationError(
            f"{origin} has a ControlNet, which takes a picture. Draw in one process: "
            "ControlNetDiffusion.from_checkpoint(path), or from_pretrained, and .sample(prompts, condition=...). "
            "One of Stable Diffusion can be saved as a folder (save_pretrained(folder), or save_to=folder), and "
            "several ranks draw with it: diffpipe sample path=folder 'images={image: picture.png}'"
        )


def source_of_module(module: LatentDiffusion) -> LatentDiffusionSource:
    """Returns a module in memory, with its weights.

    Raises:
        ConfigurationError: Weights of it are on other ranks.
    """
    names = [name for name, p in module.named_parameters() if is_placeholder(p)]
    if names:
        raise ConfigurationError(
            f"this rank holds only its stage of the module: {len(names)} parameters live elsewhere, such as "
            f"{names[0]}; draw with the callback SampleImages during training, or open the checkpoint with "
            "Predictor.from_pretrained"
        )
    name = "unet" if hasattr(module, "unet") else "transformer"
    return LatentDiffusionSource(name, module.denoiser, None, module, module.vae.config)


def model_folder(path: str) -> Path:
    """Finds the folder of a path or a hub id.

    Raises:
        ConfigurationError: There is no such model on this machine.
    """
    if (Path(path) / "model_index.json").is_file():
        return Path(path)
    if not Path(path).is_dir():
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

        with contextlib.suppress(HFValidationError, LocalEntryNotFoundError, OSError):
            snapshot = Path(snapshot_download(path, local_files_only=True))
            if (snapshot / "model_index.json").is_file():  # a hub id may be of anything
                return snapshot
    _refuse_lora(Path(path))
    raise ConfigurationError(
        f"{path!r} is neither a folder with a model_index.json nor the hub id of one on this machine; "
        "check the path, or fetch it first: hf download ID"
    )


def _refuse_lora(path: Path) -> None:
    """Raises ConfigurationError, with the way to open it, for a low-rank adaptation without its model."""
    folder = path if path.is_dir() else path.parent
    names = ("adapter_config.json", "pytorch_lora_weights.safetensors")
    found = [name for name in names if (folder / name).is_file()]
    if path.exists() and found:
        raise ConfigurationError(
            f"{str(path)!r} is a LoRA ({found[0]}), which adapts a model that it does not hold. Merge them, and "
            "open the result: pipeline = DiffusionPipeline.from_pretrained(MODEL); pipeline.load_lora_weights("
            f"{str(folder)!r}); pipeline.fuse_lora(); pipeline.unload_lora_weights(); "
            "pipeline.save_pretrained(FOLDER)"
        )


def check_request(source: Source, settings: Settings, num_patches: int | None = None) -> None:
    """Refuses what configs alone tell that a model cannot draw; the rest is told when it draws.

    Of diffusers pipelines, what they check themselves before all else, and `num_patches` unless they pack
    latents into tokens, whose number only their call knows.

    Args:
        source: The model, whose weights need not be read.
        settings: What to draw.
        num_patches: Of PipeFusion.

    Raises:
        ConfigurationError: It cannot be drawn.
    """
    refuse_ignored_size(source, settings)
    if isinstance(source, LatentDiffusionSource):
        rows: int | None = source.check(settings)
    else:
        assert isinstance(source, DiffusersFolder)
        rows = _checked_rows(source, settings)
    if rows is not None and num_patches is not None and num_patches > rows:
        raise ConfigurationError(
            f"num_patches={num_patches} is more than the {rows} rows of tokens of these pictures; choose between 1 "
            f"and {rows}"
        )


def refuse_ignored_size(source: Source, settings: Settings) -> None:
    """Refuses a height without a width, or the reverse, where a pipeline takes its own size unless it gets both.

    Args:
        source: With the pipeline, or its config.
        settings: What to draw.

    Raises:
        ConfigurationError: What was given would be ignored.
    """
    given = settings.given()
    sides = [name for name in ("height", "width") if name in given]
    if len(sides) != 1 or not isinstance(source, DiffusersFolder):
        return
    try:
        pipeline = source.outline()
    except Exception:  # some cannot be made without their text encoders
        return
    [side] = sides
    arguments = call_arguments(pipeline, settings)
    without = {name: value for name, value in arguments.items() if name != side}
    asked, own = (checked_arguments(pipeline, each) for each in (arguments, without))
    if asked and own and asked.get(side) == own.get(side) != given[side]:
        other = "width" if side == "height" else "height"
        raise ConfigurationError(
            f"{type(pipeline).__name__} would ignore {side}={given[side]} without a {other}, and draw "
            f"{own['height']} x {own['width']} pixels; give both"
        )


def _checked_rows(source: DiffusersFolder, settings: Settings) -> int | None:
    """Rows of tokens in a picture, where configs tell them."""
    try:
        pipeline = source.outline()
    except ConfigurationError:
        raise
    except Exception:  # a pipeline that cannot be made without its text encoders will check later
        return None
    checked = checked_arguments(pipeline, call_arguments(pipeline, settings))
    denoiser, vae = source.denoiser.config, getattr(pipeline, "vae", None)
    channels = denoiser.get("in_channels"), getattr(vae, "config", {}).get("latent_channels")
    names = ("vae_scale_factor", "vae_scale_factor_spatial")
    scale = next((getattr(pipeline, name) for name in names if hasattr(pipeline, name)), None)
    is_packed = hasattr(pipeline, "_pack_latents") or channels[0] != channels[1]
    height, patch = (checked or {}).get("height"), denoiser.get("patch_size") or 1
    if is_packed or not (isinstance(scale, int) and isinstance(height, int)):
        return None
    return height // scale // (patch if isinstance(patch, int) else patch[-2])


class LatentDiffusionSource:
    """This project's own module.

    Args:
        name: `"unet"` or `"transformer"`.
        denoiser: The denoiser, or a skeleton of it.
        weights: Where the weights of a skeleton are.
        module: The whole module, on the rank that leads.
        vae: Config of the autoencoder.
    """

    def __init__(
        self,
        name: str,
        denoiser: nn.Module,
        weights: Weights | None,
        module: LatentDiffusion | None,
        vae: Mapping[str, Any],
    ) -> None:
        self.name, self.denoiser, self.weights = name, denoiser, weights
        self._module, self._vae = module, vae

    def check(self, settings: Settings) -> int:
        """Refuses what the module does not draw; returns the rows of tokens in a picture.

        Raises:
            ConfigurationError: It takes no such size or option.
        """
        if settings.options:
            raise ConfigurationError(
                f"LatentDiffusion takes no {min(settings.options)!r}; it takes num_inference_steps, "
                "guidance_scale, seed, height and width"
            )
        refuse_prompts(settings.prompts)
        config = self.denoiser.config
        rows, _ = latent_size(self._vae, config, settings.height, settings.width)
        return rows // (config.get("patch_size") or 1)

    def draw(self, settings: Settings, sample: Sample) -> Any:
        """Calls `LatentDiffusion.sample` around `sample`."""
        module = self._module
        assert module is not None, "only the rank that leads has text encoders"
        self.check(settings)
        arguments = _DEFAULTS | settings.given() | {"generator": settings.generator()}
        call = module.drawing(settings.prompts or (), **arguments)
        with module.evaluating():
            return pictures(drawn_by(call, sample, type(module).__name__))

    def part(self, name: str) -> nn.Module:
        """Is never asked: all parts but the denoiser are called before the loop and after it."""
        raise AssertionError(name)


def _latent_diffusion_folder(
    folder: Path, index: dict[str, Any], leads: bool, device: torch.device, dtype: torch.dtype
) -> LatentDiffusionSource:
    name = _denoiser_name(_present(index), str(folder))
    cls = getattr(diffusers, index[name][1])
    weights = SafetensorsFolder(folder / name)
    denoiser = skeleton(cls, cls.load_config(str(folder / name)), device, dtype)
    refuse_adapted(weights.names(), str(folder / name))
    check_weights(denoiser, weights)
    module = None
    if leads:
        module = LatentDiffusion.from_pretrained(folder, **{name: denoiser})
        _settle(module, name, device, dtype)
    vae = getattr(diffusers, index["vae"][1])
    config = vae.load_config(folder_of_part(str(folder), index, "vae"), subfolder="vae")
    return LatentDiffusionSource(name, denoiser, weights, module, config)


def _checkpoint(
    path: Path, leads: bool, device: torch.device, dtype: torch.dtype, ema: bool
) -> LatentDiffusionSource:
    checkpoint = read_checkpoint(path, "LatentDiffusion")
    if "call" in checkpoint.get("hyper_parameters", {}):  # an argument of PipelineDiffusion alone
        raise ConfigurationError(
            f"{path} is a training checkpoint of a diffusers pipeline. Write the pipeline to a folder, and open "
            "that: PipelineDiffusion.from_checkpoint(path).save_pretrained(FOLDER), or train with save_to=FOLDER"
        )
    _refuse_self_conditioning(checkpoint.get("hyper_parameters", {}), str(path))
    name = _denoiser_name(checkpoint_parts(checkpoint), str(path))
    cls, config = checkpoint_part(checkpoint, name)
    weights = StateDict(checkpoint_part_weights(checkpoint, name, ema), "", str(path))
    refuse_adapted(weights.names(), str(path))
    denoiser = skeleton(cls, config, device, dtype)
    check_weights(denoiser, weights)
    module = None
    if leads:
        module = LatentDiffusion.from_checkpoint(path, ema, **{name: denoiser})
        _settle(module, name, device, dtype)
    vae = checkpoint_part(checkpoint, "vae")[1]
    return LatentDiffusionSource(name, denoiser, weights, module, vae)


def _denoiser_name(parts: Collection[str], origin: str) -> str:
    _refuse_controlnet(parts, origin)
    names = [name for name in _DENOISERS if name in parts]
    if not names:
        raise CheckpointError(
            f"{origin} has neither a unet nor a transformer, so nothing can be sampled"
        )
    if len(names) > 1:
        raise CheckpointError(
            f"{origin} names a unet and a transformer, of which only one was trained last; take the other out of "
            "its model_index.json"
        )
    return names[0]


def _settle(
    module: LatentDiffusion, denoiser: str, device: torch.device, dtype: torch.dtype
) -> None:
    """Moves all parts but the denoiser, whose placeholders must not be moved."""
    for name, part in module.parts.items():
        if isinstance(part, nn.Module) and name != denoiser:
            nn.Module.to(part, device, dtype)  # past diffusers' own, which warns
    module.eval()
    # LightningModule.to would move the denoiser, too; `module.device` is what it would have set.
    module._device = device
