"""Encodings on disk: what is written is read, by anybody, and damage is named and repaired."""

import threading

import pytest
import torch

from lightning_diffpipe.callbacks.encoding_cache import EncodingStore
from lightning_diffpipe.graph.memo import Entry

KEY = "ab" * 32


def entry(*tensors):
    return Entry(tensors, tuple(tensor.stride() for tensor in tensors))


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(1, 3, 4, dtype=torch.float64),
        torch.randn(2, 3).bfloat16(),
        torch.arange(6).reshape(1, 6),
        torch.tensor([[True, False]]),
        torch.zeros(1, 0),
    ],
    ids=lambda t: str(t.dtype),
)
def test_round_trip(tmp_path, tensor):
    store = EncodingStore(tmp_path)
    assert store.read(KEY) is None
    store.write(KEY, entry(tensor, torch.ones(1, 2)))
    read = EncodingStore(tmp_path).read(KEY)
    assert torch.equal(read.tensors[0], tensor)
    assert read.tensors[0].dtype == tensor.dtype
    assert read.strides == (tensor.stride(), (2, 1))


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: b"",
        lambda content: content[: len(content) // 2],
        lambda content: content[:-1],
        lambda content: content[:-1] + bytes([content[-1] ^ 1]),
        lambda content: b"\0" * len(content),
        lambda content: content.replace(b"diffpipe-encoding/1", b"diffpipe-encoding/9"),
        lambda content: content.replace(b"float32", b"float99"),
        lambda content: content.replace(b'"key"', b'"kex"'),
    ],
)
def test_damaged_files_are_named_and_made_again(tmp_path, damage):
    """A power cut after a rename leaves a file of the right length and other content."""
    store = EncodingStore(tmp_path)
    store.write(KEY, entry(torch.randn(1, 5)))
    path = store.path(KEY)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.warns(UserWarning, match=KEY):
        assert store.read(KEY) is None
    assert not path.exists()
    store.write(KEY, entry(torch.zeros(1, 5)))
    assert torch.equal(store.read(KEY).tensors[0], torch.zeros(1, 5))


def test_a_file_of_another_key_is_not_believed(tmp_path):
    store = EncodingStore(tmp_path)
    store.write(KEY, entry(torch.randn(1, 5)))
    other = "ab" + "cd" * 31
    store.path(KEY).rename(store.path(other))
    with pytest.warns(UserWarning, match="damaged"):
        assert store.read(other) is None


def test_a_crash_while_writing_leaves_no_entry(tmp_path, monkeypatch):
    store = EncodingStore(tmp_path)

    def crash(*paths):
        raise OSError("the power is gone")

    monkeypatch.setattr("os.replace", crash)
    with pytest.warns(UserWarning, match="the power is gone"):
        store.write(KEY, entry(torch.randn(1, 5)))
    assert store.read(KEY) is None
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
    store.write(KEY, entry(torch.randn(1, 5)))  # stays quiet: it has stopped storing


def test_writers_and_readers_of_one_key_never_see_half_of_it(tmp_path):
    value = torch.randn(1, 50_000)
    seen = []

    def write():
        store = EncodingStore(tmp_path)
        for _ in range(20):
            store.write(KEY, entry(value))

    def read():
        store = EncodingStore(tmp_path)
        for _ in range(60):
            found = store.read(KEY)
            seen.append(found is None or torch.equal(found.tensors[0], value))

    threads = [threading.Thread(target=target) for target in (write, write, read, read)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(seen)
    assert len(seen) == 120


def test_the_limit_ends_writing_not_reading(tmp_path):
    store = EncodingStore(tmp_path, max_bytes=1000)
    store.write(KEY, entry(torch.randn(1, 100)))
    with pytest.warns(UserWarning, match="used up"):
        store.write("cd" * 32, entry(torch.randn(1, 100)))
    assert store.read(KEY) is not None
    assert store.read("cd" * 32) is None
