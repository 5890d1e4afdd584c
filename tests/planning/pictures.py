"""Golden timelines: pictures kept in files, whose changes a reviewer reads.

`pytest tests/planning --update-golden` rewrites them.
"""

from pathlib import Path

FOLDER = Path(__file__).parent / "golden"


def check_golden(name: str, text: str, update: bool = False) -> None:
    path = FOLDER / f"{name}.txt"
    if update:
        path.write_text(text.rstrip() + "\n")
    assert text.rstrip() == path.read_text().rstrip()
