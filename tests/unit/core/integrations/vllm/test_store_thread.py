"""Stores in a thread: how long a step waits for copies of the blocks that it overwrites."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
from lmcache_core.integrations.vllm.plan import Store
from lmcache_core.integrations.vllm.store_thread import PendingStore, StoreThread

PATIENCE_S = 0.2


class LateEvent:
    """The end of a step on a device, which takes longer than a step waits for copies."""

    def __init__(self) -> None:
        self._ends_at = time.monotonic() + 2 * PATIENCE_S

    def synchronize(self) -> None:
        time.sleep(max(0.0, self._ends_at - time.monotonic()))


@pytest.fixture
def copies() -> Iterator[StoreThread]:
    """Copies when a step has ended on the device."""

    def copy(pending: PendingStore) -> None:
        assert pending.computed is not None
        pending.computed.synchronize()
        assert thread.is_wanted(pending), "it was given up before its step had ended"
        kept.append(thread.copied(pending))

    kept: list[bool] = []
    thread = StoreThread(copy, PATIENCE_S)
    thread.open()
    yield thread
    thread.close()
    assert kept == [True]


def test_a_step_that_still_runs_is_no_reason_to_give_up_its_stores(copies: StoreThread) -> None:
    event: Any = LateEvent()
    assert copies.submit(PendingStore(Store("r", ()), 1, 0.0, event, 1))
    copies.before_overwriting({"r"})
    assert not copies.reads("r")
