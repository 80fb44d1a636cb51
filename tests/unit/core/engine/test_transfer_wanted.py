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
from lmcache_core.telemetry import MISSED_CHUNKS_TOTAL, RETRIEVED_TOKENS_TOTAL, Counters

from tests.fixtures.embedded import embedded_engine
from tests.fixtures.kv import CHUNK_SIZE, make_metadata

NUM_BLOCKS, BLOCK_SIZE, NUM_CHUNKS = 32, 4, 3
NUM_TOKENS = NUM_CHUNKS * CHUNK_SIZE
LAYOUT = KVLayout((LayerGroup("", 2, 2, 4, "float32"), LayerGroup("narrow", 1, 1, 4, "float16")))
NAMED: list[NamedChunk] = [
    (i * CHUNK_SIZE, (i + 1) * CHUNK_SIZE, CacheEngineKey("vllm", "m", 1, 0, f"{i:064x}"))
    for i in range(NUM_CHUNKS)
]
SLOTS = torch.arange(NUM_TOKENS) + BLOCK_SIZE
UNIT_TOKENS = 8

Pages = list[tuple[torch.Tensor, torch.Tensor]]


def pages(fill: float | None = None) -> Pages:
    """K and V of each layer: random, or one number everywhere."""
    shapes = [((NUM_BLOCKS, BLOCK_SIZE, 2, 4), torch.float32)] * 2 + [
        ((NUM_BLOCKS, BLOCK_SIZE, 1, 4), torch.float16)
    ]
    sides = [
        torch.randn(shape).to(dtype) if fill is None else torch.full(shape, fill, dtype=dtype)
        for shape, dtype in shapes * 2
    ]
    return list(zip(sides[:3], sides[3:], strict=True))


def tokens_of(kvcaches: Pages) -> list[torch.Tensor]:
    return [side.flatten(0, 1)[SLOTS] for layer in kvcaches for side in layer]


class Case:
    """A transfer over memory that holds `NAMED`."""

    def __init__(self, manager: StorageManager, workers: Workers) -> None:
        self.manager = manager
        self.counters = Counters()
        metadata = make_metadata(kv_dtype=LAYOUT.kv_dtype)
        self.transfer = KVTransfer(
            manager,
            PagedGPUConnector(LAYOUT),
            metadata,
            self.counters,
            workers,
            UNIT_TOKENS,
        )
        self.stored = pages()
        assert (
            self.transfer.store(NAMED, {"kvcaches": self.stored, "slot_mapping": SLOTS})
            == [True] * NUM_CHUNKS
        )

    def load(self, wanted: tuple[int, int]) -> tuple[int, Pages]:
        target = pages(fill=7.0)
        return (
            self.transfer.load(NAMED, None, {"kvcaches": target, "slot_mapping": SLOTS}, wanted),
            target,
        )


@pytest.fixture(params=["small chunks", "large chunks"])
def case(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Case]:
    """Small chunks are copied by the caller, large ones by several threads."""
    torch.manual_seed(0)
    workers = Workers("test", NUM_CHUNKS)
    workers.open()
    if request.param == "large chunks":
        monkeypatch.setattr(transfer_module, "SMALL_BYTES", 0)
    with embedded_engine() as cache:
        yield Case(cache.manager, workers)
    workers.close()


@pytest.mark.parametrize(
    "wanted",
    [
        (CHUNK_SIZE, 2 * CHUNK_SIZE),
        (5, NUM_TOKENS - 1),
        (CHUNK_SIZE + 3, CHUNK_SIZE + 9),
        (20, 20),
    ],
)
def test_only_wanted_tokens_are_written(case: Case, wanted: tuple[int, int]) -> None:
    num_loaded, target = case.load(wanted)
    assert num_loaded == NUM_CHUNKS
    for got, stored in zip(tokens_of(target), tokens_of(case.stored), strict=True):
        inside = torch.zeros(NUM_TOKENS, dtype=torch.bool)
        inside[wanted[0] : wanted[1]] = True
        assert torch.equal(got[inside], stored[inside])
        assert (got[~inside] == 7.0).all()
    written = torch.cat(
        [
            (side.flatten(0, 1) != 7.0).flatten(1).any(1).nonzero().flatten()
            for layer in target
            for side in layer
        ]
    ).unique()
    assert set(written.tolist()) <= set(SLOTS.tolist())


def test_a_damaged_chunk_is_not_loaded_though_the_damage_is_in_other_tokens(case: Case) -> None:
    chunks = case.manager.get([NAMED[1][2]])
    chunks[0].memory.byte_array[(CHUNK_SIZE - 1) * 16] ^= 1
    case.manager.release(chunks)
    num_loaded, target = case.load((0, CHUNK_SIZE + 4))
    assert num_loaded == 1
    for got, stored in zip(tokens_of(target), tokens_of(case.stored), strict=True):
        assert torch.equal(got[:CHUNK_SIZE], stored[:CHUNK_SIZE])
        assert (got[CHUNK_SIZE:] == 7.0).all()
    assert case.counters.value(MISSED_CHUNKS_TOTAL, "corrupt") == NUM_CHUNKS - 1


def test_damaged_chunks_are_not_loaded_and_the_first_is_forgotten(case: Case) -> None:
    for _, _, key in NAMED:
        chunks = case.manager.get([key])
        chunks[0].memory.byte_array[0] ^= 1
        case.manager.release(chunks)
    assert case.load((0, NUM_TOKENS))[0] == 0
    assert case.manager.get([NAMED[0][2]]) == []


def test_a_slot_counts_as_the_tokens_that_it_stands_for(case: Case) -> None:
    case.load((0, NUM_TOKENS))
    assert case.counters.value(RETRIEVED_TOKENS_TOTAL) == NUM_TOKENS * UNIT_TOKENS
