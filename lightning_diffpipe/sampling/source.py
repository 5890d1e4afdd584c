"""Sources of models: a source turns prompts into a request, and latents into images.

A source opens a model on disk. On rank 0 it has text encoders and autoencoder, too; on all other ranks only the
denoiser, whose weights are read once it is known which layers a rank runs.
"""

import contextlib
import importlib.util
import inspect
import itertools
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Real
from pathlib import Path
from typing import Any, Protocol

import diffusers
import torch
import torch.utils._pytree as pytree
import transformers
from torch import Tensor, nn
from torch._subclasses import fake_tensor

from lightning_diffpipe.errors import (
    CheckpointError,
    ConfigurationError,
    DiffPipeError,
    require_number,
)
from lightning_diffpipe.graph.fakes import shapes_without_values
from lightning_diffpipe.graph.placement import keep_stored, note_stored_bytes, quantize_all
from lightning_diffpipe.quantization import quantizations_of, quantize_components, require_kernels
from lightning_diffpipe.sampling.adapters import (
    AdaptedWeights,
    add_to_others,
    add_to_part,
    load_image_encoder,
    read_loras,
    refuse_adapted,
    refuse_images,
    refuse_scales,
    require_ip_adapters,
    with_ip_adapters,
)
from lightning_diffpipe.sampling.call import Call
from lightning_diffpipe.sampling.digests import (
    Texts,
    as_texts,
    tensors_in,
    texts_of,
    texts_of_folder,
)
from lightning_diffpipe.sampling.dry_run import dry_run_of
from lightning_diffpipe.sampling.loop import PipelineCall, denoisers_among, settings_restored
from lightning_diffpipe.sampling.record import Controlled
from lightning_diffpipe.sampling.skeleton import (
    Weights,
    check_weights,
    load_transformer,
    load_weights,
    opened_weights,
    quantization_config,
    refuse_names,
    skeleton,
    stored_dtype,
)

Sample = Callable[[Call], Tensor]

_LIBRARIES = {"diffusers": diffusers, "transformers": transformers}
_PROMPTS = ("prompt", "class_labels")
_LONGEST_SIDE = 65535  # of a JPEG
_LARGEST = 3.4e38  # of numbers in float32
_PER_PROMPT = ("num_images_per_prompt", "num_videos_per_prompt")
_NEEDS_VALUES = (
    fake_tensor.DataDependentOutputException,
    fake_tensor.DynamicOutputShapeException,
    fake_tensor.UnsupportedOperatorException,
)


@dataclass(frozen=True)
class Settings:
    """Arguments of a request, as of `Predictor.__call__`.

    A `generator` among `options` takes the place of the seed. Prompts are None where the pipeline is given their
    embeddings, or an image alone.
    """

    prompts: Sequence[Any] | None
    num_inference_steps: int | None = None
    guidance_scale: float | None = None
    seed: int = 0
    height: int | None = None
    width: int | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        without = self.prompts is None and self.options
        if not without and (not isinstance(self.prompts, list | tuple) or not self.prompts):
            raise ConfigurationError(
                f"prompts must be a list with at least one prompt; got {self.prompts!r}"
            )
        counted = {"num_inference_steps": None, "height": _LONGEST_SIDE, "width": _LONGEST_SIDE}
        for name, most in (counted | dict.fromkeys(_PER_PROMPT)).items():
            if (value := self.given().get(name)) is not None:
                require_number(name, value, 1, most, whole=True)
        require_number("seed", self.seed, -(2**63), 2**64 - 1, whole=True)
        if self.guidance_scale is not None:
            require_number("guidance_scale", self.guidance_scale)
        items = [(name, each) for name, v in self.given().items() for each in pytree.tree_leaves(v)]
        for name, value in items:
            if isinstance(value, Real) and not isinstance(value, bool):
                require_number(name, value, -_LARGEST, _LARGEST)
            if isinstance(value, Tensor) and (bad := int((~value.isfinite()).sum())):
                raise ConfigurationError(
                    f"{name} must be finite; {bad} of its {value.numel()} entries are infinite or NaN"
                )

    def given(self) -> dict[str, Any]:
        """Returns the arguments that were set, without the prompts and the seed."""
        named = ("num_inference_steps", "guidance_scale", "height", "width")
        values = {name: getattr(self, name) for name in named}
        return {k: v for k, v in values.items() if v is not None} | dict(self.options)

    def as_texts(self) -> dict[str, str]:
        """Returns the settings as texts, which ranks compare."""
        return as_texts({"prompts": self.prompts, "seed": self.seed} | self.given())

    def generator(self) -> torch.Generator:
        """Returns the generator of the start noise, on the host, so that it is the same on every device."""
        return torch.Generator().manual_seed(int(self.seed))


@dataclass(frozen=True)
class Opening:
    """Options with which a model is opened, as of `Predictor.from_pretrained`.

    Attributes:
        parts: To take in place of those in a diffusers folder; None leaves one out.
        vae: Ways in which the autoencoder saves memory: `"tiling"`, `"slicing"`.
        tries_kernels: Whether the device is that of the computation, so that kernels of a quantization are tried.
    """

    dtype: torch.dtype
    ema: bool = True
    variant: str | None = None
    parts: Mapping[str, Any] = field(default_factory=dict)
    vae: Collection[str] = ()
    loras: Mapping[str | Path, float] | None = None
    pipeline_class: str | type | None = None
    ip_adapters: Mapping[str | Path, Any] | None = None
    base: str | Path | None = None
    quantization: Any = None
    tries_kernels: bool = True


class Source(Protocol):
    """A model that can be sampled.

    Attributes:
        name: Name of the denoiser, among the parts of the pipeline.
        denoiser: The module that is made parallel, perhaps a skeleton.
        weights: Files with the weights of the skeleton; None if the denoiser has its weights.
        origin: Path of the model, for messages.
    """

    name: str
    denoiser: nn.Module
    weights: Weights | None
    origin: str

    def images(self, settings: Settings, sample: Sample) -> Any:
        """Samples images, with the denoising loop done by `sample`; on rank 0 only."""

    def part(self, name: str) -> nn.Module:
        """Returns another part that the loop calls, with its weights; on any rank."""

    def texts(self, name: str) -> Texts:
        """Returns what ranks compare of a part, the denoiser included: as it is stored, not as rounded."""


class DiffusersFolder:
    """A pipeline saved by diffusers.

    Args:
        path: Folder with `model_index.json`.
        leads: Load the other parts, too.
        device: Device to compute on.
        opening: Further options, and parts to take in place of those of the folder.

    Raises:
        ConfigurationError: The pipeline is of a kind that is not known, or cannot do without a part.
        CheckpointError: Weights are missing.
    """

    def __init__(self, path: Path, leads: bool, device: torch.device, opening: Opening) -> None:
        dtype, variant, parts = opening.dtype, opening.variant, opening.parts
        index = _model_index(path, parts, opening.pipeline_class)
        self.name, denoiser_class = _denoiser_class(path, index)
        if parts.get(self.name) is not None:
            raise ConfigurationError(
                f"{self.name}=... cannot be given: ranks read its weights themselves; save the pipeline with it "
                "to a folder, and open that"
            )
        self._path, self._index, self._device, self._vae = path, index, device, opening.vae
        self.origin = str(path)
        self._options = {"dtype": dtype, "variant": variant}
        self._given = {name: part for name, part in parts.items() if part is not None}
        self._parts: dict[str, nn.Module] = {}  # read by this rank, but for the denoiser
        weights = opened_weights(path / self.name, variant)
        config = _config(denoiser_class, path / self.name)
        present = [name for name, entry in index.items() if is_component(entry)]
        unet = config if self.name == "unet" else None
        self._loras = read_loras(opening.loras or {}, index["_class"], present, unet)
        adapters = opening.ip_adapters or {}
        self._ip_adapters = require_ip_adapters(index["_class"], adapters)
        stored = [name for name in present if name not in parts]  # what is given stays as it is
        self._quantizations = quantizations_of(opening.quantization, stored)
        if opening.tries_kernels:
            types = {(how, dtype or torch.bfloat16) for how in self._quantizations.values()}
            require_kernels(types, device)
        self.denoiser = skeleton(denoiser_class, config, device, dtype)
        check_weights(self.denoiser, weights)
        self._pipeline = self._whole_pipeline() if leads else None
        if not leads:
            add_to_others(self._given, self.name, self._loras)
        if adapters:
            weights = with_ip_adapters(self.outline(), self.denoiser, weights, adapters)
        if self._loras:
            weights = AdaptedWeights(weights, self.name, self.denoiser, self._loras)
        self.weights: Weights | None = weights
        quantize_components(self._quantizations, {self.name: self.denoiser}, trains=False)
        sizes = weights.quantized_bytes()
        for name, parameter in self.denoiser.named_parameters():
            if name in sizes:
                note_stored_bytes(parameter, sizes[name])

    def _whole_pipeline(self) -> Any:
        """Returns the pipeline with all parts placed but the denoiser, for the rank that leads."""
        parts = {self.name: self.denoiser, **self._given}
        pipeline = _load_others(self._path, self._index, parts, **self._options)
        add_to_others(pipeline.components, self.name, self._loras)
        for name, part in pipeline.components.items():
            if isinstance(part, nn.Module) and part is not self.denoiser:
                self._placed(name, part)
        pipeline.set_progress_bar_config(disable=True)
        self._save_memory(pipeline)
        load_image_encoder(pipeline, self._ip_adapters, self._device, self._options["dtype"])
        return pipeline

    def _placed(self, name: str, part: nn.Module) -> nn.Module:
        """Moves a component to the device, where it is quantized."""
        quantize_components(self._quantizations, {name: part}, trains=False)
        quantize_all(part, self._device)
        return part.to(self._device).eval()

    def _save_memory(self, pipeline: Any) -> None:
        for way in self._vae:
            turn_on = getattr(getattr(pipeline, "vae", None), f"enable_{way}", None)
            if turn_on is None:
                raise ConfigurationError(
                    f"vae_{way}=True, but the {type(pipeline).__name__} at {self._path} has no autoencoder that can"
                )
            turn_on()

    @property
    def samples_videos(self) -> bool:
        """Whether the pipeline is asked for a number of frames."""
        cls = self._index["_class"]
        return "num_frames" in inspect.signature(cls.__call__).parameters

    def outline(self) -> Any:
        """Returns the pipeline; on other ranks than rank 0 it is made from configs alone.

        Then its modules have no weights, and those of transformers are missing.

        Raises:
            ConfigurationError: Its autoencoder cannot save memory as is asked for.
        """
        if self._pipeline is not None:
            return self._pipeline
        cls = self._index["_class"]
        entries = {n: e for n, e in self._index.items() if n in inspect.signature(cls).parameters}
        parts = {n: None if is_component(e) or _is_absent(e) else e for n, e in entries.items()}
        for name, entry in entries.items():
            if is_component(entry) and entry[0] == "diffusers":
                kind = getattr(diffusers, entry[1])
                if issubclass(kind, nn.Module):
                    parts[name] = self._outline_of(name, kind)
                else:
                    parts[name] = kind.from_config(_config(kind, self._path / name))
        pipeline = cls(**parts | {self.name: self.denoiser} | self._given)
        self._save_memory(pipeline)
        return pipeline

    def _outline_of(self, name: str, cls: Any) -> nn.Module:
        kind, cpu = _class_of_each(cls.__name__), torch.device("cpu")
        if kind is None:
            return skeleton(cls, _config(cls, self._path / name), cpu, torch.float32)
        folders = _folders_of(self._path, name)
        return cls([skeleton(kind, _config(kind, each), cpu, torch.float32) for each in folders])

    def check_adapters(self, settings: Settings) -> None:
        """Raises ConfigurationError unless the request has the images of the adapters, and no more."""
        name, pipeline = self._index["_class_name"], self._pipeline
        can_encode = pipeline is None or getattr(pipeline, "image_encoder", None) is not None
        refuse_images(name, bool(self._ip_adapters), can_encode, settings.options)
        if self._loras:
            refuse_scales(settings.options)

    def images(self, settings: Settings, sample: Sample) -> Any:
        """Calls the pipeline around `sample`."""
        assert self._pipeline is not None, "only the rank that leads has text encoders"
        self.check_adapters(settings)
        arguments = call_arguments(self._pipeline, settings)
        return images_of(call_of(self._pipeline, arguments, self._device), sample)

    def part(self, name: str) -> nn.Module:
        """Returns another part that the loop calls."""
        if self._pipeline is not None:
            return getattr(self._pipeline, name)
        if name in self._given:
            return self._placed(name, self._given[name])
        if name not in self._parts:
            part = _read_part(str(self._path), name, self._index[name], **self._options)
            if not isinstance(part, nn.Module):  # such as guidance
                return part
            add_to_part(part, name, self._loras)
            self._parts[name] = self._placed(name, part)
        return self._parts[name]

    def texts(self, name: str) -> Texts:
        """See `Source`; files of adapters are compared with the denoiser."""
        if (part := self._given.get(name)) is not None:
            return texts_of(name, getattr(part, "config", {}), part.state_dict())
        is_several = _class_of_each(self._index[name][1]) is not None
        folders = _folders_of(self._path, name) if is_several else [self._path / name]
        every = [texts_of_folder(folder, self._options["variant"]) for folder in folders]
        if name == self.name:
            every += [lora.texts(f"LoRA {n}") for n, lora in enumerate(self._loras)]
            files = enumerate(self._ip_adapters)
            every += [texts_of(f"IP-Adapter {n}", {}, tensors_in(path)) for n, path in files]
        return {name: text for texts in every for name, text in texts.items()}


def _denoiser_class(path: Path, index: Mapping[str, Any]) -> tuple[str, Any]:
    """Returns the name of the denoiser that ranks share among the parts of a pipeline, and its class."""
    names = denoisers_among(n for n, entry in index.items() if not _is_absent(entry))
    if not names:
        raise ConfigurationError(
            f"the {index['_class_name']} at {path} has no transformer and no unet, so nothing can be sampled; "
            "it has " + ", ".join(n for n in index if not n.startswith("_"))
        )
    library, class_name = index[names[0]] or ("missing", "part")
    if library != "diffusers" or not hasattr(diffusers, class_name):
        raise ConfigurationError(
            f"{path}: the {names[0]} is a {library}.{class_name}, not a model of diffusers "
            f"{diffusers.__version__}"
        )
    return names[0], getattr(diffusers, class_name)


def _model_index(
    path: Path, parts: Mapping[str, Any], pipeline_class: str | type | None
) -> dict[str, Any]:
    """Reads the model index, without parts that are given as None; `_class` is the class of the pipeline."""
    index = dict(_config(diffusers.DiffusionPipeline, path))
    stored = index["_class_name"]
    named: Any = stored if pipeline_class is None else pipeline_class
    cls = named if isinstance(named, type) else getattr(diffusers, str(named), None)
    if not (isinstance(cls, type) and issubclass(cls, diffusers.DiffusionPipeline)):
        origin = f"pipeline_class={named!r}"
        if pipeline_class is None:
            origin = f"{path} is a {named}, which"
        if isinstance(named, list | tuple):
            origin = f"{path} is a {named[-1]} of its own {named[0]}.py, whose code is not run unasked; it"
        raise ConfigurationError(
            f"{origin} is no pipeline of diffusers {diffusers.__version__}; give a class of your own, a "
            "DiffusionPipeline that you have imported, as pipeline_class=CLASS of Predictor.from_pretrained"
        )
    is_own = isinstance(stored, list | tuple)
    index |= {"_class": cls, "_class_name": cls.__name__, "_is_own": is_own}
    known = ", ".join(n for n in index if not n.startswith("_"))
    present = {"self", *getattr(cls, "_optional_components", ()), *index}
    lacking = sorted(
        p.name
        for p in inspect.signature(cls.__init__).parameters.values()
        if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD and p.name not in present
    )
    if pipeline_class and lacking:
        raise ConfigurationError(
            f"pipeline_class={cls.__name__} needs {', '.join(lacking)}, which {path} does not have; it has {known}"
        )
    for name, part in parts.items():
        if name not in index:
            value = "None" if part is None else "..."
            raise ConfigurationError(
                f"{name}={value}, but the {cls.__name__} at {path} has no such part; it has {known}"
            )
        if part is None:
            index[name] = (None, None)
    return index


def _config(cls: Any, folder: Path) -> Any:
    try:
        return cls.load_config(str(folder))
    except (OSError, ValueError) as error:  # absent, or no JSON
        raise ConfigurationError(
            f"cannot read the config of the {cls.__name__} in {folder}: {error}"
        ) from error


def _load_others(
    path: Path, index: Mapping[str, Any], parts: Mapping[str, nn.Module], **options: Any
) -> Any:
    cls = index["_class"]
    absent = {name: None for name, part in index.items() if _is_absent(part)}
    entries = {n: e for n, e in index.items() if n in inspect.signature(cls).parameters}
    parts = {**parts, **load_networks(str(path), entries, parts, _read_part, **options)}
    try:
        if not index["_is_own"]:
            return cls.from_pretrained(str(path), **options, **parts, **absent)
        # diffusers would run the folder's code.
        others = {n: e for n, e in entries.items() if n not in parts and not _is_absent(e)}
        read = lambda name, e: _read_part(str(path), name, e) if is_component(e) else e
        return cls(**absent, **parts, **{n: read(n, e) for n, e in others.items()})
    except Exception as error:
        raise ConfigurationError(f"cannot load the pipeline at {path}: {error}") from error


def is_component(entry: Any) -> bool:
    """Returns whether an entry of `model_index.json` has library and class of a part; others are settings."""
    return isinstance(entry, list | tuple) and len(entry) == 2 and isinstance(entry[0], str)


def _is_absent(entry: Any) -> bool:
    """Returns whether an entry of `model_index.json` says that a part is left out."""
    return isinstance(entry, list | tuple) and list(entry) == [None, None]


def _class_of_each(class_name: str) -> Any:
    """Returns the class of each of several models that are one part, such as ControlNets; None of one model."""
    name = class_name.removeprefix("Multi")
    return None if name == class_name else getattr(diffusers, name, None)


def _folders_of(path: Path, name: str) -> list[Path]:
    """Returns the folders of several models that are one part: `controlnet`, `controlnet_1` and so on."""
    more = (path / f"{name}_{number}" for number in itertools.count(1))
    return [path / name, *itertools.takewhile(Path.is_dir, more)]


def class_of(library: str, name: str) -> Any:
    """Returns the class of a part.

    Raises:
        ConfigurationError: It is of another library than diffusers and transformers, or of another version.
    """
    if library not in _LIBRARIES:
        raise ConfigurationError(
            f"model_index.json asks for {library}.{name}; only parts from diffusers and "
            "transformers can be read"
        )
    cls = getattr(_LIBRARIES[library], name, None)
    if cls is None:
        raise ConfigurationError(
            f"model_index.json asks for {library}.{name}, which this version of {library} does not have"
        )
    return cls


def load_part(
    path: str,
    name: str,
    entry: Sequence[str],
    dtype: torch.dtype | None = None,
    variant: str | None = None,
) -> Any:
    """Loads one part of a diffusers folder or hub id, whole: its libraries would fill in random weights.

    In the type they are stored in, weights stay mapped from their files, and take no memory until they are placed.

    Args:
        path: Folder or hub id.
        name: Sub-folder of the part, such as `"unet"`; empty if it has none.
        entry: Library and class of the part, a module, tokenizer or scheduler; as in `model_index.json`.
        dtype: Type of its weights; None for that in which most of them are stored.
        variant: Variant of its files, where there are such files, as in diffusers.

    Raises:
        CheckpointError: The weights are those of a part with adapters, or some are missing or not known.
    """
    cls, origin = class_of(*entry), f"{path}/{name}".rstrip("/")
    if not issubclass(cls, nn.Module):
        return cls.from_pretrained(path, subfolder=name)
    if (member_class := _class_of_each(entry[1])) is not None:
        of_one, folders = (entry[0], member_class.__name__), _folders_of(Path(path), name)
        return cls([load_part(path, each.name, of_one, dtype, variant) for each in folders])
    if dtype is None:
        dtype = stored_dtype(Path(path, name), variant) or torch.float32
    if quantization_config(folder := Path(path, name)) is not None:
        if entry[0] == "transformers":
            part = load_transformer(cls, folder, dtype, variant)
        else:
            part = skeleton(cls, _config(cls, folder), torch.device("cpu"), dtype)
            load_weights(part, opened_weights(folder, variant))
        keep_stored(part)
        return part
    options = {"dtype" if entry[0] == "transformers" else "torch_dtype": dtype}
    if variant is not None and any(Path(path, name).glob(f"*.{variant}*")):
        options["variant"] = variant
    part, report = cls.from_pretrained(path, subfolder=name, output_loading_info=True, **options)
    refuse_adapted(report["unexpected_keys"], origin)
    refuse_names(entry[1], origin, report["missing_keys"], len(part.state_dict()))
    if entry[0] == "diffusers":  # text encoders are often stored in a larger model
        refuse_names(entry[1], origin, report["unexpected_keys"], None)
    keep_stored(part)
    return part


def load_networks(
    path: str,
    index: Mapping[str, Any],
    but: Collection[str] = (),
    load: Callable[..., Any] = load_part,
    **options: Any,
) -> dict[str, nn.Module]:
    """Loads the parts of diffusers and transformers in a folder or hub id that have weights, but for some."""
    networks = {}
    for name, entry in index.items():
        if name not in but and is_component(entry):
            cls = getattr(_LIBRARIES.get(entry[0]), entry[1], None)
            if isinstance(cls, type) and issubclass(cls, nn.Module):
                networks[name] = load(path, name, entry, **options)
    return networks


def _read_part(path: str, name: str, entry: Sequence[str], **options: Any) -> Any:
    """Loads a part, and names it if it cannot be read."""
    try:
        return load_part(path, name, entry, **options)
    except DiffPipeError:
        raise
    except Exception as error:
        raise CheckpointError(
            f"cannot read the {entry[1]} in {path}/{name}: {error}; a download that broke off? Copy it again"
        ) from error


def call_of(pipeline: Any, arguments: Mapping[str, Any], device: torch.device) -> PipelineCall:
    """Returns the call of a diffusers pipeline with its own parts, all of them here."""
    parts = dict(pipeline.components)
    absent = frozenset(name for name, part in parts.items() if part is None)
    return PipelineCall(pipeline, "__call__", arguments, parts, tuple(parts), device, absent)


def refuse_unknown(pipeline: Any, names: Iterable[str]) -> None:
    """Raises ConfigurationError for an argument that a diffusers pipeline's call does not take."""
    takes = list(inspect.signature(type(pipeline).__call__).parameters)[1:]
    if unknown := [name for name in names if name not in takes]:
        raise ConfigurationError(
            f"{type(pipeline).__name__} takes no {unknown[0]!r}; it takes {', '.join(takes)}"
        )


def call_arguments(pipeline: Any, settings: Settings) -> dict[str, Any]:
    """Makes the arguments of a diffusers pipeline's call.

    Raises:
        ConfigurationError: An option is unknown, or cannot be used here.
    """
    takes = inspect.signature(type(pipeline).__call__).parameters
    arguments, prompts = settings.given(), settings.prompts
    option = next((name for name in _PROMPTS if name in takes), None)
    ours = {"return_dict": "the images themselves", option: "prompts"}
    for name in arguments:
        if name in ours:
            raise ConfigurationError(f"{name} cannot be given; use {ours[name]} instead")
    refuse_unknown(pipeline, arguments)
    if prompts is not None and option is not None:
        names = denoisers_among(n for n, part in pipeline.components.items() if part is not None)
        config = getattr(getattr(pipeline, names[0]), "config", None)
        refuse_prompts(prompts, option, getattr(config, "num_embeds_ada_norm", None))
        kind = str(takes[option].annotation).lower()
        takes_one = option == "prompt" and "str" in kind and "list" not in kind
        if takes_one and len(prompts) > 1:
            raise ConfigurationError(
                f"this pipeline samples one prompt at a time; got {len(prompts)}: call the predictor for each"
            )
        if not takes_one:
            arguments = {k: _of_each_prompt(k, v, len(prompts)) for k, v in arguments.items()}
        arguments[option] = prompts[0] if takes_one else list(prompts)
    elif option is not None and takes[option].default is inspect.Parameter.empty:
        raise ConfigurationError(
            f"{type(pipeline).__name__} samples from prompts; give a list of them"
        )
    elif prompts is not None and "batch_size" in takes:
        arguments["batch_size"] = len(prompts)
    arguments.setdefault("generator", settings.generator())
    if "output_type" in takes:
        arguments.setdefault("output_type", "pil")
    return arguments


def _dry_run_of(call: PipelineCall) -> Call:
    """Returns a call's request; some pipelines refuse lists of one text, whatever their annotations say."""
    try:
        return dry_run_of(call)
    except DiffPipeError:
        raise
    except (TypeError, ValueError):
        lists = {n: call.arguments.get(n) for n in ("prompt", "negative_prompt")}
        lists = {n: v for n, v in lists.items() if isinstance(v, list) and len(v) == 1}
        texts = {n: v[0] for n, v in lists.items() if isinstance(v[0], str)}
        if texts:
            with contextlib.suppress(TypeError, ValueError):
                return dry_run_of(replace(call, arguments={**call.arguments, **texts}))
        raise


def images_of(call: PipelineCall, sample: Sample) -> Any:
    """Runs a pipeline's call with its denoising loop done by `sample`, and returns its images.

    Raises:
        ConfigurationError: The call fails before the loop, or with a denoiser that predicts zeros.
    """
    try:
        with settings_restored(call.parts):
            request = _dry_run_of(call)
    except (DiffPipeError, torch.OutOfMemoryError):
        raise
    except (TypeError, ValueError) as error:  # what the pipeline's own checks raise
        said = re.sub(r"tensor\([^()]*\)", "tensor(...)", str(error))
        raise ConfigurationError(f"{call.name}: {said}") from error
    except Exception as error:
        if lacking := _lacking_package(error):
            raise ConfigurationError(
                f"{call.name} needs the package {lacking}, which is not installed: pip install {lacking}"
            ) from error
        raise ConfigurationError(
            f"{call.name} ends in {type(error).__name__} before anything is denoised, with a denoiser that "
            f"predicts zeros: {error}; {_no_step_left(call)}"
        ) from error
    _refuse_shapes(request)
    try:
        with settings_restored(call.parts):
            output = request.finish(sample(request))
    finally:
        request.close()
    for attribute in ("images", "frames"):
        if hasattr(output, attribute):
            return getattr(output, attribute)
    return output if isinstance(output, Tensor | list) else output[0]


def _lacking_package(error: Exception) -> str | None:
    """Returns the missing package that an error names; diffusers leaves names of some packages undefined."""
    name = getattr(error, "name", None) if isinstance(error, NameError | ImportError) else None
    name = str(name or "").partition(".")[0]
    is_optional = isinstance(error, ImportError) or hasattr(diffusers.utils, f"is_{name}_available")
    return name if name and is_optional and importlib.util.find_spec(name) is None else None


def _no_step_left(call: PipelineCall) -> str:
    """Returns the remedy for a failed call; pipelines fail in torch where the strength leaves no step."""
    values = {
        name: call.arguments.get(name, parameter.default)
        for name, parameter in inspect.signature(type(call.pipeline).__call__).parameters.items()
    }
    strength, num_steps = values.get("strength"), values.get("num_inference_steps")
    if isinstance(strength, Real) and isinstance(num_steps, Real) and strength * num_steps < 1:
        return f"strength={strength} of num_inference_steps={num_steps} is less than a step: raise either"
    return "if it does so in diffusers alone, take another scheduler or other arguments"


def _refuse_shapes(request: Call) -> None:
    """Runs the first call of the denoiser without values, if tensors are among the arguments of the pipeline."""
    call = request.pipeline
    tensors = [f"{n}={tuple(v.shape)}" for n, v in call.arguments.items() if isinstance(v, Tensor)]
    if not tensors:
        return
    model = Controlled(call.parts[request.denoiser], call.controls)
    try:
        shapes_without_values(model, request.steps[0][0])
    except _NEEDS_VALUES:
        pass
    except (RuntimeError, ValueError) as error:
        raise ConfigurationError(
            f"{call.name} cannot be given {', '.join(tensors)}: its {request.denoiser} fails on "
            f"what becomes of that ({error})"
        ) from None


def refuse_prompts(
    prompts: Sequence[Any], option: str = "prompt", num_classes: int | None = None
) -> None:
    """Raises ConfigurationError unless prompts are texts, or class numbers if `option` is `"class_labels"`.

    After `num_classes`, if they are known, comes one number for no class.
    """
    for prompt in prompts:
        if option == "prompt" and not isinstance(prompt, str):
            raise ConfigurationError(f"prompts of this model are texts, in quotes; got {prompt!r}")
        if option == "class_labels":
            require_number("a prompt of this model, a class,", prompt, 0, whole=True)
            if num_classes is not None and prompt > num_classes:
                raise ConfigurationError(
                    f"{prompt} is none of the {num_classes} classes of this model; choose 0 .. {num_classes - 1}, "
                    f"or {num_classes} for no class"
                )


def _of_each_prompt(name: str, value: Any, num_prompts: int) -> Any:
    """Returns one text for all prompts, such as a negative prompt, for each: some pipelines take no other."""
    if not re.fullmatch(r"(negative_)?prompt(_\d+)?", name):
        return value
    if isinstance(value, str):
        return [value] * num_prompts
    if isinstance(value, list | tuple) and len(value) != num_prompts:
        raise ConfigurationError(
            f"{name} has {len(value)} texts for {num_prompts} prompts; give one for each, or a single text for all"
        )
    return value
