"""A client's lock says to the next sidecar whether this one may still write to the arena."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from lmcache_core.errors import UnavailableError
from lmcache_core.gpu_connectors import VLLMNestedTupleGPUConnector
from lmcache_core.memory.arena_locks import forget_generation, is_over
from lmcache_core.sidecar import SidecarConnection
from lmcache_core.wire import messages as m

from tests.fixtures.frames import HELLO
from tests.fixtures.kv import CHUNK_SIZE, random_kv, tokens_of
from tests.fixtures.scripted_sidecar import GENERATION, ScriptedSidecar, scripted_sidecar
from tests.fixtures.sidecar import engine_at, running_socket
from tests.fixtures.waiting import wait_until


@pytest.fixture
def sidecar(tmp_path: Path) -> Iterator[ScriptedSidecar]:
    with scripted_sidecar(tmp_path, lambda request: None) as scripted:
        yield scripted


def connected(sidecar: ScriptedSidecar) -> SidecarConnection:
    connection = SidecarConnection(sidecar.path, HELLO, 60.0)
    connection.open()
    return connection


@pytest.mark.parametrize("is_late", [False, True], ids=["closed", "timed out"])
def test_lock_and_socket_outlive_a_connection_while_memory_is_used(
    sidecar: ScriptedSidecar, tmp_path: Path, is_late: bool
) -> None:
    """The sidecar gives memory to others when the socket ends."""
    connection = connected(sidecar)
    connection.hold(2)
    if is_late:
        with pytest.raises(UnavailableError):
            connection.call(m.ReserveExtents((1000,)), m.Extents, 0.05)
    else:
        connection.close()
    assert not connection.is_open
    connection.release(1)
    assert not is_over(tmp_path, GENERATION)
    assert sidecar.num_ended == 0
    connection.release(1)
    assert is_over(tmp_path, GENERATION)
    wait_until(lambda: sidecar.num_ended == 1)


@pytest.mark.parametrize("what", ["generation", "arena"])
def test_sidecar_without_a_lock_or_an_arena_is_not_used(
    sidecar: ScriptedSidecar, tmp_path: Path, what: str
) -> None:
    if what == "generation":
        forget_generation(tmp_path, GENERATION)
        error = "see the sidecar's arena_path"
    else:
        sidecar.arena.unlink()
        error = "No such file"
    with pytest.raises(UnavailableError, match=error):
        connected(sidecar)
    assert is_over(tmp_path, GENERATION) == (what == "arena"), "a failed attempt holds no lock"


def test_engine_holds_the_lock_during_a_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when the sidecar has long gone: its copy continues."""
    seen: list[bool] = []
    copy = VLLMNestedTupleGPUConnector.from_gpu
    with running_socket(tmp_path) as running, engine_at(running.path) as engine:
        where, generation = running.arena.path.parent, running.arena.generation

        def look(*args: Any, **kwargs: Any) -> None:
            copy(*args, **kwargs)
            if not seen:
                running.loop.run(running.server.close(), 60.0)
            seen.append(is_over(where, generation))

        monkeypatch.setattr(VLLMNestedTupleGPUConnector, "from_gpu", look)
        engine.store(tokens_of(3 * CHUNK_SIZE), kvcaches=random_kv(3 * CHUNK_SIZE))
        assert seen
        assert not any(seen)
        assert is_over(where, generation)
