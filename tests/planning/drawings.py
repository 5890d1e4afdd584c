"""Golden timelines: images kept in files, whose changes a reviewer reads.

`pytest tests/planning tests/viewing --update-golden` rewrites them.
"""

from pathlib import Path

TESTS = Path(__file__).parent.parent


def check_golden(name: str, text: str, update: bool, folder: str = "planning") -> None:
    path = TESTS / folder / "golden" / f"{name}.txt"
    if update:
        path.write_text(text.rstrip() + "\n")
    assert text.rstrip() == path.read_text().rstrip()
