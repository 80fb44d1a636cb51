"""Paged KV: bare gather and scatter against a copy of the same bytes, and the engine with a hot
tier. On a GPU too where there is one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from lmcache_core.engine import LMCacheEngine
from lmcache_core.gpu_connectors import VLLMPagedMemGPUConnectorV2
from lmcache_core.memory import HostMemoryAllocator
from lmcache_core.token_database import ChunkedTokenDatabase
from lmcache_kernels.pages import Pages

from tests.bench.measure import ROUNDS, Figure
from tests.bench.shape import (
    CHUNK_SIZE,
    DTYPE,
    HEAD_SIZE,
    HIDDEN,
    NUM_CHUNKS,
    NUM_HEADS,
    NUM_LAYERS,
    NUM_TOKENS,
    TOTAL_BYTES,
    make_config,
    make_metadata,
    tokens_of,
)
from tests.fixtures.paged_cases import paged_gather, paged_scatter

BLOCK_SIZE = 16
NUM_BLOCKS = NUM_TOKENS // BLOCK_SIZE
ARENA_GB = 1.25
GPU_CACHE_BLOCKS = 8 * NUM_BLOCKS
"""Pages on the GPU: more than its caches hold, so that a round does not read what the last one
left there.
"""


@dataclass
class PagedKV:
    """An engine's pages and a prompt in them: blocks in random order, tokens of a block in order.

    Attributes:
        layers: One tensor `[2, num_blocks, 16, 8, 128]` bf16 a layer.
        slots: int64 `[4096]`.
    """

    layers: list[torch.Tensor]
    slots: torch.Tensor

    @classmethod
    def make(
        cls, seed: int, is_filled: bool = True, device: str = "cpu", num_blocks: int = NUM_BLOCKS
    ) -> PagedKV:
        """Pages of random bits, or of zeros; touched."""
        random = torch.Generator(device).manual_seed(seed)
        shape = (2, num_blocks, BLOCK_SIZE, NUM_HEADS, HEAD_SIZE)
        layers = [torch.zeros(shape, dtype=DTYPE, device=device) for _ in range(NUM_LAYERS)]
        for layer in layers if is_filled else ():
            layer.view(torch.int16).random_(generator=random)
        blocks = torch.randperm(num_blocks, generator=random, device=device)[:NUM_BLOCKS]
        return cls(
            layers,
            (blocks[:, None] * BLOCK_SIZE + torch.arange(BLOCK_SIZE, device=device)).flatten(),
        )

    def pages(self) -> Pages:
        """For the kernels."""
        return Pages.of([layer[0] for layer in self.layers], [layer[1] for layer in self.layers])

    def content(self) -> torch.Tensor:
        """The prompt's KV in the order of its tokens, `[32, 2, 4096, 1024]`, by plain indexing."""
        return torch.stack([layer.flatten(1, 2)[:, self.slots].flatten(2) for layer in self.layers])


def alternately(
    limit: Callable[[int], object], works: Sequence[Callable[[int], object]]
) -> list[tuple[float, ...]]:
    """Seconds of each round of a limit and of what is held against it, in turn, after a round that
    does not count.

    Taken in turn, they share the machine's good and bad moments.
    """
    seconds: list[list[float]] = [[] for _ in (limit, *works)]
    for turn in range(ROUNDS + 1):
        for work, of_work in zip((limit, *works), seconds, strict=True):
            begin = time.perf_counter()
            work(turn)
            of_work.append(time.perf_counter() - begin)
    return [tuple(of_work[1:]) for of_work in seconds]


def kernel_figures() -> list[Figure]:
    """Bare gather and scatter of all chunks, one thread, against a one-thread torch copy of the
    same bytes.
    """
    source, target = PagedKV.make(0), PagedKV.make(1, is_filled=False)
    chunks = [
        torch.zeros(2, NUM_LAYERS, CHUNK_SIZE, HIDDEN, dtype=DTYPE) for _ in range(NUM_CHUNKS)
    ]
    flat, copied = (torch.zeros(TOTAL_BYTES, dtype=torch.uint8) for _ in range(2))
    from_pages, to_pages = source.pages(), target.pages()

    def gather(_turn: int) -> None:
        for slots, chunk in zip(source.slots.split(CHUNK_SIZE), chunks, strict=True):
            paged_gather(from_pages, slots, chunk)

    def scatter(_turn: int) -> None:
        for slots, chunk in zip(target.slots.split(CHUNK_SIZE), chunks, strict=True):
            paged_scatter(to_pages, slots, chunk)

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    copies, gathers, scatters = alternately(lambda _turn: copied.copy_(flat), (gather, scatter))
    torch.set_num_threads(threads)
    _check(source, target)
    limit = Figure(
        "limit: torch copy, one thread, taken in turn with the paged copies", TOTAL_BYTES, copies
    )
    note = "blocks of 32 KiB at random places: the prefetcher restarts with every block"
    return [
        limit,
        Figure("paged gather, bare", TOTAL_BYTES, gathers, limit, note),
        Figure("paged scatter, bare", TOTAL_BYTES, scatters, limit, note),
    ]


def engine_figures(verify_hot: str, limit: Figure) -> list[Figure]:
    """Store and retrieve of a paged prompt through an embedded engine with a memory tier; what came
    back is compared.

    Args:
        verify_hot: The option of that name.
        limit: A copy of the same bytes.
    """
    config, metadata = make_config(verify_hot=verify_hot), make_metadata()
    source, target = PagedKV.make(0), PagedKV.make(1, is_filled=False)
    connector = VLLMPagedMemGPUConnectorV2(HIDDEN, NUM_LAYERS)
    allocator = HostMemoryAllocator(int(ARENA_GB * (1 << 30)))
    engine = LMCacheEngine(
        config, metadata, allocator, ChunkedTokenDatabase(config, metadata), connector
    )
    engine.open()
    try:
        seconds = alternately(
            lambda turn: engine.store(
                tokens_of(turn), kvcaches=source.layers, slot_mapping=source.slots
            ),
            [
                lambda turn: engine.retrieve(
                    tokens_of(turn), kvcaches=target.layers, slot_mapping=target.slots
                )
            ],
        )
        if engine.lookup(tokens_of(ROUNDS)) != NUM_TOKENS:
            raise AssertionError("paged KV was not stored")
        _check(source, target)
    finally:
        engine.close()
    name = f"memory tier, embedded, paged, verify_hot {verify_hot}"
    notes = (
        ("gather; the digest follows", "scatter, and the digest right behind it")
        if verify_hot == "always"
        else ("gather", "scatter")
    )
    return [
        Figure(f"{name}: {what}", TOTAL_BYTES, of_what, limit, note)
        for what, of_what, note in zip(("store", "retrieve"), seconds, notes, strict=True)
    ]


def gpu_figures() -> list[Figure]:
    """The same on a GPU: kernels against a device copy, connector against a copy between pinned
    and device memory; none without CUDA.
    """
    if not torch.cuda.is_available():
        return []
    source, target = (PagedKV.make(seed, seed == 0, "cuda", GPU_CACHE_BLOCKS) for seed in range(2))
    figures = [*_gpu_kernels(source, target), *_gpu_transfers(source, target)]
    _check(source, target)
    return figures


def _gpu_kernels(source: PagedKV, target: PagedKV) -> list[Figure]:
    blob = torch.zeros(2, NUM_LAYERS, NUM_TOKENS, HIDDEN, dtype=DTYPE, device="cuda")
    copied = torch.zeros_like(blob)
    from_pages, to_pages = source.pages(), target.pages()
    on_host = (
        source.slots.cpu(),
        target.slots.cpu(),
    )  # as engines have them: checking them does not wait for the device
    copies, gathers, scatters = alternately(
        _finished(lambda: copied.copy_(blob)),
        (
            _finished(lambda: paged_gather(from_pages, on_host[0], blob)),
            _finished(lambda: paged_scatter(to_pages, on_host[1], blob)),
        ),
    )
    limit = Figure(f"limit: device copy, {torch.cuda.get_device_name()}", TOTAL_BYTES, copies)
    note = "one launch for all layers; with the slots' check and the launch"
    return [
        limit,
        Figure("GPU: paged gather", TOTAL_BYTES, gathers, limit, note),
        Figure("GPU: paged scatter", TOTAL_BYTES, scatters, limit, note),
    ]


def _gpu_transfers(source: PagedKV, target: PagedKV) -> list[Figure]:
    """Chunk by chunk through the connector, between pages and pinned memory."""
    from lmcache_core.memory import MemoryFormat, PinMemoryAllocator

    connector = VLLMPagedMemGPUConnectorV2(
        HIDDEN, NUM_LAYERS, use_gpu=True, chunk_size=CHUNK_SIZE, dtype=DTYPE, device="cuda"
    )
    allocator = PinMemoryAllocator(TOTAL_BYTES)
    chunks = [
        allocator.allocate(connector.get_shape(CHUNK_SIZE), DTYPE, MemoryFormat.KV_BLOB)
        for _ in range(NUM_CHUNKS)
    ]
    pinned = torch.zeros(TOTAL_BYTES, dtype=torch.uint8, pin_memory=True)
    device = torch.zeros(TOTAL_BYTES, dtype=torch.uint8, device="cuda")
    slots = source.slots.cpu(), target.slots.cpu()

    def store(_turn: int) -> None:
        for i, chunk in enumerate(chunks):
            connector.from_gpu(
                chunk,
                i * CHUNK_SIZE,
                (i + 1) * CHUNK_SIZE,
                kvcaches=source.layers,
                slot_mapping=slots[0],
            )

    def load(_turn: int) -> None:
        for i, chunk in enumerate(chunks):
            connector.to_gpu(
                chunk,
                i * CHUNK_SIZE,
                (i + 1) * CHUNK_SIZE,
                kvcaches=target.layers,
                slot_mapping=slots[1],
            )

    down, stores = alternately(_finished(lambda: pinned.copy_(device, non_blocking=True)), [store])
    up, loads = alternately(_finished(lambda: device.copy_(pinned, non_blocking=True)), [load])
    limits = (
        Figure("limit: device to pinned memory", TOTAL_BYTES, down),
        Figure("limit: pinned memory to device", TOTAL_BYTES, up),
    )
    note = "gather or scatter and copy, chunk by chunk, one after the other"
    return [
        *limits,
        Figure("GPU: pages to pinned memory", TOTAL_BYTES, stores, limits[0], note),
        Figure("GPU: pinned memory to pages", TOTAL_BYTES, loads, limits[1], note),
    ]


def _finished(work: Callable[[], object]) -> Callable[[int], None]:
    def run(_turn: int) -> None:
        work()
        torch.cuda.synchronize()

    return run


def _check(source: PagedKV, target: PagedKV) -> None:
    if not torch.equal(source.content().view(torch.uint8), target.content().view(torch.uint8)):
        raise AssertionError("what was scattered is not what was gathered")
