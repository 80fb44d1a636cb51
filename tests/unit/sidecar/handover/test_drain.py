"""What a sidecar hands over in a drain; `tests/unit/node/test_drain.py` has its steps."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fixtures.sidecar_app import hash_of, key_of, serving, store
from tests.fixtures.waiting import until

KEYS = [key_of(hash_of(i)) for i in range(5)]


async def test_chunks_that_are_only_on_disk_are_handed_over(tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    disk = {"disk_path": tmp_path / "disk", "disk_gb": 0.01}
    async with serving(tmp_path, **disk) as (_, parts):
        await store(parts, *KEYS)
        await parts.stack.drain(60)
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
