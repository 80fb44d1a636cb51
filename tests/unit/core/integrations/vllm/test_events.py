"""KV events: which blocks the cache has, told once every rank has stored them."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from lmcache_core.integrations.vllm.plan import ChunkRun, WorkerReport
from lmcache_core.integrations.vllm.requests import RequestState

from tests.fixtures.vllm_engine import Adapter, Feature, Request, Shape, running
from tests.fixtures.vllm_engine.worlds import CHUNK_SIZE, embedded, prompt

HASHES = tuple(bytes([i]) * 32 for i in range(5))
MASK = (1 << 64) - 1


@pytest.fixture
def events(module: ModuleType) -> Any:
    return module.StoredEvents(CHUNK_SIZE, 4, 2, [0, 3])


def state_of(**options: Any) -> RequestState:
    return RequestState(Request("r", prompt(1, 43), 1, 4, **options))


def hashes_of(state: RequestState) -> list[int]:
    return [int.from_bytes(block, "big") & MASK for block in state.request.block_hashes]


def test_an_event_has_vllms_names_and_tokens(events: Any) -> None:
    state = state_of(adapter=Adapter("adapter", "org/adapter", 7))
    events.planned(state, ChunkRun(1, 1, HASHES[1:3], (1, 2, 3, 4)))
    assert events.take() == []
    events.reported(WorkerReport(stored={(1, HASHES[1]): 2, (1, HASHES[2]): 2}))
    first, second = events.take()
    blocks = hashes_of(state)
    assert (first.block_hashes, first.parent_block_hash) == (blocks[2:4], blocks[1])
    assert (second.block_hashes, second.parent_block_hash) == (blocks[4:6], blocks[3])
    assert (first.token_ids, first.block_size) == (prompt(1, 43)[8:16], 4)
    assert (first.lora_name, first.lora_id, first.medium, first.group_idx) == ("adapter", 7, "CPU", 3)
    assert events.take() == []


def test_the_first_chunk_has_no_parent(events: Any) -> None:
    events.planned(state_of(), ChunkRun(0, 0, HASHES[:1], (1, 2)))
    events.reported(WorkerReport(stored={(0, HASHES[0]): 2}))
    (event,) = events.take()
    assert (event.parent_block_hash, event.lora_name, event.lora_id) == (None, None, None)


def test_what_not_every_rank_has_stored_is_no_event(events: Any) -> None:
    events.planned(state_of(), ChunkRun(0, 0, HASHES[:2], (1, 2, 3, 4)))
    events.reported(WorkerReport(stored={(0, HASHES[0]): 1}))
    events.reported(WorkerReport(stored={(0, HASHES[0]): 1, (1, HASHES[1]): 2}))
    assert events.take() == []


def test_chunks_beyond_the_hashes_that_vllm_has_are_left_out(events: Any) -> None:
    state = state_of()
    events.planned(state, ChunkRun(0, 4, HASHES[:3], (1,) * 6))
    events.reported(WorkerReport(stored={(0, digest): 2 for digest in HASHES[:3]}))
    assert [event.token_ids for event in events.take()] == [prompt(1, 43)[32:40]]


def test_announcements_are_bounded(module: ModuleType, events: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(module.StoredEvents.planned.__globals__, "MAX_ANNOUNCEMENTS", 2)
    events.planned(state_of(), ChunkRun(0, 0, HASHES, (1,) * 10))
    events.reported(WorkerReport(stored={(0, digest): 2 for digest in HASHES}))
    assert len(events.take()) == 2


@pytest.mark.parametrize("is_on", [True, False])
def test_an_engine_hears_of_what_it_has_stored(module: ModuleType, model: Path, is_on: bool) -> None:
    with running(module, model, embedded(), events=is_on, shape=Shape()) as engine:
        request = engine.ask(prompt(1, 43), features=[Feature("cat", 3, 4)])
        engine.forget()
        engine.ask(prompt(1, 43), features=[Feature("cat", 3, 4)])
    told = [event.block_hashes for event in engine.events]
    names = [int.from_bytes(block, "big") & MASK for block in request.block_hashes]
    assert told == ([names[at : at + 2] for at in range(0, 10, 2)] if is_on else [])
