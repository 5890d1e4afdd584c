"""Bands: which rows of the latents each rank computes.

rows 0-3 | band 0        Every tensor that grows with the rows is cut in the same shares: latents,
rows 4-7 | band 1        activations of every resolution, tokens of the image. A band is a whole number
rows 8-9 | band 2        of *units*, the rows that the model's strides and patches take together.
"""

from __future__ import annotations

from dataclasses import dataclass

from lightning_diffpipe.errors import ConfigurationError


@dataclass(frozen=True)
class Bands:
    """The rows of all ranks, seen from one of them.

    Attributes:
        rows: Rows of each band of the latents, from the top.
        rank: Whose view this is.

    Example:
        >>> bands = Bands.split(32, 3, unit=4, rank=1)
        >>> bands.rows, bands.start, bands.part_of(8), bands.resized(6, 2)
        ((12, 12, 8), 12, (3, 3), 4)
    """

    rows: tuple[int, ...]
    rank: int

    @classmethod
    def split(cls, num_rows: int, num_bands: int, unit: int, rank: int) -> Bands:
        """Balanced bands of whole units, larger ones first.

        Raises:
            ConfigurationError: The rows are no whole units, or there are fewer units than bands.
        """
        units, rest = divmod(num_rows, unit)
        if rest:
            raise ConfigurationError(
                f"the latents have {num_rows} rows, but strides and patches of this model take {unit} rows "
                f"together: choose a height of {units * unit or unit} or {(units + 1) * unit} rows"
            )
        if units < num_bands:
            raise ConfigurationError(
                f"{num_bands} bands, but the {num_rows} rows of the latents are {units} units of {unit} "
                f"rows, which this model takes together: use at most {units} ranks, or at least "
                f"{num_bands * unit} rows"
            )
        sizes = [units // num_bands + (band < units % num_bands) for band in range(num_bands)]
        return cls(tuple(unit * size for size in sizes), rank)

    @property
    def num_bands(self) -> int:
        """One for each rank."""
        return len(self.rows)

    @property
    def num_rows(self) -> int:
        """Of the latents."""
        return sum(self.rows)

    @property
    def size(self) -> int:
        """Rows of this rank's band."""
        return self.rows[self.rank]

    @property
    def start(self) -> int:
        """First row of this rank's band."""
        return sum(self.rows[: self.rank])

    @property
    def peers(self) -> list[int]:
        """All other ranks."""
        return [rank for rank in range(self.num_bands) if rank != self.rank]

    @property
    def shares(self) -> tuple[float, ...]:
        """What each band is of the whole."""
        return tuple(rows / self.num_rows for rows in self.rows)

    def part_of(self, size: int) -> tuple[int, int]:
        """Start and length of this band on a whole axis that grows with the rows."""
        return size * self.start // self.num_rows, size * self.size // self.num_rows

    def resized(self, size: int, rank: int) -> int:
        """Length on another rank of an axis that has `size` on this one."""
        return size * self.rows[rank] // self.size
