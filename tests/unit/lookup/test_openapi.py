"""The OpenAPI document describes the types that read and write bodies."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from lmcache_core.lookup.messages import JSON, MSGPACK
from lmcache_lookup.app import create_app
from lmcache_lookup.routes import bodies
from lmcache_lookup.settings import LookupSettings


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    return create_app(LookupSettings()).openapi()


def references(node: Any) -> Iterator[str]:
    if isinstance(node, dict):
        if isinstance(node.get("$ref"), str):
            yield node["$ref"]
        node = list(node.values())
    if isinstance(node, list):
        for item in node:
            yield from references(item)


def test_every_reference_resolves_and_every_schema_is_used(document: dict[str, Any]) -> None:
    named = {tuple(text.removeprefix("#/components/").split("/")) for text in references(document)}
    assert named == {
        (kind, name) for kind in ("schemas", "responses") for name in document["components"][kind]
    }


def test_every_type_is_described_with_its_own_fields(document: dict[str, Any]) -> None:
    for kind in bodies.types:
        schema = document["components"]["schemas"][kind.__name__]
        fields = msgspec.structs.fields(kind)
        text, _, attributes = (inspect.getdoc(kind) or "").partition("\n\nAttributes:\n")
        assert schema["description"] == text
        for name in re.findall(r"^    (\w+): ", attributes, re.MULTILINE):
            assert schema["properties"][name]["description"]
        assert set(schema["properties"]) == {field.encode_name for field in fields}
        assert set(schema.get("required", [])) == {
            field.encode_name for field in fields if field.required
        }


def test_questions_are_there_in_both_formats_and_events_in_messagepack(
    document: dict[str, Any],
) -> None:
    formats = {
        path: set(content)
        for path, operations in document["paths"].items()
        for operation in operations.values()
        for content in (
            operation.get("requestBody", {}).get("content"),
            operation["responses"].get("200", {}).get("content"),
        )
        if content is not None and path.startswith("/v1")
    }
    both = {"/v1/lookup", "/v1/route", "/v1/contains"}
    assert all(formats.pop(path) == {JSON, MSGPACK} for path in both)
    assert formats.pop("/v1/events") == {MSGPACK}
    assert all(kinds == {JSON} for kinds in formats.values())
