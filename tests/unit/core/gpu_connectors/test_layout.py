"""Layouts: what is refused, what a memory object looks like, and how an engine's tensors are
matched with one.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lmcache_core.errors import LayoutError
from lmcache_core.gpu_connectors import (
    KVLayout,
    LayerGroup,
    LogicalMemory,
    Order,
    Packing,
    PagedGPUConnector,
)
from lmcache_core.gpu_connectors.layout import gaps_between
from lmcache_core.record import RecordHeader

from tests.suites.connector_suite import make_memory
from tests.suites.kv_caches import make_kv_caches, one_group, same, snapshot

A = LayerGroup("a", 2, 3, 5, torch.bfloat16, layers=("a0", "a1"))
B = LayerGroup("b", 1, 1, 7, "bfloat16", sides=1, layers=("b0",))


@pytest.mark.parametrize(
    "change",
    [
        {"num_layers": 0},
        {"num_kv_heads": 0},
        {"head_size": -1},
        {"sides": 3},
        {"dtype": "complex64"},
        {"order": "NDH"},
        {"packing": "together"},
        {"sides": 1, "packing": "kv_first"},
        {"layers": ("one",)},
        {"layers": ("one", "one")},
    ],
    ids=str,
)
def test_impossible_groups_are_refused(change):
    with pytest.raises(LayoutError, match="layer group"):
        one_group(**change)


@pytest.mark.parametrize("groups", [(), (A, A)])
def test_a_layout_needs_groups_that_can_be_told_apart(groups):
    with pytest.raises(LayoutError, match="different names"):
        KVLayout(groups)


def test_dtypes_orders_and_packings_may_be_given_as_text():
    assert LayerGroup(
        "", 1, 1, 1, torch.float8_e5m2, order="HND", packing="last_dim"
    ) == LayerGroup("", 1, 1, 1, "float8_e5m2", order=Order.HND, packing=Packing.LAST_DIM)


def test_one_group_is_a_kv_blob_and_several_are_flat():
    assert PagedGPUConnector(KVLayout((A,))).get_shape(4) == torch.Size((2, 2, 4, 15))
    connector = PagedGPUConnector(KVLayout((A, B)))
    specs = connector.tensor_specs(4)
    assert [(spec.group, spec.dtype, spec.shape, spec.offset, spec.length) for spec in specs] == [
        ("a", "bfloat16", (2, 2, 4, 15), 0, 480),
        ("b", "bfloat16", (1, 1, 4, 7), 512, 56),
    ]
    assert connector.get_shape(4) == torch.Size((284,))
    assert connector.layout.kv_dtype == "bfloat16"
    assert gaps_between(specs) == [slice(480, 512)]
    mixed = PagedGPUConnector(KVLayout((A, LayerGroup("c", 1, 1, 3, "float8_e4m3fn"))))
    assert (mixed.get_shape(4), mixed.layout.kv_dtype) == (torch.Size((536,)), "uint8")


@pytest.mark.parametrize("num_tokens", [0, 1, 4, 256])
def test_specs_are_what_a_record_takes(num_tokens):
    from lmcache_core.keys import CacheEngineKey

    layout = KVLayout((A, B))
    key = CacheEngineKey("vllm", "model", 1, 0, "0" * 64)
    header = RecordHeader(
        key.canonical(), "naive", "", False, layout.tensor_specs(num_tokens), bytes(16)
    )
    header.check(layout.num_bytes(num_tokens))


def test_the_fingerprint_covers_what_a_memory_object_shows_and_no_more():
    """The text is part of the identity of cached KV: it never changes for the same layout."""
    assert KVLayout((A, B)).fingerprint() == "kv/1;'a':2x2x3x5:bfloat16;'b':1x1x1x7:bfloat16"
    for same_bytes in ({"order": "HND"}, {"packing": "last_dim"}, {"layers": ("x", "y")}):
        assert one_group(**same_bytes).fingerprint() == one_group().fingerprint()
    others = [
        {"name": "x"},
        {"num_layers": 3},
        {"num_kv_heads": 5, "head_size": 3},
        {"dtype": "float16"},
        {"sides": 1},
    ]
    assert len({one_group(**other).fingerprint() for other in [{}, *others]}) == len(others) + 1
    assert KVLayout((A, B)).fingerprint() != KVLayout((B, A)).fingerprint()


def test_tensors_may_come_by_name_in_any_order():
    layout = KVLayout((A, B))
    engine = make_kv_caches(layout, 1)
    named = {"b0": engine[2], "a1": engine[1], "elsewhere": torch.zeros(1), "a0": engine[0]}
    connector = PagedGPUConnector(layout)
    first, second = (make_memory(connector.get_shape(6), "bfloat16") for _ in range(2))
    connector.from_gpu(first, 0, 6, kvcaches=engine, slot_mapping=torch.arange(6))
    connector.from_gpu(second, 0, 6, kvcaches=named, slot_mapping=torch.arange(6))
    assert bytes(first.byte_array) == bytes(second.byte_array)
    with pytest.raises(LayoutError, match="a1"):
        connector.binding_of({name: tensor for name, tensor in named.items() if name != "a1"})


def test_tensors_by_name_are_in_order_where_the_layout_names_none():
    layout = one_group()
    engine = make_kv_caches(layout, 1)
    connector = PagedGPUConnector(layout)
    binding = connector.binding_of(dict(zip("xy", engine, strict=True)))
    assert [page.data_ptr() for page in binding.pages[0].tensors[:2]] == [
        k.data_ptr() for k, _ in engine
    ]
    with pytest.raises(LayoutError, match="3 layers"):
        connector.binding_of(dict(zip("xyz", [*engine, engine[0]], strict=True)))


def test_groups_may_have_slots_of_their_own():
    layout = KVLayout((A, B))
    engine, connector = make_kv_caches(layout, 1), PagedGPUConnector(layout)
    memory = make_memory(connector.get_shape(3), "bfloat16")
    slots = {"a": torch.tensor([-1, 4, 5, 9]), "b": torch.tensor([-1, 20, 2, 0])}
    oracle = LogicalMemory(layout, engine)
    for mapping in (slots, list(slots.values()), tuple(slots.values())):
        memory.byte_array[:] = bytes(memory.get_size())
        connector.from_gpu(memory, 1, 4, kvcaches=engine, slot_mapping=mapping)
        content = memory.tensor
        for i, slot in enumerate((20, 2, 0)):
            assert torch.equal(
                content[256 + 7 * i :][:7].view(torch.uint8),
                oracle.read(1, 0, slot)[0, 0].view(torch.uint8),
            )
        assert torch.equal(
            content[30:45].view(torch.uint8), oracle.read(0, 0, 9)[0].flatten().view(torch.uint8)
        )


@pytest.mark.parametrize(
    "mapping",
    [
        [torch.arange(4)],
        [torch.arange(4)] * 3,
        {"a": torch.arange(4)},
        {"a": torch.arange(4), "c": torch.arange(4)},
    ],
)
def test_every_group_needs_slots(mapping):
    layout = KVLayout((A, B))
    connector, engine = PagedGPUConnector(layout), make_kv_caches(layout, 1)
    with pytest.raises(ValueError, match="slot_mapping"):
        connector.from_gpu(
            make_memory(connector.get_shape(3), "bfloat16"),
            0,
            3,
            kvcaches=engine,
            slot_mapping=mapping,
        )


def test_wrong_slots_of_the_last_group_leave_the_first_untouched():
    layout = KVLayout((A, B))
    connector, engine = PagedGPUConnector(layout), make_kv_caches(layout, 1)
    before = snapshot(engine)
    for wrong in (torch.tensor([1, 1]), torch.tensor([0, 99]), torch.tensor([-1, 3])):
        with pytest.raises(LayoutError):
            connector.to_gpu(
                make_memory(connector.get_shape(2), "bfloat16"),
                0,
                2,
                kvcaches=engine,
                slot_mapping=[torch.arange(2), wrong],
            )
    assert same(snapshot(engine), before)


def test_opaque_blocks_move_whole():
    engine = torch.randint(0, 256, (7, 2 * 4 * 96), dtype=torch.uint8)
    wanted, blocks = engine[[5, 2]].clone(), torch.tensor([5, 2])
    connector = PagedGPUConnector(
        one_group(num_layers=1, num_kv_heads=1, head_size=768, dtype="uint8", sides=1)
    )
    memory = make_memory(connector.get_shape(2), "uint8")
    connector.from_gpu(memory, 0, 2, kvcaches=[engine.view(7, 1, 768)], slot_mapping=blocks)
    engine.fill_(0)
    connector.to_gpu(memory, 0, 2, kvcaches=[engine.view(7, 1, 768)], slot_mapping=blocks.flip(0))
    assert torch.equal(engine[[2, 5]], wanted)
    assert not engine[[0, 1, 3, 4, 6]].any()


groups = st.builds(
    LayerGroup,
    name=st.just(""),
    num_layers=st.integers(1, 3),
    num_kv_heads=st.integers(1, 4),
    head_size=st.integers(1, 9),
    dtype=st.sampled_from(["bfloat16", "float32", "float8_e4m3fn", "float8_e5m2"]),
    order=st.sampled_from(Order),
    packing=st.sampled_from(Packing),
)
latents = st.builds(
    LayerGroup,
    st.just(""),
    st.integers(1, 3),
    st.just(1),
    st.integers(1, 9),
    st.sampled_from(["float16", "uint8"]),
    st.just(1),
)


@st.composite
def layouts(draw):
    found = draw(st.lists(st.one_of(groups, latents), min_size=1, max_size=3))
    names = [""] if len(found) == 1 else ["a", "b", "c"]
    fields = ("num_layers", "num_kv_heads", "head_size", "dtype", "sides", "order", "packing")
    return KVLayout(
        tuple(
            LayerGroup(name, **{f: getattr(g, f) for f in fields})
            for name, g in zip(names, found, strict=False)
        )
    )


@settings(deadline=None, max_examples=80)
@given(
    layout=layouts(),
    num_blocks=st.integers(1, 5),
    block_size=st.integers(1, 6),
    is_strided=st.booleans(),
    data=st.data(),
)
def test_any_layout_takes_any_slots_out_of_one_engine_into_another(
    layout, num_blocks, block_size, is_strided, data
):
    every_slot = range(num_blocks * block_size)
    num_tokens = data.draw(st.integers(0, len(every_slot)))
    source, target = (
        [
            data.draw(st.permutations(every_slot).map(lambda slots: slots[:num_tokens]))
            for _ in layout.groups
        ]
        for _ in range(2)
    )
    engine, other, expected = (
        make_kv_caches(layout, seed, is_strided, sizes=(num_blocks, block_size))
        for seed in (1, 50, 50)
    )
    connector = PagedGPUConnector(layout)
    memory = make_memory(connector.get_shape(num_tokens), connector.layout.kv_dtype)
    connector.from_gpu(
        memory,
        0,
        num_tokens,
        kvcaches=engine,
        slot_mapping=[torch.tensor(s, dtype=torch.int64) for s in source],
    )
    connector.to_gpu(
        memory,
        0,
        num_tokens,
        kvcaches=other,
        slot_mapping=[torch.tensor(s, dtype=torch.int64) for s in target],
    )
    read, write = LogicalMemory(layout, engine), LogicalMemory(layout, expected)
    for i, group in enumerate(layout.groups):
        for layer in range(group.num_layers):
            for origin, place in zip(source[i], target[i], strict=True):
                write.write(i, layer, place, read.read(i, layer, origin))
    assert same(snapshot(other), snapshot(expected))
