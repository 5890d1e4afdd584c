"""Models the Predictor can open: a diffusers folder, a folder or checkpoint of this project, a module.

    open_source(path)         opens what is there
    source_of_module(module)  takes what is in memory

`sampling/source.py` has the protocol and the folders of diffusers.
"""

from __future__ import annotations

import contextlib
import inspect
import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lightning_diffpipe.checkpoint_files import require_file
from lightning_diffpipe.errors import CheckpointError, ConfigurationError, require_number
from lightning_diffpipe.graph.placement import is_placeholder
from lightning_diffpipe.modules.adapters import merged
from lightning_diffpipe.modules.cascade import CascadedDiffusion
from lightning_diffpipe.modules.latent_diffusion import (
    LORA_LOADER,
    LatentDiffusion,
    as_pil,
    latent_size,
)
from lightning_diffpipe.modules.part_files import (
    SINGLE_FILE,
    PartOutline,
    folder_of_part,
    outline_of_part,
)
from lightning_diffpipe.modules.parts import (
    checkpoint_part,
    checkpoint_part_weights,
    checkpoint_parts,
    read_checkpoint,
)
from lightning_diffpipe.pipelines.stand_ins import checked_arguments
from lightning_diffpipe.sampling.adapters import (
    AdaptedWeights,
    add_to_others,
    read_loras,
    refuse_adapted,
)
from lightning_diffpipe.sampling.digests import Texts, texts_of, texts_of_folder
from lightning_diffpipe.sampling.loop import denoisers_among
from lightning_diffpipe.sampling.skeleton import (
    SafetensorsFolder,
    StateDict,
    Weights,
    check_weights,
    load_weights,
    skeleton,
    stored_dtype,
)
from lightning_diffpipe.sampling.source import (
    DiffusersFolder,
    Opening,
    Sample,
    Settings,
    Source,
    call_arguments,
    images_of,
    refuse_prompts,
)

_DENOISERS = ("unet", "transformer")
_DEFAULTS = {"num_inference_steps": 25, "guidance_scale": 4.0}
_MODULES = {cls.__name__: cls for cls in (LatentDiffusion, CascadedDiffusion)}


def open_source(
    path: str | Path, leads: bool, device: torch.device, dtype: torch.dtype | None, **options: Any
) -> Source:
    """Opens the model at a path.

    Args:
        path: A diffusers folder, a hub id that is on this machine, or a training checkpoint.
        leads: Whether this rank encodes prompts and decodes latents.
        device: Device of the computation.
        dtype: Type of all weights; None for that in which the denoiser is stored, but float32 for a checkpoint, and
            in the place of float16 on a processor, which computes that many times slower.
        options: Further ones of an `Opening`.

    Raises:
        ConfigurationError: There is no such model, or of no known kind.
        CheckpointError: Its weights are missing or cannot be read.
    """
    opening = Opening(dtype or torch.float32, **options)
    if isinstance(opening.loras, Mapping):
        loras = {_lora_on_this_machine(str(file)): scale for file, scale in opening.loras.items()}
        opening = replace(opening, loras=loras)
    if str(path).endswith(".ckpt") or "://" in str(path):
        require_file(path)
        _refuse_folder_options(opening, path)
        return _checkpoint(Path(path), leads, device, opening)
    if opening.base is not None:
        raise ConfigurationError(f"base={opening.base}: {path} is a whole model; leave it out")
    folder = model_folder(str(path))
    try:
        index = json.loads((folder / "model_index.json").read_text())
    except ValueError as error:
        raise ConfigurationError(f"{folder}/model_index.json is no JSON: {error}") from error
    if dtype is None:
        kinds = [stored_dtype(folder / name, opening.variant) for name in denoisers_among(index)]
        stored = next(filter(None, kinds), torch.float32)
        slow = stored == torch.float16 and device.type == "cpu"
        opening = replace(opening, dtype=torch.float32 if slow else stored)
    if str(index.get("_class_name")) in _MODULES:
        _refuse_folder_options(opening, path)
        cls = _MODULES[index["_class_name"]]
        return _stored_module(
            cls,
            [name for name, entry in index.items() if isinstance(entry, list) and entry[0]],
            str(folder),
            lambda n: outline_of_part(folder_of_part(str(folder), index, n), n, index[n]),
            lambda name: SafetensorsFolder(folder / name),
            lambda name: texts_of_folder(folder / name),
            partial(cls.from_pretrained, folder),
            leads,
            device,
            opening,
        )
    return DiffusersFolder(folder, leads, device, opening)


def _refuse_folder_options(opening: Opening, path: str | Path) -> None:
    """Raises ConfigurationError for options of diffusers folders."""
    names = ("variant", "pipeline_class", "ip_adapters", "quantization")
    unfit = [*opening.parts, *(f"vae_{each}" for each in opening.vae)]
    unfit += [name for name in names if getattr(opening, name)]
    if unfit:
        value = repr(opening.variant) if unfit[0] == "variant" else "..."
        raise ConfigurationError(
            f"{unfit[0]}={value} is of diffusers folders; {path} was written by this project, with all its parts "
            "and in one variant: leave it out"
        )


def refuse_module(module: Any) -> None:
    """Raises ConfigurationError for a module that is none of this project, or needs more than prompts."""
    if not isinstance(module, tuple(_MODULES.values())):
        raise ConfigurationError(
            f"module must be a {' or '.join(_MODULES)}; got a {type(module).__name__}. Save a pipeline of "
            "diffusers to a folder and open that: Predictor.from_pretrained(path)"
        )
    _refuse_controlnet(module.parts, f"this {type(module).__name__}")
    _refuse_self_conditioning(module.hparams, "this module")


def _refuse_self_conditioning(hparams: Mapping[str, Any], origin: str) -> None:
    """Raises ConfigurationError for a denoiser that no loop of a Predictor can feed."""
    if hparams.get("self_conditioning") is not None:
        raise ConfigurationError(
            f"the denoiser of {origin} also takes its own estimate (self_conditioning), which no pipeline "
            "of diffusers gives it, and so no Predictor. Sample in one process: module.sample(prompts), or "
            "trainer.predict"
        )


def _refuse_controlnet(parts: Collection[str], origin: str) -> None:
    """Raises ConfigurationError if there is a ControlNet, which would be left out silently."""
    if "controlnet" in parts:
        raise ConfigurationError(
            f"{origin} has a ControlNet, which takes an image. Sample in one process: "
            "ControlNetDiffusion.from_checkpoint(path), or from_pretrained, and .sample(prompts, condition=...). "
            "One of Stable Diffusion can be saved as a folder (save_pretrained(folder), or save_to=folder), and "
            "several ranks sample with it: diffpipe sample path=folder 'images={image: image.png}'"
        )


def source_of_module(module: LatentDiffusion | CascadedDiffusion) -> ModuleSource:
    """Returns the source of a module in memory; raises ConfigurationError if weights are on other ranks."""
    names = [name for name, p in module.named_parameters() if is_placeholder(p)]
    if names:
        raise ConfigurationError(
            f"this rank holds only its stage of the module: {len(names)} parameters live elsewhere, such as "
            f"{names[0]}; sample with the callback SampleImages during training, or open the checkpoint with "
            "Predictor.from_pretrained"
        )
    name = "unet" if hasattr(module, "unet") else "transformer"
    vae = module.parts["vae"].config if "vae" in module.parts else None
    return ModuleSource(type(module), name, getattr(module, name), None, module, vae)


def _snapshot(hub_id: str) -> Path | None:
    """Returns the folder of the fetched files of a hub id; None if there are none, or if it is no hub id."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    with contextlib.suppress(HFValidationError, LocalEntryNotFoundError, OSError):
        return Path(snapshot_download(hub_id, local_files_only=True))
    return None


def _lora_on_this_machine(path: str) -> str:
    """Returns the path of a LoRA file or folder, or the folder of a hub id; raises CheckpointError for neither."""
    local = path if Path(path).exists() else _snapshot(path)
    if local is None:
        raise CheckpointError(
            f"there is no LoRA {path}; name its file, its folder, or the hub id of one on this machine"
        )
    return str(local)


def model_folder(path: str) -> Path:
    """Finds the folder of a path or hub id; raises ConfigurationError if there is no such model on this machine."""
    if (Path(path) / "model_index.json").is_file():
        return Path(path)
    snapshot = None if Path(path).is_dir() else _snapshot(path)
    if snapshot is not None and (snapshot / "model_index.json").is_file():
        return snapshot  # a hub id may be of anything
    raise ConfigurationError(
        f"{path!r} is neither a folder with a model_index.json nor the hub id of one on this machine; check the "
        f"path, or fetch it first (hf download ID). {SINGLE_FILE}, and a LoRA is opened with its model "
        "(loras={FILE: 1.0})"
    )


def check_request(
    source: Source, settings: Settings, method: str = "single", num_patches: int | None = None
) -> None:
    """Refuses requests that a model cannot serve by its configs alone; others are refused while it samples.

    Of diffusers pipelines, what they check themselves before all else, and `num_patches` unless they pack
    latents into tokens, whose number only their call knows.

    Args:
        source: The model, whose weights need not be read.
        settings: The request.
        method: Method by which ranks share the work.
        num_patches: Patches of PipeFusion.

    Raises:
        ConfigurationError: It cannot be served, or not by this method.
    """
    refuse_ignored_size(source, settings)
    if isinstance(source, ModuleSource):
        rows = source.check(settings)
        refuse_method(source, method)
    else:
        assert isinstance(source, DiffusersFolder)
        source.check_adapters(settings)
        rows = _checked_rows(source, settings)
    if method == "pipefusion" and rows is not None and (num_patches or 0) > rows:
        raise ConfigurationError(
            f"num_patches={num_patches} is more than the {rows} rows of tokens of these images; choose between 1 "
            f"and {rows}"
        )


def refuse_method(source: Source, method: str) -> None:
    """Raises ConfigurationError for a method by which ranks cannot share a module of this project."""
    if not isinstance(source, ModuleSource):
        return
    if source.cls is CascadedDiffusion and method not in ("single", "auto"):
        raise ConfigurationError(
            f"method={method} shares one denoiser, and a cascade samples with two, one after the other; take "
            "single, which divides the prompts"
        )
    if method in ("pipefusion", "sequence") and source.name == "unet":
        raise ConfigurationError(
            f"method={method} needs a transformer, and this model is a U-Net; take distrifusion"
        )


def refuse_ignored_size(source: Source, settings: Settings) -> None:
    """Raises ConfigurationError for a height or width alone, if the pipeline then takes its own size."""
    arguments = settings.given()
    sides = [name for name in ("height", "width") if name in arguments]
    if len(sides) != 1 or not isinstance(source, DiffusersFolder):
        return
    [side] = sides
    (pipeline, checked), (_, default) = (_checked(source, settings, n) for n in ((), sides))
    if checked and default and checked.get(side) == default.get(side) != arguments[side]:
        other = "width" if side == "height" else "height"
        raise ConfigurationError(
            f"{type(pipeline).__name__} would ignore {side}={arguments[side]} without a {other}, and sample "
            f"{default['height']} x {default['width']} pixels; give both"
        )


def _checked(
    source: DiffusersFolder, settings: Settings, without: Collection[str] = ()
) -> tuple[Any, dict[str, Any]]:
    """Returns an outline of a pipeline, and the arguments that it checks: none if it needs its text encoders."""
    try:
        pipeline = source.outline()
    except ConfigurationError:
        raise
    except Exception:  # some cannot be made without
        return None, {}
    arguments = call_arguments(pipeline, settings)
    remaining = {name: value for name, value in arguments.items() if name not in without}
    return pipeline, checked_arguments(pipeline, remaining) or {}


def _checked_rows(source: DiffusersFolder, settings: Settings) -> int | None:
    """Returns the rows of tokens in an image, where configs have them."""
    (pipeline, checked), denoiser = _checked(source, settings), source.denoiser.config
    channels = getattr(getattr(pipeline, "vae", None), "config", {}).get("latent_channels")
    names = ("vae_scale_factor", "vae_scale_factor_spatial")
    scale = next((getattr(pipeline, name) for name in names if hasattr(pipeline, name)), None)
    is_packed = hasattr(pipeline, "_pack_latents") or denoiser.get("in_channels") != channels
    height, patch = checked.get("height"), denoiser.get("patch_size") or 1
    if is_packed or not (isinstance(scale, int) and isinstance(height, int)):
        return None
    return height // scale // (patch if isinstance(patch, int) else patch[-2])


@dataclass(eq=False)
class ModuleSource:
    """A module of this project; see `Source`.

    Attributes:
        name: Name of the denoiser, the first one of a cascade: `"unet"` or `"transformer"`.
        module: The whole module, on the rank that leads.
        vae: Config of the autoencoder; None if it samples pixels.
        open_part: Skeleton and weights of another denoiser; None for a module in memory.
        stored_texts: Texts of a stored part, which ranks compare; None for a module in memory.
    """

    cls: type[LatentDiffusion | CascadedDiffusion]
    name: str
    denoiser: nn.Module
    weights: Weights | None
    module: LatentDiffusion | CascadedDiffusion | None
    vae: Mapping[str, Any] | None
    open_part: Callable[[str], tuple[nn.Module, Weights]] | None = None
    origin: str = "a module in memory"
    stored_texts: Callable[[str], Texts] | None = None
    _parts: dict[str, nn.Module] = field(default_factory=dict)

    def check(self, settings: Settings) -> int | None:
        """Refuses a request that the module cannot serve; returns the rows of tokens in an image of latents.

        Raises:
            ConfigurationError: It takes no such size or option.
        """
        others = ("self", "prompts", "generator", "small")
        parameters = [n for n in inspect.signature(self.cls.sample).parameters if n not in others]
        if unknown := sorted(settings.given().keys() - parameters):
            raise ConfigurationError(
                f"{self.cls.__name__} takes no {unknown[0]!r}; it takes {', '.join(parameters)} and seed"
            )
        if settings.prompts is None:
            raise ConfigurationError(
                f"{self.cls.__name__} samples from prompts; give a list of them"
            )
        refuse_prompts(settings.prompts)
        require_number("noise_level", settings.options.get("noise_level", 0), 0, 1)
        if self.vae is None:
            return None
        config = self.denoiser.config
        rows, _ = latent_size(self.vae, config, settings.height, settings.width)
        return rows // (config.get("patch_size") or 1)

    def images(self, settings: Settings, sample: Sample) -> Any:
        """Calls the module's own `sample`, with its denoising loop done by `sample`."""
        module = self.module
        assert module is not None, "only the rank that leads has text encoders"
        self.check(settings)
        arguments = _DEFAULTS | settings.given() | {"generator": settings.generator()}
        call = module.sampling_call(settings.prompts or (), **arguments)
        with module.evaluating():
            return as_pil(images_of(call, sample))

    def part(self, name: str) -> nn.Module:
        """Returns the second denoiser of a cascade, with its weights."""
        if self.module is not None:
            return getattr(self.module, name)
        if name not in self._parts:
            part, weights = self.open_part(name)
            load_weights(part, weights)
            self._parts[name] = part.eval()
        return self._parts[name]

    def texts(self, name: str) -> Texts:
        """See `Source`."""
        if self.stored_texts is not None:
            return self.stored_texts(name)
        part = self.part(name)
        return texts_of(name, part.config, part.state_dict())


def _checkpoint(path: Path, leads: bool, device: torch.device, opening: Opening) -> ModuleSource:
    checkpoint = read_checkpoint(path, " or ".join(_MODULES))
    if "call" in checkpoint.get("hyper_parameters", {}):  # an argument of PipelineDiffusion alone
        raise ConfigurationError(
            f"{path} is a training checkpoint of a diffusers pipeline. Write the pipeline to a folder, and open "
            "that: PipelineDiffusion.from_checkpoint(path).save_pretrained(FOLDER), or train with save_to=FOLDER"
        )
    _refuse_self_conditioning(checkpoint.get("hyper_parameters", {}), str(path))
    parts = checkpoint_parts(checkpoint)
    outline_of = partial(checkpoint_part, checkpoint)
    stored = lambda name: checkpoint_part_weights(checkpoint, name, opening.ema, opening.base)
    cls = CascadedDiffusion if "upscaler" in parts else LatentDiffusion
    return _stored_module(
        cls,
        parts,
        str(path),
        outline_of,
        lambda name: StateDict(stored(name), str(path)),
        lambda name: texts_of(name, outline_of(name).config, stored(name)),
        partial(cls.from_checkpoint, path, opening.ema, opening.base),
        leads,
        device,
        opening,
    )


def _stored_module(
    cls: type[LatentDiffusion | CascadedDiffusion],
    parts: Collection[str],
    origin: str,
    outline_of: Callable[[str], PartOutline],
    weights_of: Callable[[str], Weights],
    texts_of_part: Callable[[str], Texts],
    read: Callable[..., LatentDiffusion | CascadedDiffusion],
    leads: bool,
    device: torch.device,
    opening: Opening,
) -> ModuleSource:
    """Opens a module in a folder or a checkpoint; `read` makes the whole module, given its denoiser."""
    added = read_loras(opening.loras or {}, LORA_LOADER, parts)
    _refuse_controlnet(parts, origin)
    names = [name for name in _DENOISERS if name in parts]
    if len(names) != 1:
        raise CheckpointError(
            f"{origin} must have a unet or a transformer, and not both; it has {names}"
        )
    cls.check_parts(parts, origin)

    def open_part(name: str) -> tuple[nn.Module, Weights]:
        """Returns a denoiser without its weights, and these, to which LoRA files are added as they are read."""
        outline, weights = outline_of(name), weights_of(name)
        refuse_adapted(weights.names(), weights.origin)
        denoiser = skeleton(outline.cls, outline.config, device, opening.dtype)
        check_weights(denoiser, weights)
        if added:
            weights = AdaptedWeights(weights, name, denoiser, added)
        return denoiser, weights

    [name] = names
    denoiser, weights = open_part(name)
    module = read(**{name: denoiser}) if leads else None
    if module is not None:
        for other, part in module.parts.items():
            if isinstance(part, nn.Module):
                part = merged(part)  # LoRA files are of plain weights
                setattr(module, other, part)
                if other != name:  # whose placeholders must not be moved
                    add_to_others({other: part}, name, added)
                    nn.Module.to(part, device, opening.dtype)  # past diffusers' own, which warns
        module.eval()
        # LightningModule.to would move the denoiser, too; `module.device` is what it would have set.
        module._device = device
    vae = outline_of("vae").config if "vae" in cls.part_names else None
    of_loras = [lora.texts(f"LoRA {n}") for n, lora in enumerate(added)]

    def stored_texts(part: str) -> Texts:
        texts = [texts_of_part(part), *(of_loras if part == name else ())]
        return {key: text for each in texts for key, text in each.items()}

    return ModuleSource(cls, name, denoiser, weights, module, vae, open_part, origin, stored_texts)
