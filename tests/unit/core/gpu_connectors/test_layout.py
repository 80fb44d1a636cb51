"""Layouts: the memory objects of each, the engine's tensors that match it, and what is refused."""

from __future__ import annotations

import pytest
import torch
from lmcache_core.errors import LayoutError
from lmcache_core.gpu_connectors import KVLayout, LayerGroup, LogicalMemory, PagedGPUConnector
from lmcache_core.gpu_connectors.layout import gaps_between

from tests.suites.connector_suite import make_memory
from tests.suites.kv_caches import make_kv_caches, one_group, same, snapshot

A = LayerGroup("a", 2, 3, 5, torch.bfloat16, layers=("a0", "a1"))
B = LayerGroup("b", 1, 1, 7, "bfloat16", sides=1, layers=("b0",))


@pytest.mark.parametrize(
    "change",
    [
        {"num_layers": 0},
        {"sides": 3},
        {"dtype": "complex64"},
        {"order": "NDH"},
        {"packing": "together"},
        {"sides": 1, "packing": "kv_first"},
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


def test_the_fingerprint_covers_the_bytes_of_a_memory_object_and_no_more():
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
    unnamed = PagedGPUConnector(one_group())
    with pytest.raises(LayoutError, match="3 layers"):
        unnamed.binding_of(
            dict(zip("xyz", make_kv_caches(one_group(num_layers=3), 1), strict=True))
        )


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
    for missing in ([torch.arange(4)], {"a": torch.arange(4), "c": torch.arange(4)}):
        with pytest.raises(ValueError, match="slot_mapping"):
            connector.from_gpu(memory, 1, 4, kvcaches=engine, slot_mapping=missing)


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
