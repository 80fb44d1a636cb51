"""Writes docs/api from the services' OpenAPI documents: `make api-docs`."""

from __future__ import annotations

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
    "minimum": "at least {}",
    "maximum": "at most {}",
    "exclusiveMinimum": "more than {}",
    "minLength": "at least {} characters",
    "maxLength": "at most {} characters",
    "minItems": "at least {} items",
    "maxItems": "at most {} items",
}


def pages() -> dict[str, str]:
    """Every page of docs/api, by file name."""
    index = [
        "# API",
        "",
        (
            "Every call of every service, from the OpenAPI document that it serves at"
            " `/openapi.json`. `make api-docs` writes these pages;"
        ),
        "a test compares.",
        (
            "What calls mean together is in [protocols.md](../protocols.md); errors are"
            " `application/problem+json`."
        ),
        "",
        *(f"- [{name}]({name}.md)" for name in SERVICES),
    ]
    return {"README.md": "\n".join(index) + "\n"} | {
        f"{name}.md": page(name, create().openapi()) for name, create in SERVICES.items()
    }


def page(name: str, document: Json) -> str:
    """One service's page."""
    lines = [f"# API of {name}", "", "Written by `make api-docs`; do not edit.", ""]
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            lines += [f"## {method.upper()} {path}", "", *_operation(operation)]
    lines += ["## Schemas", ""]
    for title, schema in sorted(document["components"]["schemas"].items()):
        lines += [f"### {title}", "", *_schema(schema)]
    return "\n".join(lines).rstrip() + "\n"


def _operation(operation: Json) -> Iterator[str]:
    yield f"{operation['summary']}. {_line(operation.get('description', ''))}".strip()
    yield ""
    for parameter in operation.get("parameters", ()):
        needed = "" if parameter.get("required") else ", optional"
        yield f"- {parameter['in']} `{parameter['name']}`{needed}: {_type(parameter['schema'])}"
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
    told = "; ".join(f"{kind} as {', '.join(media)}" for kind, media in kinds.items())
    return told or _line(body.get("description", "")) or "no body"


def _schema(schema: Json) -> Iterator[str]:
    if text := _line(schema.get("description", "")):
        yield from (text, "")
    properties = schema.get("properties")
    if not properties:
        yield from (_type(schema), "")
        return
    yield from ("| field | type | needed | meaning |", "|---|---|---|---|")
    needed = schema.get("required", ())
    for name, field in properties.items():
        yield (
            f"| `{name}` | {_type(field)} | {'yes' if name in needed else 'no'} |"
            f" {_cell(field.get('description', ''))} |"
        )
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
        kind = f"array of {_type(schema['items'])}" if "items" in schema else "array"
    if kind == "object" and isinstance(schema.get("additionalProperties"), dict):
        kind = f"map to {_type(schema['additionalProperties'])}"
    if "format" in schema:
        kind += f" ({schema['format']})"
    return ", ".join(
        [
            kind,
            *(
                text.format(_number(schema[bound]))
                for bound, text in BOUNDS.items()
                if bound in schema
            ),
        ]
    )


def _number(bound: float) -> float:
    return int(bound) if bound == int(bound) else bound


def _line(text: str) -> str:
    return re.sub(
        r"\s+", " ", text.partition("\n\nAttributes:")[0].partition("\n\nArgs:")[0]
    ).strip()


def _cell(text: str) -> str:
    return _line(text).replace("|", "\\|")


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
