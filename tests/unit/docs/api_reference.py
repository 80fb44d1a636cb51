"""Write docs/api from the services' OpenAPI documents: `make api-docs`."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from lmcache_broker.app import create_app as create_broker
from lmcache_broker.settings import BrokerSettings
from lmcache_lookup.app import create_app as create_lookup
from lmcache_lookup.settings import LookupSettings
from lmcache_sidecar.app import create_app as create_sidecar
from lmcache_sidecar.settings import SidecarSettings
from lmcache_storage.app import create_app as create_storage
from lmcache_storage.settings import StorageSettings
from lmcache_webhook.app import create_app as create_webhook
from lmcache_webhook.settings import WebhookSettings

FOLDER = Path(__file__).resolve().parents[3] / "docs" / "api"
SERVICES: Mapping[str, Callable[[], FastAPI]] = {
    "cache_storage": lambda: create_storage(StorageSettings()),
    "lookup": lambda: create_lookup(LookupSettings()),
    "p2p_broker": lambda: create_broker(BrokerSettings()),
    "sidecar": lambda: create_sidecar(SidecarSettings()),
    "webhook": lambda: create_webhook(
        WebhookSettings(sidecar_image="lmcache-sidecar", payload_image="lmcache-payload")
    ),
}
Json = Mapping[str, Any]
BOUNDS = {
    "minimum": "≥{}",
    "maximum": "≤{}",
    "exclusiveMinimum": ">{}",
    "minLength": "≥{} chars",
    "maxLength": "≤{} chars",
    "minItems": "≥{} items",
    "maxItems": "≤{} items",
}
INDEX = """\
# API

Every call, from the OpenAPI document that each service serves at `/openapi.json`. Written by
`make api-docs`. Bodies are JSON, in lookup also MessagePack; errors are
`application/problem+json`. A `?` marks an optional field or parameter, `[]` an array, `{}` a map.
How calls work together: [protocols.md](../protocols.md).

"""
# A schema's description of so few words says no more than its name does.
NUM_WORDS_OF_A_TITLE = 8
SHARED = {"/v1/log-level", "/healthz", "/readyz", "/metrics"}
COMMON = "# Calls of every service\n\nThe webhook has no log levels.\n\n"


def pages() -> dict[str, str]:
    """Return every page of docs/api by file name; what all services share is on one page."""
    documents = {name: create().openapi() for name, create in SERVICES.items()}
    names = ["common", *SERVICES]
    written = {"README.md": INDEX + "".join(f"- [{name}]({name}.md)\n" for name in names)}
    written["common.md"] = COMMON + _body(documents["lookup"], SHARED)
    for name, document in documents.items():
        own = set(document["paths"]) - SHARED
        written[f"{name}.md"] = f"# API of {name}\n\n" + _body(document, own)
    return written


def _body(document: Json, paths: set[str]) -> str:
    """Return these calls, and the schemas that they lead to."""
    lines = []
    for path, operations in document["paths"].items():
        for method, operation in operations.items() if path in paths else ():
            lines += [f"## {method.upper()} {path}", "", *_operation(operation)]
    lines += ["## Schemas", ""]
    schemas = document["components"]["schemas"]
    for title in sorted(_reached(schemas, [document["paths"][path] for path in paths])):
        lines += [f"### {title}", "", *_schema(schemas[title])]
    return "\n".join(lines).rstrip() + "\n"


def _reached(schemas: Json, start: list[Any]) -> set[str]:
    found = set[str]()
    rest = [json.dumps(start)]
    while rest:
        for title in set(re.findall(r'"#/components/schemas/([^"]+)"', rest.pop())) - found:
            found.add(title)
            rest.append(json.dumps(schemas[title]))
    return found


def _operation(operation: Json) -> Iterator[str]:
    yield f"{operation['summary']}. {_line(operation.get('description', ''))}".strip()
    yield ""
    for parameter in operation.get("parameters", ()):
        mark = "" if parameter.get("required") else "?"
        yield f"- {parameter['in']} `{parameter['name']}`{mark}: {_type(parameter['schema'])}"
    if "requestBody" in operation:
        yield f"- body: {_content(operation['requestBody'])}"
    for status, response in operation["responses"].items():
        if status != "default":
            yield f"- {status}: {_content(response)}"
    yield ""


def _content(body: Json) -> str:
    kinds: dict[str, list[str]] = {}
    for media, content in body.get("content", {}).items():
        kinds.setdefault(_type(content.get("schema", {})), []).append(f"`{media}`")
    told = "; ".join(
        kind if "`application/json`" in media else f"{kind} as {', '.join(media)}"
        for kind, media in kinds.items()
    )
    return told or _line(body.get("description", "")) or "no body"


def _schema(schema: Json) -> Iterator[str]:
    """Yield a line for each field; fields without a meaning share one if they have one type."""
    text = _line(schema.get("description", ""))
    if len(text.split()) > NUM_WORDS_OF_A_TITLE:
        yield from (text, "")
    properties = schema.get("properties")
    if not properties:
        yield from (_type(schema), "")
        return
    needed = schema.get("required", ())
    lines: dict[str, list[str]] = {}
    for name, field in properties.items():
        meaning = _line(field.get("description", ""))
        shown = f"`{name}`{'' if name in needed else '?'}"
        lines.setdefault(f"{_type(field)}. {meaning}".removesuffix(". "), []).append(shown)
    for told, names in lines.items():
        yield f"- {', '.join(names)}: {told}"
    yield ""


def _type(schema: Json) -> str:
    if "$ref" in schema:
        title = schema["$ref"].rpartition("/")[2]
        return f"[{title}](#{title.lower()})"
    for several in ("anyOf", "oneOf"):
        if several in schema:
            return " or ".join(_type(each) for each in schema[several])
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"])
    if "const" in schema:
        return f"`{schema['const']}`"
    kind = str(schema.get("type", "any"))
    if kind == "array":
        kind = f"{_type(schema.get('items', {}))}[]"
    if kind == "object" and isinstance(schema.get("additionalProperties"), dict):
        kind = f"{{{_type(schema['additionalProperties'])}}}"
    if "format" in schema:
        kind += f" ({schema['format']})"
    bounds = [text.format(_number(schema[name])) for name, text in BOUNDS.items() if name in schema]
    return " ".join([kind, *bounds])


def _number(bound: float) -> float:
    return int(bound) if bound == int(bound) else bound


def _line(text: str) -> str:
    return re.sub(
        r"\s+", " ", text.partition("\n\nAttributes:")[0].partition("\n\nArgs:")[0]
    ).strip()


def main() -> int:
    """Write every page, and remove those of services that are no more."""
    FOLDER.mkdir(exist_ok=True)
    written = pages()
    for old in FOLDER.glob("*.md"):
        if old.name not in written:
            old.unlink()
    for name, text in written.items():
        (FOLDER / name).write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
