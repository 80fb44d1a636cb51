"""Chunks out of pages on the device and back, for every layout that the connector takes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pytest
import torch
from lmcache_core.gpu_connectors import KVLayout, LayerGroup, PagedGPUConnector, copy_engine
from lmcache_core.gpu_connectors.layout import Order, Packing
from lmcache_core.memory import MemoryFormat, PinMemoryAllocator

from tests.gpu.report import Report

NUM_BLOCKS = 96
NUM_TOKENS = 256
DTYPES = ("bfloat16", "float8_e4m3fn", "float32")
WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
"""What elements are compared as, by their bytes: not every dtype can be indexed on a device."""
NEVER = 1 << 60
"""No run is so long."""
FAR_BYTES = 3 << 30
"""Between two blocks, so that the last of three begins beyond 32 bits."""


@dataclass(frozen=True)
class Pages:
    """KV tensors of some layers, and how to read their tokens by plain indexing.

    Attributes:
        layout: As the connector is given it.
        tensors: As the connector takes them.
        views: `[blocks, block_size, heads, head_size]` of each side of each layer.
    """

    layout: KVLayout
    tensors: list[torch.Tensor | tuple[torch.Tensor, torch.Tensor]]
    views: list[torch.Tensor]

    @classmethod
    def make(
        cls, group: LayerGroup, block_size: int, device: str, num_blocks: int = NUM_BLOCKS
    ) -> Pages:
        """Random pages."""
        dtype = getattr(torch, group.dtype)
        is_hnd = group.order is Order.HND
        inner = (block_size, group.num_kv_heads)
        inner = inner[::-1] if is_hnd else inner
        front = {Packing.KV_FIRST: (2, num_blocks), Packing.BLOCK_FIRST: (num_blocks, 2)}
        packing = Packing(group.packing)
        size = group.head_size * (2 if packing is Packing.LAST_DIM else 1)
        shape = (*front.get(packing, (num_blocks,)), *inner, size)
        tensors: list[torch.Tensor | tuple[torch.Tensor, torch.Tensor]] = []
        views = []
        for _ in range(group.num_layers):
            is_pair = packing is Packing.SPLIT and group.sides == 2
            made = [_random(shape, dtype, device) for _ in range(2 if is_pair else 1)]
            tensors.append((made[0], made[1]) if is_pair else made[0])
            for side in range(group.sides):
                of_side = {
                    Packing.KV_FIRST: lambda t, s: t[s],
                    Packing.BLOCK_FIRST: lambda t, s: t[:, s],
                    Packing.LAST_DIM: lambda t, s: t.chunk(2, -1)[s],
                    Packing.SPLIT: lambda t, s: t,
                }[packing](made[side if is_pair else 0], side)
                views.append(of_side.transpose(1, 2) if is_hnd else of_side)
        return cls(KVLayout((group,)), tensors, views)

    def content(self, slots: torch.Tensor) -> torch.Tensor:
        """All sides of all layers of these slots, by plain indexing, as words on the device."""
        view = self.views[0]
        size, word = view.shape[1], WORDS[view.element_size()]
        slots = slots.to(view.device)
        blocks, offsets = slots // size, slots % size
        return torch.stack([view.view(word)[blocks, offsets] for view in self.views])


def run(report: Report) -> None:
    """Every layout by kernels and, where tokens are contiguous, by copy engines; strides beyond
    32 bits.
    """
    for name, group, block_size in _cases(("bfloat16",) if report.is_dry else DTYPES):
        source = Pages.make(group, block_size, report.device)
        slots = torch.randperm(NUM_BLOCKS * block_size)[:NUM_TOKENS]
        for least, way in ((NEVER, "kernels"), (1, "copy engines")):
            target = Pages.make(group, block_size, report.device)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(copy_engine, "LEAST_RUN_BYTES", least)
                _there_and_back(report, source.layout, source.tensors, target.tensors, slots)
            report.equal(f"{name}, {way}", target.content(slots), source.content(slots))
    _far_apart(report)


def _cases(dtypes: tuple[str, ...]) -> Iterator[tuple[str, LayerGroup, int]]:
    for dtype in dtypes:
        for order in Order:
            for packing in Packing:
                for block_size in (16, 64):
                    group = LayerGroup("", 3, 4, 64, dtype, order=order, packing=packing)
                    yield f"{dtype} {order} {packing}, blocks of {block_size}", group, block_size
        yield f"{dtype} latent", LayerGroup("", 3, 1, 576, dtype, sides=1), 64


def _far_apart(report: Report) -> None:
    """Three blocks in 6 GiB, of which only these are touched."""
    group = LayerGroup("", 1, 1, 64, "bfloat16", sides=1)
    shape, strides = (3, 16, 1, 64), (FAR_BYTES // 2, 64, 64, 1)
    source, target = (
        torch.empty(2 * FAR_BYTES + (1 << 20), dtype=torch.uint8, device=report.device)
        .view(torch.bfloat16)
        .as_strided(shape, strides)
        for _ in range(2)
    )
    source.copy_(_random(shape, torch.bfloat16, report.device))
    _there_and_back(report, KVLayout((group,)), [source], [target], torch.randperm(48))
    report.equal("blocks 3 GiB apart", target, source)


def _there_and_back(
    report: Report,
    layout: KVLayout,
    source: Sequence[object],
    target: Sequence[object],
    slots: torch.Tensor,
) -> None:
    connector = PagedGPUConnector(layout, 0 if report.is_dry else len(slots))
    allocator = PinMemoryAllocator(layout.num_bytes(len(slots)) + (1 << 16))
    chunk = allocator.allocate(
        connector.get_shape(len(slots)), getattr(torch, layout.kv_dtype), MemoryFormat.KV_BLOB
    )
    assert chunk is not None
    with torch.inference_mode():
        connector.from_gpu(chunk, 0, len(slots), kvcaches=source, slot_mapping=slots)
        connector.to_gpu(chunk, 0, len(slots), kvcaches=target, slot_mapping=slots)


def _random(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> torch.Tensor:
    """Random bits."""
    num_bytes = torch.Size(shape).numel() * dtype.itemsize
    bits = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, device=device)
    return bits.view(dtype).view(shape)
