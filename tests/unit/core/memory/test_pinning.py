"""Host memory registered with CUDA, by a runtime that is a fake: pieces, refusals, and what they
leave behind.
"""

from __future__ import annotations

import ctypes.util
import gc
import logging

import pytest
import torch
from lmcache_core.memory import tensor as module

from tests.fixtures.cuda_runtime import OUT_OF_MEMORY, Runtime, install

PIECE = 1 << 12


class Owner:
    pass


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    monkeypatch.setattr(module, "MAX_PIECE_BYTES", PIECE)
    return install(monkeypatch, PIECE)


@pytest.mark.parametrize("num_bytes", [1, PIECE, PIECE + 1, 5 * PIECE - 7])
def test_an_arena_is_registered_in_pieces_and_given_back_with_its_owner(
    runtime: Runtime, num_bytes: int
) -> None:
    arena, owner = torch.zeros(num_bytes, dtype=torch.uint8), Owner()
    assert module.pin(arena, owner)
    assert sorted(runtime.registered) == [
        arena.data_ptr() + at for at in range(0, num_bytes, PIECE)
    ]
    assert sum(runtime.registered.values()) == num_bytes
    del owner
    gc.collect()
    assert runtime.registered == {}


@pytest.mark.parametrize("fails_at", [0, 1, 3])
def test_a_refused_piece_undoes_the_others_and_leaves_no_error_pending(
    runtime: Runtime, fails_at: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Torch would raise a pending error at the next call, wherever that is."""
    runtime.fails_at = fails_at
    owner = Owner()
    assert not module.pin(torch.zeros(4 * PIECE, dtype=torch.uint8), owner)
    assert (runtime.registered, runtime.pending) == ({}, 0)
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert f"error={OUT_OF_MEMORY}" in caplog.text
    del owner
    gc.collect()


def test_without_a_loaded_runtime_there_is_no_error_to_take(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_loaded_runtimes", list)
    assert module._take_pending_error() is None


def test_a_runtime_that_cannot_be_opened_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        module, "_loaded_runtimes", lambda: ["/nowhere/libcudart.so", ctypes.util.find_library("c")]
    )
    assert module._take_pending_error() is None
