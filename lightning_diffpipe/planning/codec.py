"""Dataclasses as JSON that people and other programs write: every complaint names the key.

    ProfileError: profile.json: backbones[0].layers[3].forward_s: expected a number >= 0; got -0.1

A `Node` is a value together with where it was found. `read` makes a dataclass of it by the types of its fields, and
`write` plain values of a dataclass, without fields that are at their defaults. What a field's type does not say is
in its metadata, see `stored`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from types import MappingProxyType, UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from lightning_diffpipe.errors import DiffPipeError

_T = TypeVar("_T")

LARGEST = (1 << 63) - 1
"""No count or size is larger; what is larger was mistyped, and would overflow in arithmetic."""

LARGEST_NUMBER = 1e30
"""Sums and products of such numbers are finite, so that a search can compare what they make."""


@dataclass(frozen=True, slots=True)
class Node:
    """A JSON value and its address.

    Attributes:
        where: Address of the node, for example `backbones[0].name`; empty for the whole document.
        error: The exception to raise for a value that is not as expected.
        source: Name of the file, for messages.
    """

    value: object
    where: str
    error: type[DiffPipeError]
    source: str

    @classmethod
    def of_text(cls, text: str, error: type[DiffPipeError], source: str, wanted: str) -> Node:
        """Parses a JSON document of the wanted format; others are refused before their keys are called unknown.

        Raises:
            DiffPipeError: Of type `error`: the text is not JSON; says where it breaks off. Or an object has
                a key twice.
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
            document = cls(json.loads(text, object_pairs_hook=of_pairs), "", error, source)
        except json.JSONDecodeError as cause:
            ends = not text[cause.pos :].strip() or cause.msg.startswith("Unterminated")
            hint = "the file seems to be cut short" if ends else "it was probably edited by hand"
            where = f"line {cause.lineno}, column {cause.colno}"
            what = cause.msg.removesuffix(" at")  # "Unterminated string starting at"
            raise error(f"{source} is not JSON: {what} at {where}; {hint}") from cause
        if isinstance(document.value, dict) and document.value.get("format", wanted) != wanted:
            raise document["format"].expected(f'"{wanted}"')
        return document

    def expected(self, what: str) -> DiffPipeError:
        """Returns the error for this value, which should have been `what`."""
        got = "nothing" if self.value is None else _shown(self.value)
        return self.error(f"{self.source}: {self.where or 'document'}: expected {what}; got {got}")

    def check_keys(self, required: Iterable[str], optional: Iterable[str] = ()) -> Node:
        """Requires an object with all of `required` and nothing besides `optional`."""
        required = tuple(required)
        allowed = (*required, *optional)
        for key in self.is_a(dict, "an object"):
            if key not in allowed:
                raise self.error(
                    f"{self.source}: unknown key {self._address(key)!r}; "
                    f"known keys here: {', '.join(allowed)}"
                )
        for key in required:
            self[key]  # or it is missing
        return self

    def __contains__(self, key: str) -> bool:
        return isinstance(self.value, dict) and self.value.get(key) is not None

    def __getitem__(self, key: str) -> Node:
        members = self.is_a(dict, "an object")
        if key not in members:
            raise self.error(f"{self.source}: missing key {self._address(key)!r}")
        return Node(members[key], self._address(key), self.error, self.source)

    def members(self) -> Iterator[tuple[str, Node]]:
        """Yields keys and members of an object."""
        for key in self.is_a(dict, "an object"):
            yield key, self[key]

    def elements(self) -> Iterator[Node]:
        """Yields the elements of an array."""
        for index, value in enumerate(self.is_a(list, "an array")):
            yield Node(value, f"{self.where}[{index}]", self.error, self.source)

    def is_a(self, kind: type[_T], what: str) -> _T:
        """Returns this value, which has to be of a type that people call `what`."""
        if not isinstance(self.value, kind):
            raise self.expected(what)
        return self.value

    def number(self, minimum: float = 0.0, maximum: float = math.inf) -> float:
        """Returns this value as a finite number in a range."""
        good = isinstance(self.value, (int, float)) and not isinstance(self.value, bool)
        highest = min(maximum, LARGEST_NUMBER)
        if not good or not minimum <= self.value <= highest:  # type: ignore[operator]
            huge = good and self.value > LARGEST_NUMBER  # type: ignore[operator]
            limit = f" and <= {highest:g}" if maximum < math.inf or huge else ""
            raise self.expected(f"a number >= {minimum:g}{limit}")
        return float(self.value)  # type: ignore[arg-type]

    def integer(self, minimum: int = 0) -> int:
        """Returns this value as a whole number."""
        value = self.value
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
            raise self.expected(f"a whole number >= {minimum}")
        if value > LARGEST:
            raise self.expected(f"a whole number of at most {LARGEST}")
        return value

    def made(self, make: Callable[..., _T], *values: Any, **fields: Any) -> _T:
        """Makes something of this value; complaints of its maker name the address."""
        try:
            return make(*values, **fields)
        except DiffPipeError as cause:
            if isinstance(cause, self.error):
                raise
            raise self.error(f"{self.source}: {self.where}: {cause}") from cause

    def _address(self, key: str) -> str:
        return f"{self.where}.{key}" if self.where else key


def _shown(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def stored(default: Any = MISSING, **how: object) -> Any:
    """Makes a field of a dataclass that is read and written in another way than its type says.

    `how` may have `key`, its name in the document; `minimum` and `maximum` of a number; `always=True`, if it is
    written at its default as well; `never=True`, if it is neither read nor written; `read` and `write`, if its form
    depends on other fields: functions of the whole object's node, or of the object, and of the field's key.
    """
    return field(default=default, metadata=how)


def read(cls: type[_T], node: Node) -> _T:
    """Reads a dataclass from an object; its own `from_node`, if it has one, has the say.

    Raises:
        DiffPipeError: Of the node's type: a key is missing, unknown, or has a bad value.
    """
    reader = getattr(cls, "from_node", None)
    return reader(node) if reader else read_fields(cls, node)


def read_fields(cls: type[_T], node: Node, *also: str, optional: Iterable[str] = ()) -> _T:
    """Reads a dataclass from an object, field by field; keys of `also` are there besides, `optional` ones may be.

    Raises:
        DiffPipeError: See `read`.
    """
    keyed, hints = _stored_fields(cls), get_type_hints(cls)
    required = [key for key, field in keyed.items() if _default(field) is MISSING]
    node.check_keys((*also, *required), (*optional, *(key for key in keyed if key not in required)))
    values = {
        field.name: field.metadata["read"](node, key)
        if "read" in field.metadata
        else read_value(hints[field.name], node[key], field.metadata)
        for key, field in keyed.items()
        # An infinite number that is the default need not be in range.
        if key in required or (key in node and not node[key].value == math.inf == field.default)
    }
    return node.made(cls, **values)


def write(value: object) -> Any:
    """Returns plain values, ready for JSON."""
    if hasattr(value, "to_plain"):
        return value.to_plain()
    if is_dataclass(value):
        return {
            key: field.metadata["write"](value, key)
            if "write" in field.metadata
            else write(getattr(value, field.name))
            for key, field in _stored_fields(type(value)).items()
            if field.metadata.get("always") or getattr(value, field.name) != _default(field)
        }
    return [write(element) for element in value] if isinstance(value, tuple) else value


def _stored_fields(cls: Any) -> dict[str, Field[Any]]:
    """Returns the fields that are read and written, by their keys in the document."""
    stored = (each for each in fields(cls) if not each.metadata.get("never"))
    return {each.metadata.get("key", each.name): each for each in stored}


def _default(own: Field[Any]) -> object:
    return own.default if own.default_factory is MISSING else own.default_factory()


def read_value(hint: Any, node: Node, how: Mapping[str, Any] = MappingProxyType({})) -> Any:
    """Reads a value of a type: a number with limits as of `stored`, a text, a tuple or a dataclass."""
    if get_origin(hint) is UnionType:
        (hint,) = (each for each in get_args(hint) if each is not type(None))
    if get_origin(hint) is tuple:
        kinds = get_args(hint)
        elements = list(node.elements())
        if kinds[1] is ...:
            return tuple(read_value(kinds[0], element, how) for element in elements)
        if len(elements) != len(kinds):
            raise node.expected(f"{len(kinds)} elements")
        return tuple(read_value(k, e, how) for k, e in zip(kinds, elements, strict=True))
    if hint is int:
        return node.integer(minimum=how.get("minimum", 0))
    if hint is float:
        return node.number(maximum=how.get("maximum", math.inf))
    if hint is str:
        return node.is_a(str, "a string")
    return node.is_a(bool, "true or false") if hint is bool else read(hint, node)
