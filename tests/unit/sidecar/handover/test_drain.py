"""What a sidecar's drain hands on, and its bound; `tests/unit/node/test_drain.py` has the rest."""

from __future__ import annotations

import asyncio
import logging
import time
from pathlib import Path

import pytest
from lmcache_core.record import Miss
from lmcache_core.storage.base import StorageBackend
from lmcache_node.drain import DrainState
from lmcache_sidecar.sidecar import SidecarNode

from tests.fixtures.sidecar_app import hash_of, key_of, serving, store

KEYS = [key_of(hash_of(i)) for i in range(5)]


async def until_not_written(parts: SidecarNode) -> None:
    """Nobody waits for writes that have failed, but of several at once some may still be about to
    look whether the directory is there.

    A thread that is writing a chunk holds it.
    """
    assert await parts.stack.drain(5)
    async with asyncio.timeout(60):
        while any(
            not isinstance(held, Miss) and held.num_holders
            for held in parts.stack.hot.peek_many(KEYS)
        ):
            await asyncio.sleep(0.01)


class Hanging(StorageBackend):
    """A tier that never answers."""

    name = "storage"

    async def _hang(self, *_: object) -> list[bool]:
        await asyncio.sleep(60)
        return []

    batched_contains = batched_get = batched_put = batched_remove = clear = _hang  # type: ignore[assignment]

    async def open(self) -> None: ...

    async def close(self) -> None: ...

    def stats(self) -> dict[str, int]:
        return {"num_chunks": 0, "used_bytes": 0, "capacity_bytes": 0}


async def test_a_tier_that_hangs_does_not_keep_it_from_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "lmcache_core.storage.remote.create_remote_backend", lambda *_, **__: Hanging()
    )
    async with serving(tmp_path, remote_url="lm://localhost", drain_timeout_s=0.6) as (_, parts):
        await store(parts, *KEYS)
        begin = time.monotonic()
        await parts.drain.run()
        assert 0.5 < time.monotonic() - begin < 20
        progress = parts.drain.progress
        assert (progress.state, progress.left) == (DrainState.DONE, len(KEYS))
        assert not parts.is_settled


async def test_without_anywhere_to_go_it_is_over_at_once_and_no_reason_to_warn(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with serving(tmp_path, drain_timeout_s=60) as (_, parts):
        await store(parts, *KEYS)
        begin = time.monotonic()
        await parts.drain.run()
        assert time.monotonic() - begin < 20
        assert parts.drain.progress.left == len(KEYS)
    assert {
        record.levelname for record in caplog.records if "drained: chunks=5" in record.getMessage()
    } == {"INFO"}


async def test_the_disk_alone_is_handed_on_too(tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    disk = {"disk_path": tmp_path / "disk", "disk_gb": 0.01}
    async with serving(tmp_path, **disk) as (_, parts):
        await store(parts, *KEYS)
        await parts.stack.drain(5)
    async with serving(
        tmp_path, **disk, remote_url=f"file://{tmp_path}/shared", arena_recover=False
    ) as (_, parts):
        assert not parts.stack.hot.held()
        await parts.drain.run()
        assert parts.drain.progress.handed_over == len(KEYS)
        assert not parts.stack.hot.held(), "nothing went through shared memory"
    assert len(list((tmp_path / "shared").rglob("*.kvr"))) == len(KEYS)


async def test_the_end_of_a_sidecar_is_a_drain(tmp_path: Path) -> None:
    async with serving(tmp_path, remote_url=f"file://{tmp_path}/shared", accept_handover=True) as (
        _,
        parts,
    ):
        await store(parts, *KEYS)
        await until_not_written(parts)
        (tmp_path / "shared").mkdir()
    assert len(list((tmp_path / "shared").rglob("*.kvr"))) == len(KEYS)


async def test_it_is_not_settled_while_chunks_wait_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lmcache_core.storage.stack.DEFAULT_PENDING_SHARE", 64)
    (tmp_path / "shared").mkdir()
    url = f"file://{tmp_path}/shared"
    async with serving(tmp_path, remote_url=url) as (_, parts):
        keys = [key_of(hash_of(i)) for i in range(200)]
        await store(parts, *keys)
        assert parts.stack.num_waiting_names
        async with asyncio.timeout(60):
            while not parts.is_settled:
                await asyncio.sleep(0)
        assert len(list((tmp_path / "shared").rglob("*.kvr"))) == len(keys)
