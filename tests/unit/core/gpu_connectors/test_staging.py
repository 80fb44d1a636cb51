"""Chunks on their way to and from pages on a device: the order of copies, scatters and waits."""

from __future__ import annotations

import pytest
import torch
from lmcache_core.errors import SerdeError
from lmcache_core.gpu_connectors import LogicalMemory, Packing, PagedGPUConnector
from lmcache_core.gpu_connectors.staging import Staging
from lmcache_core.gpu_connectors.streams import LaunchedCopies
from lmcache_core.memory import device_copies

from tests.fixtures.cuda_streams import DEVICE, Runtime, install
from tests.suites.connector_suite import SLOTS, make_memory
from tests.suites.kv_caches import make_kv_caches, one_group, same, snapshot

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


def in_turn(runtime):
    """What was launched, the streams numbered in the order of their first use."""
    launched = [line.split() for line in runtime.log if line != "wait"]
    numbers = list(dict.fromkeys(number for _, number in launched))
    return [f"{name} {1 + numbers.index(number)}" for name, number in launched]


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
    launched = LaunchedCopies()
    kwargs = connector.launching(target, launched)
    for memory, chunk in zip(memories, CHUNKS, strict=True):
        connector.to_gpu(memory, *chunk, **kwargs)
    assert "wait" not in runtime.log
    assert in_turn(runtime) == ["copy 1", "scatter 1", "copy 2", "scatter 2", "copy 1", "scatter 1"]
    assert same(snapshot(target["kvcaches"]), before)
    launched.wait()
    check_equal(source, target, range(4, 13))


def test_copies_are_launched_in_pieces(runtime, connector, monkeypatch):
    """Between two of them, the engine's own get their turn."""
    monkeypatch.setattr(device_copies, "PIECE_BYTES", 100)
    source, target = kwargs_of(1), kwargs_of(50)
    (memory,) = gathered(connector, source, CHUNKS[0])
    connector.to_gpu(memory, *CHUNKS[0], **target)
    assert max(runtime.copied_bytes) == 100
    assert sum(runtime.copied_bytes) == 2 * memory.get_size()
    assert contents([memory]) == expected(PagedGPUConnector(LAYOUT, 3), source)[:1]
    check_equal(source, target, range(4, 7))


@pytest.mark.parametrize("to_pages", [False, True])
def test_connectors_share_buffers(runtime, to_pages):
    """They take turns, and each buffer is used in the order of its stream."""
    staging = Staging()
    connectors = [PagedGPUConnector(LAYOUT, 3, staging) for _ in range(2)]
    pages = [kwargs_of(seed) for seed in (1, 20)]
    memories = [gathered(PagedGPUConnector(LAYOUT, 3), kwargs, *CHUNKS) for kwargs in pages]
    wanted, targets = [contents(one) for one in memories], [kwargs_of(50), kwargs_of(70)]
    runtime.log.clear()
    launched = LaunchedCopies()
    for i, chunk in enumerate(CHUNKS):
        for connector, kwargs, own, target in zip(
            connectors, pages, memories, targets, strict=True
        ):
            if to_pages:
                connector.to_gpu(own[i], *chunk, **connector.launching(target, launched))
            else:
                own[i].tensor.zero_()
                connector.from_gpu(own[i], *chunk, **connector.launching(kwargs, launched))
    assert "wait" not in runtime.log
    names = ["copy", "scatter"] if to_pages else ["gather", "copy"]
    assert in_turn(runtime) == [f"{name} {1 + i % 2}" for i in range(6) for name in names]
    for event in reversed(launched.ended):
        event.synchronize()
    if to_pages:
        for kwargs, target in zip(pages, targets, strict=True):
            check_equal(kwargs, target, range(4, 13))
    else:
        assert [contents(one) for one in memories] == wanted


def test_a_decoder_has_scratch_on_each_stream(runtime):
    """Which the next chunk's may overwrite only behind the decoder."""
    connector, target = PagedGPUConnector(LAYOUT, 3), kwargs_of(50)
    assert connector.take_staging(DEVICE, decodes=True)
    num_taken, seen = len(runtime.taken), {}

    def decode(staged, scratch):
        assert len(scratch) >= len(staged) // 2
        seen.setdefault(scratch.data_ptr(), set()).add(runtime.current())

    memory = make_memory(connector.get_shape(3), "bfloat16")
    for chunk in CHUNKS:
        connector.to_gpu(memory, *chunk, **target, decode=decode)
    assert sorted(map(len, seen.values())) == [1, 1]
    assert len(runtime.taken) == num_taken


def test_encoded_chunks_are_decoded_into_the_buffers_on_both_streams(runtime, connector):
    source, target = kwargs_of(1), kwargs_of(50)
    memories = gathered(connector, source, *CHUNKS)
    runtime.log.clear()
    launched = LaunchedCopies()
    kwargs = connector.launching(target, launched)
    for memory, chunk in zip(memories, CHUNKS, strict=True):
        content = memory.tensor.view(-1).view(torch.uint8)

        def decode(staged, scratch, content=content):
            runtime.launch("decode", lambda: staged.copy_(content))

        connector.to_gpu(memory, *chunk, **kwargs, decode=decode)
    assert in_turn(runtime) == [
        f"{name} {stream}" for stream in (1, 2, 1) for name in ("decode", "scatter")
    ]
    launched.wait()
    check_equal(source, target, range(4, 13))


def test_both_streams_start_after_what_was_launched_before(runtime, connector):
    source, target = kwargs_of(1), kwargs_of(50)
    memories = gathered(connector, source, *CHUNKS)
    runtime.compute.launch(lambda: [page.zero_() for page in target["kvcaches"]])
    launched = LaunchedCopies()
    kwargs = connector.launching(target, launched)
    for memory, chunk in zip(memories, CHUNKS, strict=True):
        connector.to_gpu(memory, *chunk, **kwargs)
    for event in reversed(launched.ended):
        event.synchronize()
    check_equal(source, target, range(4, 13))


def test_an_error_waits_for_copies_that_run(runtime, connector):
    source, target = kwargs_of(1), kwargs_of(50)
    (memory,) = gathered(connector, source, CHUNKS[0])

    content, buffers = memory.tensor.view(-1).view(torch.uint8), []

    def fail(staged, scratch):
        buffers.append(staged.zero_())
        staged.copy_(content, non_blocking=True)
        raise SerdeError("damaged")

    with pytest.raises(SerdeError, match="damaged"):
        connector.to_gpu(memory, *CHUNKS[0], **target, decode=fail)
    assert torch.equal(buffers[0], content)


def launched_stores(connector, source):
    launched = LaunchedCopies()
    kwargs = connector.launching(source, launched)
    memories = [make_memory(connector.get_shape(end - start), "bfloat16") for start, end in CHUNKS]
    for memory, chunk in zip(memories, CHUNKS, strict=True):
        connector.from_gpu(memory, *chunk, **kwargs)
    return memories, launched


def contents(memories):
    return [bytes(memory.byte_array) for memory in memories]


def expected(connector, source):
    return contents(gathered(connector, source, *CHUNKS))


@pytest.mark.parametrize("order", [(2, 1, 0), (1, 2, 0), (1, 0, 2)])
def test_a_buffer_is_not_filled_before_it_is_copied(runtime, connector, order):
    """In whatever order the streams end."""
    source = kwargs_of(1)
    wanted = expected(PagedGPUConnector(LAYOUT, 3), source)
    memories, launched = launched_stores(connector, source)
    for i in order:
        launched.ended[i].synchronize()
        assert contents(memories)[i] == wanted[i]


def test_pages_may_be_overwritten_before_chunks_are_copied(runtime, connector):
    source = kwargs_of(1)
    wanted = expected(PagedGPUConnector(LAYOUT, 3), source)
    memories, launched = launched_stores(connector, source)
    poisoned = contents(memories)
    for event in launched.read[:2]:
        event.synchronize()
    assert contents(memories) == poisoned
    launched.read[2].synchronize()
    for page in source["kvcaches"]:
        page.zero_()
    launched.wait()
    assert contents(memories) == wanted


def test_a_store_starts_after_its_event_and_what_was_launched_before(runtime, connector):
    source, other = kwargs_of(1), runtime.make()
    wanted = expected(PagedGPUConnector(LAYOUT, 3), source)
    pages = source["kvcaches"]
    kept = [page.clone() for page in pages]
    for page in pages:
        page.zero_()
    half = len(pages) // 2
    runtime.compute.launch(lambda: restore(pages[:half], kept[:half]))
    other.launch(lambda: restore(pages[half:], kept[half:]))
    memories, launched = launched_stores(connector, {**source, "after": other.record_event()})
    launched.ended[1].synchronize()
    launched.wait()
    assert contents(memories) == wanted


def restore(pages, kept):
    for page, before in zip(pages, kept, strict=True):
        page.copy_(before)


def test_the_next_chunk_is_gathered_before_the_copy_of_one_is_waited_for(runtime, connector):
    source = kwargs_of(1)
    memories, launched = launched_stores(connector, source)
    assert "wait" not in runtime.log
    assert in_turn(runtime) == ["gather 1", "copy 1", "gather 2", "copy 2", "gather 1", "copy 1"]
    poisoned, wanted = contents(memories), expected(PagedGPUConnector(LAYOUT, 3), source)
    for i, event in enumerate(list(launched.ended)):
        assert contents(memories)[i] == poisoned[i]
        event.synchronize()
        assert contents(memories)[i] == wanted[i]


def test_a_copy_alone_has_ended_when_it_returns(runtime, connector):
    source, target = kwargs_of(1), kwargs_of(50)
    (memory,) = gathered(connector, source, CHUNKS[0])
    assert contents([memory]) == expected(PagedGPUConnector(LAYOUT, 3), source)[:1]
    connector.to_gpu(memory, *CHUNKS[0], **target)
    check_equal(source, target, range(4, 7))
