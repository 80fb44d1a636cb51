"""A sidecar is killed while an engine stands still in the middle of a copy, and its successor fills
the same arena.

`verify_hot: never` throughout: nothing but the generations stands between a client and bytes that
    another one writes.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from lmcache_core.engine import LMCacheEngine
from lmcache_demo.settings import quiet_environment

from tests.fixtures.kv import CHUNK_SIZE, assert_equal_prefix, empty_kv, random_kv, tokens_of
from tests.fixtures.processes import Processes
from tests.fixtures.restarted_sidecar import ARENA_BYTES, RestartedSidecar, paused_engine, until
from tests.fixtures.sidecar import engine_at

NUM_CHUNKS = 40
NUM_TOKENS = NUM_CHUNKS * CHUNK_SIZE
NUM_PROMPTS = 6
"""More than the arena holds."""


@pytest.fixture
def sidecar(tmp_path: Path) -> Iterator[RestartedSidecar]:
    with Processes(tmp_path, quiet_environment()) as processes:
        yield RestartedSidecar(processes, tmp_path, verify_hot="never")


def is_back(engine: LMCacheEngine) -> bool:
    engine.store(tokens_of(CHUNK_SIZE, 9), kvcaches=random_kv(CHUNK_SIZE, 9))
    return engine.lookup(tokens_of(CHUNK_SIZE, 9)) == CHUNK_SIZE


def fill(engine: LMCacheEngine, sidecar: RestartedSidecar, seed: int) -> None:
    """Store until chunks are evicted, everything that can be written to written to."""
    evicted = sidecar.hot["evicted_chunks"]
    for number in range(NUM_PROMPTS):
        engine.store(
            tokens_of(NUM_TOKENS, seed + number), kvcaches=random_kv(NUM_TOKENS, seed + number)
        )
    assert sidecar.hot["evicted_chunks"] > evicted
    assert sidecar.hot["failed_allocations"] == 0


def check_served(engine: LMCacheEngine, seeds: range) -> int:
    """Whatever is served of these prompts is what was stored; how many tokens were."""
    num_served = 0
    for seed in seeds:
        target = empty_kv(NUM_TOKENS)
        num = int(engine.retrieve(tokens_of(NUM_TOKENS, seed), kvcaches=target).sum())
        assert_equal_prefix(target, random_kv(NUM_TOKENS, seed), num)
        num_served += num
    return num_served


@pytest.mark.parametrize(("number", "num_restarts"), [(signal.SIGKILL, 2), (signal.SIGTERM, 1)])
def test_a_store_that_is_paused_over_restarts_spoils_nothing(
    sidecar: RestartedSidecar, number: int, num_restarts: int
) -> None:
    with (
        paused_engine(sidecar.socket, "store", NUM_CHUNKS, seed=1) as paused,
        engine_at(sidecar.socket) as engine,
    ):
        reserved_bytes = sidecar.ask("/v1/status")["reserved_bytes"]
        assert reserved_bytes >= NUM_CHUNKS * 1024
        paused.stop()
        for restart in range(num_restarts):
            sidecar.restart(number)
            assert sidecar.lent_bytes == reserved_bytes
            until(lambda: is_back(engine), "the engine does not come back")
            fill(engine, sidecar, seed=100 * restart + 100)
            hot = sidecar.hot
            assert hot["arena_used_bytes"] == hot["used_bytes"] + reserved_bytes
        last = 100 * num_restarts
        assert paused.go_on() == b"stored"
        assert check_served(engine, range(last, last + NUM_PROMPTS)) > NUM_TOKENS
        assert check_served(engine, range(1, 2)) == 0, "half of it was written before anybody knew"
        until(lambda: sidecar.lent_bytes == 0, "memory stays lent although nobody writes to it")
        fill(engine, sidecar, seed=1000)
        hot = sidecar.hot
        assert hot["arena_used_bytes"] == hot["used_bytes"] > ARENA_BYTES - reserved_bytes, (
            "its memory is used again"
        )
        assert check_served(engine, range(1000, 1000 + NUM_PROMPTS)) > NUM_TOKENS
        sidecar.ask("/v1/admin/clear", {})
        assert sidecar.hot["arena_used_bytes"] == 0


def test_memory_of_a_client_that_never_comes_back_is_free_at_its_end(
    sidecar: RestartedSidecar,
) -> None:
    with engine_at(sidecar.socket) as engine:
        with paused_engine(sidecar.socket, "store", NUM_CHUNKS, seed=1) as paused:
            paused.stop()
            sidecar.restart()
            until(lambda: is_back(engine), "the engine does not come back")
            fill(engine, sidecar, seed=100)
            assert sidecar.lent_bytes > 0
        until(lambda: sidecar.lent_bytes == 0, "it is gone, and so is its lock")
        fill(engine, sidecar, seed=200)
        assert check_served(engine, range(200, 200 + NUM_PROMPTS)) > NUM_TOKENS


def test_a_load_that_is_paused_over_a_restart_does_not_count(sidecar: RestartedSidecar) -> None:
    with engine_at(sidecar.socket) as engine:
        engine.store(tokens_of(NUM_TOKENS, 1), kvcaches=random_kv(NUM_TOKENS, 1))
        with paused_engine(sidecar.socket, "retrieve", NUM_CHUNKS, seed=1) as paused:
            paused.stop()
            sidecar.restart()
            assert sidecar.recovery["recovered_chunks"] == NUM_CHUNKS
            assert sidecar.lent_bytes == 0, "nobody waits for who only reads"
            until(
                lambda: engine.lookup(tokens_of(NUM_TOKENS, 1)) == NUM_TOKENS,
                "the engine does not come back",
            )
            assert check_served(engine, range(1, 2)) == NUM_TOKENS
            fill(engine, sidecar, seed=100)
            assert paused.go_on() == b"0"
