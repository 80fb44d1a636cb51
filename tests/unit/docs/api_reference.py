"""Write docs/api from the services' OpenAPI documents: `make api-docs`."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from fastapi import FastAPI
from lmcache_broker.app import create_app as create_broker
from lmcache_broker.settings import BrokerSettings
from lmcache_lookup.app import create_app as create_lookup
from lmcache_lookup.settings import LookupSettings
from lmcache_servicekit.problems import INVALID, MALFORMED, PROBLEMS
from lmcache_sidecar.app import create_app as create_sidecar
from lmcache_sidecar.settings import SidecarSettings
from lmcache_storage.app import create_app as create_storage
from lmcache_storage.problems import PROBLEMS as STORAGE_PROBLEMS
from lmcache_storage.settings import StorageSettings
from lmcache_webhook.app import create_app as create_webhook
from lmcache_webhook.settings import WebhookSettings

Paths = Mapping[str, Mapping[str, Any]]
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
UNTYPED = (404, 405, 406, 408, 413, 415)
"""Statuses that say all: the `type` of these problems is `about:blank`."""
SHARED = {"/v1/admin/log-level", "/healthz", "/readyz", "/metrics", "/"}
EVERY = "every service"
HEAD = """\
# API

Every call of every service. Parameters, bodies with an example, and answers:
"""
TAIL = """\
Each service also serves its OpenAPI document at `/openapi.json`. Written by `make api-docs`. How
calls work together: [protocols.md](../protocols.md).

"""


def pages() -> dict[str, str]:
    """Return every file of docs/api by name."""
    documents = {name: create().openapi() for name, create in SERVICES.items()}
    paths = {
        name: {path: calls for path, calls in document["paths"].items() if path not in SHARED}
        for name, document in documents.items()
    }
    paths[EVERY] = {path: documents["lookup"]["paths"][path] for path in sorted(SHARED)}
    schemas = {name: document["components"]["schemas"] for name, document in documents.items()}
    schemas[EVERY] = schemas["lookup"]
    written = {f"{name}.yaml": _yaml(document) for name, document in documents.items()}
    links = []
    for name in paths:
        page = f"{name.replace(' ', '_')}.md"
        written[page] = _page(name, documents.get(name, {}), paths[name], schemas[name])
        links.append(f"[{name}]({page})")
    tables = [_table(name, calls) for name, calls in paths.items()] + [_problems()]
    written["README.md"] = f"{HEAD}{', '.join(links)}.\n{TAIL}" + "\n".join(tables)
    return written


def _page(title: str, document: Mapping[str, Any], paths: Paths, schemas: Mapping[str, Any]) -> str:
    """Return the calls of a service, then the types that they name."""
    parts = [f"# API: {title}\n"]
    if document:
        parts.append(
            f"{document['info']['description']} All of it: [{title}.yaml]({title}.yaml).\n"
        )
    parts.append("Failures are [problems](README.md#problems).\n")
    for path, calls in paths.items():
        for method, call in calls.items():
            parts += _call(f"{method.upper()} {path}", call, schemas)
    named, found = list(_refs(paths)), set()
    while named:
        found.add(name := named.pop())
        named += set(_refs(schemas[name])) - found
    return "\n".join([*parts, *(_type(name, schemas[name]) for name in sorted(found))])


def _call(heading: str, call: Mapping[str, Any], schemas: Mapping[str, Any]) -> Iterator[str]:
    yield f"## `{heading}`\n"
    yield " ".join(f"{call['summary']}. {_line(call.get('description', ''))}".split()) + "\n"
    rows = [
        (one["name"], one["in"], _kind(one["schema"]), _line(one.get("description", "")))
        for one in call.get("parameters", ())
    ]
    if rows:
        yield _rows_of(("parameter", "in", "type", "meaning"), rows)
    for media_type, content in call.get("requestBody", {}).get("content", {}).items():
        yield f"Body, `{media_type}`: {_kind(content['schema'])}\n"
        for name in _refs(content):
            for example in schemas[name].get("examples", ()):
                yield f"```json\n{json.dumps(example, indent=2)}\n```\n"
    answers = []
    for status, answer in call["responses"].items():
        kinds = [_kind(one.get("schema", {})) for one in answer.get("content", {}).values()]
        if status.isdecimal() and "$ref" not in answer:
            answers.append(f"{status} {' or '.join(filter(None, dict.fromkeys(kinds)))}".rstrip())
    failing = [status for status, one in call["responses"].items() if "$ref" in one]
    failing = [f"a problem ({', '.join(filter(str.isdecimal, failing))})"] if failing else []
    yield f"Answers: {'; '.join(answers + failing)}\n"


def _type(name: str, schema: Mapping[str, Any]) -> str:
    required = schema.get("required", ())
    rows = [
        (
            field,
            _kind(one) + ("" if field in required else ", optional"),
            one.get("description", ""),
        )
        for field, one in schema.get("properties", {}).items()
    ]
    rows += [
        (str(place), _kind(one), one.get("description", ""))
        for place, one in enumerate(schema.get("prefixItems", ()))
    ]
    table = [_rows_of(("field", "type", "meaning"), rows)] if rows else []
    return "\n".join([f"## {name}\n", f"{_line(schema.get('description', ''))}\n", *table])


def _kind(schema: Mapping[str, Any]) -> str:
    """Return a type in a few words; patterns are in the document alone."""
    if "$ref" in schema:
        name = schema["$ref"].rsplit("/", 1)[1]
        return f"[{name}](#{name.lower()})"
    if "anyOf" in schema:
        return " or ".join(_kind(one) for one in schema["anyOf"])
    if "enum" in schema or "const" in schema:
        values = schema.get("enum") or [schema["const"]]
        return " or ".join(f"`{value}`" for value in values)
    kind = str(schema.get("type", ""))
    if schema.get("items"):
        kind = f"list of {_kind(schema['items'])}"
    if isinstance(schema.get("additionalProperties"), dict):
        kind = f"map to {_kind(schema['additionalProperties'])}"
    signs = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    bounds = [f"{sign} {schema[name]:,}" for name, sign in signs.items() if name in schema]
    return ", ".join([kind, *bounds])


def _refs(node: Any) -> Iterator[str]:
    """Yield the names of the schemas that a part of a document refers to."""
    if isinstance(node, list):
        for item in node:
            yield from _refs(item)
    elif isinstance(node, dict):
        for key, item in node.items():
            if key == "$ref" and "/schemas/" in item:
                yield item.rsplit("/", 1)[1]
            yield from _refs(item)


def _rows_of(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for first, *others in rows:
        cells = [f"`{first}`", *(cell.replace("|", r"\|") for cell in others)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _table(title: str, paths: Paths) -> str:
    return "\n".join([f"## {title}\n", "| call | |", "|---|---|", *_rows(paths)]) + "\n"


def _problems() -> str:
    every = [*PROBLEMS.values(), *STORAGE_PROBLEMS.values(), MALFORMED, INVALID]
    by_type = {problem.type: problem for problem in every}
    ordered = sorted(by_type.values(), key=lambda problem: (problem.status, problem.type))
    rows = [f"| `{one.type}` | {one.status} | {one.title} |" for one in ordered]
    rows.append(f"| `about:blank` | {', '.join(map(str, UNTYPED))} | The status says all |")
    return "\n".join(["## Problems\n", "| `type` | status | |", "|---|---|---|", *rows]) + "\n"


def _rows(paths: Paths) -> Iterator[str]:
    for path, operations in paths.items():
        for method, operation in operations.items():
            summary = operation["summary"].replace("|", r"\|")
            yield f"| `{method.upper()} {path}` | {summary}. |"


def _yaml(document: Mapping[str, Any]) -> str:
    return yaml.safe_dump(
        _plain(document), sort_keys=False, width=100, allow_unicode=True, default_flow_style=None
    )


def _plain(value: Any) -> Any:
    """Return a copy with every description on one line, so that no version of Python changes it."""
    if isinstance(value, Mapping):
        return {
            key: _line(item) if key == "description" and isinstance(item, str) else _plain(item)
            for key, item in value.items()
        }
    return [_plain(item) for item in value] if isinstance(value, list) else value


def _line(text: str) -> str:
    return " ".join(text.split())


def main() -> int:
    """Write every file, and remove those of services that are no more."""
    FOLDER.mkdir(exist_ok=True)
    written = pages()
    for old in FOLDER.iterdir():
        if old.name not in written:
            old.unlink()
    for name, text in written.items():
        (FOLDER / name).write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
