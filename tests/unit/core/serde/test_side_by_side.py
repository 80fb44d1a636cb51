"""Threads of a codec and the memory that they work on."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from lmcache_core.serde.machine_code import side_by_side

PATIENCE_S = 60.0


def test_a_failure_waits_for_the_other_threads() -> None:
    """A caller who learns that a payload is damaged gives its memory back, and it becomes another
    chunk's: nothing may write to it any more.
    """
    gate, has_failed = threading.Event(), threading.Event()
    ended: list[int] = []
    raised: list[BaseException] = []

    def work(part: int) -> None:
        if part == 0:
            has_failed.set()
            raise ArithmeticError("the first")
        assert gate.wait(PATIENCE_S)
        ended.append(part)

    def call() -> None:
        try:
            side_by_side(pool, work, range(3))
        except ArithmeticError as exc:
            raised.append(exc)

    with ThreadPoolExecutor(3) as pool:
        calling = threading.Thread(target=call)
        calling.start()
        assert has_failed.wait(PATIENCE_S)
        calling.join(0.1)
        assert calling.is_alive(), "the others still work"
        gate.set()
        calling.join(PATIENCE_S)
    assert sorted(ended) == [1, 2]
    assert [str(one) for one in raised] == ["the first"]


def test_results_come_in_order_and_a_closed_pool_is_an_error() -> None:
    with ThreadPoolExecutor(3) as pool:
        assert side_by_side(pool, lambda part: 2 * part, range(50)) == list(range(0, 100, 2))
    with pytest.raises(RuntimeError):
        side_by_side(pool, lambda part: part, range(3))
