"""The OpenAPI document's part on bodies, made from the very types that read and write them."""

from __future__ import annotations

import inspect
from typing import Any, Final

import msgspec
from fastapi import Response
from lmcache_core.lookup.messages import NO_LINE_END
from lmcache_core.lookup.requests import JSON, MSGPACK

from lmcache_lookup.formats import Body

_COMPONENT: Final = "#/components/schemas/{name}"


def documented(
    body: Body[Any, Any] | None = None, answer: type | None = None, packed: type | None = None
) -> dict[str, Any]:
    """Arguments of a route's decorator that say what it reads and writes.

    Args:
        body: What it reads, if it reads something.
        answer: What it writes as JSON; None for an empty answer, which is not documented here.
        packed: What it writes as MessagePack where that differs.
    """
    route: dict[str, Any] = {"response_class": Response}
    if answer is not None:
        route["responses"] = {
            200: {"description": _sentence(answer), "content": _contents(answer, packed or answer)}
        }
    if body is not None:
        route["openapi_extra"] = {
            "requestBody": {"required": True, "content": _contents(body.plain, body.packed)}
        }
    return route


def schemas_of(*types: type) -> dict[str, Any]:
    """The schemas of types and of all that they are made of, by name."""
    _, components = msgspec.json.schema_components(types, ref_template=_COMPONENT)
    return {name: _cleaned(schema) for name, schema in components.items()}


def _contents(plain: type, packed: type) -> dict[str, Any]:
    return {
        kind: {"schema": {"$ref": _COMPONENT.format(name=one.__name__)}}
        for kind, one in ((JSON, plain), (MSGPACK, packed))
    }


def _sentence(kind: type) -> str:
    return (kind.__doc__ or "").partition("\n")[0]


def _cleaned(schema: Any) -> Any:
    """Without what only Python's regular expressions need, and with bytes as they are in
    MessagePack instead of as JSON would hold them.
    """
    if isinstance(schema, list):
        return [_cleaned(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    if schema.get("contentEncoding") == "base64":
        return {"type": "string", "format": "binary", "description": schema["description"]}
    cleaned = {name: _cleaned(value) for name, value in schema.items()}
    if isinstance(cleaned.get("pattern"), str):
        cleaned["pattern"] = cleaned["pattern"].removesuffix(NO_LINE_END)
    if isinstance(cleaned.get("description"), str):
        cleaned["description"] = inspect.cleandoc(cleaned["description"])
    return cleaned
