"""The model below adapters: frozen weights that checkpoints leave to the folder from which they were read.

    opened     from_pretrained(FOLDER, lora=Lora(...))     the digest of each part's frozen weights is noted
    set up     those of parts that are as they were read   will be left out
    saved      adapters, buffers, states of optimizers     and FOLDER with the digests
    opened     from_checkpoint, ckpt_path, Predictor       FOLDER is read as well, and compared

A checkpoint of a model of 12 billion weights then has megabytes, not 24 GB. `Lora(store_all=True)` keeps all in it.

A digest is of names, shapes and some values of every tensor, in the precision of bfloat16: a run may have another
one than the run before. An optimizer changes all values of a tensor, so another state of a training is noticed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lightning_diffpipe.errors import CheckpointError

BASE_KEY = "diffpipe_base"
_SAMPLED = 256  # values of a tensor


@dataclass(frozen=True)
class BaseModel:
    """Where weights are that a checkpoint does not have.

    Attributes:
        path: A folder, absolute, or a hub id.
        digests: Of the weights of each part that is left to it.
    """

    path: str
    digests: Mapping[str, str]

    @classmethod
    def of(cls, path: str | Path, parts: Mapping[str, Any]) -> BaseModel:
        """Returns the base of parts that have just been read from a folder, and had adapters added."""
        origin = str(Path(path).resolve()) if Path(path).is_dir() else str(path)
        frozen = {name: dict(frozen_weights(part)) for name, part in parts.items()}
        return cls(origin, {name: digest_of(found) for name, found in frozen.items() if found})

    @classmethod
    def recorded(cls, checkpoint: Mapping[str, Any], path: str | Path | None = None) -> BaseModel:
        """Returns the base that a checkpoint names, or that at another path; without parts if it needs none."""
        found = checkpoint.get(BASE_KEY, {"path": "", "digests": {}})
        return cls(str(path or found["path"]), found["digests"])

    def record(self) -> dict[str, Any]:
        """Returns plain values for a checkpoint, of which `recorded` makes the same again."""
        return asdict(self)

    def left_out(self, parts: Mapping[str, Any]) -> dict[str, frozenset[str]]:
        """Returns, by part, names of frozen weights that are as they were read; a part that is not has none."""
        found = {}
        for name in self.digests.keys() & parts.keys():
            frozen = dict(frozen_weights(parts[name]))
            if digest_of(frozen) == self.digests[name]:
                found[name] = frozenset(frozen)
        return found

    def completed(
        self, name: str, own: Mapping[str, Tensor], stored: Mapping[str, Tensor], remedy: str
    ) -> dict[str, Tensor]:
        """Returns the weights of a part, of which a checkpoint has some.

        Args:
            name: Of the part.
            own: All its weights, by their names in it, as the base has them.
            stored: Those in the checkpoint.
            remedy: What to do if they are others than the adapters were trained with.

        Raises:
            CheckpointError: They are.
        """
        if name not in self.digests:
            return dict(stored)
        rest = {k: value for k, value in own.items() if k not in stored and ".lora_" not in k}
        if digest_of(rest) != self.digests[name]:
            raise CheckpointError(
                f"the checkpoint has adapters only, of the model that was at {self.path} when they were trained, "
                f"and the {name} here has other weights than that; {remedy}"
            )
        return {**rest, **stored}


def frozen_weights(part: Any) -> Iterator[tuple[str, nn.Parameter]]:
    """Yields those weights of a part that are neither trained nor adapters, under all their names."""
    if isinstance(part, nn.Module):
        for name, parameter in part.named_parameters(remove_duplicate=False):
            if not parameter.requires_grad and ".lora_" not in name:
                yield name, parameter


def digest_of(tensors: Mapping[str, Tensor]) -> str:
    """Returns the digest of named tensors, in any order and precision.

    Example:
        >>> one = {"a": torch.arange(3.0), "b": torch.zeros(2, 2)}
        >>> digest_of(one) == digest_of({n: one[n].double() for n in ("b", "a")})
        True
        >>> digest_of(one) == digest_of({**one, "a": torch.arange(3.0) + 1})
        False
    """
    found = hashlib.blake2b(digest_size=16)
    for name in sorted(tensors):
        flat = tensors[name].detach().reshape(-1)
        found.update(f"{name} {list(tensors[name].shape)}".encode())
        number = min(_SAMPLED, flat.numel())
        places = torch.arange(number) * (flat.numel() - 1) // max(number - 1, 1)
        values = flat[places.to(flat.device)].cpu()
        if values.is_floating_point():
            values = values.to(torch.bfloat16)
        found.update(values.view(torch.uint8).numpy().tobytes())
    return found.hexdigest()
