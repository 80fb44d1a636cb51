"""`/healthz` runs no check; `/readyz` runs all at once, each with its own limit."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from fastapi import FastAPI
from lmcache_core.errors import UnavailableError
from lmcache_servicekit import app as app_module
from lmcache_servicekit.app import create_service_app
from lmcache_servicekit.health import HealthRegistry
from lmcache_servicekit.state import service_state

from tests.fixtures.sample_service import SampleSettings

pytestmark = pytest.mark.virtual_time


async def fine() -> str:
    return "fine"


async def slow() -> str:
    await asyncio.sleep(30)
    return "never"


async def broken() -> str:
    raise OSError("redis://user:hunter2@host")


async def ours() -> str:
    raise UnavailableError("redis: no answer")


async def test_checks_run_at_once_and_each_has_its_own_limit() -> None:
    both = asyncio.Barrier(2)

    async def together() -> str:
        await both.wait()
        return "fine"

    registry = HealthRegistry()
    registry.add("one", together, timeout_s=30)
    registry.add("two", together, timeout_s=30)
    registry.add("slow", slow, timeout_s=0.05)
    report = await registry.run()
    assert report.status == "unready"
    assert (report.checks["one"].ok, report.checks["two"].ok) == (True, True)
    assert report.checks["slow"].detail == "no answer within 0.05 s"


@pytest.mark.parametrize(("required", "status"), [(True, "unready"), (False, "degraded")])
async def test_optional_check_degrades(required: bool, status: str) -> None:
    registry = HealthRegistry()
    registry.add("fine", fine)
    registry.add("gone", broken, required=required)
    registry.add("ours", ours, required=required)
    report = await registry.run()
    assert report.status == status
    # Texts of other libraries may contain secrets.
    assert (report.checks["ours"].detail, report.checks["gone"].detail) == (
        "redis: no answer",
        "OSError",
    )


async def test_failed_check_is_named_and_changes_are_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    registry = HealthRegistry()
    registry.add("index", slow, timeout_s=0.01, where="redis at h:1")
    registry.add("fine", fine)
    for _ in range(2):
        assert (await registry.run()).checks[
            "index"
        ].detail == "redis at h:1: no answer within 0.01 s"
    registry.add("index", fine, where="redis at h:1")
    for _ in range(2):
        await registry.run()
    assert caplog.messages == [
        "dependency unavailable: check=index error=redis at h:1: no answer within 0.01 s",
        "dependency available again: check=index detail=redis at h:1",
    ]


async def test_closing_service_reports_nothing_as_unavailable(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app_module, "HEALTH_LOOK_S", 0.01)
    asked = asyncio.Event()

    async def fine_for_now() -> str:
        asked.set()
        if is_closing:
            raise UnavailableError("closed")
        return "fine"

    @asynccontextmanager
    async def closing_slowly(app: FastAPI) -> AsyncIterator[None]:
        nonlocal is_closing
        service_state(app).health.add("part", fine_for_now)
        yield
        is_closing = True
        await asyncio.sleep(0.1)

    is_closing = False
    app = create_service_app(
        SampleSettings(), "lmcache-servicekit", lifespan=closing_slowly, routers=[]
    )
    async with asyncio.timeout(30), app.router.lifespan_context(app):
        await asked.wait()
    assert [line for line in caplog.messages if "unavailable" in line] == []
