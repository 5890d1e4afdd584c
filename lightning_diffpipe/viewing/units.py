"""Seconds, bytes and shares as a person reads them."""

from __future__ import annotations

from collections.abc import Sequence


def seconds(value: float) -> str:
    """Three digits and a unit.

    Example:
        >>> seconds(0.0123), seconds(2.5), seconds(0.00000042)
        ('12.3 ms', '2.50 s', '0.42 us')
    """
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if abs(value) >= scale or unit == "us":
            break
    number = value / scale
    digits = 0 if abs(number) >= 100 else 1 if abs(number) >= 10 else 2
    return f"{number:.{digits}f} {unit}" if value else "0 s"


def size(num_bytes: float) -> str:
    """Bytes with a binary prefix.

    Example:
        >>> size(3 * 2**30), size(1500), size(12)
        ('3.0 GiB', '1.5 KiB', '12 B')
    """
    for unit, scale in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= scale:
            return f"{num_bytes / scale:.1f} {unit}"
    return f"{num_bytes:.0f} B"


def operations(flops: float) -> str:
    """Operations with a decimal prefix; a question mark if unknown.

    Example:
        >>> operations(2.96e12), operations(1500), operations(0)
        ('2.96 TFLOP', '1.50 kFLOP', '?')
    """
    for unit, scale in (("TFLOP", 1e12), ("GFLOP", 1e9), ("MFLOP", 1e6), ("kFLOP", 1e3)):
        if flops >= scale:
            return f"{flops / scale:.2f} {unit}"
    return f"{flops:.0f} FLOP" if flops else "?"


def percent(share: float) -> str:
    """Returns a share of one.

    Example:
        >>> percent(0.2837)
        '28.4%'
    """
    return f"{100 * share:.1f}%"


def count_of(number: int, what: str, ending: str = "s") -> str:
    """A number of things.

    Example:
        >>> count_of(1, "stage"), count_of(8, "microbatch", "es")
        ('1 stage', '8 microbatches')
    """
    return f"{number} {what}{'' if number == 1 else ending}"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns aligned to the right, but the first column to the left.

    Example:
        >>> print(table(["stage", "time"], [["0", "1 s"], ["1", "12 s"]]))
        stage  time
        0       1 s
        1      12 s
    """
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
    lines = []
    for row in (header, *rows):
        cells = [f"{row[0]:<{widths[0]}}"]
        cells += [f"{cell:>{width}}" for cell, width in zip(row[1:], widths[1:], strict=True)]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
