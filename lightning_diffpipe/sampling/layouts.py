"""Layouts that have been found, so that the next request of the same shapes need not be probed.

What the shapes of a request are is only known inside the user's closure: the length of a prompt, a control
image. So a known layout is tried on, by running the closure with all blocks stubbed and comparing the shapes of
their arguments; that costs no more than the code between blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_diffpipe.graph.calltree import Forward, forward_replaced
from lightning_diffpipe.graph.memo import settings_digest
from lightning_diffpipe.sampling.glue import find_glue
from lightning_diffpipe.sampling.layout import Layout, shapes_of
from lightning_diffpipe.sampling.probe import probe
from lightning_diffpipe.sampling.rehearsal import failing
from lightning_diffpipe.sampling.request import Request

MAX_LAYOUTS = 8

_WRITES = "code between blocks writes into what a block returned"


class LayoutStore:
    """Layouts of one model, newest first.

    Args:
        axis: Of the latents, that is cut; None for the default.
    """

    def __init__(self, axis: int | None = None) -> None:
        self._axis = axis
        self._known: list[tuple[_Key, Layout]] = []

    def layout_for(self, request: Request) -> Layout:
        """A layout that fits the request: a known one, or one found by probing.

        Raises:
            LayoutError: The model cannot be sampled in parts, or fails while it is probed.
            ConfigurationError: Memory does not suffice to probe it.
        """
        key = _key(request)
        for known, layout in self._known:
            if known == key and fits(layout, request):
                return layout
        with failing("while it is probed", "sample it with method=single", _WRITES):
            layout = probe(request, self._axis)
        self.add(request, layout)
        return layout

    def add(self, request: Request, layout: Layout) -> None:
        """Makes the layout of a request known."""
        self._known = [(_key(request), layout), *self._known][:MAX_LAYOUTS]


_Key = tuple[torch.Size, torch.dtype, str]


def _key(request: Request) -> _Key:
    # A model whose attention processors were exchanged since is looked at anew.
    return request.latents.shape, request.latents.dtype, settings_digest(request.model)


def fits(layout: Layout, request: Request) -> bool:
    """Whether blocks are called as the layout says, on the same shapes, with the same code between them."""
    calls: list[tuple[str, Any]] = []

    def run(answer: Callable[..., Any]) -> Tensor:
        def make(name: str, forward: Forward) -> Forward:
            def stubbed(*args: Any, **kwargs: Any) -> Any:
                calls.append((name, shapes_of((args, kwargs))))
                return answer(name, forward, args, kwargs)

            return stubbed

        with forward_replaced(request.model, layout.block_names, make):
            return request.denoise(request.latents, request.timesteps[0])

    kept = layout.constants.keys() | layout.step_constants.keys()
    try:
        with request.inferring():
            glue = find_glue(
                run, request.model, layout.blocks, kept, request.latents.device, layout.glue.local
            )
    except (IndexError, RuntimeError, ValueError):
        return False
    same_calls = calls == [(block.name, block.arguments) for block in layout.blocks]
    return same_calls and glue.same_as(layout.glue)
