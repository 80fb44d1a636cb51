"""What the connectors for paged memory have beyond their contract
(`tests/contract/test_gpu_connectors.py`).
"""

from __future__ import annotations

import threading

import pytest
import torch
from lmcache_core.errors import LayoutError
from lmcache_core.gpu_connectors import (
    KVLayout,
    LayerGroup,
    LogicalMemory,
    Packing,
    PagedGPUConnector,
    VLLMPagedMemGPUConnector,
    VLLMPagedMemGPUConnectorV2,
)

from tests.suites.connector_suite import SLOTS, make_memory
from tests.suites.kv_caches import make_kv_caches, one_group, same, snapshot

HIDDEN, NUM_LAYERS = 15, 2
LAYOUT = one_group(packing=Packing.KV_FIRST)


@pytest.fixture
def connector():
    return VLLMPagedMemGPUConnector(HIDDEN, NUM_LAYERS)


@pytest.mark.parametrize("missing", ["kvcaches", "slot_mapping"])
def test_a_missing_argument_is_named(connector, missing):
    kwargs = {"kvcaches": make_kv_caches(LAYOUT, 1), "slot_mapping": torch.tensor(SLOTS)}
    del kwargs[missing]
    memory = make_memory(connector.get_shape(1), "bfloat16")
    for copy in (connector.from_gpu, connector.to_gpu):
        with pytest.raises(ValueError, match=missing):
            copy(memory, 4, 5, **kwargs)


def test_pages_on_a_device_whose_copies_cannot_be_ordered_are_refused(connector):
    """As those of Intel's GPUs: here torch's device without memory."""
    engine = [tensor.to("meta") for tensor in make_kv_caches(LAYOUT, 1)]
    for one in (connector, PagedGPUConnector(LAYOUT)):
        with pytest.raises(LayoutError, match="are on meta: KV can be cached only on cuda or cpu"):
            one.binding_of(engine)


def test_k_and_v_that_are_the_same_memory_are_read_but_not_written(connector):
    engine = [(k, k) for k, _ in make_kv_caches(one_group(), 1)]
    memory = make_memory(connector.get_shape(2), "bfloat16")
    connector.from_gpu(memory, 5, 7, kvcaches=engine, slot_mapping=torch.tensor(SLOTS))
    with pytest.raises(LayoutError, match="share memory"):
        connector.to_gpu(memory, 5, 7, kvcaches=engine, slot_mapping=torch.tensor(SLOTS))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("options", [{}, {"use_gpu": True, "chunk_size": 16, "device": "cuda"}])
@pytest.mark.parametrize("is_on_device", [False, True])
def test_pages_on_a_gpu_go_through_host_memory(options, is_on_device):
    source, target = ([t.cuda() for t in make_kv_caches(LAYOUT, seed)] for seed in (1, 50))
    slots = torch.tensor(SLOTS, device="cuda" if is_on_device else "cpu")
    connector = VLLMPagedMemGPUConnectorV2(HIDDEN, NUM_LAYERS, **options)
    memory = make_memory(connector.get_shape(11), "bfloat16")
    connector.from_gpu(memory, 4, 15, kvcaches=source, slot_mapping=slots)
    connector.to_gpu(memory, 4, 15, kvcaches=target, slot_mapping=slots)
    for slot in SLOTS[4:]:
        got, wanted = (
            LogicalMemory(LAYOUT, engine).read(0, 1, slot).view(torch.uint8)
            for engine in (target, source)
        )
        assert torch.equal(got, wanted)


@pytest.mark.parametrize("method", ["from_gpu", "to_gpu"])
def test_groups_in_the_same_memory_share_no_block(method):
    connector = PagedGPUConnector(
        KVLayout(
            tuple(
                LayerGroup(name, 1, 3, 5, "bfloat16", packing="kv_first")
                for name in ("full", "window")
            )
        )
    )
    page = make_kv_caches(LAYOUT, 1)[0]
    memory = make_memory(connector.get_shape(4), "bfloat16")
    before, content = snapshot([page]), bytes(memory.byte_array)
    for slots in ([0, 1, 2, 3], [12, 13, 14, 3]):
        mappings = [torch.tensor([0, 1, 2, 4]), torch.tensor(slots)]
        with pytest.raises(
            LayoutError, match="'full' and 'window' are the same memory and both have block 0"
        ):
            getattr(connector, method)(memory, 0, 4, kvcaches=[page, page], slot_mapping=mappings)
    assert same(snapshot([page]), before)
    assert bytes(memory.byte_array) == content
    apart = [torch.tensor([0, 1, 2, 4]), torch.tensor([12, 13, 8, 15])]
    getattr(connector, method)(memory, 0, 4, kvcaches=[page, page], slot_mapping=apart)
    getattr(connector, method)(memory, 0, 4, kvcaches=[page, page.clone()], slot_mapping=apart[0])


CHECKED = torch.tensor([-1, -1, 9, 3, 4, 5, 14, 0])
"""Slots of which those of tokens [2, 8) are checked once for all chunks of a transfer."""


@pytest.fixture
def declared():
    return PagedGPUConnector(LAYOUT)


@pytest.mark.parametrize(("start", "end"), [(1, 4), (6, 9)])
def test_unchecked_tokens_are_refused(declared, start, end):
    engine = make_kv_caches(LAYOUT, 1)
    before = snapshot(engine)
    addresses = declared.addresses_of(engine, CHECKED, 2, 8)
    memory = make_memory(declared.get_shape(end - start), LAYOUT.kv_dtype)
    for copy in (declared.from_gpu, declared.to_gpu):
        with pytest.raises(
            LayoutError, match=rf"tokens \[{start}, {end}\) are not among those .* \[2, 8\)"
        ):
            copy(memory, start, end, addresses=addresses)
    assert same(snapshot(engine), before)


STAGED = {"use_gpu": True, "chunk_size": 8, "dtype": torch.bfloat16, "device": "cpu"}


def make_connector(**options):
    return VLLMPagedMemGPUConnectorV2(HIDDEN, NUM_LAYERS, **options)


def kwargs_for(engine):
    return {"kvcaches": engine, "slot_mapping": torch.tensor(SLOTS)}


def gathered(connector, engine, start=5, end=8):
    memory = make_memory(connector.get_shape(end - start), "bfloat16")
    connector.from_gpu(memory, start, end, **kwargs_for(engine))
    return bytes(memory.byte_array)


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
