"""What a ControlNet is shown besides the caption: a picture of the same size, in [0, 1].

It is made from the picture itself (`"edges"`), or comes with the data.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor


def edges(image: Tensor) -> Tensor:
    """Returns how steep grey levels are (Sobel's gradient): 0 in even areas, 1 between black and white.

    Args:
        image: `(3, H, W)` in [-1, 1].

    Returns:
        `(3, H, W)` in [0, 1], three times the same.
    """
    grey = F.pad(image.mean(0)[None], (1, 1, 1, 1), mode="replicate")[0]
    # Slices: a convolution of one small picture takes five times as long.
    down, across = (part[:-2] + 2 * part[1:-1] + part[2:] for part in (grey, grey.T))
    gradient = torch.hypot(down[:, 2:] - down[:, :-2], (across[:, 2:] - across[:, :-2]).T) / 8
    return gradient.clamp(max=1).expand(3, -1, -1)


MADE: dict[str, Callable[[Tensor], Tensor]] = {"edges": edges}
"""Conditions that are made from the picture, by name."""
