"""Real sidecar processes, one after the other on one arena, without any other tier."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from lmcache_core.engine import LMCacheEngine
from lmcache_demo.settings import quiet_environment

from tests.fixtures.embedded import PATIENT
from tests.fixtures.kv import CHUNK_SIZE, assert_equal_prefix, empty_kv, random_kv, tokens_of
from tests.fixtures.processes import Processes
from tests.fixtures.restarted_sidecar import RestartedSidecar, until
from tests.fixtures.sidecar import engine_at

NUM_CHUNKS = 20
NUM_TOKENS = NUM_CHUNKS * CHUNK_SIZE
TOKENS, KV = tokens_of(NUM_TOKENS), random_kv(NUM_TOKENS)


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    with Processes(tmp_path, quiet_environment()) as owner:
        yield owner


def num_retrieved(engine: LMCacheEngine) -> int:
    """How many tokens are hits; their KV is what was stored."""
    target = empty_kv(NUM_TOKENS)
    num = int(engine.retrieve(TOKENS, kvcaches=target).sum())
    assert_equal_prefix(target, KV, num)
    return num


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_an_engine_finds_again_what_it_stored_before_a_restart(
    processes: Processes, tmp_path: Path, number: int
) -> None:
    sidecar = RestartedSidecar(processes, tmp_path)
    with engine_at(sidecar.socket, **PATIENT) as engine:
        engine.store(TOKENS, kvcaches=KV)
        before = sidecar.ask("/v1/status")
        inode = (sidecar.arena / "kv.arena").stat().st_ino
        sidecar.restart(number)  # at once: what was answered is written down
        until(
            lambda: engine.lookup(TOKENS) == NUM_TOKENS, "the engine does not come back by itself"
        )
        assert num_retrieved(engine) == NUM_TOKENS
    after = sidecar.ask("/v1/status")
    assert after["generation"] != before["generation"]
    assert after["arena"] == {
        "is_recorded": True,
        "huge_pages": before["arena"]["huge_pages"],
        "lent_bytes": 0,
        "recovery": {
            "is_over": True,
            "found_chunks": NUM_CHUNKS,
            "checked_chunks": NUM_CHUNKS,
            "recovered_chunks": NUM_CHUNKS,
            "damaged_chunks": 0,
            "dropped_chunks": 0,
        },
    }
    assert (sidecar.arena / "kv.arena").stat().st_ino == inode, (
        "engines need not give up memory first"
    )
    lines = sidecar.ask("/metrics").splitlines()
    assert f'lmcache_sidecar_loaded_chunks_total{{tier="memory"}} {NUM_CHUNKS}.0' in lines
    assert f"lmcache_sidecar_recovered_chunks_total {NUM_CHUNKS}.0" in lines


def test_a_bit_that_flips_while_it_is_down_is_not_served(
    processes: Processes, tmp_path: Path
) -> None:
    sidecar = RestartedSidecar(processes, tmp_path, verify_hot="never")
    with engine_at(sidecar.socket, **PATIENT) as engine:
        engine.store(TOKENS, kvcaches=KV)
        sidecar.end()
        at = 12 * CHUNK_SIZE  # the first token of the 13th chunk, in the first layer's K
        row = KV[0][0][at].numpy().tobytes()
        with (sidecar.arena / "kv.arena").open("r+b") as file:
            offset = file.read().index(row)
            file.seek(offset)
            file.write(bytes([row[0] ^ 1]))
        sidecar.start()
        until(lambda: sidecar.recovery["is_over"], "the recovery does not end")
        assert sidecar.recovery["recovered_chunks"] == NUM_CHUNKS - 1
        assert sidecar.recovery["damaged_chunks"] == 1
        until(lambda: engine.lookup(TOKENS) > 0, "the engine does not come back")
        assert num_retrieved(engine) == 12 * CHUNK_SIZE
        engine.store(TOKENS, kvcaches=KV)
        assert num_retrieved(engine) == NUM_TOKENS
    assert (
        'lmcache_sidecar_unrecovered_chunks_total{reason="damaged"} 1.0'
        in sidecar.ask("/metrics").splitlines()
    )
