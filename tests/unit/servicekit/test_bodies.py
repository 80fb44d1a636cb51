"""Docstrings of msgspec types describe their schemas."""

from __future__ import annotations

from typing import Any

import msgspec
from lmcache_servicekit.bodies import BodyTypes


class Named(msgspec.Struct):
    """Anything with a name.

    Attributes:
        name: Its name, which may be
            long.
        size: Of anything.
    """

    name: str
    size: int


class Thing(Named):
    """A thing.

    Attributes:
        size: Of this thing.
    """

    size: int


class Pair(msgspec.Struct, array_like=True):
    """A pair: an array.

    Attributes:
        first: The one.

    Raises:
        ValueError: Never.
    """

    first: int
    second: str


class Pairs(msgspec.Struct):
    """Pairs.

    Attributes:
        pairs: At most two.
    """

    pairs: list[Pair]


def told(properties: dict[str, Any]) -> dict[str, str | None]:
    return {name: schema.get("description") for name, schema in properties.items()}


def test_a_struct_is_described_by_its_docstring_and_those_it_inherits_from() -> None:
    bodies = BodyTypes()
    bodies.route(answer=Thing)
    schema = bodies.schemas()["Thing"]
    assert schema["description"] == "A thing."
    assert told(schema["properties"]) == {
        "name": "Its name, which may be long.",
        "size": "Of this thing.",
    }


def test_nested_structs_and_arrays_are_described() -> None:
    bodies = BodyTypes()
    bodies.route(answer=Pairs)
    schemas = bodies.schemas()
    assert told(schemas["Pairs"]["properties"]) == {"pairs": "At most two."}
    assert schemas["Pair"]["description"] == "A pair: an array."
    items = schemas["Pair"]["prefixItems"]
    assert [item.get("description") for item in items] == ["The one.", None]
