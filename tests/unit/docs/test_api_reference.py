"""docs/api is what the services' OpenAPI documents say."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib.resources import files
from typing import Any

import msgspec
import pytest
from lmcache_core.keys import CacheEngineKey
from lmcache_servicekit.app import ServiceApp
from lmcache_servicekit.bodies import ApiModel

from tests.unit.docs.api_reference import FOLDER, SERVICES, pages

EXAMPLES: dict[str, Any] = json.loads(
    files("lmcache_servicekit").joinpath("examples.json").read_bytes()
)

OLD = {"/v1/peers/{peer_id}:drain"}
"""In no document: where the preview's `lmcachectl` calls it."""


def test_the_pages_are_those_that_make_api_docs_writes() -> None:
    written = {path.name: path.read_text(encoding="utf-8") for path in FOLDER.glob("*")}
    expected = pages()
    assert sorted(written) == sorted(expected)
    for name, text in expected.items():
        assert written[name] == text, f"docs/api/{name} is out of date: run `make api-docs`"


@pytest.mark.parametrize("service", SERVICES)
def test_calls_of_admins_have_one_prefix_and_operations_an_id_each(service: str) -> None:
    app = SERVICES[service]()
    assert isinstance(app, ServiceApp)
    for route in app.guarded:
        assert route.path in OLD or (
            route.guard().role != "admin" or route.path.startswith("/v1/admin/")
        )
    document = app.openapi()
    assert OLD & document["paths"].keys() == set()
    assert document["servers"] == [{"url": "/"}]
    operations = [operation for path in document["paths"].values() for operation in path.values()]
    ids = [operation["operationId"] for operation in operations]
    assert sorted(set(ids)) == sorted(ids)
    assert all(operation["tags"] and operation["summary"] for operation in operations)


@pytest.mark.parametrize("service", SERVICES)
def test_operations_parameters_and_fields_say_more_than_their_names(service: str) -> None:
    document = SERVICES[service]().openapi()
    said = [*_said_of_operations(document["paths"]), *_said_of_schemas(document["components"])]
    assert len(said) > 30
    assert [name for name, text in said if _plain(text) in ("", _plain(name.split()[-1]))] == []


def test_every_json_body_has_an_example_and_each_example_a_body() -> None:
    bodies = set()
    for create in SERVICES.values():
        document = create().openapi()
        schemas = document["components"]["schemas"]
        for operation in (one for path in document["paths"].values() for one in path.values()):
            content = operation.get("requestBody", {}).get("content", {})
            if "application/json" not in content:
                continue
            schema = content["application/json"]["schema"]
            name = schema.get("anyOf", [schema])[0]["$ref"].rsplit("/", 1)[1]
            assert schemas[name]["examples"] == [EXAMPLES[name]], operation["operationId"]
            bodies.add(name)
    assert bodies == EXAMPLES.keys()


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_is_accepted_by_its_model_and_has_nothing_else(name: str) -> None:
    for create in SERVICES.values():
        create()  # which imports the models
    (model,) = (one for one in _subclasses(ApiModel, msgspec.Struct) if one.__name__ == name)
    text = json.dumps(EXAMPLES[name])
    if issubclass(model, msgspec.Struct):
        read = msgspec.to_builtins(msgspec.json.decode(text, type=model))
    else:
        read = model.model_validate_json(text).model_dump(mode="json", exclude_unset=True)
    assert _within(EXAMPLES[name], read)
    for key in EXAMPLES[name].get("keys", ()):
        assert CacheEngineKey.from_url(key).to_url() == key


def _subclasses(*classes: type) -> Iterator[Any]:
    for one in classes:
        for below in one.__subclasses__():
            yield below
            yield from _subclasses(below)


def _within(part: Any, whole: Any) -> bool:
    """Return whether the whole has all that the part has; it may have defaults, too."""
    if isinstance(part, dict):
        return all(name in whole and _within(value, whole[name]) for name, value in part.items())
    if isinstance(part, list):
        return len(part) == len(whole) and all(map(_within, part, whole))
    return bool(part == whole)


def _said_of_operations(paths: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the name and the description of each operation, parameter and answer."""
    for operation in (operation for path in paths.values() for operation in path.values()):
        name = operation["operationId"]
        yield name, operation.get("description", operation["summary"])
        for status, response in operation["responses"].items():
            yield f"{name} {status}", response.get("description", response.get("$ref"))
        for parameter in operation.get("parameters", ()):
            yield f"{name} {parameter['name']}", parameter.get("description", "")


def _said_of_schemas(node: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """Yield the name and the description of each schema and of each of its fields, those of arrays
    included.
    """
    if isinstance(node, list):
        for item in node:
            yield from _said_of_schemas(item, name)
    if not isinstance(node, dict):
        return
    for schema_name, schema in node.get("schemas", {}).items():
        yield schema_name, schema.get("description", "")
        yield from _said_of_schemas(schema, schema_name)
    fields = list(node.get("properties", {}).items())
    fields += [(str(place), item) for place, item in enumerate(node.get("prefixItems", ()))]
    for field, schema in fields:
        yield f"{name} {field}", schema.get("description", "")
        yield from _said_of_schemas(schema, f"{name} {field}")
    for part in ("items", "anyOf", "additionalProperties"):
        yield from _said_of_schemas(node.get(part), name)


def _plain(text: str) -> str:
    return "".join(char for char in text.lower() if char.isalnum())
