"""A stored chunk on its way through memory to the disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from lmcache_core.storage.codecs import Codecs
from lmcache_core.storage.disk import DiskBackend
from lmcache_core.storage.disk.index import DiskIndex
from lmcache_core.storage.encoded import EncodedBackend
from lmcache_core.storage.guard import Guard
from lmcache_core.storage.hot import LocalCPUBackend

from tests.fixtures.kv import CHUNK_SIZE, random_kv, tokens_of
from tests.fixtures.sidecar import engine_at, running_socket
from tests.fixtures.waiting import wait_until


def test_each_tier_is_asked_once_whether_it_has_the_chunk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def count(catalogue: type[Any], question: str) -> None:
        answer = getattr(catalogue, question)

        def counted(*args: Any) -> Any:
            asked.append(f"{catalogue.__name__}.{question}")
            return answer(*args)

        monkeypatch.setattr(catalogue, question, counted)

    for catalogue, question in (
        (LocalCPUBackend, "contains_many"),
        (DiskIndex, "contains_many"),
        (DiskIndex, "wants"),
    ):
        count(catalogue, question)
    disk = DiskBackend(tmp_path / "disk", 1 << 24)
    tier = Guard(EncodedBackend(disk, Codecs({})), is_priced=True)
    with running_socket(tmp_path, lower=[tier]) as running, engine_at(running.path) as engine:
        engine.store(tokens_of(CHUNK_SIZE), kvcaches=random_kv(CHUNK_SIZE))
        wait_until(disk.held)
    assert asked == ["LocalCPUBackend.contains_many", "DiskIndex.wants"]
