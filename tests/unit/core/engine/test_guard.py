"""A failure inside the cache is a counted miss with `error_handling`, and raised without; wrong
arguments are refused by every call; nothing leaks.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lmcache_core.engine import LMCacheEngine
from lmcache_core.errors import LayoutError, LMCacheError, UnavailableError
from lmcache_core.gpu_connectors import VLLMNestedTupleGPUConnector
from lmcache_core.keys import ChunkKey
from lmcache_core.memory.base import MemoryObj
from lmcache_core.telemetry import FAILED_CALLS_TOTAL

from tests.fixtures.embedded import Embedded, embedded_engine
from tests.fixtures.kv import CHUNK_SIZE, HIDDEN, NUM_LAYERS, empty_kv
from tests.fixtures.prompts import kv_of, tokens_of
from tests.suites.faults import ForwardingBackend

TOKENS = tokens_of((0, 1, 0, 1))
OTHER = tokens_of((1, 1, 1))
FAILURES = [RuntimeError("CUDA error"), UnavailableError("gone"), KeyError("a bug")]


class BreakingConnector(VLLMNestedTupleGPUConnector):
    """Fails from a chosen copy on."""

    def __init__(self) -> None:
        super().__init__(HIDDEN, NUM_LAYERS)
        self.failure: BaseException | None = None
        self.num_good = 0

    def _step(self) -> None:
        self.num_good -= 1
        if self.failure is not None and self.num_good < 0:
            raise self.failure

    def from_gpu(self, memory_obj: MemoryObj, start: int, end: int, **kwargs: Any) -> None:
        self._step()
        super().from_gpu(memory_obj, start, end, **kwargs)

    def to_gpu(self, memory_obj: MemoryObj, start: int, end: int, **kwargs: Any) -> None:
        self._step()
        super().to_gpu(memory_obj, start, end, **kwargs)


def failed(cache: Embedded) -> dict[str, int]:
    return {
        name: num
        for (counter, name), num in cache.engine.counters.snapshot().items()
        if counter == FAILED_CALLS_TOTAL and num
    }


@pytest.mark.parametrize("failure", FAILURES, ids=lambda failure: type(failure).__name__)
def test_a_failing_copy_is_a_miss_where_errors_are_handled(
    failure: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    connector = BreakingConnector()
    with embedded_engine(connector=connector, error_handling=True) as cache:
        cache.store(TOKENS)
        connector.failure, connector.num_good = failure, 2
        assert cache.retrieve(TOKENS, 2 * CHUNK_SIZE) == 0, "chunks copied before count for nothing"
        connector.num_good = 2
        cache.store(OTHER)
        assert failed(cache) == {"retrieve": 1, "store": 1}
        assert [record.levelno for record in caplog.records] == [logging.ERROR] * 2
        cache.check_nothing_held()
        connector.failure = None
        assert cache.engine.lookup(OTHER) == 0, "a failed store keeps nothing"
        assert cache.retrieve(TOKENS) == len(TOKENS)


@pytest.mark.parametrize(
    ("failure", "handles_errors"),
    [(RuntimeError("CUDA error"), False), (KeyboardInterrupt(), True)],
    ids=["failure", "interrupt"],
)
def test_a_failing_copy_is_raised_where_errors_are_not_handled_and_an_interrupt_always(
    failure: BaseException, handles_errors: bool
) -> None:
    connector = BreakingConnector()
    with embedded_engine(connector=connector, error_handling=handles_errors) as cache:
        cache.store(TOKENS)
        for call in (
            lambda: cache.retrieve(TOKENS),
            lambda: cache.store(OTHER),
        ):
            connector.failure, connector.num_good = failure, 1
            with pytest.raises(type(failure)):
                call()
            cache.check_nothing_held()
        assert failed(cache) == {}


@pytest.mark.parametrize("error_handling", [True, False])
@pytest.mark.parametrize(
    "failure",
    [ValueError("wrong shape"), LayoutError("wrong layout")],
    ids=lambda failure: type(failure).__name__,
)
def test_wrong_arguments_are_raised_either_way(error_handling: bool, failure: Exception) -> None:
    connector = BreakingConnector()
    with embedded_engine(connector=connector, error_handling=error_handling) as cache:
        cache.store(TOKENS)
        connector.failure, connector.num_good = failure, 1
        with pytest.raises(ValueError, match=str(failure)):
            cache.retrieve(TOKENS)
        connector.num_good = 1
        with pytest.raises(ValueError, match=str(failure)):
            cache.store(OTHER)
        connector.failure = None
        with pytest.raises(ValueError, match="multiple of the chunk size"):
            cache.engine.retrieve(
                TOKENS, torch.arange(len(TOKENS)) > 0, kvcaches=empty_kv(len(TOKENS))
            )
        with pytest.raises(ValueError, match="kvcaches is missing"):
            cache.engine.retrieve(TOKENS)
        with pytest.raises(ValueError, match="kvcaches is missing"):
            cache.engine.store(OTHER)
        with pytest.raises(ValueError, match="'Cold'"):
            cache.engine.lookup(TOKENS, ["Cold"])
        assert failed(cache) == {}
        cache.check_nothing_held()


@pytest.mark.parametrize("error_handling", [True, False])
@pytest.mark.parametrize("method", ["lookup", "reserve", "put", "get", "prefetch"])
def test_a_broken_store_fails_the_call_that_needs_it(
    method: str, error_handling: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object, **options: object) -> None:
        raise ConnectionError("a bug")

    with embedded_engine(error_handling=error_handling) as cache:
        cache.store(TOKENS)
        monkeypatch.setattr(cache.manager, method, fail)
        num_failed = 0
        for call in (
            lambda: cache.retrieve(TOKENS),
            lambda: cache.engine.lookup(OTHER),
            lambda: cache.store(OTHER),
            lambda: cache.engine.prefetch(OTHER),
        ):
            try:
                call()
            except ConnectionError:
                assert not error_handling
                num_failed += 1
        num_failed += sum(failed(cache).values())
        assert num_failed == 1
        cache.check_nothing_held()
        monkeypatch.undo()
        assert cache.retrieve(TOKENS) == len(TOKENS)


@pytest.mark.parametrize("error_handling", [True, False])
def test_a_bug_of_a_tier_is_not_raised_as_a_wrong_argument(
    error_handling: bool, tmp_path: Path
) -> None:
    class Broken(ForwardingBackend):
        async def batched_contains(self, keys: Sequence[ChunkKey]) -> list[bool]:
            return [bool(int("no number"))]

    with embedded_engine(tmp_path, wrap=Broken, error_handling=error_handling) as cache:
        if error_handling:
            assert cache.engine.lookup(TOKENS) == 0
            assert failed(cache) == {"lookup": 1}
        else:
            with pytest.raises(LMCacheError, match="no number") as raised:
                cache.engine.lookup(TOKENS)
            assert not isinstance(raised.value, ValueError)


IDS = list(range(100, 100 + 2 * CHUNK_SIZE))
ID_TOKENS = torch.tensor(IDS)
CALLS: dict[str, Callable[[LMCacheEngine, Any], object]] = {
    "lookup": lambda engine, tokens: engine.lookup(tokens),
    "retrieve": lambda engine, tokens: engine.retrieve(tokens, kvcaches=empty_kv(len(IDS))),
    "store": lambda engine, tokens: engine.store(tokens, kvcaches=kv_of(ID_TOKENS)),
    "prefetch": lambda engine, tokens: engine.prefetch(tokens),
}
NO_TOKENS: dict[str, Any] = {
    "negative": np.array([-1, *IDS[1:]], np.int16),
    "above 2^64": [1 << 64, *IDS[1:]],
    "None inside": [None, *IDS[1:]],
    "None": None,
    "booleans": np.ones(len(IDS), np.bool_),
    "bfloat16": torch.tensor(IDS, dtype=torch.bfloat16),
    "text": "x" * len(IDS),
    "two dimensions": ID_TOKENS[None],
    "rows of several lengths": [[1, 2], [3]],
    "a generator": (token for token in IDS),
    "on no device": torch.empty(len(IDS), dtype=torch.int64, device="meta"),
}


@pytest.mark.parametrize("handles_errors", [False, True])
@pytest.mark.parametrize("call", CALLS)
def test_anything_but_token_ids_is_refused_by_every_call(call: str, handles_errors: bool) -> None:
    with embedded_engine(error_handling=handles_errors) as cache:
        for form, tokens in NO_TOKENS.items():
            with pytest.raises(ValueError, match="token"):
                CALLS[call](cache.engine, tokens)
            assert cache.hot.stats()["num_chunks"] == 0, form
