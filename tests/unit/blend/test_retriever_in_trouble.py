"""Retrievals whose segments are slow, fail, vanish, or are closed meanwhile."""

from __future__ import annotations

import threading

import pytest
import torch
from lmcache_core.blend import retriever as retriever_module
from lmcache_core.blend.retriever import MAX_SEGMENTS_AT_ONCE
from lmcache_core.gpu_connectors import VLLMNestedTupleGPUConnector

from tests.fixtures.documents import Watched, document, request, retrieving, store
from tests.fixtures.embedded import PATIENT, embedded_engine, until
from tests.fixtures.kv import CHUNK_SIZE, HIDDEN, NUM_LAYERS
from tests.fixtures.waiting import threads_end

PATIENCE_S = 60.0


def test_segments_are_fetched_concurrently_within_a_bound():
    running, most, lock, enough = set(), [], threading.Lock(), threading.Event()

    def before(tokens):
        with lock:
            running.add(int(tokens[0]))
            most.append(len(running))
            if len(running) >= MAX_SEGMENTS_AT_ONCE:
                enough.set()
        assert enough.wait(PATIENCE_S), "they wait for each other, so all must be under way"
        with lock:
            running.discard(int(tokens[0]))

    documents = [document(number, 20) for number in range(3 * MAX_SEGMENTS_AT_ONCE)]
    with embedded_engine(**PATIENT) as cache, retrieving(Watched(cache.engine, before)) as made:
        store(cache.engine, *documents)
        found = request(made, torch.cat(documents[::-1])).result(2)
        assert found.valid_mask.all()
    assert max(most) == MAX_SEGMENTS_AT_ONCE


@pytest.mark.parametrize("num_left", [0, 1])
def test_chunks_that_vanish_between_lookup_and_fetch_are_not_valid(num_left):
    first, second = document(1, 30), document(2, 30)
    both = torch.cat([first, second])
    with embedded_engine(**PATIENT) as cache:

        def vanish(tokens):
            cache.hot.clear_now()
            store(cache.engine, both[: num_left * CHUNK_SIZE])

        store(cache.engine, both)
        with retrieving(Watched(cache.engine, vanish)) as made:
            task = request(made, both)
            assert int(task.result(0).valid_mask.sum()) == num_left * CHUNK_SIZE
            assert (task.result(1).k is None) == (num_left == 0)
        cache.check_nothing_held()


def test_a_failure_in_a_thread_is_raised_by_result():
    first, second = document(1, 30), document(2, 30)

    def fail(tokens):
        if int(tokens[0]) == int(second[0]):
            raise OSError("no more files")

    with embedded_engine(**PATIENT) as cache, retrieving(Watched(cache.engine, fail)) as made:
        store(cache.engine, first, second)
        task = request(made, torch.cat([first, second]))
        for layer_id in (0, 1):
            with pytest.raises(OSError, match="no more files"):
                task.result(layer_id)
        assert int(request(made, first).result(0).valid_mask.sum()) == CHUNK_SIZE * 2
        cache.check_nothing_held()


def test_with_error_handling_a_segment_that_fails_is_not_found():
    first, second = document(1, 30), document(2, 46)

    class Failing(VLLMNestedTupleGPUConnector):
        def to_gpu(self, memory_obj, start, end, **kwargs):
            if len(kwargs["kvcaches"][0][0]) == len(second):
                raise OSError("the device is gone")
            super().to_gpu(memory_obj, start, end, **kwargs)

    with (
        embedded_engine(connector=Failing(HIDDEN, NUM_LAYERS), error_handling=True) as cache,
        retrieving(cache.engine) as made,
    ):
        store(cache.engine, first, second)
        assert (
            request(made, torch.cat([second, first])).result(0).valid_mask.tolist()
            == [False] * 48 + [True] * 32
        )
        cache.check_nothing_held()


def asks(made, watched, documents):
    """Whether another request looks anything up."""
    num_lookups = len(watched.lookups)
    request(made, torch.cat(documents[:2]))
    return len(watched.lookups) > num_lookups


def test_close_waits_for_running_fetches_only():
    reached, go_on, asked = threading.Semaphore(0), threading.Event(), []

    def hold(tokens):
        asked.append(tokens)
        reached.release()
        assert go_on.wait(PATIENCE_S)

    documents = [document(number, 14) for number in range(2 * MAX_SEGMENTS_AT_ONCE)]
    with embedded_engine(**PATIENT) as cache:
        store(cache.engine, *documents)
        watched = Watched(cache.engine, hold)
        with retrieving(watched) as made:
            task = request(made, torch.cat(documents))
            for _ in range(MAX_SEGMENTS_AT_ONCE):
                assert reached.acquire(timeout=PATIENCE_S)
            closing = threading.Thread(target=made.close)
            closing.start()
            until(lambda: not asks(made, watched, documents), "it does not close")
            assert closing.is_alive()
            go_on.set()
            closing.join(PATIENCE_S)
            assert not closing.is_alive()
            assert int(task.result(0).valid_mask.sum()) == MAX_SEGMENTS_AT_ONCE * CHUNK_SIZE
            num_lookups = len(watched.lookups)
            assert request(made, torch.cat(documents)).result(0).k is None
            assert (len(asked), len(watched.lookups)) == (MAX_SEGMENTS_AT_ONCE, num_lookups), (
                "a closed one asks no peer"
            )
        threads_end("lmcache-blend")


def test_all_segments_together_have_one_deadline(monkeypatch):
    monkeypatch.setattr(retriever_module, "RETRIEVAL_TIMEOUT_S", 0.6)
    go_on = threading.Event()
    documents = [document(number, 14) for number in range(12)]
    with (
        embedded_engine() as cache,
        retrieving(Watched(cache.engine, lambda tokens: go_on.wait(PATIENCE_S))) as made,
    ):
        store(cache.engine, *documents)
        task = request(made, torch.cat(documents))
        try:
            with pytest.raises(TimeoutError, match="12 of 12 segments did not come within 1 s"):
                task.result(0)
        finally:
            go_on.set()
        monkeypatch.setattr(retriever_module, "RETRIEVAL_TIMEOUT_S", PATIENCE_S)
        assert len(task.result(0).valid_mask) == sum(map(len, documents))
