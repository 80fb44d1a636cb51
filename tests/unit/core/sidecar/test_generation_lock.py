"""What a client's lock tells the next sidecar: whether this one may still write to the arena."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from lmcache_core.errors import UnavailableError
from lmcache_core.memory.arena_locks import forget_generation, is_over
from lmcache_core.sidecar import SidecarConnection
from lmcache_core.wire import messages as m

from tests.fixtures.frames import HELLO
from tests.fixtures.kv import CHUNK_SIZE, random_kv, tokens_of
from tests.fixtures.scripted_sidecar import GENERATION, ScriptedSidecar, scripted_sidecar
from tests.fixtures.sidecar import engine_at, running_socket


@pytest.fixture
def sidecar(tmp_path: Path) -> Iterator[ScriptedSidecar]:
    with scripted_sidecar(tmp_path, lambda request: None) as scripted:
        yield scripted


def connected(sidecar: ScriptedSidecar) -> SidecarConnection:
    connection = SidecarConnection(sidecar.path, HELLO, 0.5)
    connection.open()
    return connection


def test_it_is_held_as_long_as_the_connection(sidecar: ScriptedSidecar, tmp_path: Path) -> None:
    first, second = connected(sidecar), connected(sidecar)
    assert not is_over(tmp_path, GENERATION)
    first.close()
    assert not is_over(tmp_path, GENERATION)
    second.close()
    assert is_over(tmp_path, GENERATION)


def test_it_outlives_the_connection_while_memory_is_touched(
    sidecar: ScriptedSidecar, tmp_path: Path
) -> None:
    connection = connected(sidecar)
    connection.hold(2)
    connection.close()
    connection.release(1)
    assert not is_over(tmp_path, GENERATION)
    connection.release(1)
    assert is_over(tmp_path, GENERATION)


def test_a_connection_that_times_out_keeps_it_until_nothing_is_held(
    sidecar: ScriptedSidecar, tmp_path: Path
) -> None:
    connection = connected(sidecar)
    connection.hold(1)
    with pytest.raises(UnavailableError):
        connection.call(m.ReserveExtents((1000,)), m.Extents, 0.05)
    assert not connection.is_open
    assert not is_over(tmp_path, GENERATION)
    connection.release(1)
    assert is_over(tmp_path, GENERATION)


@pytest.mark.parametrize("what", ["generation", "arena"])
def test_without_it_there_is_no_sidecar(
    sidecar: ScriptedSidecar, tmp_path: Path, what: str
) -> None:
    if what == "generation":
        forget_generation(tmp_path, GENERATION)
    else:
        sidecar.arena.unlink()
    with pytest.raises(
        UnavailableError,
        match="see the sidecar's arena_path" if what == "generation" else "No such file",
    ):
        connected(sidecar)
    assert is_over(tmp_path, GENERATION) == (what == "arena"), "one that has failed holds nothing"


def test_an_engine_holds_it_in_the_middle_of_a_store(tmp_path: Path) -> None:
    """Also when the sidecar has long gone: its copy goes on."""
    seen: list[bool] = []
    with running_socket(tmp_path) as running, engine_at(running.path) as engine:
        where, generation = running.arena.path.parent, running.arena.generation
        connector = engine._transfer._gpu_connector
        copy = connector.from_gpu

        def look(*args: Any, **kwargs: Any) -> None:
            copy(*args, **kwargs)
            if not seen:
                running.loop.run(running.server.close(), 10.0)
            seen.append(is_over(where, generation))

        connector.from_gpu = look  # type: ignore[method-assign]
        engine.store(tokens_of(3 * CHUNK_SIZE), kvcaches=random_kv(3 * CHUNK_SIZE))
        assert seen
        assert not any(seen)
        assert is_over(where, generation)
