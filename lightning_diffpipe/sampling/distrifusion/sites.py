"""Standing between a closure and its model, for as long as somebody samples.

The positions of an emulator are threads that share one model, so its modules are intercepted once, by the
first that begins, and released by the last that ends. Who answers a call is decided per thread.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from torch import nn

from lightning_diffpipe.graph.interception import Interception

MODEL = "model"
"""The name of the model's own site; those inside begin with `model.`."""


class _Holder(nn.Module):
    """A module around the model, so that calls of the model itself are seen, too."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model


_lock = threading.Lock()
_shared: dict[int, tuple[Interception, int]] = {}


@contextlib.contextmanager
def intercepted(model: nn.Module) -> Iterator[Interception]:
    """Intercepts a model, together with everybody else who does so now."""
    with _lock:
        interception, users = _shared.get(id(model)) or (Interception(_Holder(model), {MODEL}), 0)
        interception.install()
        _shared[id(model)] = (interception, users + 1)
    try:
        yield interception
    finally:
        with _lock:
            interception, users = _shared.pop(id(model))
            if users > 1:
                _shared[id(model)] = (interception, users - 1)
            else:
                interception.uninstall()
