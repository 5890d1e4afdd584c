"""The model below adapters: frozen weights that checkpoints leave to the folder from which they were read.

    opened     from_pretrained(FOLDER, lora=Lora(...))     shapes and samples of frozen weights are noted, by part
    set up     those of parts that are as they were read   will be left out
    saved      adapters, buffers, states of optimizers     and FOLDER with the samples
    opened     from_checkpoint, ckpt_path, Predictor       FOLDER is read as well, and compared

A checkpoint of a model of 12 billion weights then has megabytes, not 24 GB. `Lora(store_all=True)` keeps all in it.

Samples are as they were read, and compared in the coarser type of both: a run may have another precision than the
run before. An optimizer changes all values of a tensor, so another state of a training is noticed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lightning_diffpipe.errors import CheckpointError, ConfigurationError
from lightning_diffpipe.graph.versions import plain_tensors

BASE_KEY = "diffpipe_base"
_SAMPLES = 16  # of a tensor


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
        noted = {
            name: {
                key: (list(weight.shape), sampled(weight)) for key, weight in frozen_weights(part)
            }
            for name, part in parts.items()
        }
        return cls(_origin(path), {name: each for name, each in noted.items() if each})

    @classmethod
    def recorded(cls, checkpoint: Mapping[str, Any], path: str | Path | None = None) -> BaseModel:
        """Returns the base that a checkpoint names, or that at another path; without parts if it needs none.

        Raises:
            ConfigurationError: There is a path, and it needs none.
            CheckpointError: It was written by an earlier state of this project.
        """
        base = checkpoint.get(BASE_KEY, {"path": "", "samples": {}})
        if "samples" not in base:
            raise CheckpointError(
                f"the checkpoint leaves weights to {base.get('path')} as earlier states of this project did; save "
                "the whole model with the one that wrote it: from_checkpoint(path).save_pretrained(FOLDER)"
            )
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
        noted = self.samples[name]
        return weights.keys() == noted.keys() and all(
            list(weight.shape) == noted[key][0] and _are_same(sampled(weight), noted[key][1])
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
                f"and the {name} here has other weights than that; open that model: from_pretrained(FOLDER), or "
                "base=FOLDER for from_checkpoint, the Predictor and diffpipe sample"
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
