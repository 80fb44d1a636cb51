"""The canary passes every layout declared rightly, finds every one declared wrongly, and leaves
engine memory as it was.
"""

from __future__ import annotations

import pytest
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
DTYPES = ["float32", "float8_e5m2", "uint8"]


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
KV_FIRST, BLOCK_FIRST = {"packing": Packing.KV_FIRST}, {"packing": Packing.BLOCK_FIRST}
LATENT = {"sides": 1}
# What the engine has, what is declared, and how many blocks there are: two blocks look like two
# sides.
WRONG = {
    **{f"{p}: order": (NHD | {"packing": p}, HND | {"packing": p}, 9) for p in Packing},
    "latent: order": (HND | LATENT, NHD | LATENT, 9),
    "kv_first as block_first": (KV_FIRST, BLOCK_FIRST, 2),
    "block_first as kv_first": (BLOCK_FIRST, KV_FIRST, 2),
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


@pytest.mark.parametrize("layout", RIGHT.values(), ids=RIGHT.keys())
def test_a_layout_declared_rightly_passes(layout):
    for sizes in ((20, SIDE), (2, 1), (1, 2), (13, 100)):
        canary(PagedGPUConnector(layout), layout, make_kv_caches(layout, 3, sizes=sizes))
    with pytest.raises(LayoutError, match="two slots"):
        canary(PagedGPUConnector(layout), layout, make_kv_caches(layout, 3, sizes=(1, 1)))


@pytest.mark.parametrize(("engine", "stated", "num_blocks"), WRONG.values(), ids=WRONG.keys())
def test_a_wrong_layout_is_found_though_its_shape_is_right(engine, stated, num_blocks):
    actual, declared = layout_of(**engine), layout_of(**stated)
    kvcaches = make_kv_caches(actual, 3, sizes=(num_blocks, SIDE))
    PagedGPUConnector(declared).binding_of(kvcaches)  # the shapes are right
    with pytest.raises(LayoutError, match=r"layer \d, (K|V|latent), slot \d+, head \d.*order"):
        canary(PagedGPUConnector(declared), actual, kvcaches)


@pytest.mark.parametrize("change", [lambda layers: [(v, k) for k, v in layers], lambda x: x[::-1]])
def test_sides_or_layers_in_another_order_are_found(change):
    layout = layout_of()
    kvcaches = make_kv_caches(layout, 3)
    with pytest.raises(LayoutError, match="layer 0, K"):
        run_canary(
            PagedGPUConnector(layout),
            change(kvcaches),
            LogicalMemory(layout, kvcaches),
            through_other_memory,
        )


def test_groups_may_be_the_same_memory():
    """Hybrid engines give all groups the same bytes; a block belongs to one group at a time."""
    layout = KVLayout(
        tuple(LayerGroup(name, 2, 3, 5, "float16", packing=Packing.BLOCK_FIRST) for name in "abc")
    )
    tensors = make_kv_caches(KVLayout(layout.groups[:1]), 3, sizes=(12, 4))
    canary(PagedGPUConnector(layout), layout, tensors * 3)


def test_a_store_that_changes_bytes_is_found():
    def damaged(memory):
        content = bytearray(memory.byte_array)
        content[-1] ^= 1
        return BytesBufferMemoryObj(content, memory.metadata)

    layout = layout_of()
    with pytest.raises(LayoutError, match="store gave back other bytes"):
        canary(PagedGPUConnector(layout), layout, make_kv_caches(layout, 3), damaged)


def test_the_pattern_is_small_however_large_blocks_are():
    sizes = []

    def counted(memory):
        sizes.append(memory.get_size())
        return through_other_memory(memory)

    layout = layout_of()
    canary(PagedGPUConnector(layout), layout, make_kv_caches(layout, 3, sizes=(4, 64)), counted)
    assert sizes == [sum(spec.length for spec in layout.tensor_specs(32))]


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
        super().to_gpu(memory_obj, start, end, **kwargs)
        if self._fault == "lost":
            for tensor in kwargs["kvcaches"]:
                tensor[:, kwargs["slot_mapping"][-1] // SIDE].zero_()
        else:
            kwargs["kvcaches"][1][0, 0, 0, 0, 0] += 1


@pytest.mark.parametrize(
    ("fault", "message"),
    [("lost", "scattered to the wrong place"), ("spilt", "changed other slots")],
)
def test_a_scatter_that_misses_or_spills_is_found(fault, message):
    layout = layout_of(packing=Packing.KV_FIRST, dtype="int32")
    with pytest.raises(LayoutError, match=message):
        canary(Crooked(layout, fault), layout, make_kv_caches(layout, 3))


def test_memory_from_the_transport_is_released():
    allocator = HostMemoryAllocator(1 << 20)

    def transport(memory):
        loaded = allocator.allocate(memory.metadata.shape, memory.metadata.dtype)
        loaded.byte_array[:] = memory.byte_array
        return loaded

    layout = RIGHT["hybrid"]
    canary(PagedGPUConnector(layout), layout, make_kv_caches(layout, 3), transport)
    assert allocator.used_bytes == 0


@pytest.mark.parametrize("other", [{"head_size": 12}, {"dtype": "float16"}])
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


def test_an_engine_whose_tensors_are_not_what_it_claims_is_refused():
    with pytest.raises(LayoutError, match="the engine has"):
        LogicalMemory(layout_of(), make_kv_caches(layout_of(head_size=7), 3))


def test_the_documented_connector_passes():
    layout = layout_of(packing=Packing.KV_FIRST)
    canary(VLLMPagedMemGPUConnector(SIDE * 6, 2), layout, make_kv_caches(layout, 3))
