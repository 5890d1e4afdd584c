"""Do all ranks sample the same model? Options, config and weights of each, compared when a model is opened.

Ranks read their weights themselves, under PipeFusion only those of their own layers, perhaps from copies on several
hosts. A stale copy would give a wrong image without an error. So every rank takes a digest of *every* tensor that
is stored, whichever it will read, and before the first request that needs them of other parts that all ranks read,
such as a second denoiser or a ControlNet:

    name, type, shape, and blocks of bytes (`digest_of_tensor`), the first, the last and others at equal distances;
    a tensor that is no longer than these together is read as a whole

That reads 16 KiB of each tensor: some 20 MB, in a second or so, of a model of 24 GB with a thousand tensors.

Caught: another model, a download that broke off, a file of zeros, and a copy from another time of the training, in
as little as one tensor: an optimizer changes all elements of one, weight decay at the least; averages differ, too.
Not caught: single bytes that a disk or a network has changed elsewhere in a large tensor, and a table of which only
a few rows were trained, such as embeddings of classes. For these, compare checksums of the files.

Requests are compared as well, as text: rank 0's is sampled, and a rank that was given another one raises an error.
"""

from __future__ import annotations

import hashlib
import json
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from lightning_diffpipe.errors import ConfigurationError, raised_by_all
from lightning_diffpipe.graph.versions import digest_of_tensor
from lightning_diffpipe.sampling.world import World


def digests_of_safetensors(path: Path) -> dict[str, str]:
    """Returns the digests of all tensors of a file, by name; it is mapped, so that only samples are read."""
    with safe_open(path, framework="pt") as file:
        return {name: digest_of_tensor(file.get_tensor(name)) for name in file.keys()}  # noqa: SIM118


@dataclass(frozen=True)
class Identity:
    """Options, config and weights of a model, which must be the same on all ranks.

    Attributes:
        options: Arguments of the Predictor, as text by name.
        config: Config of the denoiser, as text by name.
        weights: Digests of all tensors by name.
        origin: Host and folder of the weights, for messages.
        files: File of each tensor, if there are several.
    """

    options: Mapping[str, str]
    config: Mapping[str, str]
    weights: Mapping[str, str]
    origin: str
    files: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, options: Mapping[str, Any], denoiser: Any, weights: Any) -> Identity:
        """Returns the identity of a model that is open, whose parameters may be placeholders for `weights`."""
        config = dict(getattr(denoiser, "config", {}))
        texts = as_texts(options), as_texts({k: v for k, v in config.items() if k[0] != "_"})
        host = socket.gethostname()
        if weights is not None:
            origin = f"{host}:{weights.origin}"
            return cls(*texts, weights.digests(), origin, weights.files())
        # Some parts have no weights, such as guidance.
        stored = denoiser.state_dict() if isinstance(denoiser, nn.Module) else {}
        digests = {name: digest_of_tensor(tensor) for name, tensor in stored.items()}
        return cls(*texts, digests, f"{host}, in memory")

    @classmethod
    def of_folder(cls, folder: Path, variant: str | None, loras: Mapping[str, str]) -> Identity:
        """Returns the identity of a part in a folder: its config, its weights of a variant, digests of LoRAs."""
        config = json.loads(path.read_text()) if (path := folder / "config.json").exists() else {}
        infix = f".{variant}." if variant else "."
        paths = [p for p in folder.iterdir() if p.suffix in (".safetensors", ".bin")]
        # Those of a variant where it has them all; files of another one are not read.
        read = [
            p for p in paths if infix in p.name and (variant or p.name.count(".") == 1)
        ] or paths
        digests, files = {}, {}
        for path in sorted(read):
            if path.suffix != ".bin":
                of_file = digests_of_safetensors(path)
            else:  # whose tensors are not known
                size = path.stat().st_size
                whole = torch.from_file(str(path), size=size, dtype=torch.uint8)
                of_file = {path.name: digest_of_tensor(whole)}
            digests |= of_file
            files |= dict.fromkeys(of_file, f"/{path.name}")
        texts = as_texts({k: v for k, v in config.items() if not k.startswith("_")})
        return cls({}, texts, digests | loras, f"{socket.gethostname()}:{folder}", files)

    @property
    def digest(self) -> str:
        """One digest of everything that is compared."""
        parts = [sorted(part.items()) for part in (self.options, self.config, self.weights)]
        return hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()


@raised_by_all()
def refuse_other_models(world: World, mine: Identity) -> None:
    """Raises ConfigurationError on all ranks if one has other arguments, config or weights; collective."""
    if len(set(world.links.gather_object(mine.digest))) == 1:
        return
    first, *others = world.links.gather_object(mine)
    for rank, other in enumerate(others, start=1):
        if other.digest != first.digest:
            raise ConfigurationError(_difference(first, rank, other))


def as_texts(values: Mapping[str, Any]) -> dict[str, str]:
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


def refuse_other_request(rank: int, mine: Mapping[str, str], first: Mapping[str, str]) -> None:
    """Raises ConfigurationError if the requests of this rank and of rank 0, both as texts, differ."""
    if names := differing(mine, first):
        name = names[0]
        raise ConfigurationError(
            f"rank {rank} was asked for {name}={mine.get(name)}, but rank 0 for {name}={first.get(name)}: all "
            "ranks sample one request together, give it to all alike"
        )


def differing(first: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Returns the names under which two mappings differ, or only one has a value."""
    return sorted(n for n in first.keys() | other.keys() if first.get(n) != other.get(n))


def _difference(first: Identity, rank: int, other: Identity) -> str:
    if names := differing(first.options, other.options):
        name = names[0]
        return (
            f"rank {rank} was given {name}={other.options.get(name)}, but rank 0 {name}={first.options.get(name)}: "
            "give all ranks the same arguments"
        )
    if names := differing(first.config, other.config):
        name = names[0]
        return (
            f"rank {rank} has another model than rank 0: its config has {name}={other.config.get(name)} "
            f"({other.origin}), but that of rank 0 {name}={first.config.get(name)} ({first.origin}): copy the "
            "folder again, or give all ranks the same path"
        )
    names = differing(first.weights, other.weights)
    name = names[0]
    files = [f"{each.origin}{each.files.get(name, '')}" for each in (other, first)]
    return (
        f"rank {rank} has other weights than rank 0: {len(names)} of {len(first.weights)} tensors differ, such as "
        f"{name} (in {files[0]} on rank {rank}, {files[1]} on rank 0): one is stale or broken, copy it again"
    )
