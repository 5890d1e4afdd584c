"""Files that are whole or not there: written aside, then put in place.

Ranks, jobs and machines may write the same file at once, and any of them may be killed meanwhile. A reader finds
one of their files, never half of one. Others may read what is written, as far as the user's umask lets them.
"""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
import uuid
from pathlib import Path


def check_writable(path: Path) -> None:
    """Finds out before long work whether its result can be written; leaves nothing behind.

    Raises:
        OSError: The path is a folder, or its folder can neither be made nor written.
    """
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    nearest = next(folder for folder in path.absolute().parents if folder.exists())
    with tempfile.TemporaryFile(dir=nearest):
        pass


def write_atomically(path: Path, content: str | bytes) -> None:
    """Writes a file aside, then puts it in place.

    Raises:
        OSError: The folder cannot be made or written; nothing is left behind.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(
        f".{uuid.uuid4().hex}"
    )  # no name of a process: hosts may share the folder
    try:
        aside.write_bytes(content.encode() if isinstance(content, str) else content)
        aside.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            aside.unlink()
        raise
