"""The model below adapters: frozen weights that checkpoints leave to the folder from which they were read.

    opened     from_pretrained(FOLDER, lora=Lora(...))     digests of each part's frozen weights are noted
    set up     those of parts that are as they were read   will be left out
    saved      adapters, buffers, states of optimizers     and FOLDER with the digests
    opened     from_checkpoint, ckpt_path, Predictor       FOLDER is read as well, and compared

A checkpoint of a model of 12 billion weights then has megabytes, not 24 GB. `Lora(store_all=True)` keeps all in it.

A digest is of names, shapes and some values of every tensor, in the precision of bfloat16: a run may have another
one than the run before. Values that were rounded to float16 first may differ there, and a part has a second digest
for them. An optimizer changes all values of a tensor, so another state of a training is noticed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lightning_diffpipe.errors import CheckpointError, ConfigurationError

BASE_KEY = "diffpipe_base"
_SAMPLED = 256  # values of a tensor


@dataclass(frozen=True)
class BaseModel:
    """Where weights are that a checkpoint does not have.

    Attributes:
        path: A folder, absolute, or a hub id.
        digests: Digests of the frozen weights, by part: as they were read, and as a run in float16 has them.
    """

    path: str
    digests: Mapping[str, Sequence[str]]

    @classmethod
    def of(cls, path: str | Path, parts: Mapping[str, Any]) -> BaseModel:
        """Returns the base of parts that have just been read from a folder, and had adapters added."""
        frozen = {name: dict(frozen_weights(part)) for name, part in parts.items()}
        digests = {
            name: (digest_of(found), digest_of(found, torch.float16))
            for name, found in frozen.items()
            if found
        }
        return cls(_origin(path), digests)

    @classmethod
    def recorded(cls, checkpoint: Mapping[str, Any], path: str | Path | None = None) -> BaseModel:
        """Returns the base that a checkpoint names, or that at another path; without parts if it needs none.

        Raises:
            ConfigurationError: There is a path, and it needs none.
        """
        found = checkpoint.get(BASE_KEY, {"path": "", "digests": {}})
        if path is not None and not found["digests"]:
            raise ConfigurationError(
                f"base={path} is for checkpoints that leave weights to another model, and this one has all of its "
                "own; leave it out"
            )
        return cls(found["path"] if path is None else _origin(path), found["digests"])

    def refuse_folder(self, path: str | Path) -> None:
        """Raises ConfigurationError for a folder to write into, if that is the one with these weights."""
        if str(Path(path).resolve()) == self.path:
            raise ConfigurationError(
                f"{path} has the model below the adapters, and what is written into it would take the place of "
                "weights that checkpoints leave to it; choose another folder, or have all weights in the "
                "checkpoints: Lora(store_all=True), in the command model.lora.store_all=true"
            )

    def record(self) -> dict[str, Any]:
        """Returns plain values for a checkpoint, of which `recorded` makes the same again."""
        return asdict(self)

    def left_out(self, parts: Mapping[str, Any]) -> dict[str, frozenset[str]]:
        """Returns, by part, names of frozen weights that are as they were read; a part that is not has none."""
        found = {}
        for name, digests in self.digests.items():
            frozen = dict(frozen_weights(parts.get(name)))
            if digest_of(frozen) in digests:
                found[name] = frozenset(frozen)
        return found

    def completed(
        self, name: str, own: Mapping[str, Tensor], stored: Mapping[str, Tensor], remedy: str
    ) -> dict[str, Tensor]:
        """Returns the weights of a part, of which a checkpoint has some.

        Args:
            name: Name of the part.
            own: All its weights, by their names in it, as the base has them.
            stored: Those in the checkpoint.
            remedy: What to do if they are others than the adapters were trained with.

        Raises:
            CheckpointError: They are.
        """
        if name not in self.digests:
            return dict(stored)
        rest = {k: value for k, value in own.items() if k not in stored and ".lora_" not in k}
        if digest_of(rest) not in self.digests[name]:
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


def _origin(path: str | Path) -> str:
    return str(Path(path).resolve()) if Path(path).is_dir() else str(path)


def digest_of(tensors: Mapping[str, Tensor], dtype: torch.dtype | None = None) -> str:
    """Returns the digest of named tensors in any order, and in float64, float32 or bfloat16.

    Args:
        tensors: Those of several types of floats have one digest if they are rounded to the same in bfloat16.
        dtype: Floats are rounded to this type before, as in a run of that precision.

    Example:
        >>> one = {"a": torch.arange(3.0) / 7, "b": torch.zeros(2, 2)}
        >>> digest_of(one) == digest_of({n: one[n].double() for n in ("b", "a")})
        True
        >>> digest_of(one, torch.float16) == digest_of({n: one[n].half() for n in one})
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
            values = values.to(dtype).to(torch.bfloat16)
        found.update(values.view(torch.uint8).numpy().tobytes())
    return found.hexdigest()
