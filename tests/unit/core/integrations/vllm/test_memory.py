"""vLLM's KV tensors: every layout it has, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lmcache_core.errors import LayoutError
from lmcache_core.gpu_connectors import PagedGPUConnector, run_canary
from lmcache_core.integrations.vllm.groups import CacheGroup
from lmcache_core.integrations.vllm.memory import BlockMemory, attention_backends, memory_of

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

BLOCK_BYTES = 2 * HEAD_SIZE * 2 * 4 * 4


def registered(shape: Shape) -> dict[str, torch.Tensor]:
    return RankMemory(shape).by_name


@pytest.mark.parametrize(
    ("mode", "layout"), [("tokens", HND), ("tokens", BLOCK_FIRST), ("blocks", PACKED)]
)
def test_blocks_may_lie_apart(mode: str, layout: str) -> None:
    """Several layers in one allocation, the block outermost: each layer's blocks lie apart."""
    shape = Shape(layout=layout)
    (group,) = groups_of(shape)
    plain = registered(shape)
    names = list(plain)
    whole = torch.zeros(shape.num_blocks, len(names), *next(iter(plain.values())).shape[1:])
    tensors = {name: whole[:, i] for i, name in enumerate(names)}
    memory = memory_of(group, tensors, shape.num_blocks, mode)
    run_canary(PagedGPUConnector(memory.layout), memory.kvcaches, memory.engine, lambda kv: kv)
    if mode == "blocks":
        tensors[names[1]][3].fill_(1.0)
        assert memory.kvcaches[1][3].view(torch.float32).eq(1.0).all()
        assert (
            sum(int(of_layer.view(torch.float32).sum()) for of_layer in memory.kvcaches)
            == BLOCK_BYTES // 4
        )


def test_order_of_axes_counts_for_chunks_of_blocks_and_not_of_tokens() -> None:
    of_blocks = set()
    for layout in (HND, NHD):
        shape = Shape(layout=layout)
        (group,) = groups_of(shape)
        memory = memory_of(group, registered(shape), shape.num_blocks, "blocks")
        of_blocks.add(memory.layout.fingerprint())
    assert len(of_blocks) == 2
    layouts = set()
    for layout in (HND, NHD, BLOCK_FIRST, KV_FIRST):
        shape = Shape(layout=layout)
        (group,) = groups_of(shape)
        layouts.add(
            memory_of(group, registered(shape), shape.num_blocks, "tokens").layout.fingerprint()
        )
    assert len(layouts) == 1


def names_in_records(group: CacheGroup, mode: str = "tokens", backends: str = "") -> list[str]:
    tensors = registered(Shape(layout=PACKED if mode == "blocks" else HND))
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
    """What is inside of a block is the backend's own, and vLLM chooses it by what is installed."""
    (group,) = groups_of(Shape())
    names = [
        names_in_records(group, "blocks", backends)
        for backends in ("", "one.Backend", "other.Backend")
    ]
    assert names[0] == [""]
    assert names[0] != names[1] != names[2] != names[0]
    assert names_in_records(group, "tokens", "one.Backend") == [""]


def test_recurrent_state_is_moved_as_blocks_where_attention_is_moved_by_token() -> None:
    shape = Shape((FULL, STATE), layout=HND)
    _, group = groups_of(shape)
    memory = memory_of(group, registered(shape), shape.num_blocks, "tokens", "one.Backend")
    run_canary(PagedGPUConnector(memory.layout), memory.kvcaches, memory.engine, lambda kv: kv)
    (of,) = memory.layout.groups
    assert (memory.unit_tokens, of.num_layers, of.head_size) == (4, 2, BLOCK_BYTES)
    assert of.name, "the backend's"


@pytest.mark.parametrize(
    ("mode", "layout"),
    [
        *[("tokens", HND), ("tokens", BLOCK_FIRST), ("tokens", KV_FIRST)],
        *[("blocks", PACKED), ("blocks", NHD)],
    ],
)
def test_attention_backend_may_divide_blocks(mode: str, layout: str) -> None:
    """In hybrids vLLM's blocks are longer than a backend's own, which lie one after the other."""
    shape, half = Shape(layout=layout), Shape(layout=layout, block_size=2, num_blocks=128)
    (group,) = groups_of(shape)
    memory = memory_of(group, registered(half), shape.num_blocks, mode)
    whole = memory_of(group, registered(shape), shape.num_blocks, mode)
    is_same = memory.layout.fingerprint() == whole.layout.fingerprint()
    assert is_same == (mode == "tokens"), "the inside of a divided block is in another order"
    run_canary(PagedGPUConnector(memory.layout), memory.kvcaches, memory.engine, lambda kv: kv)


class OneBackend:
    pass


class OtherBackend:
    pass


def test_the_backends_of_layers() -> None:
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


def wrong(**changes: Any) -> dict[str, torch.Tensor]:
    tensors = registered(Shape(layout=HND))
    return {name: changes["change"](tensor) for name, tensor in tensors.items()}


@pytest.mark.parametrize(
    ("mode", "tensors", "complaint"),
    [
        ("tokens", wrong(change=lambda tensor: tensor[1:]), r'set "lmcache.layout" to "blocks"'),
        (
            "tokens",
            wrong(change=lambda tensor: tensor[..., 1:]),
            r"is not of 64 blocks of 4 tokens with 2 heads of 4",
        ),
        ("tokens", wrong(change=lambda tensor: tensor.unsqueeze(0)), "is not of 64 blocks"),
        ("blocks", wrong(change=lambda tensor: tensor[1:]), "not 64 contiguous blocks"),
        ("blocks", wrong(change=lambda tensor: tensor[..., 1:]), "not 64 contiguous blocks"),
        ("blocks", {}, r"no KV tensor for model\.layers\.0\.attn, model\.layers\.1\.attn"),
        (
            "tokens",
            {"model.layers.0.attn": torch.zeros(1)},
            r"no KV tensor for model\.layers\.1\.attn",
        ),
    ],
)
def test_other_tensors_are_refused(
    mode: str, tensors: dict[str, torch.Tensor], complaint: str
) -> None:
    (group,) = groups_of(Shape())
    with pytest.raises(LayoutError, match=complaint):
        memory_of(group, tensors, 64, mode)


def test_latent_is_recognised_by_its_spec_not_by_its_shape() -> None:
    (latent,), (full,) = groups_of(Shape((MLA,))), groups_of(Shape((FULL,)))
    tensors = {name: torch.zeros(64, 1, 4, LATENT_SIZE) for name in latent.layers}
    assert memory_of(latent, tensors, 64, "tokens").layout.groups[0].sides == 1
    with pytest.raises(LayoutError):
        memory_of(full, tensors, 64, "tokens")


def test_check_reads_and_writes_vllms_own_blocks() -> None:
    shape = Shape()
    (group,) = groups_of(shape)
    tensors = registered(shape)
    memory = memory_of(group, tensors, shape.num_blocks, "blocks")
    assert isinstance(memory.engine, BlockMemory)
    assert memory.engine.num_slots(0) == (shape.num_blocks, 1)
    block = torch.arange(BLOCK_BYTES, dtype=torch.uint8).view(1, 1, -1)
    memory.engine.write(0, 1, 7, block)
    assert torch.equal(memory.engine.read(0, 1, 7), block)
    assert torch.equal(tensors[group.layers[1]][7].reshape(-1).view(torch.uint8), block.view(-1))
    assert [view.data_ptr() for view in memory.engine.block_memory(0, 7)] == [
        tensors[name][7].data_ptr() for name in group.layers
    ]
