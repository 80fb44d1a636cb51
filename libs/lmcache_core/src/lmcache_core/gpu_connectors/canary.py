"""Sends a known pattern through the whole cache before any KV is trusted to it.

A layout that is declared wrongly but consistently round-trips with itself: data gathered in a wrong
order is scattered back in the same wrong order, and the error shows only in other slots or in an
engine with the right layout. So the connector does not check itself: the pattern is written into
engine memory and read back by plain indexing of the engine's own tensors, or by the engine's
operator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from lmcache_core.errors import LayoutError
from lmcache_core.gpu_connectors.binding import Binding
from lmcache_core.gpu_connectors.engine_memory import EngineMemory
from lmcache_core.gpu_connectors.layout import KVLayout, LayerGroup
from lmcache_core.gpu_connectors.paged import PagedConnector
from lmcache_core.memory.base import MemoryFormat, MemoryObj, MemoryObjMetadata
from lmcache_core.memory.buffer import BytesBufferMemoryObj
from lmcache_core.memory.dtypes import num_bytes

MAX_CANARY_TOKENS = 32
"""Tokens in the pattern: they cover parts of two blocks, and an attach takes only a fraction of a
second.
"""
PATTERN_SEED = 0x1CEB00DA
SIDE_NAMES = {1: ("latent",), 2: ("K", "V")}


@dataclass(frozen=True)
class _Spots:
    """The slots of one group's pattern.

    Attributes:
        source: Slots to gather from.
        target: Slots to scatter to, none of them in `source`.
        watched: Blocks of both, and their neighbours that no other group uses.
    """

    source: list[int]
    target: list[int]
    watched: list[int]


def run_canary(
    connector: PagedConnector,
    kvcaches: Any,
    engine: EngineMemory,
    transport: Callable[[MemoryObj], MemoryObj],
) -> None:
    """Send a pattern from engine memory through gather, transport and scatter into other slots, and
    compare at every step.

    Uses the first and the last blocks of every group, which the engine must not touch during the
    check; their content is restored in any case. Groups may share memory, as in hybrid models, if
    there are at least four blocks for each group.

    Args:
        kvcaches: The argument that it will get in service.
        engine: Checks it. Its layout states what a memory object must contain.
        transport: Stores the memory object and loads it again. Borrows its argument; its result is
            released here, unless it is the argument itself.

    Raises:
        LayoutError: The pattern arrived changed: the layout is not as declared, or the transport
            changed bytes; or there are fewer than two slots for the test.
    """
    with torch.inference_mode():
        binding = connector.binding_of(kvcaches)
        _check_same_kv(binding.layout, engine.layout)
        spots = _choose_spots(engine)
        patterns = [
            _pattern(group, i, len(spots[0].source)) for i, group in enumerate(engine.layout.groups)
        ]
        with _preserved(engine, binding, spots):
            _write(engine, patterns, [spot.source for spot in spots])
            _send(connector, kvcaches, engine, transport, patterns, spots)


def _send(
    connector: PagedConnector,
    kvcaches: Any,
    engine: EngineMemory,
    transport: Callable[[MemoryObj], MemoryObj],
    patterns: list[torch.Tensor],
    spots: list[_Spots],
) -> None:
    """Copy from the source slots to the target slots."""
    num_tokens = len(spots[0].source)
    source, target = [spot.source for spot in spots], [spot.target for spot in spots]
    dtype = engine.layout.kv_dtype
    shape = connector.get_shape(num_tokens)
    memory = BytesBufferMemoryObj(
        bytearray(num_bytes(shape, dtype)),
        MemoryObjMetadata(shape, dtype, 0, 0, 1, MemoryFormat.KV_BLOB),
    )
    connector.from_gpu(memory, 0, num_tokens, kvcaches=kvcaches, slot_mapping=_mappings(source))
    _check_gathered(engine.layout, memory, patterns, source)
    loaded = transport(memory)
    try:
        if not torch.equal(_bytes_of(loaded), _bytes_of(memory)):
            raise LayoutError(
                "canary: the store gave back other bytes than it was given; the KV layout is not to"
                " blame"
            )
        replaced = [_read(engine, i, spot.target) for i, spot in enumerate(spots)]
        before = [tensor.clone() for tensor in _watched(engine, spots)]
        connector.to_gpu(loaded, 0, num_tokens, kvcaches=kvcaches, slot_mapping=_mappings(target))
    finally:
        if loaded is not memory:
            loaded.ref_count_down()
    for i, (group, pattern) in enumerate(zip(engine.layout.groups, patterns, strict=True)):
        _compare(
            group, _read(engine, i, target[i]), pattern, target[i], "scattered to the wrong place"
        )
    _write(engine, replaced, target)
    if not all(
        torch.equal(_raw(now), _raw(then))
        for now, then in zip(_watched(engine, spots), before, strict=True)
    ):
        raise LayoutError(
            "canary: scattering KV changed other slots than it was meant for: the KV layout"
            " is not as declared"
        )


def _check_same_kv(declared: KVLayout, engine: KVLayout) -> None:
    sizes = [
        [(g.sides, g.num_layers, g.num_kv_heads, g.head_size, g.dtype) for g in layout.groups]
        for layout in (declared, engine)
    ]
    if sizes[0] != sizes[1]:
        raise LayoutError(
            f"canary: the connector was made for {declared.fingerprint()}; the engine has"
            f" {engine.fingerprint()}"
        )


def _choose_spots(engine: EngineMemory) -> list[_Spots]:
    """Return slots at both ends of each group's blocks, at different offsets in the block for
    source and target.
    """
    sizes = [engine.num_slots(i) for i in range(len(engine.layout.groups))]
    chosen: list[tuple[list[int], list[int]]] = []
    for i, (num_blocks, block_size) in enumerate(sizes):
        last = num_blocks - 1
        if num_blocks >= 4 * len(sizes):
            source, target = (2 * i, last - 2 * i), (2 * i + 1, last - 1 - 2 * i)
        elif num_blocks >= 2 * len(sizes):
            source, target = (2 * i, 2 * i), (2 * i + 1, 2 * i + 1)
        else:
            source, target = (0, 0), (last, last)
        chosen.append((_slots_in(*source, block_size), _slots_in(*target[::-1], block_size)))
        if num_blocks == 1:
            slots = list(range(block_size))
            chosen[-1] = (
                slots[: block_size // 2],
                (slots[-(block_size // 2) :] if block_size > 1 else []),
            )
    num_tokens = min(MAX_CANARY_TOKENS, *(len(slots) for pair in chosen for slots in pair))
    if num_tokens == 0:
        raise LayoutError(
            "canary: there must be two slots to try the layout with, not (blocks, slots in each)"
            f" {sizes}"
        )
    spots = [
        _Spots(_ends(source, num_tokens), _ends(target, num_tokens), [])
        for source, target in chosen
    ]
    used = [
        {slot // size for slot in spot.source + spot.target}
        for spot, (_, size) in zip(spots, sizes, strict=True)
    ]
    for i, (num_blocks, _) in enumerate(sizes):
        others = set().union(*used[:i], *used[i + 1 :])
        beside = {
            block + step for block in used[i] for step in (-1, 1) if 0 <= block + step < num_blocks
        }
        spots[i].watched.extend(sorted(used[i] | (beside - others)))
    return spots


def _slots_in(first: int, second: int, block_size: int) -> list[int]:
    """Return all slots of two blocks, or of one if they are the same."""
    return [
        block * block_size + i
        for block in dict.fromkeys((first, second))
        for i in range(block_size)
    ]


def _ends(slots: list[int], num_tokens: int) -> list[int]:
    """Return `num_tokens` slots, half from the beginning and half from the end."""
    return slots[: num_tokens - num_tokens // 2] + slots[len(slots) - num_tokens // 2 :]


def _pattern(group: LayerGroup, index: int, num_tokens: int) -> torch.Tensor:
    """Return finite numbers that differ by layer, side, token, head and element: `[sides,
    num_layers, num_tokens, num_kv_heads, head_size]`.
    """
    dtype: torch.dtype = getattr(torch, group.dtype)
    shape = (*group.shape(num_tokens)[:3], group.num_kv_heads, group.head_size * dtype.itemsize)
    random = torch.Generator().manual_seed(PATTERN_SEED + index)
    raw = torch.randint(0, 256, shape, dtype=torch.uint8, generator=random)
    if dtype.is_floating_point:
        # Without the exponent's highest bit nothing is infinite or NaN.
        raw[..., dtype.itemsize - 1 :: dtype.itemsize] &= 0xBF
    return raw.view(dtype)


def _mappings(slots: list[list[int]]) -> Any:
    mappings = [torch.tensor(of_group, dtype=torch.int64) for of_group in slots]
    return mappings[0] if len(mappings) == 1 else mappings


def _write(engine: EngineMemory, contents: list[torch.Tensor], slots: list[list[int]]) -> None:
    for i, content in enumerate(contents):
        for layer in range(content.shape[1]):
            for token, slot in enumerate(slots[i]):
                engine.write(i, layer, slot, content[:, layer, token])


def _read(engine: EngineMemory, group: int, slots: list[int]) -> torch.Tensor:
    """Return `[sides, num_layers, num_tokens, num_kv_heads, head_size]`."""
    layers = range(engine.layout.groups[group].num_layers)
    cells = [[_raw(engine.read(group, layer, slot)) for slot in slots] for layer in layers]
    stacked = torch.stack([torch.stack(of_layer, dim=1) for of_layer in cells], dim=1)
    return stacked.view(getattr(torch, engine.layout.groups[group].dtype))


def _watched(engine: EngineMemory, spots: list[_Spots]) -> Iterator[torch.Tensor]:
    for i, spot in enumerate(spots):
        for block in spot.watched:
            yield from engine.block_memory(i, block)


@contextmanager
def _preserved(engine: EngineMemory, binding: Binding, spots: list[_Spots]) -> Iterator[None]:
    """Restore what the pattern overwrites, where the engine and where the connector assumes the
    slots to be.
    """
    views = list(_watched(engine, spots))
    for pages, spot in zip(binding.pages, spots, strict=True):
        blocks = {slot // pages.block_size for slot in spot.target if slot < pages.num_slots}
        views += [page[block] for page in pages.tensors for block in blocks]
    saved = [(view, view.clone()) for view in views]
    try:
        yield
    finally:
        for view, content in saved:
            view.copy_(content)


def _check_gathered(
    layout: KVLayout, memory: MemoryObj, patterns: list[torch.Tensor], slots: list[list[int]]
) -> None:
    content = _bytes_of(memory)
    for i, (group, pattern, spec) in enumerate(
        zip(layout.groups, patterns, layout.tensor_specs(len(slots[0])), strict=True)
    ):
        got = content[spec.offset : spec.offset + spec.length].view(pattern.dtype)
        got = got.view(pattern.shape)
        _compare(group, got, pattern, slots[i], "gathered from the wrong place")


def _compare(
    group: LayerGroup, got: torch.Tensor, pattern: torch.Tensor, slots: list[int], what: str
) -> None:
    wrong = (_raw(got) != _raw(pattern)).nonzero()
    if not len(wrong):
        return
    side, layer, token, head, _ = wrong[0].tolist()
    where = (
        f"group {group.name!r}, layer {layer}, {SIDE_NAMES[group.sides][side]}, slot"
        f" {slots[token]}, head {head}"
    )
    raise LayoutError(
        f"canary: KV was {what}: {where}. The engine has {group.tensor_shape()} in order"
        f" {group.order}, packing {group.packing}; the connector was given another layout: correct"
        " its order and packing. Until then nothing is cached"
    )


def _bytes_of(memory: MemoryObj) -> torch.Tensor:
    return memory.tensor.cpu().view(-1).view(torch.uint8)


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)
