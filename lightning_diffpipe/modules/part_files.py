"""Parts of a folder as files: their index, configs and vocabularies, and how one is read, described and written.

A part is read from its folder, from the texts that a checkpoint has of it, or from the model below adapters; a
folder on disk may leave parts to another one. Modules in training are made of parts in `parts.py`.

Frozen weights below adapters are left out of checkpoints, which name the folder that they were read from:

    opened     from_pretrained(FOLDER, lora=Lora(...))     shapes and samples of frozen weights are stored, by part
    set up     those of parts that are as they were read   will be left out
    saved      adapters, buffers, states of optimizers     and FOLDER with the samples
    opened     from_checkpoint, ckpt_path, Predictor       FOLDER is read as well, and compared

A checkpoint of a model of 12 billion weights then has megabytes, not 24 GB. `Lora(store_all=True)` keeps all in it.
Samples are as they were read, and compared in the coarser type of both: a run may have another precision than the
run before. An optimizer changes all values of a tensor, so another state of a training is noticed.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import diffusers
import huggingface_hub
import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from lightning_diffpipe.errors import CheckpointError, ConfigurationError
from lightning_diffpipe.graph.versions import plain_tensors
from lightning_diffpipe.modules.adapters import add_adapters
from lightning_diffpipe.sampling.skeleton import dtype_named
from lightning_diffpipe.sampling.source import class_of, load_part

BASE_KEY = "diffpipe_base"
OTHER_PARTS = "_other_parts"
_ROOM_BYTES = 2**25  # for configs and vocabularies
_SAMPLES = 16  # of a tensor


@dataclass(frozen=True)
class PartOutline:
    """A part without its weights.

    Attributes:
        config: Its config, as stored: without default values of the class. Empty for parts of transformers.
    """

    cls: type
    config: Mapping[str, Any]


SINGLE_FILE = "A single file becomes a folder by its pipeline's from_single_file(FILE).save_pretrained(FOLDER)"


def outline_of_part(path: str, name: str, entry: Sequence[str]) -> PartOutline:
    """Reads what there is to know about a part before `load_part` reads its weights, with the same arguments."""
    cls = class_of(*entry)
    has_config = issubclass(cls, diffusers.ModelMixin)
    return PartOutline(cls, cls.load_config(path, subfolder=name) if has_config else {})


def read_index(path: str) -> dict[str, Any]:
    """Reads the `model_index.json` of a folder or hub id.

    Raises:
        ConfigurationError: There is none.
    """
    try:
        return diffusers.DiffusionPipeline.load_config(path)
    except OSError as error:
        refusal = f"{path!r} is neither a folder with a model_index.json nor a hub model"
        if Path(path).exists():
            raise ConfigurationError(f"{refusal}. {SINGLE_FILE}") from error
        if huggingface_hub.constants.HF_HUB_OFFLINE:
            remedy = "check the path, or allow downloads (offline=false on the command line)"
            raise ConfigurationError(f"{refusal} on this machine; {remedy}") from error
        reason = str(error).split("\n", 1)[0]
        raise ConfigurationError(
            f"{refusal} that can be downloaded ({reason}); check the path. If the model has a licence to accept, "
            "as Flux has, do so on its page of the hub, then `hf auth login`"
        ) from error


def fetched(path: str) -> str:
    """Returns the complete folder of a hub id; a folder, or an id that diffusers cannot fetch, as it is."""
    if Path(path).is_dir():
        return path
    try:
        return str(diffusers.DiffusionPipeline.download(path))
    except (OSError, ValueError, AttributeError):  # whoever reads a part says why it cannot
        return path


def folder_of_part(path: str, index: Mapping[str, Any], name: str) -> str:
    """Returns the folder or hub id with a part: this one, or another one that its index names."""
    other = index.get(OTHER_PARTS)
    if other is None or not Path(path).is_dir() or (Path(path) / name).is_dir():
        return path
    return str((Path(path) / other).resolve())


def index_entry(part: Any) -> list[str]:
    """Returns the entry of a part in an index: its library and class."""
    return [type(part).__module__.partition(".")[0], type(part).__name__]


def write_part(part: Any, folder: Path) -> None:
    """Writes a part to another folder, then puts its files in place."""
    folder.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".") as name:
        written = Path(name)
        try:
            part.save_pretrained(written)
        except SafetensorError as error:  # has no path
            raise CheckpointError(f"cannot write the weights of {folder}: {error}") from error
        for path in written.glob("*config.json"):
            config = json.loads(path.read_text())
            # The path that a part was once read from means nothing elsewhere.
            if config.pop("_name_or_path", None) is not None:
                path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
        for path in [path for path in written.rglob("*") if path.is_file()]:
            target = folder / path.relative_to(written)
            target.parent.mkdir(exist_ok=True)
            path.replace(target)


def text_files(part: Any) -> dict[str, str]:
    """Returns the files that describe a part without its weights, by file name."""
    folders = [f for f in (tempfile.gettempdir(), "/dev/shm", ".") if Path(f).is_dir()]
    roomy = next((f for f in folders if shutil.disk_usage(f).free > _ROOM_BYTES), None)
    with tempfile.TemporaryDirectory(dir=roomy) as folder:
        if not isinstance(part, nn.Module):
            part.save_pretrained(folder)
        elif hasattr(part, "save_config"):
            part.save_config(folder)
        else:
            part.config.save_pretrained(folder)
        return {path.name: path.read_text() for path in Path(folder).iterdir() if path.is_file()}


def from_stored(stored: Mapping[str, Any]) -> Any:
    """Builds a part of a checkpoint, with adapters, and weights that still have to be loaded."""
    cls = class_of(*stored["class"])
    with tempfile.TemporaryDirectory() as folder:
        for name, text in stored["files"].items():
            (Path(folder) / name).write_text(text)
        if not issubclass(cls, nn.Module):
            part = cls.from_pretrained(folder)
        elif hasattr(cls, "load_config"):
            part = cls.from_config(cls.load_config(folder))
        else:
            part = cls(cls.config_class.from_pretrained(folder))
    add_adapters(part, stored.get("adapters", {}))
    return part


@dataclass(frozen=True)
class BaseModel:
    """The model that has the weights which a checkpoint leaves out.

    Attributes:
        path: A folder, absolute, or a hub id.
        samples: Shape and samples of each frozen weight, by part and name.
    """

    path: str
    samples: Mapping[str, Mapping[str, tuple[list[int], Tensor]]]

    @classmethod
    def of(cls, path: str | Path, parts: Mapping[str, Any]) -> BaseModel:
        """Returns the base of parts that have just been read from a folder, and had adapters added."""
        samples = {
            name: {
                key: (list(weight.shape), sampled(weight)) for key, weight in frozen_weights(part)
            }
            for name, part in parts.items()
        }
        return cls(_origin(path), {name: each for name, each in samples.items() if each})

    @classmethod
    def recorded(cls, checkpoint: Mapping[str, Any], path: str | Path | None = None) -> BaseModel:
        """Returns the base that a checkpoint names, or that at another path; without parts if it needs none.

        Raises:
            ConfigurationError: There is a path, and it needs none.
        """
        base = checkpoint.get(BASE_KEY, {"path": "", "samples": {}})
        if path is not None and not base["samples"]:
            raise ConfigurationError(
                f"base={path} is for checkpoints that leave weights to another model, and this one has all of its "
                "own; leave it out"
            )
        return cls(base["path"] if path is None else _origin(path), base["samples"])

    def refuse_folder(self, path: str | Path) -> None:
        """Raises ConfigurationError for a folder to write into, if that is the one with these weights."""
        if str(Path(path).resolve()) == self.path:
            raise ConfigurationError(
                f"{path} has the model below the adapters, and what is written into it would take the place of "
                "weights that checkpoints leave to it; choose another folder, or have all weights in the "
                "checkpoints: Lora(store_all=True), in the command model.lora.store_all=true"
            )

    def fits(self, name: str, weights: Mapping[str, Tensor]) -> bool:
        """Returns whether these are the frozen weights of a part, in whatever precision."""
        stored = self.samples[name]
        return weights.keys() == stored.keys() and all(
            list(weight.shape) == stored[key][0] and _are_same(sampled(weight), stored[key][1])
            for key, weight in weights.items()
        )

    def left_out(self, parts: Mapping[str, Any]) -> dict[str, frozenset[str]]:
        """Returns, by part, names of frozen weights that are as they were read; a part that is not has none."""
        frozen = {name: dict(frozen_weights(parts.get(name))) for name in self.samples}
        return {n: frozenset(weights) for n, weights in frozen.items() if self.fits(n, weights)}

    def completed(
        self, name: str, own: Mapping[str, Tensor], stored: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """Returns a part's weights, `stored` and those of the base, or raises CheckpointError for another base."""
        if name not in self.samples:
            return dict(stored)
        rest = {k: value for k, value in own.items() if k not in stored and ".lora_" not in k}
        if not self.fits(name, rest):
            raise CheckpointError(
                f"the checkpoint has adapters only, of the model that was at {self.path} when they were trained, "
                f"and the {name} here has other weights than that; open that model: by model.path=FOLDER, "
                "from_pretrained(FOLDER), or base=FOLDER for from_checkpoint, the Predictor and diffpipe sample"
            )
        return {**rest, **stored}


def frozen_weights(part: Any) -> Iterator[tuple[str, nn.Parameter]]:
    """Yields the weights of a part that are neither trained nor adapters, under all their names."""
    if isinstance(part, nn.Module):
        for name, parameter in part.named_parameters(remove_duplicate=False):
            if not parameter.requires_grad and ".lora_" not in name:
                yield name, parameter


def _origin(path: str | Path) -> str:
    return str(Path(path).resolve()) if Path(path).is_dir() else str(path)


def _are_same(one: Tensor, other: Tensor) -> bool:
    """Returns whether values are the same when those of one type are rounded to the other."""
    return torch.equal(one, other.to(one.dtype)) or torch.equal(one.to(other.dtype), other)


def sampled(tensor: Tensor) -> Tensor:
    """Returns a few values of a tensor, the first and the last among them, on the host.

    Example:
        >>> sampled(torch.arange(31).reshape(1, 31)).tolist()
        [0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30]
    """
    flat = plain_tensors(tensor.detach())[0].reshape(-1)
    number = min(_SAMPLES, flat.numel())
    places = torch.arange(number) * (flat.numel() - 1) // max(number - 1, 1)
    return flat[places.to(flat.device)].cpu()


def from_base(base: BaseModel, name: str, stored: Mapping[str, Any]) -> Any:
    """Reads a part from the base of a checkpoint, with adapters, whose weights still have to be loaded.

    Raises:
        CheckpointError: The base is not there.
    """
    try:
        index = read_index(base.path)
        path = fetched(base.path)
        part = load_part(folder_of_part(path, index, name), name, stored["class"])
    except (OSError, ConfigurationError) as error:
        raise CheckpointError(
            f"the checkpoint has adapters only, and the {name} of the model below them cannot be read from "
            f"{base.path}: {error}. Give the folder that has it now: from_checkpoint(path, base=FOLDER), and "
            "base=FOLDER for the Predictor and diffpipe sample"
        ) from error
    add_adapters(part, stored.get("adapters", {}))
    return part


def frozen_dtypes(setting: Any, names: Collection[str]) -> dict[str, torch.dtype | None]:
    """Returns the type of each part: one for all, or in a mapping those of some; None for others.

    Raises:
        ConfigurationError: There is no such type or part.
    """
    given = setting if isinstance(setting, Mapping) else dict.fromkeys(names, setting)
    if unknown := sorted(given.keys() - set(names)):
        raise ConfigurationError(
            f"frozen_dtype names the component {unknown[0]!r}; this model has {', '.join(names)}"
        )
    return {name: dtype_named("frozen_dtype", given.get(name)) for name in names}


def load_for_training(path: str, name: str, entry: Sequence[str], dtype: torch.dtype | None) -> Any:
    """Loads a part as `load_part`; without a type, an autoencoder that asks for float32 gets it.

    One that is given float32 computes in it, too (`in_own_precision`).
    """
    config = outline_of_part(path, name, entry).config if dtype is None else {}
    part = load_part(path, name, entry, torch.float32 if config.get("force_upcast") else dtype)
    if dtype == torch.float32:
        part.computes_in_own_type = True
    return part
