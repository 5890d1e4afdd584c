"""Parts of a folder as files: their index, configs and vocabularies, and how one is read, described and written.

A part is read from its folder, from the texts that a checkpoint has of it, or from the model below adapters; a
folder on disk may leave parts to another one. Modules in training are made of parts in `parts.py`.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import diffusers
import huggingface_hub
import torch
from safetensors import SafetensorError
from torch import nn

from lightning_diffpipe.errors import CheckpointError, ConfigurationError
from lightning_diffpipe.modules.adapters import add_adapters
from lightning_diffpipe.modules.base_model import BaseModel
from lightning_diffpipe.sampling.source import class_of, load_part

OTHER_PARTS = "_other_parts"
_ROOM_BYTES = 2**25  # for configs and vocabularies


@dataclass(frozen=True)
class PartOutline:
    """A part without its weights.

    Attributes:
        cls: Its class.
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


def load_for_training(path: str, name: str, entry: Sequence[str], dtype: torch.dtype | None) -> Any:
    """Loads a part as `load_part`; without a type, an autoencoder that asks for float32 gets it."""
    config = outline_of_part(path, name, entry).config if dtype is None else {}
    return load_part(path, name, entry, torch.float32 if config.get("force_upcast") else dtype)
