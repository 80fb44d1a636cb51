"""What `VLLMPagedMemGPUConnectorV2` has beyond the contract: its options, its staging buffer,
and the binding that it keeps.
"""

from __future__ import annotations

import threading

import pytest
import torch
from lmcache_core.errors import LayoutError
from lmcache_core.gpu_connectors import (
    Packing,
    VLLMPagedMemGPUConnector,
    VLLMPagedMemGPUConnectorV2,
)
from lmcache_core.memory.base import MemoryFormat

from tests.suites.connector_suite import SLOTS, make_memory
from tests.suites.kv_caches import make_kv_caches, one_group, same, snapshot

HIDDEN, NUM_LAYERS = 15, 2
LAYOUT = one_group(packing=Packing.KV_FIRST)
STAGED = {"use_gpu": True, "chunk_size": 8, "dtype": torch.bfloat16, "device": "cpu"}


def make_connector(**options):
    return VLLMPagedMemGPUConnectorV2(HIDDEN, NUM_LAYERS, **options)


def kwargs_for(engine):
    return {"kvcaches": engine, "slot_mapping": torch.tensor(SLOTS)}


def gathered(connector, engine, start=5, end=8):
    memory = make_memory(connector.get_shape(end - start), "bfloat16")
    connector.from_gpu(memory, start, end, **kwargs_for(engine))
    return bytes(memory.byte_array)


@pytest.mark.parametrize("fmt", MemoryFormat)
def test_from_gpu_makes_a_kv_blob_of_memory_in_any_format(fmt):
    memory = make_memory(make_connector().get_shape(3), "bfloat16", fmt)
    make_connector().from_gpu(memory, 5, 8, **kwargs_for(make_kv_caches(LAYOUT, 1)))
    assert memory.metadata.fmt is MemoryFormat.KV_BLOB


def test_unknown_options_are_named():
    with pytest.raises(TypeError, match="buffer, devices"):
        make_connector(use_gpu=True, chunk_size=8, buffer=1, devices="cpu")


@pytest.mark.parametrize("chunk_size", [None, 0, 2.5])
def test_a_staging_buffer_needs_a_size(chunk_size):
    with pytest.raises(ValueError, match="chunk_size"):
        make_connector(use_gpu=True, chunk_size=chunk_size)


@pytest.mark.parametrize("other", [{"dtype": torch.float16}, {"device": "meta"}])
def test_pages_must_fit_the_buffer(other):
    engine = make_kv_caches(LAYOUT, 1)
    before = snapshot(engine)
    with pytest.raises(LayoutError, match="the connector was made for"):
        gathered(make_connector(**(STAGED | other)), engine)
    assert same(snapshot(engine), before)


def test_the_staging_buffers_are_two_and_as_large_as_asked_for(monkeypatch):
    allocated = []
    allocate = torch.empty
    monkeypatch.setattr(
        torch,
        "empty",
        lambda *sizes, **options: allocated.append(sizes) or allocate(*sizes, **options),
    )
    connector, engine = make_connector(**STAGED), make_kv_caches(LAYOUT, 1)
    for start, end in ((5, 8), (4, 12), (5, 8)):
        assert gathered(connector, engine, start, end) == gathered(
            VLLMPagedMemGPUConnector(HIDDEN, NUM_LAYERS), engine, start, end
        )
    assert allocated == [(LAYOUT.num_bytes(8),)] * 2
    assert gathered(connector, engine, 4, 15) == gathered(make_connector(), engine, 4, 15)
    assert allocated[2:] == [(LAYOUT.num_bytes(11),)], "longer chunks allocate"


def test_threads_do_not_disturb_each_other_in_the_buffer():
    connector, engine = make_connector(**STAGED), make_kv_caches(LAYOUT, 1)
    wanted = {start: gathered(make_connector(), engine, start, start + 4) for start in range(4, 11)}
    wrong = []

    def work(start):
        wrong.extend(
            start
            for _ in range(50)
            if gathered(connector, engine, start, start + 4) != wanted[start]
        )

    threads = [threading.Thread(target=work, args=(start,)) for start in wanted]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize("first", [torch.inference_mode, torch.enable_grad])
def test_the_buffer_serves_every_mode(first):
    connector, engine = make_connector(**STAGED), make_kv_caches(LAYOUT, 1)
    with first():
        memory = make_memory(connector.get_shape(3), "bfloat16")
        connector.from_gpu(memory, 5, 8, **kwargs_for(engine))
    for mode in (torch.enable_grad, torch.inference_mode):
        target = make_kv_caches(LAYOUT, 2)
        with mode():
            connector.to_gpu(memory, 5, 8, **kwargs_for(target))
        assert gathered(make_connector(), target) == bytes(memory.byte_array)


def test_the_same_tensors_are_bound_once():
    connector, engine = make_connector(), make_kv_caches(LAYOUT, 1)
    binding = connector.binding_of(engine)
    assert connector.binding_of(list(engine)) is binding
    assert connector.binding_of([t[:] for t in engine]) is binding
    assert connector.binding_of(make_kv_caches(LAYOUT, 1)) is not binding


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda t: t.set_(torch.full_like(t, 3)), id="other memory"),
        pytest.param(
            lambda t: t.set_(t.untyped_storage(), 0, t.shape, (*t.stride()[:2], 5, 20, 1)),
            id="other strides",
        ),
        pytest.param(lambda t: t.data.copy_(torch.full_like(t, 3)), id="other content"),
    ],
)
def test_tensors_changed_in_place_are_not_stale(change):
    connector, engine = make_connector(), make_kv_caches(LAYOUT, 1)
    before = gathered(connector, engine)
    with torch.no_grad():
        change(engine[1])
    assert gathered(connector, engine) == gathered(make_connector(), engine) != before
