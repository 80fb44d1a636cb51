"""Rates between pages on the device and chunks in host memory, for the KV of three models; what a
concurrent store costs a computation; and the kernels alone.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from lmcache_core.concurrency import Workers
from lmcache_core.engine.transfer import KVTransfer, NamedChunk
from lmcache_core.gpu_connectors import KVLayout, LayerGroup, PagedGPUConnector
from lmcache_core.keys import CacheEngineKey
from lmcache_core.memory import HostMemoryAllocator, PinMemoryAllocator
from lmcache_core.storage.manager import StorageManager
from lmcache_core.telemetry import Counters
from lmcache_kernels import pages as kernel_pages
from lmcache_kernels.paged_copy import paged_gather, paged_scatter

from tests.bench import blend_device, codec_device, paged
from tests.bench.measure import ROUNDS, Figure, timed
from tests.bench.shape import CHUNK_SIZE, make_config, make_metadata
from tests.gpu.connectors import Pages
from tests.gpu.report import Report

BLOCK_SIZE = 16
NUM_TOKENS = 8192
SHAPES = {
    "Llama-3.1-8B": LayerGroup("", 32, 8, 128, "bfloat16", packing="kv_first"),
    "Llama-3.1-70B, one rank of 8": LayerGroup("", 80, 1, 128, "bfloat16", packing="kv_first"),
    "DeepSeek-V3, latent": LayerGroup("", 61, 1, 576, "bfloat16", sides=1),
}
IN_FLIGHT = (1, 2, 4)
"""Chunks, each in a buffer and on a stream of its own."""
ARENAS = {"pageable": HostMemoryAllocator, "pinned": PinMemoryAllocator}
VERIFY_HOT = ("always", "never")
ARENA_ROUNDS = 3
"""Rounds that an arena holds; older ones are evicted."""
MATMUL_SIZE, NUM_MATMULS = 8192, 40


@dataclass
class Case:
    """A model's KV, and a cache for it.

    Attributes:
        transfer: Between pages and chunks.
        source: Pages to store; `target`: pages to load.
        slots: Of the tokens.
        num_bytes: Of all tokens.
        last: Round that was stored last.
    """

    transfer: KVTransfer
    source: Pages
    target: Pages
    slots: torch.Tensor
    num_bytes: int
    last: int = 0

    def named(self, turn: int) -> list[NamedChunk]:
        """Chunks of a round."""
        return [
            (at, at + CHUNK_SIZE, CacheEngineKey("vllm", f"m{turn}", 1, 0, f"{at:064x}"))
            for at in range(0, len(self.slots), CHUNK_SIZE)
        ]

    def store(self, turn: int) -> None:
        """Store every token, under names of its own."""
        self.last = turn
        kwargs = {"kvcaches": self.source.tensors, "slot_mapping": self.slots}
        assert all(self.transfer.store(self.named(turn), kwargs))

    def load(self, turn: int) -> None:
        """Load what was stored last."""
        kwargs = {"kvcaches": self.target.tensors, "slot_mapping": self.slots}
        named = self.named(self.last)
        assert self.transfer.load(named, None, kwargs) == len(named)


def run(report: Report) -> None:
    """Everything that is timed."""
    for name, group in SHAPES.items():
        _shape(report, name, group)
    for part in (paged, codec_device, blend_device):
        for figure in part.gpu_figures():
            report.figure(figure)


def _shape(report: Report, name: str, group: LayerGroup) -> None:
    if report.is_dry:
        group = replace(group, num_layers=2, head_size=64)
    layout, num_tokens = KVLayout((group,)), 2 * CHUNK_SIZE if report.is_dry else NUM_TOKENS
    limits = _limits(report, layout.num_bytes(num_tokens))
    for arena, allocator in ARENAS.items():
        for verify_hot in VERIFY_HOT:
            with _case(report, layout, num_tokens, allocator, verify_hot) as case:
                with torch.inference_mode():
                    stores = timed(case.store)
                    loads = timed(case.load)
                got, wanted = (one.content(case.slots) for one in (case.target, case.source))
                report.equal(f"{name}, {arena}, verify_hot {verify_hot}", got, wanted)
                for what, seconds in (("store", stores), ("load", loads)):
                    title = f"{name}: {what}, {arena} arena, verify_hot {verify_hot}"
                    report.figure(Figure(title, case.num_bytes, seconds, limits[what]))
                if arena == "pinned" and verify_hot == "always":
                    _contention(report, name, case)
                    _in_flight(report, name, group, case, limits)


def _limits(report: Report, num_bytes: int) -> dict[str, Figure]:
    """Copies between the device and pinned memory."""
    host = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=not report.is_dry)
    device = torch.zeros(num_bytes, dtype=torch.uint8, device=report.device)

    down, up = timed(report.copying(device, host)), timed(report.copying(host, device))
    return {
        "store": Figure("limit: device to pinned memory", num_bytes, down),
        "load": Figure("limit: pinned memory to device", num_bytes, up),
    }


@contextlib.contextmanager
def _case(
    report: Report,
    layout: KVLayout,
    num_tokens: int,
    allocator: type[HostMemoryAllocator],
    verify_hot: str,
) -> Iterator[Case]:
    (group,), num_blocks = layout.groups, 2 * num_tokens // BLOCK_SIZE
    source, target = (Pages.make(group, BLOCK_SIZE, report.device, num_blocks) for _ in range(2))
    blocks = torch.randperm(num_blocks)[: num_tokens // BLOCK_SIZE]
    slots = (blocks[:, None] * BLOCK_SIZE + torch.arange(BLOCK_SIZE)).flatten()
    num_bytes = layout.num_bytes(num_tokens)
    counters, workers = Counters(), Workers("lmcache-gpu")
    config = make_config(verify_hot=verify_hot)
    arena = allocator(ARENA_ROUNDS * num_bytes)
    manager = StorageManager(config, arena, counters, workers)
    workers.open()
    manager.open(lambda salt: None)
    try:
        connector = PagedGPUConnector(layout, 0 if report.is_dry else CHUNK_SIZE)
        metadata = make_metadata()
        transfer = KVTransfer(manager, connector, metadata, counters, workers)
        yield Case(transfer, source, target, slots, num_bytes)
    finally:
        manager.close()
        workers.close()


def _contention(report: Report, name: str, case: Case) -> None:
    """How much longer matrix products take while another thread stores."""
    size = 64 if report.is_dry else MATMUL_SIZE
    one = torch.ones(size, size, dtype=torch.bfloat16, device=report.device)

    def products() -> float:
        began = time.perf_counter()
        for _ in range(NUM_MATMULS):
            torch.mm(one, one)
        report.wait()
        return time.perf_counter() - began

    products()
    alone = products()
    is_over = threading.Event()

    def storing() -> None:
        turn = ROUNDS + 1
        with torch.inference_mode():
            while not is_over.is_set():
                case.store(turn)
                turn += 1

    thread = threading.Thread(target=storing)
    thread.start()
    try:
        with_stores = products()
    finally:
        is_over.set()
        thread.join()
    report.note(
        f"{name}: matrix products during stores", times_longer=round(with_stores / alone, 3)
    )


def _in_flight(
    report: Report, name: str, group: LayerGroup, case: Case, limits: dict[str, Figure]
) -> None:
    """Bare kernels and copies between pages and pinned memory, without the engine."""
    shape, dtype = group.shape(CHUNK_SIZE), getattr(torch, group.dtype)
    slots = case.slots.split(CHUNK_SIZE)
    hosts = [torch.zeros(shape, dtype=dtype, pin_memory=not report.is_dry) for _ in slots]
    source, target = (
        kernel_pages.Pages.of(*(pages.views[side :: group.sides] for side in range(group.sides)))
        for pages in (case.source, case.target)
    )
    for number in IN_FLIGHT:
        staged = [torch.empty(shape, dtype=dtype, device=report.device) for _ in range(number)]
        streams = [None if report.is_dry else torch.cuda.Stream() for _ in range(number)]

        def each() -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
            lanes = itertools.cycle(zip(staged, streams, strict=True))  # noqa: B023 (run at once)
            for of_chunk, host, (buffer, stream) in zip(slots, hosts, lanes, strict=False):
                with torch.cuda.stream(stream):
                    yield of_chunk, host, buffer
            report.wait()

        def store(_turn: int) -> None:
            for of_chunk, host, buffer in each():
                paged_gather(source, of_chunk, buffer)
                host.copy_(buffer, non_blocking=True)

        def load(_turn: int) -> None:
            for of_chunk, host, buffer in each():
                buffer.copy_(host, non_blocking=True)
                paged_scatter(target, of_chunk, buffer)

        for view in case.target.views:
            view.zero_()
        title = f"{name}: {{}}, bare, {number} chunks in flight"
        for what, work in (("store", store), ("load", load)):
            report.figure(Figure(title.format(what), case.num_bytes, timed(work), limits[what]))
        got, wanted = (pages.content(case.slots) for pages in (case.target, case.source))
        report.equal(f"{name}, {number} chunks in flight", got, wanted)
