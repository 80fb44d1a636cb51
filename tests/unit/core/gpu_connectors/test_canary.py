"""The canary passes every layout that is declared as it is, and finds every one that is not;
engine memory is as before.
"""

from __future__ import annotations

import pytest
import torch
from lmcache_core.errors import LayoutError
from lmcache_core.gpu_connectors import (
    KVLayout,
    LayerGroup,
    LogicalMemory,
    Order,
    Packing,
    PagedGPUConnector,
    VLLMPagedMemGPUConnector,
    run_canary,
)
from lmcache_core.memory import BytesBufferMemoryObj, HostMemoryAllocator

from tests.suites.kv_caches import make_kv_caches, one_group, same, snapshot

SIDE = 4
"""Heads and tokens of a block: as many, so that a wrong order has the right shape."""
DTYPES = ["bfloat16", "float32", "float8_e4m3fn", "float8_e5m2", "uint8"]


def layout_of(**fields):
    return one_group(**({"num_kv_heads": SIDE, "head_size": 6} | fields))


RIGHT = {
    **{
        f"{packing} {order}": layout_of(packing=packing, order=order)
        for packing in Packing
        for order in Order
    },
    **{dtype: layout_of(dtype=dtype, packing=Packing.LAST_DIM) for dtype in DTYPES},
    "one head": layout_of(num_kv_heads=1, packing=Packing.BLOCK_FIRST),
    "latent": layout_of(num_kv_heads=1, sides=1),
    "hybrid": KVLayout(
        (
            LayerGroup("a", 2, 4, 5, "float16"),
            LayerGroup("b", 1, 1, 16, "float16"),
            LayerGroup("c", 3, 1, 9, "uint8", 1),
        )
    ),
}
NHD, HND = {"order": Order.NHD}, {"order": Order.HND}
# What the engine has, what the connector is told, and how many blocks there are: two blocks look
# like two sides.
WRONG = {
    **{
        f"{p}: {a['order']} told as {b['order']}": (a | {"packing": p}, b | {"packing": p}, 9)
        for p in Packing
        for a, b in ((NHD, HND), (HND, NHD))
    },
    "kv_first told as block_first": (
        {"packing": Packing.KV_FIRST},
        {"packing": Packing.BLOCK_FIRST},
        2,
    ),
    "block_first told as kv_first": (
        {"packing": Packing.BLOCK_FIRST},
        {"packing": Packing.KV_FIRST},
        2,
    ),
    **{
        f"latent: {a['order']} told as {b['order']}": (a | {"sides": 1}, b | {"sides": 1}, 9)
        for a, b in ((NHD, HND), (HND, NHD))
    },
}


def through_other_memory(memory):
    """A store and a load: the bytes come back in memory of their own."""
    return BytesBufferMemoryObj(bytes(memory.byte_array), memory.metadata)


def canary(connector, layout, kvcaches, transport=through_other_memory, **options):
    """Run it, and see to it that engine memory is as before."""
    before = snapshot(kvcaches)
    try:
        run_canary(connector, kvcaches, LogicalMemory(layout, kvcaches), transport, **options)
    finally:
        assert same(snapshot(kvcaches), before)


@pytest.mark.parametrize(
    "sizes", [(20, SIDE), (3, SIDE), (2, 1), (1, 2), (40, 1), (13, 100)], ids=str
)
@pytest.mark.parametrize("layout", RIGHT.values(), ids=RIGHT.keys())
def test_what_is_declared_as_it_is_passes(layout, sizes):
    canary(PagedGPUConnector(layout), layout, make_kv_caches(layout, 3, sizes=sizes))


@pytest.mark.parametrize("name", ["kv_first NHD", "split HND", "last_dim NHD"])
def test_the_order_of_memory_is_nobodys_business(name):
    canary(
        PagedGPUConnector(RIGHT[name]), RIGHT[name], make_kv_caches(RIGHT[name], 3, is_strided=True)
    )


def test_the_documented_connector_has_its_canary_too():
    layout = layout_of(packing=Packing.KV_FIRST)
    canary(VLLMPagedMemGPUConnector(SIDE * 6, 2), layout, make_kv_caches(layout, 3))


@pytest.mark.parametrize(("engine", "told", "num_blocks"), WRONG.values(), ids=WRONG.keys())
def test_what_is_declared_wrongly_is_found_though_its_shape_is_right(engine, told, num_blocks):
    actual, declared = layout_of(**engine), layout_of(**told)
    kvcaches = make_kv_caches(actual, 3, sizes=(num_blocks, SIDE))
    PagedGPUConnector(declared).binding_of(kvcaches)  # nothing to see in the shapes
    with pytest.raises(LayoutError, match=r"layer \d, (K|V|latent), slot \d+, head \d.*order"):
        canary(PagedGPUConnector(declared), actual, kvcaches)


def test_k_and_v_that_changed_places_are_found():
    layout = layout_of()
    kvcaches = make_kv_caches(layout, 3)
    with pytest.raises(LayoutError, match="layer 0, K"):
        run_canary(
            PagedGPUConnector(layout),
            [(v, k) for k, v in kvcaches],
            LogicalMemory(layout, kvcaches),
            through_other_memory,
        )


def test_layers_in_another_order_are_found():
    layout = layout_of()
    kvcaches = make_kv_caches(layout, 3)
    with pytest.raises(LayoutError, match="layer 0, K"):
        run_canary(
            PagedGPUConnector(layout),
            kvcaches[::-1],
            LogicalMemory(layout, kvcaches),
            through_other_memory,
        )


def test_only_the_wrong_group_of_a_hybrid_model_is_blamed():
    right = LayerGroup("right", 1, 3, 5, "float16")
    actual, declared = (
        KVLayout((right, LayerGroup("wrong", 1, SIDE, 6, "float16", order=order)))
        for order in Order
    )
    with pytest.raises(LayoutError, match="group 'wrong'"):
        canary(PagedGPUConnector(declared), actual, make_kv_caches(actual, 3, sizes=(9, SIDE)))


def test_groups_may_be_the_same_memory():
    """Hybrid engines give all groups the same bytes; a block belongs to one group at a time."""
    layout = KVLayout(
        tuple(LayerGroup(name, 2, 3, 5, "float16", packing=Packing.BLOCK_FIRST) for name in "abc")
    )
    tensors = make_kv_caches(KVLayout(layout.groups[:1]), 3, sizes=(12, 4))
    canary(PagedGPUConnector(layout), layout, tensors * 3)


@pytest.mark.parametrize(
    "other", [{"head_size": 12}, {"num_kv_heads": 2}, {"num_layers": 1}, {"dtype": "float16"}]
)
def test_the_engine_must_have_what_the_connector_was_made_for(other):
    layout = layout_of()
    claimed = layout_of(**other)
    with pytest.raises(LayoutError, match="canary: the connector was made for"):
        run_canary(
            PagedGPUConnector(layout),
            make_kv_caches(layout, 3),
            LogicalMemory(claimed, make_kv_caches(claimed, 3)),
            through_other_memory,
        )


def test_an_engine_whose_tensors_are_not_what_it_claims_is_told():
    with pytest.raises(LayoutError, match="the engine has"):
        LogicalMemory(layout_of(), make_kv_caches(layout_of(head_size=7), 3))


def test_a_store_that_changes_bytes_is_found():
    def damaged(memory):
        content = bytearray(memory.byte_array)
        content[-1] ^= 1
        return BytesBufferMemoryObj(content, memory.metadata)

    layout = layout_of()
    with pytest.raises(LayoutError, match="store gave back other bytes"):
        canary(PagedGPUConnector(layout), layout, make_kv_caches(layout, 3), damaged)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_engine_memory_is_restored_when_the_transport_fails(error):
    def failing(memory):
        raise error

    layout = layout_of()
    with pytest.raises(error):
        canary(PagedGPUConnector(layout), layout, make_kv_caches(layout, 3), failing)


class Crooked(PagedGPUConnector):
    """Loses the last token, or writes one slot too many."""

    def __init__(self, layout, fault):
        super().__init__(layout)
        self._fault = fault

    def to_gpu(self, memory_obj, start, end, **kwargs):
        if self._fault == "lost":
            super().to_gpu(memory_obj, start, end, **kwargs)
            for tensor in kwargs["kvcaches"]:
                tensor[:, kwargs["slot_mapping"][-1] // SIDE].zero_()
        else:
            super().to_gpu(memory_obj, start, end, **kwargs)
            kwargs["kvcaches"][1][0, 0, 0, 0, 0] += 1


@pytest.mark.parametrize(
    ("fault", "said"), [("lost", "scattered to the wrong place"), ("beside", "changed other slots")]
)
def test_a_scatter_that_misses_or_spills_is_found(fault, said):
    layout = layout_of(packing=Packing.KV_FIRST, dtype="int32")
    with pytest.raises(LayoutError, match=said):
        canary(Crooked(layout, fault), layout, make_kv_caches(layout, 3))


def test_there_must_be_two_slots():
    layout = layout_of()
    with pytest.raises(LayoutError, match="two slots"):
        canary(PagedGPUConnector(layout), layout, make_kv_caches(layout, 3, sizes=(1, 1)))


def test_what_the_transport_returns_is_released():
    allocator = HostMemoryAllocator(1 << 20)

    def transport(memory):
        loaded = allocator.allocate(memory.metadata.shape, memory.metadata.dtype)
        loaded.byte_array[:] = memory.byte_array
        return loaded

    layout = RIGHT["hybrid"]
    canary(PagedGPUConnector(layout), layout, make_kv_caches(layout, 3), transport)
    assert allocator.used_bytes == 0


def test_the_pattern_is_finite_and_nowhere_twice():
    from lmcache_core.gpu_connectors import canary as module

    group = LayerGroup("", 4, 8, 16, "float8_e4m3fn")
    pattern = module._pattern(group, 0, 32)
    assert pattern.float().isfinite().all()
    heads = pattern.view(torch.uint8).flatten(0, 3)
    assert len(torch.unique(heads, dim=0)) == len(heads)
