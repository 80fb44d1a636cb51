"""What the CUDA runtime refuses must cost speed, never a later call, and never a byte."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from lmcache_core.gpu_connectors import KVLayout, LayerGroup, PagedGPUConnector
from lmcache_core.memory import HostMemoryAllocator, MemoryFormat
from lmcache_core.memory.tensor import pin

from tests.gpu.connectors import Pages
from tests.gpu.report import Report

GROUP = LayerGroup("", 4, 2, 64, "bfloat16", packing="kv_first")
NUM_TOKENS, BLOCK_SIZE = 256, 16


def run(report: Report) -> None:
    """Each fault, and the same copies afterwards."""
    _pinned_twice(report)
    _copies(report, "after memory was pinned twice")
    _no_room(report)
    _copies(report, "after the device was full")


def _pinned_twice(report: Report) -> None:
    """The second registration is refused, and its error is not left for torch to raise."""
    arena = torch.zeros(1 << 20, dtype=torch.uint8)

    class Owner:
        """Its end unpins the arena."""

    first, second = Owner(), Owner()
    were_pinned = pin(arena, first), pin(arena, second)
    if were_pinned != (not report.is_dry, False):
        raise AssertionError(f"pinned twice: {were_pinned}")
    report.note("pinned twice", were_pinned=were_pinned)


def _no_room(report: Report) -> None:
    """A staging buffer that finds no room on the device."""
    if report.is_dry:
        return
    pages = [Pages.make(GROUP, BLOCK_SIZE, report.device) for _ in range(2)]
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(1e-6)
    try:
        _copies(report, "without room", pages)
    except torch.OutOfMemoryError:
        report.note("no room for staging", text="refused")
    else:
        raise AssertionError("there was room for a staging buffer")
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def _copies(report: Report, name: str, pages: Sequence[Pages] = ()) -> None:
    source, target = pages or [Pages.make(GROUP, BLOCK_SIZE, report.device) for _ in range(2)]
    slots = torch.randperm(NUM_TOKENS)
    connector = PagedGPUConnector(KVLayout((GROUP,)), 0 if report.is_dry else NUM_TOKENS)
    allocator = HostMemoryAllocator(1 << 20)
    chunk = allocator.allocate(
        connector.get_shape(NUM_TOKENS), torch.bfloat16, MemoryFormat.KV_BLOB
    )
    assert chunk is not None
    connector.from_gpu(chunk, 0, NUM_TOKENS, kvcaches=source.tensors, slot_mapping=slots)
    connector.to_gpu(chunk, 0, NUM_TOKENS, kvcaches=target.tensors, slot_mapping=slots)
    report.equal(name, target.content(slots), source.content(slots))
