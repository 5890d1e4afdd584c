"""The verbs of the command line, by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from omegaconf import DictConfig

VERBS: dict[str, tuple[str, Callable[[DictConfig], Any]]] = {}

# Settings that may be given by position: `diffpipe show plan.json`.
POSITIONS = {"show": ("plan",), "diff": ("before", "after")}


def verb(summary: str) -> Callable[[Callable[[DictConfig], Any]], Callable[[DictConfig], Any]]:
    """Registers a function as a verb of the command line.

    Args:
        summary: One line for `diffpipe --help`.
    """

    def register(function: Callable[[DictConfig], Any]) -> Callable[[DictConfig], Any]:
        VERBS[function.__name__] = (summary, function)
        return function

    return register
