"""Host memory registered with CUDA, here with a fake runtime."""

from __future__ import annotations

import gc
import logging
import os
import threading

import pytest
import torch
from lmcache_core.memory import tensor as module

from tests.fixtures.cuda_runtime import OUT_OF_MEMORY, Runtime, install

PIECE = 1 << 12


class Owner:
    pass


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    monkeypatch.setattr(module, "COPY_BOUNDARY_BYTES", PIECE)
    return install(monkeypatch, PIECE)


@pytest.mark.parametrize("num_bytes", [1, PIECE, 5 * PIECE - 7])
def test_an_arena_is_registered_in_pieces_and_given_back_with_its_owner(
    runtime: Runtime, num_bytes: int
) -> None:
    """Pieces end where copies are split."""
    arena, owner = torch.zeros(num_bytes, dtype=torch.uint8), Owner()
    assert module.pin(arena, owner, piece_bytes=PIECE)
    begin, end = arena.data_ptr(), arena.data_ptr() + num_bytes
    inside = range(begin // PIECE * PIECE + PIECE, end, PIECE)
    assert sorted(runtime.registered) == [begin, *inside]
    assert sum(runtime.registered.values()) == num_bytes
    for part in module.copy_parts(arena):
        assert runtime.has(begin + part.start, part.stop - part.start)
    del owner
    gc.collect()
    assert runtime.registered == {}


def test_memory_is_pinned_and_unpinned_on_the_named_device(runtime: Runtime) -> None:
    """Another one would get a context, which takes memory there."""
    owner = Owner()
    assert module.pin(torch.zeros(9, dtype=torch.uint8), owner, torch.device("cuda", 3))
    thread = threading.Thread(target=lambda owners: owners.clear(), args=([owner],))
    del owner
    thread.start()
    thread.join()
    assert not runtime.registered
    assert runtime.devices == {3}


def test_a_forked_child_unpins_nothing(runtime: Runtime) -> None:
    """CUDA cannot be used there."""
    owner = Owner()
    assert module.pin(torch.zeros(9, dtype=torch.uint8), owner)
    child = os.fork()
    if child == 0:
        del owner
        gc.collect()
        os._exit(0 if runtime.registered else 1)
    assert os.waitpid(child, 0)[1] == 0
    del owner
    assert not runtime.registered


@pytest.mark.parametrize("fails_at", [0, 1, 3])
def test_a_refused_piece_undoes_the_others_and_leaves_no_error_pending(
    runtime: Runtime, fails_at: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Torch would raise a pending error at the next call, wherever that is."""
    runtime.fails_at = fails_at
    owner = Owner()
    assert not module.pin(torch.zeros(4 * PIECE, dtype=torch.uint8), owner, None, PIECE)
    assert (runtime.registered, runtime.pending) == ({}, 0)
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert f"error={OUT_OF_MEMORY}" in caplog.text
    del owner
    gc.collect()
