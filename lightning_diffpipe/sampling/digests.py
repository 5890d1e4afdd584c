"""Do all ranks sample the same model and request? What each has is compared as texts by name.

Ranks read their weights themselves, under PipeFusion only those of their own layers, perhaps from copies on several
hosts. A stale copy would give a wrong image without an error. So when a model is opened, and before the first
request that needs them of other parts that all ranks read, such as a second denoiser or a ControlNet, every rank
gives its options, its config and a digest of *every* tensor that is stored, whichever it will read: name, type,
shape, and four samples of 4 KiB (`digest_of_tensor`). That reads some 20 MB of a model of 24 GB.

A copy from another time of the training is caught in as little as one tensor: an optimizer changes all elements of
one, weight decay at the least. Single bytes of a large tensor, or a few rows of a table, are not.
"""

import hashlib
import json
import re
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from lightning_diffpipe.errors import ConfigurationError, raised_by_all
from lightning_diffpipe.graph.versions import digest_of_tensor
from lightning_diffpipe.sampling.world import World

Texts = dict[str, str]


def texts_of(part: str, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Texts:
    """Returns the config of a part, but for where and by what it was written, and digests of its tensors."""
    values = {f"{part}.config.{n}": v for n, v in config.items() if not n.startswith("_")}
    digests = {f"{part}.{name}": digest_of_tensor(tensor) for name, tensor in tensors.items()}
    return as_texts(values) | digests


def texts_of_folder(folder: Path, variant: str | None = None) -> Texts:
    """Returns the texts of a part that is stored in a folder, with its weights of a variant."""
    config = json.loads(path.read_text()) if (path := folder / "config.json").exists() else {}
    infix = f".{variant}." if variant else "."
    paths = sorted(p for p in folder.iterdir() if p.suffix in (".safetensors", ".bin"))
    # Those of a variant where it has them all; files of another one are not read.
    read = [p for p in paths if infix in p.name and (variant or p.name.count(".") == 1)] or paths
    tensors = {name: tensor for path in read for name, tensor in tensors_in(path).items()}
    return texts_of(folder.name, config, tensors)


def tensors_in(path: Path) -> dict[str, Tensor]:
    """Returns the tensors of a file, mapped; of one that is no safetensors file its bytes, by its name."""
    if path.suffix == ".safetensors":
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return {path.name: torch.from_file(str(path), size=path.stat().st_size, dtype=torch.uint8)}


@raised_by_all()
def refuse_other_models(world: World, mine: Texts, origin: str) -> None:
    """Raises ConfigurationError on all ranks if one has other texts; collective. `origin` is the model's path."""
    digest = hashlib.blake2b(repr(sorted(mine.items())).encode(), digest_size=16).hexdigest()
    if len(set(world.links.gather_object(digest))) > 1:
        of_ranks = world.links.gather_object((mine, f"{socket.gethostname()}:{origin}"))
        for rank, (texts, place) in enumerate(of_ranks):
            refuse_other(rank, texts, of_ranks[0][0], f" ({place} and {of_ranks[0][1]})")


def refuse_other(rank: int, mine: Texts, first: Texts, places: str = "") -> None:
    """Raises ConfigurationError if the texts of a rank and of rank 0 differ."""
    if names := sorted(n for n in first.keys() | mine.keys() if first.get(n) != mine.get(n)):
        name = names[0]
        raise ConfigurationError(
            f"rank {rank} has {name}={mine.get(name)}, but rank 0 {name}={first.get(name)}; {len(names)} of "
            f"{len(first)} differ{places}: ranks sample one request of one model together, so give all the same "
            "arguments, and copy files that are stale or broken again"
        )


def as_texts(values: Mapping[str, Any]) -> Texts:
    """Returns texts that can be compared between processes."""
    return {name: _text(value) for name, value in values.items()}


def _text(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor {tuple(value.shape)} of {value.dtype}, digest {digest_of_tensor(value)}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_text, value))}]" if isinstance(value, list) else repr(value)
    if isinstance(value, torch.Generator):
        return "a generator"  # that of rank 0 counts
    if callable(getattr(value, "tobytes", None)):  # an image or an array
        digest = hashlib.blake2b(value.tobytes(), digest_size=16).hexdigest()
        shape = getattr(value, "size", None) if hasattr(value, "mode") else value.shape
        return f"a {type(value).__name__} of {shape}, digest {digest}"
    return re.sub(r" at 0x[0-9a-fA-F]+", "", repr(value))
