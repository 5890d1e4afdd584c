"""Encodings on disk: one file for each layer and sample, under the hash of what it depends on.

    <folder>/3f/3f0c2a9b11d0...    {"format": "diffpipe-encoding/1", "key": ..., "tensors": [...], "crc32": ...}
                                   raw bytes of the tensors

Any number of ranks, runs and machines may share a folder: a file is written elsewhere and renamed, so that a
reader sees all of it or nothing, and whoever writes the same key writes the same content. A file that
was cut short by a crash of the machine, or damaged, is named in a warning, removed and made again.
"""

from __future__ import annotations

import contextlib
import json
import warnings
import zlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_diffpipe.files import write_atomically
from lightning_diffpipe.graph.memo import Entry

FORMAT = "diffpipe-encoding/1"


class EncodingStore:
    """Keeps entries as files.

    Args:
        folder: Where; made if it is not there.
        max_bytes: This process stops writing after so many bytes; None: no limit.

    Attributes:
        bytes_written: By this process.
        num_damaged: Files that could not be read.
        why_full: Why nothing is written any more; empty while it is.
    """

    def __init__(self, folder: str | Path, max_bytes: int | None = None) -> None:
        self.folder = Path(folder)
        self.max_bytes = max_bytes
        self.bytes_written = self.num_damaged = 0
        self.why_full = ""
        self.folder.mkdir(parents=True, exist_ok=True)

    def path(self, key: str) -> Path:
        """Returns the file of a key."""
        return self.folder / key[:2] / key

    def read(self, key: str) -> Entry | None:
        """Returns the entry of a key; None if there is none, or if its file is damaged, which a warning names."""
        path = self.path(key)
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            warnings.warn(f"cannot read the stored encoding {path}: {error}", stacklevel=2)
            return None
        try:
            return _parse(content, key)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            self.num_damaged += 1
            warnings.warn(
                f"the stored encoding {path} is damaged ({error}); it is removed and made again",
                stacklevel=2,
            )
            with contextlib.suppress(OSError):
                path.unlink()
            return None

    def write(self, key: str, entry: Entry) -> None:
        """Keeps an entry, unless the limit is reached or the disk is full, which a warning tells once."""
        if self.why_full:
            return
        content = _format(key, entry)
        if self.max_bytes is not None and self.bytes_written + len(content) > self.max_bytes:
            self._stop(f"its share of {self.max_bytes} bytes is used up")
            return
        try:
            write_atomically(self.path(key), content, durable=False)
        except OSError as error:
            self._stop(str(error))
            return
        self.bytes_written += len(content)

    def _stop(self, why: str) -> None:
        self.why_full = why
        warnings.warn(
            f"no more encodings are stored in {self.folder}: {why}. Training goes on; what is stored is "
            "used, the rest is computed",
            stacklevel=3,
        )


def _format(key: str, entry: Entry) -> bytes:
    payload = b"".join(_bytes(tensor) for tensor in entry.tensors)
    header = {
        "format": FORMAT,
        "key": key,
        "tensors": [
            {
                "dtype": str(tensor.dtype).removeprefix("torch."),
                "shape": list(tensor.shape),
                "stride_in_group": list(stride),
            }
            for tensor, stride in zip(entry.tensors, entry.strides, strict=True)
        ],
        "crc32": zlib.crc32(payload),
    }
    return json.dumps(header).encode() + b"\n" + payload


def _parse(content: bytes, key: str) -> Entry:
    head, newline, payload = content.partition(b"\n")
    if not newline:
        raise ValueError("it has no header")
    header: Any = json.loads(head)
    if header["format"] != FORMAT or header["key"] != key:
        raise ValueError(f"its header says {header['format']!r}, key {header['key']!r}")
    if zlib.crc32(payload) != header["crc32"]:
        raise ValueError(f"the checksum of its {len(payload)} bytes is wrong")
    tensors, start = [], 0
    for described in header["tensors"]:
        dtype = getattr(torch, described["dtype"])
        shape = torch.Size(described["shape"])
        stop = start + shape.numel() * dtype.itemsize
        tensor = torch.empty(shape, dtype=dtype)
        if stop > start:
            raw = torch.frombuffer(bytearray(payload[start:stop]), dtype=torch.uint8)
            tensor = raw.view(dtype).reshape(shape)
        tensors.append(tensor)
        start = stop
    strides = tuple(tuple(described["stride_in_group"]) for described in header["tensors"])
    return Entry(tuple(tensors), strides)


def _bytes(tensor: Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
