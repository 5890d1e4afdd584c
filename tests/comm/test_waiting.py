"""Calls that may never return, each in a thread of its own."""

import threading
import weakref

import pytest

from lightning_diffpipe.comm.waiting import in_thread


class Buffer:
    """Something whose end can be seen."""


def test_what_a_call_gives_or_raises_comes_to_who_asks():
    def fail():
        raise TimeoutError("nothing came")

    assert in_thread(lambda: 3, "test").result(5) == 3
    with pytest.raises(TimeoutError, match="nothing came"):
        in_thread(fail, "test").result(5)


def test_calls_do_not_wait_for_each_other():
    """One that was made first may end last, or never."""
    ends = [threading.Event() for _ in range(3)]
    calls = [in_thread(end.wait, "test") for end in ends]
    for end, call in reversed(list(zip(ends, calls, strict=True))):
        assert not call.done()
        end.set()
        assert call.result(5)


def test_buffers_of_a_call_that_has_returned_are_free():
    """A receive holds its buffer for as long as it waits, and no longer."""
    buffer = Buffer()
    seen, call = weakref.ref(buffer), in_thread(lambda held=buffer: bool(held), "test")
    del buffer
    assert call.result(5)
    for thread in threading.enumerate():
        if thread.name == "test":
            thread.join(5)
    assert seen() is None
