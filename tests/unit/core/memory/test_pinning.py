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

PIECE = 1 << 12
OUT_OF_MEMORY = 2


class Runtime:
    """As much of the CUDA runtime as pinning touches; an error stays pending until it is asked
    for.
    """

    def __init__(self, fails_at: int | None = None) -> None:
        self.registered: dict[int, int] = {}
        self.pending = 0
        self.num_calls = 0
        self.fails_at = fails_at

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:
        self.num_calls += 1
        assert num_bytes <= PIECE
        if self.num_calls - 1 == self.fails_at:
            self.pending = OUT_OF_MEMORY
            return OUT_OF_MEMORY
        self.registered[address] = num_bytes
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        del self.registered[address]
        return 0

    def cudaGetLastError(self) -> int:
        error, self.pending = self.pending, 0
        return error


class Owner:
    pass


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    made = Runtime()
    monkeypatch.setattr(module, "MAX_PIECE_BYTES", PIECE)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(module, "_cuda_runtime", lambda: made)
    monkeypatch.setattr(module, "_take_pending_error", made.cudaGetLastError)
    return made


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
