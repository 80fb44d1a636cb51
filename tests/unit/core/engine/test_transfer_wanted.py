"""Loads of a part of the tokens: only these are written, and whole chunks are verified."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from lmcache_core.concurrency import Workers
from lmcache_core.engine import transfer as transfer_module
from lmcache_core.engine.transfer import KVTransfer, NamedChunk
from lmcache_core.gpu_connectors import KVLayout, LayerGroup, PagedGPUConnector
from lmcache_core.keys import CacheEngineKey
from lmcache_core.storage.manager import StorageManager
from lmcache_core.telemetry import MISSED_CHUNKS_TOTAL, Counters

from tests.fixtures.embedded import embedded_engine
from tests.fixtures.kv import CHUNK_SIZE, make_metadata

NUM_CHUNKS = 3
NUM_TOKENS = NUM_CHUNKS * CHUNK_SIZE
LAYOUT = KVLayout((LayerGroup("", 2, 2, 4, "float32"),))
NAMED: list[NamedChunk] = [
    (i * CHUNK_SIZE, (i + 1) * CHUNK_SIZE, CacheEngineKey("vllm", "m", 1, 0, f"{i:064x}"))
    for i in range(NUM_CHUNKS)
]
SLOTS = torch.arange(NUM_TOKENS) + 4
ABSENT = 7.0


class Case:
    """A transfer over memory that holds `NAMED`: K and V of two layers, in blocks of four."""

    def __init__(self, manager: StorageManager, workers: Workers) -> None:
        self.manager, self.counters = manager, Counters()
        self.transfer = KVTransfer(
            manager, PagedGPUConnector(LAYOUT), make_metadata(), self.counters, workers
        )
        self.stored = torch.randn(2, 2, NUM_TOKENS // 4 + 2, 4, 2, 4)
        assert all(self.transfer.store(NAMED, self._kwargs(self.stored)))

    def load(self, wanted: tuple[int, int]) -> tuple[int, torch.Tensor]:
        target = torch.full_like(self.stored, ABSENT)
        return self.transfer.load(NAMED, None, self._kwargs(target), wanted), target

    def _kwargs(self, pages: torch.Tensor) -> dict[str, object]:
        return {"kvcaches": [tuple(layer) for layer in pages], "slot_mapping": SLOTS}

    def check(self, target: torch.Tensor, begin: int, end: int) -> None:
        """These tokens are as they were stored, and nothing else is written."""
        expected = torch.full_like(target, ABSENT)
        slots = SLOTS[begin:end]
        expected.flatten(2, 3)[:, :, slots] = self.stored.flatten(2, 3)[:, :, slots]
        assert torch.equal(target, expected)


@pytest.fixture(params=["small chunks", "large chunks"])
def case(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Case]:
    """Small chunks are copied by the caller, large ones by several threads."""
    workers = Workers("test", NUM_CHUNKS)
    workers.open()
    if request.param == "large chunks":
        monkeypatch.setattr(transfer_module, "SMALL_BYTES", 0)
    with embedded_engine() as cache:
        yield Case(cache.manager, workers)
    workers.close()


@pytest.mark.parametrize(
    "wanted", [(0, NUM_TOKENS), (5, NUM_TOKENS - 1), (CHUNK_SIZE + 3, CHUNK_SIZE + 9), (20, 20)]
)
def test_only_wanted_tokens_are_written(case: Case, wanted: tuple[int, int]) -> None:
    num_loaded, target = case.load(wanted)
    assert num_loaded == NUM_CHUNKS
    case.check(target, *wanted)


@pytest.mark.parametrize("end", [CHUNK_SIZE + 4, NUM_TOKENS])
def test_a_damaged_chunk_is_not_loaded_though_the_damage_is_in_other_tokens(
    case: Case, end: int
) -> None:
    chunks = case.manager.get([NAMED[1][2]])
    chunks[0].memory.byte_array[-1] ^= 1
    case.manager.release(chunks)
    num_loaded, target = case.load((0, end))
    assert num_loaded == 1
    if end < NUM_TOKENS:
        case.check(target, 0, CHUNK_SIZE)
    assert case.counters.value(MISSED_CHUNKS_TOTAL, "corrupt") == NUM_CHUNKS - 1
    assert case.manager.get([NAMED[1][2]]) == [], "it is forgotten"
