"""Models without weights, from configuration files alone, in their own training step: to be timed on paper.

    FOLDER/model_index.json, FOLDER/*/config.json  ->  parts on the meta device  ->  PipelineDiffusion  ->  profile

No weights are read and no memory is taken, so a model may be larger than the machine. Integers are the exception:
pipelines cut and count tokens by the values of ids and masks, which are therefore computed (`Values`). The
configurations of well-known models, as they are published, are in `published/`.
"""

import functools
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import diffusers
import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils.weak import WeakTensorKeyDictionary
from transformers import BaseImageProcessor, BatchEncoding, ProcessorMixin

from lightning_diffpipe.errors import ConfigurationError, DiffPipeError, require_number
from lightning_diffpipe.graph.placement import created_in
from lightning_diffpipe.modules.adapters import Lora
from lightning_diffpipe.modules.controlnet import ControlNetDiffusion
from lightning_diffpipe.modules.parts import PartsModule
from lightning_diffpipe.modules.pipeline_diffusion import Expert, PipelineDiffusion
from lightning_diffpipe.pipelines.stand_ins import Captured, StandIn
from lightning_diffpipe.pipelines.trial import encoding_means, find_tail
from lightning_diffpipe.planning.profile import ModelProfile
from lightning_diffpipe.profiling.modelled import DeviceModel, device_named, modelled
from lightning_diffpipe.quantization import quantizations_of, quantize_components
from lightning_diffpipe.sampling.source import class_of

Configs = Mapping[str, Mapping[str, Any]]
"""By `"model_index"` or the name of a part: the contents of its configuration file."""

_PUBLISHED = files("lightning_diffpipe.modules") / "published"
PUBLISHED = tuple(sorted(f.name.removesuffix(".json") for f in _PUBLISHED.iterdir()))
_FILES = tuple(f"{kind}config.json" for kind in ("", "scheduler_", "tokenizer_", "preprocessor_"))
_MOST_VALUES = 2**20


def read_configs(path: str) -> Configs:
    """Reads the configuration files of a diffusers folder, or those of a well-known model.

    Raises:
        ConfigurationError: There is neither.
    """
    if path in PUBLISHED:
        return json.loads((_PUBLISHED / f"{path}.json").read_text())
    folder = Path(path)
    try:
        configs = {"model_index": json.loads((folder / "model_index.json").read_text())}
        for part in sorted(folder.iterdir()):
            for file in (part / name for name in _FILES if (part / name).is_file()):
                configs[part.name] = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            f"there is no model {path!r} to plan for: neither one of {', '.join(PUBLISHED)}, nor a folder with a "
            f"model_index.json and configuration files ({error})"
        ) from error
    return configs


class Values(TorchDispatchMode):
    """Keeps the values of integers and truth values on the meta device, as far as they follow from known ones.

    Other numbers that are copied to the host, such as statistics of an autoencoder's latents, become ones.
    """

    def __init__(self) -> None:
        super().__init__()
        self._known = WeakTensorKeyDictionary()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, aten = kwargs or {}, torch.ops.aten
        if func is aten._local_scalar_dense.default:
            if args[0] in self._known:
                return self._known[args[0]].item()
            if args[0].is_meta and args[0].dtype == torch.bool:
                return False  # whether an image has other numbers than it may have
        if func is aten.nonzero.default and args[0] in self._known:
            with _disable_current_modes():
                places = self._known[args[0]].nonzero()
            return self._on_meta(places)
        if func is aten.index.Tensor:
            args = (args[0], [i for each in args[1] for i in self._by_numbers(each)])
        if func is aten._to_copy.default and args[0].is_meta:
            place = torch.device(kwargs.get("device") or "meta")
            if place.type != "meta":
                with _disable_current_modes():
                    kind = {"dtype": kwargs.get("dtype") or args[0].dtype, "device": place}
                    value = self._known.get(args[0])
                    return torch.ones(args[0].shape, **kind) if value is None else value.to(**kind)
        out = func(*args, **kwargs)
        self._note(func, args, kwargs, pytree.tree_leaves(out))
        return out

    def _by_numbers(self, index: Tensor | None) -> Sequence[Tensor | None]:
        """Returns indices in place of a mask, the number of whose entries would not be known on the meta device."""
        is_mask = index is not None and index.dtype == torch.bool and index in self._known
        if not is_mask:
            return [index]
        with _disable_current_modes():
            return [self._on_meta(each) for each in self._known[index].nonzero().unbind(1)]

    def _on_meta(self, value: Tensor) -> Tensor:
        meta = value.to("meta")
        self._known[meta] = value
        return meta

    def _note(self, func: Any, args: Any, kwargs: dict[str, Any], outs: Sequence[Any]) -> None:
        """Computes small outputs of integers and truth values again on the host, if all inputs are known there."""
        on_meta = [x for x in outs if isinstance(x, Tensor) and x.is_meta]
        if not any(not x.is_floating_point() and x.numel() <= _MOST_VALUES for x in on_meta):
            return
        inputs = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if not all(x.device.type == "cpu" or x in self._known for x in inputs):
            for x in on_meta:
                self._known.pop(x, None)
            return
        value = lambda x: self._known[x] if x.is_meta else x
        args, kwargs = pytree.tree_map_only(Tensor, value, (args, kwargs))
        if kwargs.get("device") is not None:
            kwargs["device"] = torch.device("cpu")
        with _disable_current_modes():
            values = pytree.tree_leaves(func(*args, **kwargs))
        self._known.update({x: v for x, v in zip(outs, values, strict=True) if x is not None})


class BlankTokenizer:
    """A tokenizer without a vocabulary: all prompts have as many tokens as there may be."""

    pad_token_id, bos_token_id, eos_token_id, unk_token_id = 0, 1, 2, 3
    padding_side = "right"

    def __init__(self, model_max_length: int) -> None:
        self.model_max_length = model_max_length

    def __call__(
        self,
        text: Any,
        *_: Any,
        max_length: int | None = None,
        return_tensors: Any = None,
        **__: Any,
    ) -> BatchEncoding:
        """Gives ids and a mask of `max_length` tokens."""
        rows = 1 if isinstance(text, str) else len(text)
        ids = torch.full((rows, max_length or self.model_max_length), 2)
        values: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if not return_tensors:
            values = {name: value.tolist() for name, value in values.items()}
        return BatchEncoding(values)

    def apply_chat_template(self, conversation: Any, tokenize: bool = True, **options: Any) -> Any:
        """Returns the output of a call for one or several conversations; without `tokenize` an empty text."""
        chats = conversation if isinstance(conversation[0], list) else [conversation]
        return self(chats, **options) if tokenize else ""

    def tokenize(self, text: str) -> list[str]:
        """Gives no words, of which some might be learned embeddings."""
        return []

    def batch_decode(self, ids: Any, **_: Any) -> list[str]:
        """Gives no words, of which some might have been cut off."""
        return [""] * len(ids)


def _module(cls: Any, config: Mapping[str, Any], dtype: torch.dtype, device: Any) -> nn.Module:
    with torch.device(device), created_in(dtype):
        if issubclass(cls, diffusers.ModelMixin):
            return cls.from_config(config)
        return cls(cls.config_class(**config))


def _other_part(cls: Any, config: Mapping[str, Any], path: str, name: str) -> Any:
    """Makes a scheduler, tokenizer or image processor; None for a part that training does not call."""
    if name.startswith("tokenizer"):
        if any((Path(path) / name).glob("[!t]*")):  # a vocabulary
            return cls.from_pretrained(path, subfolder=name)
        return BlankTokenizer(min(config.get("model_max_length", 512), 4096))
    if issubclass(cls, BaseImageProcessor):
        return cls(**config)
    return cls.from_config(config) if hasattr(cls, "from_config") else None


def _zeros_of(encoder: nn.Module) -> StandIn:
    """Returns an encoder on the CPU that answers with zeros, of the shapes that the one on paper gives."""
    answers: dict[str, Any] = {}
    place = next(encoder.parameters()).device

    def zeros(x: Tensor) -> Tensor:
        return torch.zeros(x.shape, dtype=torch.float32 if x.is_floating_point() else x.dtype)

    def call(*args: Any, **options: Any) -> Any:
        shapes = pytree.tree_map_only(Tensor, lambda x: (x.shape, x.dtype), (args, options))
        if (key := repr(shapes)) not in answers:
            args, options = pytree.tree_map_only(Tensor, lambda x: x.to(place), (args, options))
            answers[key] = pytree.tree_map_only(Tensor, zeros, encoder(*args, **options))
        return answers[key]

    return StandIn(encoder, call=call, device=torch.device("cpu"), dtype=torch.float32)


class OnPaper:
    """A training step without weights, or with random ones.

    Args:
        path: A diffusers folder, or the name of a well-known model.
        dtype: Type of weights, gradients and activations.
        configs: Its configurations; None reads them.
        call: Further arguments of the pipeline's call.
        device: Device of the weights: meta by default, without memory; else they have random values.
        lora: Adapters that are trained in place of the denoiser's weights.
        quantization: Quantization of frozen linear layers, as of `PipelineDiffusion.from_pretrained`.
        expert: As in `PipelineDiffusion`.
        with_reference: Whether each sample has an image of its size that it is made from; pipelines that do
            nothing without one, and Flux Kontext, have it in any case.

    Attributes:
        module: The model in training.
        denoiser: Name of the denoiser among its parts.
        size: Height and width in pixels and number of frames that the pipeline samples by default.

    Raises:
        ConfigurationError: The model cannot be trained by its pipeline's own call, or not without values.
    """

    def __init__(
        self,
        path: str,
        dtype: torch.dtype,
        configs: Configs | None = None,
        call: Mapping[str, Any] | None = None,
        device: torch.device | str = "meta",
        lora: Lora | None = None,
        quantization: Any = None,
        expert: Expert | None = None,
        with_reference: bool = False,
    ) -> None:
        configs = configs or read_configs(path)
        index = configs["model_index"]
        cls = getattr(diffusers, str(index["_class_name"]), None)
        if cls is None:
            raise ConfigurationError(f"diffusers has no pipeline {index['_class_name']!r} ({path})")
        expected = inspect.signature(cls.__init__).parameters
        parts = {name: index[name] for name in expected if name in index}
        processors = list[str]()
        for name, entry in parts.items():
            if isinstance(entry, list | tuple) and len(entry) == 2:  # (library, class), or Nones
                part_class, config = entry[0] and class_of(*entry), configs.get(name, {})
                kind = part_class or type(None)
                if issubclass(kind, nn.Module):
                    parts[name] = _module(part_class, config, dtype, device)
                else:
                    processors += [name] * issubclass(kind, ProcessorMixin)
                    parts[name] = part_class and _other_part(part_class, config, path, name)
        required = [n for n, p in expected.items() if p.default is p.empty and n != "self"]
        self.dtype, self.device = dtype, device
        self.with_reference = with_reference or configs["model_index"].get("with_reference", False)
        self.module: PartsModule
        if "controlnet" in parts:
            parameters = inspect.signature(ControlNetDiffusion).parameters
            if lora is not None:
                raise ConfigurationError("a ControlNet is trained as a whole; leave lora_rank out")
            self.module = ControlNetDiffusion(**{n: p for n, p in parts.items() if n in parameters})
            self.denoiser = "unet"
            side = 8 * self.module.unet.config.sample_size  # 8 pixels per latent
            self.size = {"height": side, "width": side, "num_frames": 1}
        else:
            pipeline = cls(**dict.fromkeys(required) | parts)
            self.module = PipelineDiffusion(
                pipeline, caption_dropout=0.0, call=call, lora=lora, expert=expert
            )
            self.denoiser = self.module.step.denoiser
            try:
                with Values():
                    self.size = self._default_size(self.module)
            except ConfigurationError as error:
                if not processors:
                    raise
                raise ConfigurationError(
                    f"{cls.__name__} cannot be planned for on paper: configuration files do not say how its "
                    f"{processors[0]} prepares images and texts; time its training where it is to run "
                    "(`diffpipe bench`)"
                ) from error
            step = self.module.step
            self.with_reference |= step.needs_image and not step.animates
            if self.with_reference and step.image is None:
                raise ConfigurationError(
                    f"{cls.__name__} edits no images, so that no reference can be planned for on paper; leave "
                    "with_reference out"
                )
        self.size |= configs.get("size", {})
        self.module.to(dtype)  # tables that are made in another type
        quantizations = quantizations_of(quantization, [*self.module.parts], runs=False)
        quantize_components(quantizations, self.module.parts)

    def _default_size(self, module: PipelineDiffusion) -> dict[str, int]:
        """Returns the size that the pipeline samples by default, in pixels; also sets the tail of the module."""
        step, parts = module.step, dict(module.parts)
        for name, part in parts.items():
            if isinstance(part, nn.Module):
                parts[name] = _zeros_of(part)
        on_host = {"device": torch.device("cpu"), "dtype": torch.float32}
        on_host["parameters"] = lambda: iter([torch.zeros(())])
        for each, denoiser in zip(module.steps, module.denoisers, strict=True):
            parts[each.denoiser] = StandIn(denoiser, **on_host)
            module._tail = find_tail(each, parts)
        shapes = list[tuple[int, ...]]()

        def draw(shape: Sequence[int]) -> Tensor:
            shapes.append(tuple(shape))
            raise Captured

        nothing: Callable[..., Any] = lambda *_: None
        if step.decoder is not None:
            vae = parts[step.decoder]
            parts[step.decoder] = StandIn(vae, encode=encoding_means(vae), dtype=torch.float32)
        shown = {step.image: torch.zeros(1, 3, 64, 64)} if step.needs_image else {}
        step.run(draw, torch.ones(1), [step.neutral], shown, parts, nothing, nothing)
        encoded = module.encode(torch.zeros(1, 3, 64, 64, device=self.device))
        rows, columns = (64 // side for side in encoded.shape[-2:])
        parameters = inspect.signature(type(module.pipeline).__call__).parameters
        frames = getattr(parameters.get("num_frames"), "default", 1)
        height, width = shapes[0][-2] * rows, shapes[0][-1] * columns
        return {"height": height, "width": width, "num_frames": frames or 1}

    def step(self, module: Any, batch: Mapping[str, Any]) -> Tensor:
        """Returns the loss of a batch."""
        with Values():
            return module.losses(batch)["loss"]

    def batch(self, num_samples: int) -> dict[str, Any]:
        """Returns a batch of random values, without memory where weights have none."""
        height, width, frames = self.size["height"], self.size["width"], self.size["num_frames"]
        make = functools.partial(torch.randn, dtype=self.dtype, device=self.device)
        batch: dict[str, Any] = {"image": make(num_samples, 3, height, width)}
        if frames > 1:
            batch = {"video": make(num_samples, 3, frames, height, width)}
        if isinstance(self.module, ControlNetDiffusion) or self.with_reference:
            batch["condition"] = make(num_samples, 3, height, width)
        if getattr(self.module, "samples_from", "caption") == "class_labels":
            return batch | {"class_labels": torch.zeros(num_samples, dtype=torch.long)}
        return batch | {"caption": ["an image"] * num_samples}


@dataclass(frozen=True)
class ModelOnPaper:
    """A description of the model to profile: nothing is done before `profile()`.

    Args:
        path: A diffusers folder, of which configuration files are read, or the name of a well-known model.
        device: A name of `DEVICES`, or a device of your own.
        dtype: Type of weights, gradients and activations.
        resolution: Pixels along an edge; that of the model if not given.
        num_frames: Number of frames of a video; that of the model if not given.
        call: Further arguments of the pipeline's call, such as `{"max_sequence_length": 256}`.
        lora_rank: Rank of adapters that are trained in place of the denoiser's weights; None for the weights.
        quantization: Quantization of frozen linear layers, as of `PipelineDiffusion.from_pretrained`.
        expert: As in `PipelineDiffusion`; both denoisers of Wan 2.2 if not given.
        with_reference: As in `OnPaper`.

    Raises:
        ConfigurationError: There is no such model, device or type.
    """

    path: str | None = None
    device: str | DeviceModel = "h100"
    dtype: str = "bfloat16"
    resolution: int | None = None
    num_frames: int | None = None
    call: Mapping[str, Any] | None = None
    lora_rank: int | None = None
    quantization: Any = None
    expert: Expert | None = None
    with_reference: bool = False

    def __post_init__(self) -> None:
        read_configs(str(self.path))
        device_named(self.device)
        for name in ("resolution", "num_frames", "lora_rank"):
            if getattr(self, name) is not None:
                require_number(name, getattr(self, name), 1, whole=True)
        dtype = getattr(torch, self.dtype, None)
        if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
            raise ConfigurationError(
                f"dtype={self.dtype!r} is none; choose bfloat16, float16 or float32"
            )

    def profile(self, sample_counts: Sequence[int] = (1, 8)) -> ModelProfile:
        """Models it, which takes seconds.

        Args:
            sample_counts: Numbers of samples to model; linear between and beyond.

        Raises:
            ConfigurationError: The step cannot be run without values.
        """
        device, verbosity = device_named(self.device), diffusers.utils.logging.get_verbosity()
        diffusers.utils.logging.set_verbosity_error()  # these pipelines sample no images
        try:
            path = str(self.path)
            lora = None if self.lora_rank is None else Lora(self.lora_rank)
            names = ("call", "quantization", "expert", "with_reference")
            settings: dict[str, Any] = {name: getattr(self, name) for name in names}
            paper = OnPaper(path, getattr(torch, self.dtype), lora=lora, **settings)
            if self.resolution is not None:
                paper.module.require_size(self.resolution, self.resolution)
                paper.size |= {"height": self.resolution, "width": self.resolution}
            if self.num_frames is not None:
                paper.size["num_frames"] = self.num_frames
            height, width = paper.size["height"], paper.size["width"]
            pixels = f"{height}" if height == width else f"{height}x{width}"
            name = path if path in PUBLISHED else Path(path).resolve().name
            trained = "" if lora is None else f", adapters of rank {lora.rank}"
            trained += f", quantized ({self.quantization})" if self.quantization else ""
            trained += f", expert {self.expert}" if self.expert else ""
            trained += ", with a reference" if paper.with_reference else ""
            title = f"{name} at {pixels} in {self.dtype}{trained}, modelled on {device.name}"
            run = (paper.module, paper.step, paper.batch)
            return modelled(title, *run, paper.denoiser, device, sample_counts)
        except (DiffPipeError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # of whatever library the model is made of
            raise ConfigurationError(
                f"{self.path} cannot be run without weights: {type(error).__name__}: "
                f"{str(error).splitlines()[0] if str(error) else ''}; measure a profile with diffpipe profile"
            ) from error
        finally:
            diffusers.utils.logging.set_verbosity(verbosity)
