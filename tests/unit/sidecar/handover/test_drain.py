"""What a sidecar hands over in a drain; `tests/unit/node/test_drain.py` has its steps."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from lmcache_core.storage.base import StorageBackend
from lmcache_node.drain import DrainState

from tests.fixtures.sidecar_app import hash_of, key_of, serving, store
from tests.fixtures.waiting import until

KEYS = [key_of(hash_of(i)) for i in range(5)]


class Hanging(StorageBackend):
    """A tier that never answers."""

    name = "storage"

    async def _hang(self, *_: object) -> list[bool]:
        await asyncio.Event().wait()
        return []

    batched_contains = batched_get = batched_put = batched_remove = clear = _hang  # type: ignore[assignment]

    async def open(self) -> None: ...

    async def close(self) -> None: ...

    def stats(self) -> dict[str, int]:
        return {"num_chunks": 0, "used_bytes": 0, "capacity_bytes": 0}


async def test_drain_ends_though_a_tier_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "lmcache_core.storage.remote.create_remote_backend", lambda *_, **__: Hanging()
    )
    async with serving(tmp_path, remote_url="lm://localhost", drain_timeout_s=0.3) as (_, parts):
        await store(parts, *KEYS)
        await parts.drain.run()
        progress = parts.drain.progress
        assert (progress.state, progress.left) == (DrainState.DONE, len(KEYS))
        assert not parts.is_settled


async def test_chunks_that_are_only_on_disk_are_handed_over(tmp_path: Path) -> None:
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


async def test_sidecar_is_not_settled_while_chunks_wait_to_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lmcache_core.storage.stack.DEFAULT_PENDING_SHARE", 64)
    (tmp_path / "shared").mkdir()
    url = f"file://{tmp_path}/shared"
    async with serving(tmp_path, remote_url=url) as (_, parts):
        keys = [key_of(hash_of(i)) for i in range(200)]
        await store(parts, *keys)
        assert parts.stack.num_waiting_names
        await until(lambda: parts.is_settled)
        assert len(list((tmp_path / "shared").rglob("*.kvr"))) == len(keys)
