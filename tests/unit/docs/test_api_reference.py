"""docs/api is what the services' OpenAPI documents say."""

from __future__ import annotations

import pytest
from lmcache_servicekit.app import ServiceApp

from tests.unit.docs.api_reference import FOLDER, SERVICES, pages

OLD = {"/v1/peers/{peer_id}:drain"}
"""In no document: where the preview's `lmcachectl` calls it."""


def test_the_pages_are_those_that_make_api_docs_writes() -> None:
    written = {path.name: path.read_text(encoding="utf-8") for path in FOLDER.glob("*")}
    expected = pages()
    assert sorted(written) == sorted(expected)
    for name, text in expected.items():
        assert written[name] == text, f"docs/api/{name} is out of date: run `make api-docs`"


def test_every_call_is_on_a_page() -> None:
    page = pages()["README.md"]
    assert "| `POST /v1/lookup` |" in page
    assert "| `PUT /v1/chunks/{key}` |" in page


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
    described = {tag["name"] for tag in document["tags"] if tag["description"]}
    operations = [operation for path in document["paths"].values() for operation in path.values()]
    for operation in operations:
        assert set(operation["tags"]) <= described
        for parameter in operation.get("parameters", ()):
            kinds = [parameter, *parameter["schema"].get("anyOf", ())]
            told = [kind["description"] for kind in kinds if "description" in kind]
            assert told, (operation["operationId"], parameter["name"])
    ids = [operation["operationId"] for operation in operations]
    assert sorted(set(ids)) == sorted(ids)
    assert all(operation["tags"] and operation["summary"] for operation in operations)
