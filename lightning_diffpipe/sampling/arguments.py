"""Refusing arguments that are no numbers, before they fail somewhere deep."""

from __future__ import annotations

from numbers import Integral
from typing import Any

from lightning_diffpipe.errors import ConfigurationError


def refuse_unless_whole(name: str, value: Any, least: int | None = None) -> None:
    """Raises unless an argument is a whole number.

    Args:
        name: Of the argument.
        value: Of the argument.
        least: What it must be at least.

    Raises:
        ConfigurationError: It is something else.

    Example:
        >>> refuse_unless_whole("num_patches", 2.5)
        Traceback (most recent call last):
        lightning_diffpipe.errors.ConfigurationError: num_patches must be a whole number; got 2.5
    """
    if not isinstance(value, Integral) or isinstance(value, bool):
        raise ConfigurationError(f"{name} must be a whole number; got {value!r}")
    if least is not None and int(value) < least:
        raise ConfigurationError(f"{name} must be at least {least}; got {value}")
