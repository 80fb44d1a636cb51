"""What becomes of a chunk that a client stores, on its way through memory to the disk."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from lmcache_core.storage.codecs import Codecs
from lmcache_core.storage.disk import DiskBackend
from lmcache_core.storage.disk.index import DiskIndex
from lmcache_core.storage.encoded import EncodedBackend
from lmcache_core.storage.guard import Guard
from lmcache_core.storage.hot import LocalCPUBackend

from tests.fixtures.embedded import until
from tests.fixtures.kv import CHUNK_SIZE, random_kv, tokens_of
from tests.fixtures.sidecar import RunningSocket, engine_at, running_socket

CAPACITY_BYTES = 1 << 24
TOKENS = tokens_of(CHUNK_SIZE)


@contextmanager
def sidecar_with(disk: DiskBackend, directory: Path) -> Iterator[RunningSocket]:
    tier = Guard(EncodedBackend(disk, Codecs({})), is_priced=True)
    with running_socket(directory, lower=[tier]) as running:
        yield running


def store(running: RunningSocket) -> None:
    with engine_at(running.path) as engine:
        engine.store(TOKENS, kvcaches=random_kv(CHUNK_SIZE))


def test_each_side_asks_once_whether_it_has_the_chunk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def count(catalogue: type[Any], question: str) -> None:
        answer = getattr(catalogue, question)

        def counted(*args: Any) -> Any:
            asked.append(f"{catalogue.__name__}.{question}")
            return answer(*args)

        monkeypatch.setattr(catalogue, question, counted)

    for question in ("contains_many", "_admits"):
        count(LocalCPUBackend, question)
    for question in ("contains_many", "wants"):
        count(DiskIndex, question)
    disk = DiskBackend(tmp_path / "disk", CAPACITY_BYTES)
    with sidecar_with(disk, tmp_path) as running:
        store(running)
        until(lambda: disk.held())
    assert asked == [
        "LocalCPUBackend.contains_many",  # RESERVE
        "LocalCPUBackend._admits",
        "DiskIndex.wants",
    ]
