"""Files that are whole or not there: written next to their place, then put into it.

Ranks, jobs and machines may write the same file at once, and any of them may be killed meanwhile, or find the disk
full. A reader finds one of their files, never half of one. Others may read what is written, as far as the user's
umask lets them.
"""

import contextlib
import errno
import os
import shutil
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import IO

_UNFINISHED = ".part"
_ABANDONED_S = 3600.0


def check_writable(path: Path) -> None:
    """Raises OSError with the path, before long work, if its result could not be written there; leaves no file."""
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    nearest = next(folder for folder in path.absolute().parents if folder.exists())
    with _naming(path), tempfile.TemporaryFile(dir=nearest):
        pass


@contextlib.contextmanager
def replacing(path: Path, durable: bool = True) -> Iterator[IO[bytes]]:
    """Opens a file next to a path, to which it is moved at the end; after an error it is removed.

    Args:
        path: Path of the file; a file or link at this path is replaced.
        durable: Wait until the disk has it, so that it survives a power cut.

    Raises:
        OSError: The folder cannot be made or written, or is full; has the path.
    """
    with _naming(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = unfinished_path(path)
        try:
            with unfinished.open("wb") as file:
                yield file
                if durable:
                    file.flush()
                    os.fsync(file.fileno())
            unfinished.replace(path)
        except BaseException:
            with contextlib.suppress(OSError):
                unfinished.unlink()
            raise
        if durable:
            sync_folder(path.parent)


def write_atomically(path: Path, content: str | bytes, durable: bool = True) -> None:
    """Writes a file next to its place, then puts it there; arguments and errors as of `replacing`."""
    with replacing(path, durable) as file:
        file.write(content.encode() if isinstance(content, str) else content)


def remove_abandoned(folder: Path) -> None:
    """Removes unfinished files of killed processes; those of running ones are less than an hour old."""
    for path in folder.glob(f".*{_UNFINISHED}"):
        with contextlib.suppress(OSError):
            if time.time() - path.lstat().st_mtime > _ABANDONED_S:
                shutil.rmtree(path) if path.is_dir() else path.unlink()


def unfinished_path(path: Path) -> Path:
    """Returns a name in the folder of a path for a file to be moved there; killed processes may leave the file."""
    return path.with_name(f".{uuid.uuid4().hex}{_UNFINISHED}")  # no process: hosts share folders


def sync_folder(folder: Path) -> None:
    """Waits until the names in a folder are on the disk."""
    with contextlib.suppress(OSError):  # not every file system syncs folders
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


@contextlib.contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Turns errors of the disk, also those beneath errors of a writer, into an OSError with the user's path."""
    before = sys.exc_info()[1]
    try:
        yield
    except Exception as error:
        first: BaseException | None = error
        while first not in (None, before) and not (isinstance(first, OSError) and first.errno):
            first = first.__cause__ or first.__context__
        if first is before or not isinstance(first, OSError):
            raise
        raise OSError(first.errno, first.strerror, str(path)) from error
