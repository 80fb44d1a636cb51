"""docs/api is what the services' OpenAPI documents say."""

from __future__ import annotations

from tests.unit.docs.api_reference import FOLDER, pages


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
