"""The supervisor ends what it owns, within a bound."""

from __future__ import annotations

import asyncio
import contextlib
import logging

import pytest
from lmcache_core.concurrency import TaskSupervisor, supervisor


async def swallow_first(ended: list[str]) -> None:
    """Swallow one cancellation, then wait for the next."""
    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.Event().wait()
    try:
        await asyncio.Event().wait()
    finally:
        ended.append("swallow_first")


async def wait_and_tell(ended: list[str]) -> None:
    try:
        await asyncio.Event().wait()
    finally:
        await asyncio.sleep(0.01)  # giving back takes a while
        ended.append("wait_and_tell")


async def test_close_names_and_leaves_a_task_that_ignores_its_cancellation(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(supervisor, "CANCEL_WAIT_S", 0.2)
    ended: list[str] = []
    tasks = TaskSupervisor("component")
    tasks.start("stubborn", swallow_first(ended))
    tasks.start("good", wait_and_tell(ended))
    await asyncio.sleep(0)
    [stubborn] = [task for task in asyncio.all_tasks() if task.get_name() == "component/stubborn"]
    with caplog.at_level(logging.ERROR, "lmcache_core.concurrency"):
        async with asyncio.timeout(10):
            await tasks.close()
    assert ended == ["wait_and_tell"]
    [record] = caplog.records
    assert "component/stubborn" in record.getMessage()
    assert "good" not in record.getMessage()
    stubborn.cancel()
    await asyncio.wait([stubborn])


async def test_close_joins_what_takes_a_while_to_end(caplog: pytest.LogCaptureFixture) -> None:
    ended: list[str] = []
    tasks = TaskSupervisor("component")
    tasks.start("good", wait_and_tell(ended))
    await asyncio.sleep(0)
    await tasks.close()
    assert ended == ["wait_and_tell"]
    assert caplog.records == []


async def test_a_close_that_is_cancelled_while_it_drains_has_cancelled_the_tasks() -> None:
    ended: list[str] = []
    tasks = TaskSupervisor("component")
    tasks.start("good", wait_and_tell(ended))
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await tasks.close(drain_s=60)
    async with asyncio.timeout(10):
        while not ended:
            await asyncio.sleep(0.01)


async def test_close_of_nothing_ends_at_once() -> None:
    tasks = TaskSupervisor("component")
    await tasks.close(drain_s=60)
    work = wait_and_tell([])
    assert not tasks.start("late", work)
