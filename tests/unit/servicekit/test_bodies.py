"""Docstrings of msgspec types describe their schemas."""

from __future__ import annotations

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


class Pair(msgspec.Struct, array_like=True):
    """A pair: an array.

    Attributes:
        first: The one.

    Raises:
        ValueError: Never.
    """

    first: int
    second: str


class Thing(Named):
    """A thing.

    Attributes:
        size: Of this thing.
        pairs: At most two.
    """

    size: int
    pairs: list[Pair]


def test_structs_are_described_by_their_docstrings_and_those_they_inherit() -> None:
    bodies = BodyTypes()
    bodies.route(answer=Thing)
    schemas = bodies.schemas()
    thing, pair = schemas["Thing"], schemas["Pair"]
    assert (thing["description"], pair["description"]) == ("A thing.", "A pair: an array.")
    assert {name: schema["description"] for name, schema in thing["properties"].items()} == {
        "name": "Its name, which may be long.",
        "size": "Of this thing.",
        "pairs": "At most two.",
    }
    assert [item.get("description") for item in pair["prefixItems"]] == ["The one.", None]
