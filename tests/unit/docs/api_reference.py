"""Write docs/api from the services' OpenAPI documents: `make api-docs`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
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
HEAD = """\
# API

Every call of every service. Parameters, fields, types, bounds and answers are in OpenAPI documents:
"""
TAIL = """\
Each service also serves its own at `/openapi.json`. Written by `make api-docs`. How calls work
together: [protocols.md](../protocols.md).

"""


def pages() -> dict[str, str]:
    """Return every file of docs/api by name."""
    documents = {name: create().openapi() for name, create in SERVICES.items()}
    links = ", ".join(f"[{name}]({name}.yaml)" for name in documents)
    tables = [_table(name, document["paths"], SHARED) for name, document in documents.items()]
    rest = documents["lookup"]["paths"]
    tables.append(_table("every service", rest, rest.keys() - SHARED))
    tables.append(_problems())
    written = {"README.md": f"{HEAD}{links}.\n{TAIL}" + "\n".join(tables)}
    return written | {f"{name}.yaml": _yaml(document) for name, document in documents.items()}


def _table(title: str, paths: Mapping[str, Any], without: set[str]) -> str:
    return "\n".join([f"## {title}\n", "| call | |", "|---|---|", *_rows(paths, without)]) + "\n"


def _problems() -> str:
    every = [*PROBLEMS.values(), *STORAGE_PROBLEMS.values(), MALFORMED, INVALID]
    by_type = {problem.type: problem for problem in every}
    ordered = sorted(by_type.values(), key=lambda problem: (problem.status, problem.type))
    rows = [f"| `{one.type}` | {one.status} | {one.title} |" for one in ordered]
    rows.append(f"| `about:blank` | {', '.join(map(str, UNTYPED))} | The status says all |")
    return "\n".join(["## Problems\n", "| `type` | status | |", "|---|---|---|", *rows]) + "\n"


def _rows(paths: Mapping[str, Any], without: set[str]) -> Iterator[str]:
    for path, operations in paths.items():
        for method, operation in operations.items() if path not in without else ():
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
