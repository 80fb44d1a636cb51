"""Docstrings describe schemas."""

from __future__ import annotations

from typing import Any

import msgspec
from lmcache_servicekit.bodies import BodyTypes
from lmcache_servicekit.docstrings import ApiModel


class Base(ApiModel):
    """Any thing.

    Attributes:
        name: Its name, which may be
            long.
        size: Of any thing.
    """

    name: str
    size: int


class Thing(Base):
    """A thing.

    Attributes:
        size: Of this thing.
        part: A nested thing.
    """

    size: int
    part: Base


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


def test_a_model_is_described_by_its_docstring_and_those_it_inherits_from() -> None:
    schema = Thing.model_json_schema()
    assert schema["description"] == "A thing."
    assert told(schema["properties"]) == {
        "name": "Its name, which may be long.",
        "size": "Of this thing.",
        "part": "A nested thing.",
    }
    assert told(schema["$defs"]["Base"]["properties"])["size"] == "Of any thing."


def test_nested_structs_and_arrays_are_described() -> None:
    bodies = BodyTypes()
    bodies.route(answer=Pairs)
    schemas = bodies.schemas()
    assert told(schemas["Pairs"]["properties"]) == {"pairs": "At most two."}
    assert schemas["Pair"]["description"] == "A pair: an array."
    items = schemas["Pair"]["prefixItems"]
    assert [item.get("description") for item in items] == ["The one.", None]
