"""Host memory registered with CUDA, here with a fake runtime."""

from __future__ import annotations

import gc
import logging
import os

import pytest
import torch
from lmcache_core.memory import tensor as module

from tests.fixtures.cuda_runtime import GLOBAL_MODE, LIBRARIES, OUT_OF_MEMORY, Runtime, install

PIECE = 1 << 12


class Owner:
    pass


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    monkeypatch.setattr(module, "COPY_BOUNDARY_BYTES", PIECE)
    return install(monkeypatch, PIECE)


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


@pytest.mark.parametrize("used", LIBRARIES)
@pytest.mark.parametrize("fails_at", [0, 1, 3])
def test_a_refused_piece_leaves_the_others_pinned_and_no_error_pending(
    runtime: Runtime, fails_at: int, used: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Others may be copying to what is pinned; torch would raise a pending error at the next call,
    wherever that is.
    """
    runtime.fails_at, runtime.used = fails_at, used
    arena, owner = torch.zeros(4 * PIECE, dtype=torch.uint8), Owner()
    assert not module.pin(arena, owner, None, PIECE)
    assert (len(runtime.registered), runtime.pending) == (fails_at, 0)
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert f"error={OUT_OF_MEMORY}" in caplog.text
    assert f"pinned_bytes={sum(runtime.registered.values())} of={4 * PIECE}" in caplog.text
    del owner
    gc.collect()
    assert not runtime.registered


def test_a_capture_of_another_thread_survives(runtime: Runtime) -> None:
    """vLLM captures graphs in the mode in which CUDA forbids such calls to all threads."""
    runtime.is_capturing = True
    arena, owner = torch.zeros(2 * PIECE, dtype=torch.uint8), Owner()
    assert module.pin(arena, owner, None, PIECE)
    del owner
    gc.collect()
    assert not runtime.registered
    assert not runtime.is_capture_broken
    assert runtime.capture_mode() == GLOBAL_MODE, "this thread's own captures are less strict"


def test_large_pieces_end_where_copies_are_split(runtime: Runtime) -> None:
    runtime.max_bytes = 5 * PIECE // 2
    arena, owner = torch.zeros(9 * PIECE, dtype=torch.uint8), Owner()
    assert module.pin(arena, owner, piece_bytes=runtime.max_bytes)
    assert len(runtime.registered) <= 6
    assert not any(begin % PIECE for begin in sorted(runtime.registered)[1:])
    del owner
    gc.collect()
