"""vLLM's KV tensors in two views: the GPU connector's and vLLM's own."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lmcache_core._typing import override
from lmcache_core.errors import LayoutError
from lmcache_core.gpu_connectors import (
    EngineMemory,
    KVLayout,
    LayerGroup,
    LogicalMemory,
    Order,
    Packing,
)
from lmcache_core.integrations.vllm.groups import CacheGroup, described
from lmcache_core.integrations.vllm.options import BLOCKS

MLA_SPECS = frozenset({"MLAAttentionSpec", "SlidingWindowMLASpec"})
CPU_BACKENDS = (".cpu_attn.", ".cpu_mla.", ".amx_mla.")
"""Modules of backends that pack a block's KV for the processor's instruction set, which its shape
does not tell.
"""
SCALED_BY_HEAD = "per_token_head"
"""How vLLM's names of KV dtypes end whose blocks hold a scale for each token and head."""


@dataclass(frozen=True)
class GroupMemory:
    """The memory of one cache group on this worker.

    Attributes:
        layout: Content of one of its chunks.
        kvcaches: Its tensors, as `PagedGPUConnector` takes them.
        engine: The same memory through vLLM's own tensors, to check the connector against.
        unit_tokens: Tokens in one slot: 1, or a block if blocks are moved whole.
    """

    layout: KVLayout
    kvcaches: tuple[torch.Tensor, ...]
    engine: EngineMemory
    unit_tokens: int


def memory_of(
    group: CacheGroup,
    tensors: Mapping[str, torch.Tensor],
    num_blocks: int,
    mode: str,
    backends: str = "",
) -> GroupMemory:
    """Match vLLM's tensors with the description of a group.

    Facts that only a worker knows become names of the tensors in the records of chunks: a record
    from an engine that differs there is a miss.

    Args:
        tensors: The tensor of each layer, by name.
        mode: "blocks" or "tokens", see `ConnectorOptions.layout`; recurrent state is always moved
            as blocks.
        backends: The attention backends that vLLM has chosen for its layers.

    Raises:
        LayoutError: The tensors do not match the description.
    """
    missing = [name for name in group.layers if name not in tensors]
    if missing:
        raise LayoutError(f"vLLM registered no KV tensor for {', '.join(missing[:3])}")
    layers = [tensors[name] for name in group.layers]
    if mode == BLOCKS or group.is_state:
        return _as_blocks(group, layers, num_blocks, backends)
    if any(module in backends for module in CPU_BACKENDS):
        raise LayoutError(
            f'{backends} packs its KV, which cannot be cut by token: set "lmcache.layout" to'
            ' "blocks"'
        )
    return _as_tokens(group, layers, num_blocks)


def attention_backends(vllm_config: Any, layers: Sequence[str]) -> str:
    """Return the classes of these layers' attention backends; "" if vLLM does not know the
    layers.
    """
    known = _attention_layers(vllm_config, layers)
    classes = {layer.get_attn_backend() for layer in known}
    return ",".join(sorted(f"{found.__module__}.{found.__qualname__}" for found in classes))


def create_scales(vllm_config: Any, layers: Iterable[str]) -> None:
    """Make attention layers create the scales that their blocks hold. vLLM creates them when it
    first writes to a layer, in all blocks: it would overwrite those of blocks loaded before.

    Args:
        layers: Names of the layers, whose KV memory is allocated and not yet in use.

    Raises:
        LayoutError: This release of vLLM creates them in a way that is not known here.
    """
    for layer in _attention_layers(vllm_config, layers):
        dtype = str(getattr(layer, "kv_cache_dtype", ""))
        if not dtype.endswith(SCALED_BY_HEAD):
            continue
        create = getattr(layer.impl, "_ensure_scale_caches", None)
        if create is None:
            raise LayoutError(
                f"kv_cache_dtype={dtype}: {type(layer.impl).__name__} keeps scales in its blocks,"
                " and may overwrite loaded ones: use another KV dtype"
            )
        create(layer.kv_cache)


def _attention_layers(vllm_config: Any, names: Iterable[str]) -> list[Any]:
    config = getattr(vllm_config, "compilation_config", None)
    layers = getattr(config, "static_forward_context", {})
    return [layers[name] for name in names if hasattr(layers.get(name), "get_attn_backend")]


class BlockMemory(EngineMemory):
    """vLLM's tensors, one opaque block at a time.

    Args:
        layout: Layers of opaque blocks: what the connector calls tokens are blocks here.
        tensors: vLLM's tensors, in the order of the layout's groups; the first dimension counts
            blocks.
    """

    def __init__(self, layout: KVLayout, tensors: Sequence[torch.Tensor]) -> None:
        self.layout = layout
        self._tensors = layout.split(tensors)

    @override
    def num_slots(self, group: int) -> tuple[int, int]:
        return self._tensors[group][0].shape[0], 1

    @override
    def write(self, group: int, layer: int, slot: int, cells: torch.Tensor) -> None:
        block = self._tensors[group][layer][slot]
        block.copy_(cells.reshape(-1).view(block.dtype).view(block.shape))

    @override
    def read(self, group: int, layer: int, slot: int) -> torch.Tensor:
        block = self._tensors[group][layer][slot].cpu().contiguous()
        return block.view(-1).view(torch.uint8).view(1, 1, -1)

    @override
    def block_memory(self, group: int, block: int) -> Sequence[torch.Tensor]:
        return [tensor[block] for tensor in self._tensors[group]]


def _as_blocks(
    group: CacheGroup, layers: Sequence[torch.Tensor], num_blocks: int, backends: str
) -> GroupMemory:
    """View each block of a layer as one run of bytes, in the order in which they lie."""
    by_form: dict[tuple[int, str], list[int]] = {}
    dense = []
    for i, tensor in enumerate(layers):
        # An attention backend may divide vLLM's blocks into smaller ones of its own.
        parts = max(1, tensor.shape[0] // num_blocks)
        blocks = tensor.unflatten(0, (-1, parts)) if parts > 1 else tensor  # type: ignore[no-untyped-call]
        strides = [int(stride) for stride in blocks.stride()]
        axes = sorted(range(1, blocks.dim()), key=lambda axis: -strides[axis])
        is_plain = blocks[0].is_contiguous()
        dense.append(blocks if is_plain else blocks.permute(0, *axes))
        if blocks.shape[0] != num_blocks or not dense[i][0].is_contiguous():
            raise LayoutError(
                f"layer {group.layers[i]}: {list(tensor.shape)} with strides"
                f" {list(tensor.stride())}: not {num_blocks} contiguous blocks"
            )
        size = blocks[0].numel() * blocks.element_size()
        order = "" if is_plain and parts == 1 else f";{parts}{axes}"
        by_form.setdefault((size, order), []).append(i)
    groups = [
        LayerGroup(
            _name_of(group, number, members, backends + order),
            *(len(members), 1, size, "uint8"),
            sides=1,
        )
        for number, ((size, order), members) in enumerate(by_form.items())
    ]
    layout = KVLayout(tuple(groups))
    ordered = [dense[i] for members in by_form.values() for i in members]
    return GroupMemory(
        layout,
        tuple(_bytes_of_blocks(tensor) for tensor in ordered),
        BlockMemory(layout, ordered),
        group.block_size,
    )


def _name_of(group: CacheGroup, number: int, members: Sequence[int], inside: str = "") -> str:
    """Return the name in records for some of a group's layers: "" if the group's own description
    identifies them.

    Args:
        number: Counts these parts of a group.
        inside: What determines the inside of their blocks, as far as only a worker knows it.
    """
    facts = [(i, described(group.specs[i])) for i in members]
    is_as_described = {text for _, text in facts} == {described(group.spec)}
    if len(members) == len(group.layers) and is_as_described and not inside:
        return ""
    return f"{number}:{hashlib.sha256(repr((facts, inside)).encode()).hexdigest()[:16]}"


def _bytes_of_blocks(tensor: torch.Tensor) -> torch.Tensor:
    """Return `[num_blocks, 1, 1, bytes of a block]`, sharing memory."""
    num_blocks, itemsize = tensor.shape[0], tensor.element_size()
    size, step = tensor[0].numel() * itemsize, tensor.stride(0) * itemsize
    num_elements = ((num_blocks - 1) * step + size) // itemsize
    elements = tensor.as_strided((num_elements,), (1,), tensor.storage_offset())
    return elements.view(torch.uint8).as_strided((num_blocks, 1, 1, size), (step, size, size, 1))


def _as_tokens(group: CacheGroup, layers: Sequence[torch.Tensor], num_blocks: int) -> GroupMemory:
    """View each token's K and V, whatever the order of vLLM's axes."""
    shapes: dict[tuple[Any, ...], list[int]] = {}
    for i, (tensor, spec) in enumerate(zip(layers, group.specs, strict=True)):
        shapes.setdefault(_declared(group, tensor, spec, num_blocks), []).append(i)
    groups = [
        LayerGroup(_name_of(group, number, members), len(members), *declared)
        for number, (declared, members) in enumerate(shapes.items())
    ]
    layout = KVLayout(tuple(groups))
    ordered = tuple(layers[i] for members in shapes.values() for i in members)
    return GroupMemory(layout, ordered, LogicalMemory(layout, ordered), 1)


def _declared(
    group: CacheGroup, tensor: torch.Tensor, spec: Any, num_blocks: int
) -> tuple[Any, ...]:
    """Return heads, head size, dtype, sides, order and packing of a layer's tensor."""
    heads, size, tokens = spec.num_kv_heads, spec.head_size, group.block_size
    # An attention backend may divide vLLM's blocks into smaller ones of its own.
    parts = max(tensor.shape[:2]) // num_blocks if tensor.dim() > 1 else 1
    if parts > 1 and tokens % parts == 0:
        num_blocks, tokens = num_blocks * parts, tokens // parts
    nhd, hnd = Order.NHD, Order.HND
    forms: dict[tuple[int, ...], tuple[int, int, Order, Packing]]
    if type(spec).__name__ in MLA_SPECS:
        forms = {
            (num_blocks, tokens, size): (1, 1, nhd, Packing.SPLIT),
            (num_blocks, 1, tokens, size): (1, 1, hnd, Packing.SPLIT),
        }
    else:
        forms = {
            (num_blocks, heads, tokens, 2 * size): (heads, 2, hnd, Packing.LAST_DIM),
            (num_blocks, 2, tokens, heads, size): (heads, 2, nhd, Packing.BLOCK_FIRST),
            (2, num_blocks, tokens, heads, size): (heads, 2, nhd, Packing.KV_FIRST),
        }
    form = forms.get(tuple(tensor.shape))
    if form is None:
        raise LayoutError(
            f"a KV tensor {list(tensor.shape)} is not of {num_blocks} blocks of {tokens} tokens"
            f' with {heads} heads of {size}: set "lmcache.layout" to "blocks", which moves whole'
            " blocks"
        )
    heads, sides, order, packing = form
    return heads, size, str(tensor.dtype).removeprefix("torch."), sides, order, packing
