"""What routes depend on runs on the event loop: FastAPI sends plain functions to the thread
pool, which costs each request.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import lmcache_broker.app
import lmcache_lookup.app
import lmcache_sidecar.app
import lmcache_storage.app
import pytest
from fastapi import FastAPI
from fastapi.dependencies.models import Dependant
from fastapi.routing import APIRoute
from lmcache_broker.settings import BrokerSettings
from lmcache_lookup.settings import LookupSettings
from lmcache_sidecar.settings import SidecarSettings
from lmcache_storage.settings import StorageSettings
from starlette.routing import BaseRoute

APPS: dict[str, Callable[[], FastAPI]] = {
    "broker": lambda: lmcache_broker.app.create_app(BrokerSettings()),
    "lookup": lambda: lmcache_lookup.app.create_app(LookupSettings()),
    "sidecar": lambda: lmcache_sidecar.app.create_app(SidecarSettings()),
    "storage": lambda: lmcache_storage.app.create_app(StorageSettings()),
}


def routes_of(routes: Sequence[BaseRoute]) -> Iterator[APIRoute]:
    for route in routes:
        if isinstance(route, APIRoute):
            yield route
        else:  # an included router, which FastAPI keeps whole
            yield from routes_of(getattr(getattr(route, "original_router", None), "routes", ()))


def calls_of(dependant: Dependant) -> Iterator[Callable[..., Any]]:
    if dependant.call is not None:
        yield dependant.call
    for below in dependant.dependencies:
        yield from calls_of(below)


def is_async(call: Callable[..., Any]) -> bool:
    return inspect.iscoroutinefunction(call) or inspect.iscoroutinefunction(type(call).__call__)


@pytest.mark.parametrize("name", APPS)
def test_nothing_that_a_request_needs_waits_for_a_thread(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    routes = list(routes_of(APPS[name]().routes))
    assert len(routes) > 3
    plain = {
        f"{route.path}: {call.__qualname__}"
        for route in routes
        for call in calls_of(route.dependant)
        if not is_async(call)
    }
    assert plain == set()
