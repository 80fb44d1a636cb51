"""Chunks on their way to pages on a device: what is launched when, and what is waited for."""

from __future__ import annotations

import pytest
import torch
from lmcache_core.gpu_connectors import LogicalMemory, Packing, PagedGPUConnector

from tests.fixtures.cuda_streams import Runtime, install
from tests.suites.connector_suite import SLOTS, make_memory
from tests.suites.kv_caches import (
    BLOCK_SIZE,
    NUM_BLOCKS,
    make_kv_caches,
    one_group,
    same,
    snapshot,
)

LAYOUT = one_group(packing=Packing.KV_FIRST)
CHUNKS = ((4, 7), (7, 10), (10, 13))


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    return install(monkeypatch)


@pytest.fixture
def connector() -> PagedGPUConnector:
    return PagedGPUConnector(LAYOUT, staging_tokens=3)


def gathered(connector, kwargs, *chunks):
    memories = [make_memory(connector.get_shape(end - start), "bfloat16") for start, end in chunks]
    for memory, chunk in zip(memories, chunks, strict=True):
        connector.from_gpu(memory, *chunk, **kwargs)
    return memories


def kwargs_of(seed):
    return {"kvcaches": make_kv_caches(LAYOUT, seed), "slot_mapping": torch.tensor(SLOTS)}


def check_equal(source, target, tokens):
    for token in tokens:
        got, wanted = (
            LogicalMemory(LAYOUT, kwargs["kvcaches"]).read(0, 1, SLOTS[token]).view(torch.uint8)
            for kwargs in (target, source)
        )
        assert torch.equal(got, wanted)


def test_the_next_chunk_is_copied_before_the_scatter_of_one_is_waited_for(runtime, connector):
    source, target = kwargs_of(1), kwargs_of(50)
    memories = gathered(connector, source, *CHUNKS)
    before = snapshot(target["kvcaches"])
    runtime.log.clear()
    with connector.loading(target) as kwargs:
        for memory, chunk in zip(memories, CHUNKS, strict=True):
            connector.to_gpu(memory, *chunk, **kwargs)
        assert runtime.log == ["copy 0", "scatter 0", "copy 1", "scatter 1", "copy 0", "scatter 0"]
        assert same(snapshot(target["kvcaches"]), before)
    assert runtime.log[6:] == ["wait"]
    check_equal(source, target, range(4, 13))


def test_encoded_chunks_are_decoded_into_the_buffers_on_both_streams(runtime, connector):
    source, target = kwargs_of(1), kwargs_of(50)
    memories = gathered(connector, source, *CHUNKS)
    runtime.log.clear()
    with connector.loading(target) as kwargs:
        for memory, chunk in zip(memories, CHUNKS, strict=True):
            content = memory.tensor.view(-1).view(torch.uint8)

            def decode(staged, content=content):
                runtime.launch("decode", lambda: staged.copy_(content))

            connector.to_gpu(memory, *chunk, **kwargs, decode=decode)
        assert runtime.log == [
            f"{name} {stream}" for stream in (0, 1, 0) for name in ("decode", "scatter")
        ]
    check_equal(source, target, range(4, 13))


def test_both_streams_start_after_what_was_launched_before(runtime, connector):
    source, target = kwargs_of(1), kwargs_of(50)
    memories = gathered(connector, source, *CHUNKS)
    runtime.compute.launch(lambda: [page.zero_() for page in target["kvcaches"]])
    with connector.loading(target) as kwargs:
        for memory, chunk in zip(memories, CHUNKS, strict=True):
            connector.to_gpu(memory, *chunk, **kwargs)
        runtime.streams[1].synchronize()
    check_equal(source, target, range(4, 13))


def test_an_error_waits_for_copies_that_run(runtime, connector):
    source, target = kwargs_of(1), kwargs_of(50)
    (memory,) = gathered(connector, source, CHUNKS[0])

    def load_one_and_fail():
        with connector.loading(target) as kwargs:
            connector.to_gpu(memory, *CHUNKS[0], **kwargs)
            connector.to_gpu(memory, *CHUNKS[1], **{**kwargs, "slot_mapping": None})

    with pytest.raises(ValueError, match="slot_mapping"):
        load_one_and_fail()
    check_equal(source, target, range(4, 7))


def test_a_load_alone_has_ended_when_it_returns(runtime, connector):
    source, target = kwargs_of(1), kwargs_of(50)
    (memory,) = gathered(connector, source, CHUNKS[0])
    connector.to_gpu(memory, *CHUNKS[0], **target)
    check_equal(source, target, range(4, 7))


def test_of_a_chunk_only_the_wanted_slots_are_written_in_one_copy(runtime, connector):
    source, target = kwargs_of(1), kwargs_of(50)
    (memory,) = gathered(connector, source, CHUNKS[1])
    addresses = connector.addresses_of(target["kvcaches"], target["slot_mapping"], 8, 9)
    untouched = LogicalMemory(LAYOUT, [page.clone() for page in target["kvcaches"]])
    runtime.log.clear()
    connector.to_gpu(memory, *CHUNKS[1], addresses=addresses, wanted=(8, 9))
    assert runtime.log == ["copy 0", "scatter 0", "wait"]
    check_equal(source, target, [8])
    for slot in range(NUM_BLOCKS * BLOCK_SIZE):
        if slot != SLOTS[8]:
            got = LogicalMemory(LAYOUT, target["kvcaches"]).read(0, 1, slot)
            assert torch.equal(got.view(torch.uint8), untouched.read(0, 1, slot).view(torch.uint8))
