"""Slots that are checked once for all chunks of a transfer."""

from __future__ import annotations

import pytest
import torch
from lmcache_core.errors import LayoutError
from lmcache_core.gpu_connectors import KVLayout, LayerGroup, PagedGPUConnector

from tests.suites.connector_suite import make_memory
from tests.suites.kv_caches import make_kv_caches, one_group, same, snapshot

LAYOUT = one_group()
SLOTS = torch.tensor([-1, -1, 9, 3, 4, 5, 14, 0])
BEGIN, END = 2, 8


@pytest.fixture
def connector():
    return PagedGPUConnector(LAYOUT)


def fill(connector, engine, start, end, **kwargs):
    memory = make_memory(connector.get_shape(end - start), connector.layout.kv_dtype)
    connector.from_gpu(memory, start, end, **kwargs)
    return bytes(memory.byte_array)


@pytest.mark.parametrize(("start", "end"), [(2, 8), (2, 4), (4, 7), (7, 8), (5, 5)])
def test_a_chunk_is_copied_as_with_slots_of_its_own(connector, start, end):
    engine = make_kv_caches(LAYOUT, 1)
    addresses = connector.addresses_of(engine, SLOTS, BEGIN, END)
    alone = fill(connector, engine, start, end, kvcaches=engine, slot_mapping=SLOTS)
    assert fill(connector, engine, start, end, addresses=addresses) == alone
    others = [make_kv_caches(LAYOUT, 2), make_kv_caches(LAYOUT, 2)]
    memory = make_memory(connector.get_shape(end - start), connector.layout.kv_dtype)
    memory.byte_array[:] = alone
    connector.to_gpu(memory, start, end, kvcaches=others[0], slot_mapping=SLOTS)
    connector.to_gpu(
        memory, start, end, addresses=connector.addresses_of(others[1], SLOTS, BEGIN, END)
    )
    assert same(*map(snapshot, others))


@pytest.mark.parametrize(("start", "end"), [(1, 4), (6, 9), (0, 1)])
def test_tokens_that_were_not_checked_are_refused(connector, start, end):
    engine = make_kv_caches(LAYOUT, 1)
    before = snapshot(engine)
    addresses = connector.addresses_of(engine, SLOTS, BEGIN, END)
    memory = make_memory(connector.get_shape(end - start), connector.layout.kv_dtype)
    for copy in (connector.from_gpu, connector.to_gpu):
        with pytest.raises(
            LayoutError, match=rf"tokens \[{start}, {end}\) are not among those .* \[2, 8\)"
        ):
            copy(memory, start, end, addresses=addresses)
    assert same(snapshot(engine), before)


@pytest.mark.parametrize(
    ("slots", "message"),
    [
        (SLOTS - 1, "contains -1"),
        (SLOTS * 1000, "contains 14000"),
        (torch.tensor([-1, -1, 9, 3, 4, 5, 14, 9]), "more than once"),
        (SLOTS[:6], "not all in slot_mapping"),
        (SLOTS.int(), "int64"),
    ],
)
def test_slots_are_refused_before_any_chunk_is_copied(connector, slots, message):
    """A slot that two chunks of one transfer name is refused too: the second would overwrite the
    first.
    """
    with pytest.raises(LayoutError, match=message):
        connector.addresses_of(make_kv_caches(LAYOUT, 1), slots, BEGIN, END)


def test_groups_that_share_a_block_in_different_chunks_are_refused():
    layout = KVLayout(
        tuple(LayerGroup(name, 1, 1, 4, "uint8", sides=1) for name in ("full", "window"))
    )
    tensor = torch.zeros(8, 4, 1, 4, dtype=torch.uint8)
    connector = PagedGPUConnector(layout)
    blocks = [torch.arange(8), torch.arange(8, 16)]
    assert connector.addresses_of([tensor, tensor], blocks, 0, 8)
    with pytest.raises(
        LayoutError, match="'full' and 'window' are the same memory and both have block 1"
    ):
        connector.addresses_of([tensor, tensor], [blocks[0], blocks[1] - 4], 0, 8)
