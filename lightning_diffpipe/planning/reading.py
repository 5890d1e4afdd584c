"""Reading JSON that people and other programs wrote: every complaint names the key.

    ProfileError: profile.json: backbones[0].layers[3].forward_s: expected a number >= 0; got -0.1

A `Node` is a value together with where it was found.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from lightning_diffpipe.errors import DiffPipeError

LARGEST = (1 << 63) - 1
"""No count or size is larger; what is larger was mistyped, and would overflow in arithmetic."""

LARGEST_NUMBER = 1e30
"""Sums and products of such numbers are finite, so that a search can compare what they make."""


@dataclass(frozen=True, slots=True)
class Node:
    """A JSON value and its address.

    Attributes:
        value: What `json.loads` made of it.
        where: Its address, for example `backbones[0].name`; empty for the whole document.
        error: The exception to raise for a value that is not as expected.
        source: What is being read, for messages.
    """

    value: object
    where: str
    error: type[DiffPipeError]
    source: str

    @classmethod
    def of_text(cls, text: str, error: type[DiffPipeError], source: str) -> Node:
        """Parses JSON.

        Raises:
            DiffPipeError: Of type `error`: the text is not JSON; says where it breaks off. Or an object has
                a key twice, a number thousands of digits, or objects lie too deep in each other.
        """

        def of_pairs(pairs: list[tuple[str, object]]) -> dict[str, object]:
            members: dict[str, object] = {}
            for key, value in pairs:
                if key in members:
                    raise error(
                        f"{source}: an object has the key {key!r} twice, with {_shown(members[key])} and "
                        f"with {_shown(value)}; keep one of them"
                    )
                members[key] = value
            return members

        try:
            return cls(json.loads(text, object_pairs_hook=of_pairs), "", error, source)
        except RecursionError as cause:
            raise error(
                f"{source}: objects or arrays lie too deep in each other to be read"
            ) from cause
        except json.JSONDecodeError as cause:
            ends = not text[cause.pos :].strip() or cause.msg.startswith("Unterminated")
            hint = "the file seems to be cut short" if ends else "it was probably edited by hand"
            where = f"line {cause.lineno}, column {cause.colno}"
            what = cause.msg.removesuffix(" at")  # "Unterminated string starting at"
            raise error(f"{source} is not JSON: {what} at {where}; {hint}") from cause
        except DiffPipeError:
            raise
        except ValueError as cause:
            raise error(f"{source}: a number has too many digits: {cause}") from cause

    def check_format(self, wanted: str) -> None:
        """Refuses a document of another kind, before its keys are called unknown."""
        if isinstance(self.value, dict) and self.value.get("format", wanted) != wanted:
            raise self["format"].expected(f'"{wanted}"')

    def expected(self, what: str) -> DiffPipeError:
        """The error for this value, which should have been `what`."""
        got = "nothing" if self.value is None else _shown(self.value)
        return self.error(f"{self.source}: {self.where or 'document'}: expected {what}; got {got}")

    def check_keys(self, required: Iterable[str], optional: Iterable[str] = ()) -> Node:
        """Requires an object with all of `required` and nothing besides `optional`."""
        if not isinstance(self.value, dict):
            raise self.expected("an object")
        required = tuple(required)
        allowed = (*required, *optional)
        for key in self.value:
            if key not in allowed:
                raise self.error(
                    f"{self.source}: unknown key {self._address(key)!r}; "
                    f"known keys here: {', '.join(allowed)}"
                )
        for key in required:
            if key not in self.value:
                raise self.error(f"{self.source}: missing key {self._address(key)!r}")
        return self

    def __contains__(self, key: str) -> bool:
        return isinstance(self.value, dict) and self.value.get(key) is not None

    def __getitem__(self, key: str) -> Node:
        """The member `key` of an object."""
        if not isinstance(self.value, dict):
            raise self.expected("an object")
        if key not in self.value:
            raise self.error(f"{self.source}: missing key {self._address(key)!r}")
        return Node(self.value[key], self._address(key), self.error, self.source)

    def members(self) -> Iterator[tuple[str, Node]]:
        """Keys and members of an object."""
        if not isinstance(self.value, dict):
            raise self.expected("an object")
        for key in self.value:
            yield key, self[key]

    def elements(self) -> Iterator[Node]:
        """The elements of an array."""
        if not isinstance(self.value, list):
            raise self.expected("an array")
        for index, value in enumerate(self.value):
            yield Node(value, f"{self.where}[{index}]", self.error, self.source)

    def text(self) -> str:
        """This value as a string."""
        if not isinstance(self.value, str):
            raise self.expected("a string")
        return self.value

    def flag(self) -> bool:
        """This value as true or false."""
        if not isinstance(self.value, bool):
            raise self.expected("true or false")
        return self.value

    def number(self, minimum: float = 0.0, maximum: float = math.inf) -> float:
        """This value as a finite number in a range."""
        good = isinstance(self.value, (int, float)) and not isinstance(self.value, bool)
        highest = min(maximum, LARGEST_NUMBER)
        if not good or not minimum <= self.value <= highest:  # type: ignore[operator]
            huge = good and self.value > LARGEST_NUMBER  # type: ignore[operator]
            limit = f" and <= {highest:g}" if maximum < math.inf or huge else ""
            raise self.expected(f"a number >= {minimum:g}{limit}")
        return float(self.value)  # type: ignore[arg-type]

    def integer(self, minimum: int = 0) -> int:
        """This value as a whole number."""
        value = self.value
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
            raise self.expected(f"a whole number >= {minimum}")
        if value > LARGEST:
            raise self.expected(f"a whole number of at most {LARGEST}")
        return value

    def _address(self, key: str) -> str:
        return f"{self.where}.{key}" if self.where else key


def _shown(value: object) -> str:
    try:
        text = json.dumps(value)
    except RecursionError:
        return "objects or arrays too deep in each other"
    return text if len(text) <= 60 else f"{text[:57]}..."
