"""vLLM's KV tensors: the layouts that are moved, and the tensors that are refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from lmcache_core.errors import LayoutError
from lmcache_core.gpu_connectors import PagedGPUConnector, run_canary
from lmcache_core.integrations.vllm.groups import CacheGroup
from lmcache_core.integrations.vllm.memory import (
    BlockMemory,
    GroupMemory,
    attention_backends,
    memory_of,
)

from tests.fixtures.vllm_engine import FULL, MLA, STATE, Shape
from tests.fixtures.vllm_engine.memory import RankMemory
from tests.fixtures.vllm_engine.parts import groups_of
from tests.fixtures.vllm_engine.shapes import (
    BLOCK_FIRST,
    HEAD_SIZE,
    HND,
    KV_FIRST,
    LATENT_SIZE,
    NHD,
    PACKED,
)

NUM_BLOCKS = Shape().num_blocks
BLOCK_BYTES = 2 * HEAD_SIZE * 2 * 4 * 4
Tensors = dict[str, torch.Tensor]


def registered(layout: str, **changes: int) -> Tensors:
    return RankMemory(Shape(layout=layout, **changes)).by_name


def memory_in(mode: str, tensors: Tensors) -> GroupMemory:
    """A group of full attention in these tensors."""
    (group,) = groups_of(Shape())
    return memory_of(group, tensors, NUM_BLOCKS, mode)


def check(memory: GroupMemory) -> None:
    """Check that it is read and written as vLLM does it."""
    run_canary(PagedGPUConnector(memory.layout), memory.kvcaches, memory.engine, lambda kv: kv)


@pytest.mark.parametrize(
    ("mode", "layout"), [("tokens", HND), ("tokens", BLOCK_FIRST), ("blocks", PACKED)]
)
def test_blocks_may_lie_apart(mode: str, layout: str) -> None:
    """Several layers in one allocation, the block outermost: each layer's blocks lie apart."""
    plain = registered(layout)
    whole = torch.zeros(NUM_BLOCKS, len(plain), *next(iter(plain.values())).shape[1:])
    memory = memory_in(mode, {name: whole[:, i] for i, name in enumerate(plain)})
    check(memory)
    if mode == "blocks":
        whole[3, 1].fill_(1.0)
        sums = [int(of_layer.view(torch.float32).sum()) for of_layer in memory.kvcaches]
        assert sums == [0, BLOCK_BYTES // 4]
        assert memory.kvcaches[1][3].view(torch.float32).eq(1.0).all()


@pytest.mark.parametrize(
    ("mode", "layout"),
    [
        *[("tokens", HND), ("tokens", BLOCK_FIRST), ("tokens", KV_FIRST)],
        *[("blocks", PACKED), ("blocks", NHD)],
    ],
)
def test_attention_backend_may_divide_blocks(mode: str, layout: str) -> None:
    """In hybrids vLLM's blocks are longer than a backend's own, which lie one after the other."""
    divided = memory_in(mode, registered(layout, block_size=2, num_blocks=2 * NUM_BLOCKS))
    whole = memory_in(mode, registered(layout))
    is_same = divided.layout.fingerprint() == whole.layout.fingerprint()
    assert is_same == (mode == "tokens"), "the inside of a divided block is in another order"
    check(divided)


def test_layers_of_each_size_are_a_group_in_a_chunk() -> None:
    tensors = registered(PACKED)
    tensors["model.layers.1.attn"] = torch.zeros(NUM_BLOCKS, 2, 4, 6 * HEAD_SIZE)
    groups = memory_in("blocks", tensors).layout.groups
    sizes = [(of.num_layers, of.head_size) for of in groups]
    assert sizes == [(1, BLOCK_BYTES), (1, 3 * BLOCK_BYTES)]


def names_in_records(group: CacheGroup, mode: str = "tokens", backends: str = "") -> list[str]:
    tensors = registered(PACKED if mode == "blocks" else HND)
    return [of.name for of in memory_of(group, tensors, 64, mode, backends).layout.groups]


@pytest.mark.parametrize("mode", ["tokens", "blocks"])
def test_records_name_how_layers_differ_from_the_first(mode: str) -> None:
    """The scheduler, which names chunks, knows only the first layer."""
    (group,) = groups_of(Shape())
    other = type(group.spec)(**(vars(group.spec) | {"page_size_padded": 4096}))
    one, both = replace(group, specs=(group.spec, other)), replace(group, specs=(other, other))
    assert one.describe() == both.describe() == group.describe()
    names = [names_in_records(changed, mode) for changed in (group, one, both)]
    assert names[0] == [""]
    assert names[0] != names[1] != names[2] != names[0]


def test_records_of_blocks_name_the_backend() -> None:
    """The inside of a block is the backend's own, which vLLM chooses by what is installed."""
    (group,) = groups_of(Shape())
    backends = "", "one.Backend", "other.Backend"
    names = [names_in_records(group, "blocks", backend) for backend in backends]
    assert names[0] == [""]
    assert names[0] != names[1] != names[2] != names[0]
    assert names_in_records(group, "tokens", "one.Backend") == [""]


def test_recurrent_state_is_moved_as_blocks_where_attention_is_moved_by_token() -> None:
    shape = Shape((FULL, STATE), layout=HND)
    _, group = groups_of(shape)
    tensors = RankMemory(shape).by_name
    memory = memory_of(group, tensors, NUM_BLOCKS, "tokens", "one.Backend")
    check(memory)
    (of,) = memory.layout.groups
    assert (memory.unit_tokens, of.num_layers, of.head_size) == (4, 2, BLOCK_BYTES)
    assert of.name, "the backend's"


class OneBackend:
    pass


class OtherBackend:
    pass


def test_backends_of_layers_are_named() -> None:
    def layer(backend: type) -> SimpleNamespace:
        return SimpleNamespace(get_attn_backend=lambda: backend)

    context = {
        "a": layer(OneBackend),
        "b": layer(OtherBackend),
        "c": layer(OneBackend),
        "mlp": object(),
    }
    config = SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context=context))
    assert attention_backends(config, ["a", "c", "mlp", "absent"]).endswith(".OneBackend")
    assert len(attention_backends(config, ["a", "b"]).split(",")) == 2
    assert attention_backends(SimpleNamespace(), ["a"]) == ""


@pytest.mark.parametrize(
    ("mode", "change", "error"),
    [
        ("tokens", lambda tensor: tensor[1:], r'set "lmcache.layout" to "blocks"'),
        ("tokens", lambda tensor: tensor[..., 1:], "is not of 64 blocks of 4 tokens with 2 heads"),
        ("tokens", lambda tensor: tensor.unsqueeze(0), "is not of 64 blocks"),
        ("blocks", lambda tensor: tensor[1:], "not 64 contiguous blocks"),
        ("blocks", lambda tensor: tensor[..., 1:], "not 64 contiguous blocks"),
    ],
)
def test_tensors_of_another_shape_are_refused(
    mode: str, change: Callable[[torch.Tensor], torch.Tensor], error: str
) -> None:
    tensors = {name: change(tensor) for name, tensor in registered(HND).items()}
    with pytest.raises(LayoutError, match=error):
        memory_in(mode, tensors)


def test_latent_is_recognised_by_its_spec_not_by_its_shape() -> None:
    (latent,), (full,) = groups_of(Shape((MLA,))), groups_of(Shape((FULL,)))
    tensors = {name: torch.zeros(NUM_BLOCKS, 1, 4, LATENT_SIZE) for name in latent.layers}
    assert memory_of(latent, tensors, NUM_BLOCKS, "tokens").layout.groups[0].sides == 1
    with pytest.raises(LayoutError):
        memory_of(full, tensors, NUM_BLOCKS, "tokens")


def test_order_of_axes_counts_for_chunks_of_blocks_and_not_of_tokens() -> None:
    def num_layouts(mode: str, *layouts: str) -> int:
        memories = [memory_in(mode, registered(layout)) for layout in layouts]
        return len({memory.layout.fingerprint() for memory in memories})

    assert num_layouts("blocks", HND, NHD) == 2
    assert num_layouts("tokens", HND, NHD, BLOCK_FIRST, KV_FIRST) == 1


def test_check_reads_and_writes_vllms_own_blocks() -> None:
    tensors = registered(PACKED)
    engine = memory_in("blocks", tensors).engine
    assert isinstance(engine, BlockMemory)
    assert engine.num_slots(0) == (NUM_BLOCKS, 1)
    block = torch.arange(BLOCK_BYTES, dtype=torch.uint8).view(1, 1, -1)
    engine.write(0, 1, 7, block)
    assert torch.equal(engine.read(0, 1, 7), block)
    first, second = tensors.values()
    assert torch.equal(second[7].reshape(-1).view(torch.uint8), block.view(-1))
    addresses = [view.data_ptr() for view in engine.block_memory(0, 7)]
    assert addresses == [first[7].data_ptr(), second[7].data_ptr()]
