"""Attributes of objects of others, replaced for as long as somebody needs it.

Lightning, torchmetrics and torch decide some things for a process by itself, or at a moment of their own. Where no
argument or hook changes that, an attribute does.
"""

import contextlib
from collections.abc import Callable, Collection, Iterator
from functools import partial
from typing import Any
from unittest import mock

from torch.utils._python_dispatch import _disable_current_modes

patched = partial(mock.patch.multiple, create=True)
"""Sets attributes of an object, class or module inside; afterwards it has again what it had by itself."""


@contextlib.contextmanager
def made_on_demand(owner: Any, names: Collection[str], make: Callable[[], None]) -> Iterator[None]:
    """Makes attributes of these names of an object when one of them is first read inside.

    `make` sets them. It is no part of a step that is being probed, even if that has asked; where it fails, whoever
    asks next gets the error as well.
    """
    kind, is_made = type(owner), False

    def read(asked: Any, name: str) -> Any:
        nonlocal is_made
        if name in names and not is_made:
            is_made = True  # or about to be
            try:
                with _disable_current_modes():
                    make()
            except BaseException:
                is_made = False
                raise
        return kind.__getattribute__(asked, name)

    owner.__class__ = type(kind.__name__, (kind,), {"__getattribute__": read})
    try:
        yield
    finally:
        owner.__class__ = kind
