"""Files that are whole or not there."""

import os

import pytest

from lightning_diffpipe.files import write_atomically


def test_writing_leaves_nothing_half_done(tmp_path):
    target = tmp_path / "deep" / "p.json"
    write_atomically(target, "one")
    write_atomically(target, "two")
    assert target.read_text() == "two"
    assert list(target.parent.iterdir()) == [target]
    target.unlink()
    target.mkdir()  # a file cannot take the place of a folder
    with pytest.raises(OSError, match="directory"):
        write_atomically(target, "three")
    assert list(target.parent.iterdir()) == [target]


def test_others_may_read_what_is_written(tmp_path):
    """History: plans and profiles of a run could be read by nobody else in the group."""
    before = os.umask(0o027)
    try:
        write_atomically(tmp_path / "plan.json", b"{}")
    finally:
        os.umask(before)
    assert (tmp_path / "plan.json").stat().st_mode & 0o777 == 0o640
