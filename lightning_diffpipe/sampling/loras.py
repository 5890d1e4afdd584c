"""LoRA files at sampling: their low-rank products are added to weights as each rank reads its own.

Diffusers' own loader puts the layers of a file into the structure of a part, which has no weights yet; they are
taken out again, and what peft makes of them is added when a weight is read. So no rank holds more than its share of
the denoiser, a step computes nothing more, and a file means what it means in one process: its names, its
scales, and what diffusers leaves out of it, with diffusers' own warning.
"""

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from diffusers.utils.state_dict_utils import StateDictType, convert_state_dict_to_peft
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from lightning_diffpipe.errors import CheckpointError, ConfigurationError, require_number
from lightning_diffpipe.sampling.digests import digest_of_tensor
from lightning_diffpipe.sampling.skeleton import ChangedWeights, Weights

MERGE = "save the trained module with save_pretrained(folder), which merges adapters"
SECOND = "transformer_2"
"""The second denoiser of pipelines that have one for noisier times and one for the others (Wan 2.2)."""

_ADAPTER = "file"


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
        if not any(
            ".lora_" in name or ".lora." in name or "_lora." in name for name in self._weights
        ):
            raise CheckpointError(
                f"{self.path} has no adapters ({', '.join(sorted(self._weights)[:3]) or 'nothing'}); a LoRA has "
                "pairs such as unet.mid_block.to_q.lora_A.weight and lora_B.weight"
            )

    def parts(self) -> set[str]:
        """Returns the parts of a pipeline that it has adapters of."""
        names = {name.partition(".")[0] for name in self._weights}
        return {SECOND if self._is_second and n == name_in_file(SECOND) else n for n in names}

    def digest(self, part: str) -> str:
        """Returns a digest of its adapters of a part, which ranks compare."""
        prefix, is_there = f"{name_in_file(part)}.", part in self.parts()
        pairs = [(n, digest_of_tensor(v)) for n, v in self._weights.items() if n.startswith(prefix)]
        return f"{self._scale} {sorted(pairs) if is_there else []}"

    def layers(self, name: str, part: nn.Module) -> dict[str, Any]:
        """Returns peft's layers of a part, by their names there, which is left as it was.

        Raises:
            CheckpointError: The file is of another model, or has more than low-rank products.
        """
        if name not in self.parts():
            return {}
        try:
            layers = self._put_into(name, part, _ADAPTER)
        finally:
            for key, layer in _layers_of(part).items():
                part.set_submodule(key, layer.get_base_layer())
            part.__dict__.pop("peft_config", None)
            part.__dict__.pop("_hf_peft_config_loaded", None)
        for layer in layers.values():
            layer.set_scale(_ADAPTER, self._scale)
        return layers

    def adapt(self, name: str, part: nn.Module) -> None:
        """Adds peft's layers to a part in float32, for further training; raises CheckpointError as `layers`."""
        self._put_into(name, part, "default")

    def _put_into(self, name: str, part: nn.Module, adapter: str) -> dict[str, Any]:
        """Adds peft's layers to a part, and returns them by name if they are all that the file has of it."""
        tensors = [key for key in self._weights if key.startswith(f"{name_in_file(name)}.")]
        try:
            self._load(name, part, adapter)
        except Exception as error:  # whatever does not fit
            reason = " ".join(str(error).split())
            raise CheckpointError(
                f"cannot load {self.path} into the {name}, is it of another model? {type(error).__name__}: {reason}"
            ) from error
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
        self._of_loras = {f"LoRA {n}": lora.digest(part) for n, lora in enumerate(loras)}

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

    def digests(self) -> dict[str, str]:
        """Returns the digests of each tensor, and of the adapters that are added to it."""
        return self._weights.digests() | self._of_loras


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
