"""Where the trained weights that come with this package are."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

import lightning_diffpipe
from lightning_diffpipe.errors import ConfigurationError

NAMES = ("glyphs", "glyphs_transformer")


def built_in(name: str) -> Path:
    """Returns the diffusers folder of built-in weights.

    In a checkout it is `examples/<name>`; a wheel carries the same folder inside the package.

    Args:
        name: One of `NAMES`.

    Raises:
        ConfigurationError: There are no such weights.
    """
    if name not in NAMES:
        raise ConfigurationError(f"no built-in weights {name!r}; there are: {', '.join(NAMES)}")
    packaged = Path(str(files(lightning_diffpipe))) / "weights" / name
    checkout = Path(lightning_diffpipe.__file__).parent.parent / "examples" / name
    return packaged if packaged.is_dir() else checkout
