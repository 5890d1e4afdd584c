"""Adapters at sampling: LoRA files, and IP-Adapters, whose prompts are images.

Both are put into the structure of a part, which has no weights yet, by diffusers' own loader, are taken out again,
and join its stored weights as each rank reads those of its own layers. So no rank holds more than its share of the
denoiser, and a file means what it means in one process: its names, its scales, and what diffusers leaves out of it,
with diffusers' own warning.

* Low-rank products of LoRAs are added to a weight when it is read, so that a step computes nothing more.
* An IP-Adapter has `image_proj`, which makes tokens of what an image encoder answers, and `ip_adapter`, keys and
  values for each attention layer, which also reads these tokens. The denoiser gets further layers, of
  placeholders. The image encoder is asked before the loop, on rank 0 only.

Source: IP-Adapter, Ye et al. (2023), https://arxiv.org/abs/2308.06721
"""

import contextlib
import inspect
import json
import logging
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import transformers
from diffusers.models.model_loading_utils import load_state_dict
from diffusers.utils.state_dict_utils import StateDictType, convert_state_dict_to_peft
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from lightning_diffpipe.errors import CheckpointError, ConfigurationError, require_number
from lightning_diffpipe.graph.placement import placeholder_of
from lightning_diffpipe.sampling.digests import Texts, texts_of
from lightning_diffpipe.sampling.skeleton import ChangedWeights, StateDict, Weights

MERGE = "save the trained module with save_pretrained(folder), which merges adapters"
SECOND = "transformer_2"
"""The second denoiser of pipelines that have one for noisier times and one for the others (Wan 2.2)."""

_ADAPTER = "file"
_ENCODER = "image_encoder"
_IMAGE, _EMBEDDINGS = "ip_adapter_image", "ip_adapter_image_embeds"


def refuse_adapted(names: Collection[str], origin: str) -> None:
    """Raises CheckpointError for weights of a part with adapters whose settings are not stored."""
    if adapters := [name for name in names if ".base_layer." in name or ".lora_" in name]:
        raise CheckpointError(
            f"{origin} has weights of adapters ({adapters[0]}, and {len(adapters) - 1} more), but not their "
            "settings, so they would be lost; load it into a module with the same adapters "
            f"(module.load_state_dict), and then {MERGE}"
        )


def lora_files(path: Path, parts: Mapping[str, Any]) -> dict[Path, dict[str, Any]]:
    """Returns the files with adapters of parts, each with the parts it is for, by name; none without parts.

    diffusers loads a file into one of two denoisers, the second by an argument of its own (Wan's
    `load_into_transformer_2`), and by the name of the first.

    Args:
        path: The file, or its folder; the second denoiser has a folder in that, if it is not the only one.
        parts: Parts of a pipeline, by their names there.
    """
    first = {name: part for name, part in parts.items() if name != SECOND}
    second = {name: part for name, part in parts.items() if name == SECOND}
    files = {path: first, path if path.is_file() and not first else path / SECOND: second}
    return {file: of_file for file, of_file in files.items() if of_file}


def weights_of(part: str, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the weights of a part, by their names in it, among those of all parts."""
    own = {name: value for name, value in weights.items() if name.startswith(f"{part}.")}
    return {name.removeprefix(f"{part}."): value for name, value in own.items()}


def name_in_file(part: str) -> str:
    """Returns the name that a LoRA file has for a part of a pipeline."""
    return "transformer" if part == SECOND else part


class StoredLora:
    """One file, read whole; such files are small.

    Args:
        path: A file, or a folder with `pytorch_lora_weights.safetensors`.
        scale: Factor of its outputs.
        cls: The pipeline's class, which knows how such files are named.
        unet: Config of the U-Net, if there is one, by which blocks of some files are numbered.
        is_second: It is for the second denoiser, under the name of the first.

    Raises:
        ConfigurationError: The pipeline takes no such files, the scale is no number, or peft is missing.
        CheckpointError: The file cannot be read, or has no adapters.
    """

    def __init__(
        self,
        path: str | Path,
        scale: float,
        cls: Any,
        unet: Mapping[str, Any] | None = None,
        is_second: bool = False,
    ) -> None:
        self._is_second = is_second
        self.path, self._scale = str(path), scale
        require_number(f"loras[{self.path!r}]", scale)
        if not hasattr(cls, "lora_state_dict"):
            raise ConfigurationError(
                f"{cls.__name__} of diffusers takes no LoRA files; leave them out"
            )
        options = {"return_alphas": True, "return_lora_metadata": True, "unet_config": unet}
        try:
            self._weights, *alphas, metadata = cls.lora_state_dict(
                self.path, local_files_only=True, **options
            )
        except Exception as error:
            first: BaseException = error  # it names only the last attempt
            while first.__context__ is not None:
                first = first.__context__
            why = dict.fromkeys(" ".join(str(e).split()).rstrip(".") for e in (error, first))
            raise CheckpointError(f"cannot read the LoRA {self.path}: {'; '.join(why)}") from error
        self._settings = {
            "network_alphas": (alphas[0] if alphas else None) or None,
            "metadata": metadata or None,
            "low_cpu_mem_usage": True,
        }
        marks = (".lora_", ".lora.", "_lora.")
        if not any(mark in name for name in self._weights for mark in marks):
            raise CheckpointError(
                f"{self.path} has no adapters ({', '.join(sorted(self._weights)[:3]) or 'nothing'}); a LoRA has "
                "pairs such as unet.mid_block.to_q.lora_A.weight and lora_B.weight"
            )

    def parts(self) -> set[str]:
        """Returns the parts of a pipeline that it has adapters of."""
        names = {name.partition(".")[0] for name in self._weights}
        return {SECOND if self._is_second and n == name_in_file(SECOND) else n for n in names}

    def texts(self, name: str) -> Texts:
        """Returns what ranks compare of it, under a name, since paths may differ."""
        return texts_of(name, {"scale": self._scale}, self._weights)

    def layers(self, name: str, part: nn.Module) -> dict[str, Any]:
        """Returns peft's layers of a part, by their names there, which is left as it was.

        Raises:
            CheckpointError: The file is of another model, or has more than low-rank products.
        """
        if name not in self.parts():
            return {}
        try:
            layers = self.adapt(name, part, _ADAPTER)
        finally:
            for key, layer in _layers_of(part).items():
                part.set_submodule(key, layer.get_base_layer())
            part.__dict__.pop("peft_config", None)
            part.__dict__.pop("_hf_peft_config_loaded", None)
        for layer in layers.values():
            layer.set_scale(_ADAPTER, self._scale)
        return layers

    def adapt(self, name: str, part: nn.Module, adapter: str = "default") -> dict[str, Any]:
        """Adds peft's layers to a part in float32, and returns them by name."""
        tensors = [key for key in self._weights if key.startswith(f"{name_in_file(name)}.")]
        with _fitting(self.path, name):
            self._load(name, part, adapter)
        layers = _layers_of(part)
        adapters = {
            f"{key}.{kind}": value
            for key, layer in layers.items()
            for kind, value in layer.named_parameters()
            if not kind.startswith("base_layer.")
        }
        if len(adapters) != len(tensors) or any(value.is_meta for value in adapters.values()):
            raise CheckpointError(
                f"{self.path} is of another model: of its {len(tensors)} tensors the {name} takes {len(adapters)}; "
                f"the first is {min(tensors)}"
            )
        more = [key for key in adapters if key.endswith(".bias") or "_magnitude_" in key]
        if more:
            raise CheckpointError(
                f"{self.path} has more than low-rank products, such as {more[0]}: magnitudes (DoRA) or biases, "
                "which are not added here. Merge it, and open the result: pipeline.load_lora_weights(FILE); "
                "pipeline.fuse_lora(); pipeline.unload_lora_weights(); pipeline.save_pretrained(FOLDER)"
            )
        for value in adapters.values():
            value.data = value.data.float()
        return layers

    def _load(self, name: str, part: nn.Module, adapter: str) -> None:
        from diffusers.loaders.peft import PeftAdapterMixin  # with all of transformers' generation

        weights, settings = self._weights, self._settings | {"adapter_name": adapter}
        if name.startswith("text_encoder"):
            weights = _in_names_of_peft(weights, part)
            alphas = _in_names_of_peft(settings["network_alphas"] or {}, part)
            settings = settings | {"network_alphas": alphas or None}
        cls = type(part)
        if not isinstance(part, PeftAdapterMixin):  # such as PixArt's, which lack nothing else
            part.__class__ = type(cls.__name__, (PeftAdapterMixin, cls), {})
        try:
            part.load_lora_adapter(weights, prefix=name_in_file(name), **settings)
        finally:
            part.__class__ = cls


@contextlib.contextmanager
def _fitting(files: str, part: str) -> Iterator[None]:
    """Raises CheckpointError for whatever does not fit into a part."""
    try:
        yield
    except Exception as error:
        reason = " ".join(str(error).split())
        raise CheckpointError(
            f"cannot load {files} into the {part}, is it of another model? {type(error).__name__}: {reason}"
        ) from error


def _layers_of(part: nn.Module) -> dict[str, Any]:
    return {name: module for name, module in part.named_modules() if hasattr(module, "merge")}


def _in_names_of_peft(values: Mapping[str, Any], part: nn.Module) -> dict[str, Any]:
    """Renames what is stored for a text encoder, as diffusers does for files with output layers only."""
    for kind in (StateDictType.DIFFUSERS_OLD, StateDictType.DIFFUSERS):
        values = convert_state_dict_to_peft(values, kind)
    if hasattr(part, "text_model"):
        return dict(values)
    return {name.replace(".text_model.", ".", 1): value for name, value in values.items()}


def _added(layers: Collection[Any], weight: Tensor) -> Tensor:
    """Returns a weight with the products of peft's layers, in float32 at least."""
    for layer in layers if weight.is_floating_point() else ():
        change = layer.get_delta_weight(_ADAPTER).detach()
        if is_traceable_wrapper_subclass(weight):
            weight = weight.dequantize()
        wide = torch.promote_types(weight.dtype, torch.float32)
        weight = weight.to(wide) + change.to(weight.device, wide)
    return weight


def read_loras(
    loras: Mapping[str | Path, float],
    cls: Any,
    parts: Collection[str],
    unet: Mapping[str, Any] | None = None,
) -> list[StoredLora]:
    """Reads all files; a folder may have another one in it, of the second denoiser (see `lora_files`).

    Raises:
        ConfigurationError: They are no mapping; see `StoredLora`, too.
        CheckpointError: See `StoredLora`, or a file changes parts that the pipeline does not have.
    """
    if not isinstance(loras, Mapping):
        raise ConfigurationError(f"loras must be a mapping of files to their scales; got {loras!r}")
    read = list[StoredLora]()
    for path, scale in loras.items():
        second = Path(path) / SECOND
        has_second = SECOND in parts and second.is_dir()
        if not has_second or any(Path(path).glob("*.safetensors")):
            read.append(StoredLora(path, scale, cls, unet))
        if has_second:
            read.append(StoredLora(second, scale, cls, unet, is_second=True))
    for lora in read:
        if others := sorted(lora.parts() - set(parts)):
            raise CheckpointError(
                f"{lora.path} is of another model: it changes {', '.join(others)}, and {cls.__name__} here has "
                f"{', '.join(parts)}"
            )
    return read


def refuse_scales(given: Mapping[str, Any]) -> None:
    """Raises ConfigurationError for a scale that pipelines pass to layers of LoRAs: weights have none."""
    for name, value in given.items():
        scale = value.get("scale", 1) if isinstance(value, Mapping) else 1
        if name.endswith("attention_kwargs") and scale != 1:
            raise ConfigurationError(
                f"{name} has scale={scale}, but LoRAs are added to the weights here, before any call: give each "
                f"its scale where the model is opened, loras={{FILE: {scale}}}, and leave it out of {name}"
            )


class AdaptedWeights(ChangedWeights):
    """Stored weights of a part, with LoRA files added as they are read.

    Args:
        weights: The stored ones.
        part: Name of the part.
        model: Its structure.
        loras: The files.

    Raises:
        CheckpointError: A file is of another model.
    """

    def __init__(
        self, weights: Weights, part: str, model: nn.Module, loras: Collection[StoredLora]
    ) -> None:
        super().__init__(weights)
        self._layers = [lora.layers(part, model) for lora in loras]

    def read(self, names: Collection[str]) -> Iterator[tuple[str, Tensor]]:
        """Reads some of them, one at a time."""
        for name, value in self._weights.read(names):
            layer = name.removesuffix(".weight")
            yield name, _added([each[layer] for each in self._layers if layer in each], value)

    def quantized_bytes(self) -> Mapping[str, int]:
        """See `Weights`; plain ones take the place of those to which something is added."""
        adapted = {f"{layer}.weight" for layers in self._layers for layer in layers}
        sizes = self._weights.quantized_bytes()
        return {name: size for name, size in sizes.items() if name not in adapted}


def add_to_part(part: nn.Module, name: str, loras: Collection[StoredLora]) -> None:
    """Adds to the weights of a part in memory; raises CheckpointError if a file is of another model."""
    for lora in loras:
        for key, layer in lora.layers(name, part).items():
            module = part.get_submodule(key)
            before = module.weight
            weight = _added([layer], before.detach()).to(before.dtype)
            if is_traceable_wrapper_subclass(before):  # a plain one takes its place
                module.weight = nn.Parameter(weight, requires_grad=False)
            else:
                before.data = weight


def add_to_others(parts: Mapping[str, Any], denoiser: str, loras: Collection[StoredLora]) -> None:
    """Adds to the weights of all given parts but the denoiser, as `add_to_part`."""
    adapted_parts = set().union(*(lora.parts() for lora in loras)) - {denoiser}
    for name in sorted(adapted_parts & parts.keys()):
        add_to_part(parts[name], name, loras)


class ExtendedWeights(ChangedWeights):
    """Stored weights of a denoiser, and of the adapters that were loaded into it."""

    def __init__(self, weights: Weights, added: StateDict) -> None:
        super().__init__(weights)
        self._added = added

    def names(self) -> set[str]:
        """Returns all stored names."""
        return self._weights.names() | self._added.names()

    def read(self, names: Collection[str]) -> Iterator[tuple[str, Tensor]]:
        """Reads some of them, one at a time."""
        added = self._added.names()
        yield from self._weights.read([name for name in names if name not in added])
        yield from self._added.read([name for name in names if name in added])


def require_ip_adapters(cls: Any, adapters: Mapping[str | Path, Any]) -> list[Path]:
    """Returns the files of adapters.

    Raises:
        ConfigurationError: They are no mapping, or the pipeline's class takes none, or one only.
        CheckpointError: A file is not there.
    """
    if not isinstance(adapters, Mapping):
        raise ConfigurationError(
            f"ip_adapters must be a mapping of files to their scales; got {adapters!r}"
        )
    if adapters and not hasattr(cls, "load_ip_adapter"):
        raise ConfigurationError(
            f"{cls.__name__} of diffusers takes no IP-Adapter; leave ip_adapters out"
        )
    if len(adapters) > 1:
        files = inspect.signature(cls.load_ip_adapter).parameters["weight_name"].annotation
        if "list" not in str(files).lower():
            raise ConfigurationError(
                f"{cls.__name__} of diffusers takes one IP-Adapter at a time; ip_adapters has {len(adapters)}"
            )
    for path, scale in adapters.items():
        for number in tree_leaves(scale):
            require_number(f"ip_adapters[{str(path)!r}]", number)
    paths = [Path(path) for path in adapters]
    for path in paths:
        if not path.is_file():
            raise CheckpointError(
                f"there is no IP-Adapter {path}; name its file, such as FOLDER/models/ip-adapter_sd15.safetensors"
            )
    return paths


def load_image_encoder(
    pipeline: Any, paths: Collection[Path], device: torch.device, dtype: torch.dtype
) -> None:
    """Gives a pipeline the `image_encoder` in a file's folder, if it lacks one; raises CheckpointError."""
    folders = [path.parent / _ENCODER for path in paths if (path.parent / _ENCODER).is_dir()]
    if not folders or getattr(pipeline, _ENCODER, None) is not None:
        return
    folder = folders[0]
    try:
        [name] = json.loads((folder / "config.json").read_text())["architectures"]
        load = getattr(transformers, name).from_pretrained
        encoder, report = load(folder, dtype=dtype, output_loading_info=True)
        if missing := report["missing_keys"]:
            raise ValueError(f"it lacks {len(missing)} tensors, such as {min(missing)}")
        parts = {_ENCODER: encoder.to(device).eval()}
        if (folder / "preprocessor_config.json").exists():
            parts["feature_extractor"] = transformers.AutoImageProcessor.from_pretrained(folder)
    except Exception as error:
        raise CheckpointError(f"cannot read the image encoder in {folder}: {error}") from error
    pipeline.register_modules(**parts)


def with_ip_adapters(
    pipeline: Any, denoiser: nn.Module, weights: Weights, adapters: Mapping[str | Path, Any]
) -> Weights:
    """Loads adapters into a pipeline whose denoiser is a skeleton, and sets their scales.

    The denoiser gets further layers, whose parameters are placeholders.

    Returns:
        The weights of the denoiser with those of the adapters.

    Raises:
        ConfigurationError: The pipeline takes no such scale, or not several adapters.
        CheckpointError: A file cannot be read, or is of another model.
    """
    paths = [Path(path) for path in adapters]
    files = ", ".join(map(str, paths))
    before = {id(parameter) for parameter in denoiser.parameters()}
    load = pipeline.load_ip_adapter
    folders, names = [str(path.parent) for path in paths], [path.name for path in paths]
    several = len(paths) > 1
    empty = {name: None for name in inspect.signature(load).parameters if "image_encoder" in name}
    empty.pop("image_encoder_dtype", None)
    with _fitting(files, type(denoiser).__name__):
        num_stored = sum(map(_num_layer_tensors, paths))
        # It warns that the image encoder is missing, also on ranks that need none.
        with mock.patch.object(logging.getLogger(load.__module__), "disabled", True):
            load(
                folders if several else folders[0],
                subfolder=[""] * len(paths) if several else "",
                weight_name=names if several else names[0],
                local_files_only=True,
                **empty,
            )
    added = _taken_out(denoiser, before)
    num_layer_tensors = sum(".processor." in name for name in added)
    is_whole = num_layer_tensors == num_stored > 0
    if not is_whole or any(value.is_meta for value in added.values()):
        raise CheckpointError(
            f"{files} of another model: of {num_stored} tensors for layers the {type(denoiser).__name__} takes "
            f"{num_layer_tensors}; LoRAs in the same file, as adapters for faces have, belong in a file of `loras`"
        )
    scales = list(adapters.values())
    try:
        pipeline.set_ip_adapter_scale(scales if several else scales[0])
        # Some take any scales as they are, and compare them later.
        getattr(pipeline, "is_ip_adapter_active", None)
    except Exception as error:
        raise ConfigurationError(
            f"ip_adapters={scales}: {type(pipeline).__name__} takes no such scales ({error}); take numbers"
        ) from error
    return ExtendedWeights(weights, StateDict(added, files))


def _num_layer_tensors(path: Path) -> int:
    """Returns the number of tensors for attention layers in a file."""
    names = list[str]()
    for name, value in load_state_dict(str(path)).items():
        names += [f"{name}.{each}" for each in value] if isinstance(value, Mapping) else [name]
    return sum(name.startswith(("ip_adapter.", "double_blocks.")) for name in names)


def _taken_out(denoiser: nn.Module, before: Collection[int]) -> dict[str, Tensor]:
    """Returns the values of parameters that were not there before, which become placeholders."""
    values: dict[str, Tensor] = {}
    for path, module in denoiser.named_modules():
        for key, parameter in module._parameters.items():
            if parameter is not None and id(parameter) not in before:
                values[f"{path}.{key}"] = parameter.detach()
                stand_in = placeholder_of(parameter, parameter.device)
                module._parameters[key] = stand_in.requires_grad_(parameter.requires_grad)
    return values


def refuse_images(
    pipeline: str, has_adapters: bool, can_encode: bool, given: Mapping[str, Any]
) -> None:
    """Raises ConfigurationError unless the arguments of a call have the images of the adapters, and no more."""
    names = [name for name in given if name.startswith("ip_adapter_") and given[name] is not None]
    if names and not has_adapters:
        raise ConfigurationError(
            f"{names[0]} needs an IP-Adapter: open the pipeline with ip_adapters={{FILE: 0.6}}, a file such as "
            "FOLDER/models/ip-adapter_sd15.safetensors"
        )
    if has_adapters and not names:
        raise ConfigurationError(
            f"the {pipeline} was opened with ip_adapters, which read an image; give {_IMAGE}= or "
            f"{_EMBEDDINGS}=, or leave ip_adapters out"
        )
    if _IMAGE in names and _EMBEDDINGS not in names and not can_encode:
        raise ConfigurationError(
            f"{_IMAGE} needs an image encoder, and the {pipeline} has none: put its folder `{_ENCODER}` beside the "
            f"file of the IP-Adapter, or give {_ENCODER}=, or {_EMBEDDINGS}= in place of the image"
        )
