"""Rates between pages on the device and the arena of a sidecar, for the KV of three models; what a
concurrent store costs a computation; and the kernels alone.
"""

from __future__ import annotations

import contextlib
import itertools
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from lmcache_core.engine.stores import SidecarClient
from lmcache_core.engine.transfer import KVTransfer, NamedChunk
from lmcache_core.gpu_connectors import KVLayout, LayerGroup, PagedGPUConnector
from lmcache_core.gpu_connectors.streams import ThreadStreams, record_event
from lmcache_core.keys import CacheEngineKey
from lmcache_core.record.chunk_store import ChunkStore
from lmcache_core.telemetry import Counters
from lmcache_kernels import pages as kernel_pages

from tests.bench.engines import (
    CHUNK_SIZE,
    make_config,
    make_metadata,
    running_sidecar,
    running_store,
)
from tests.bench.measure import ROUNDS, Figure, timed
from tests.fixtures.paged_cases import paged_gather, paged_scatter
from tests.fixtures.restarted_sidecar import until
from tests.gpu import kernel_rates
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
ARENAS = {"pageable": False, "pinned": True}
"""Whether the worker pins the sidecar's arena, by name."""
PIN_S = 30.0
"""In which the arena must be pinned."""
VERIFY_HOT = ("always", "sampled", "never")
ARENA_ROUNDS = 3
"""Rounds that an arena holds; older ones are evicted."""
MATMUL_SIZE, NUM_MATMULS = 8192, 40


@dataclass(frozen=True)
class Prompt:
    """A model's KV of some tokens.

    Attributes:
        layout: Of the pages.
        source: Pages to store; `target`: pages to load.
        slots: Of the tokens.
    """

    layout: KVLayout
    source: Pages
    target: Pages
    slots: torch.Tensor

    @classmethod
    def make(cls, report: Report, group: LayerGroup) -> Prompt:
        """Random pages, small ones in a dry run."""
        num_tokens = 2 * CHUNK_SIZE if report.is_dry else NUM_TOKENS
        if report.is_dry:
            group = replace(group, num_layers=2, head_size=64)
        num_blocks = 2 * num_tokens // BLOCK_SIZE
        source, target = (
            Pages.make(group, BLOCK_SIZE, report.device, num_blocks) for _ in range(2)
        )
        blocks = torch.randperm(num_blocks)[: num_tokens // BLOCK_SIZE]
        slots = (blocks[:, None] * BLOCK_SIZE + torch.arange(BLOCK_SIZE)).flatten()
        return cls(KVLayout((group,)), source, target, slots)

    @property
    def num_bytes(self) -> int:
        """Of all tokens."""
        return self.layout.num_bytes(len(self.slots))

    def check(self, report: Report, name: str) -> None:
        """Compare what was loaded with what was stored.

        Raises:
            WrongBytes: They differ.
        """
        got, wanted = (pages.content(self.slots) for pages in (self.target, self.source))
        report.equal(name, got, wanted)


@dataclass
class Case:
    """A prompt, and a cache for it.

    Attributes:
        prompt: The prompt.
        model: Its name in keys.
        chunks: Where its chunks are.
        transfer: Between pages and chunks.
        last: Round that was stored last.
    """

    prompt: Prompt
    model: str
    chunks: ChunkStore
    transfer: KVTransfer
    last: int = 0

    def named(self, turn: int) -> list[NamedChunk]:
        """Chunks of a round."""
        return [
            (
                *(at, at + CHUNK_SIZE),
                CacheEngineKey("vllm", self.model, 1, 0, f"{turn:032x}{at:032x}"),
            )
            for at in range(0, len(self.prompt.slots), CHUNK_SIZE)
        ]

    def store(self, turn: int) -> None:
        """Store every token, under names of its own."""
        self.last = turn
        kwargs = {"kvcaches": self.prompt.source.tensors, "slot_mapping": self.prompt.slots}
        assert all(self.transfer.store(self.named(turn), kwargs))

    def load(self, turn: int) -> None:
        """Load what was stored last."""
        kwargs = {"kvcaches": self.prompt.target.tensors, "slot_mapping": self.prompt.slots}
        named = self.named(self.last)
        assert self.transfer.load(named, None, kwargs) == len(named)

    def is_pinned(self) -> bool:
        """Return whether CUDA takes what was stored last for pinned memory."""
        chunks = self.chunks.get([key for _, _, key in self.named(self.last)])
        try:
            return bool(chunks) and all(chunk.memory.tensor.is_pinned() for chunk in chunks)
        finally:
            self.chunks.release(chunks)


def run(report: Report) -> None:
    """Everything that is timed."""
    for name, group in SHAPES.items():
        _in_flight(report, name, group)
    try:
        import lmcache_sidecar.app  # noqa: F401 (as the services' processes do)
    except ImportError as exc:
        report.note("without a sidecar", text=str(exc))
    else:
        for verify_hot in VERIFY_HOT:
            _arenas(report, verify_hot)
    if not report.is_dry:
        kernel_rates.run(report)


def _arenas(report: Report, verify_hot: str) -> None:
    """Stores and loads as in vLLM with a sidecar: through the arena of its process."""
    prompts = {name: Prompt.make(report, group) for name, group in SHAPES.items()}
    num_bytes = ARENA_ROUNDS * max(prompt.num_bytes for prompt in prompts.values())
    with (
        tempfile.TemporaryDirectory(prefix="lmcache-gpu-") as place,
        running_sidecar(Path(place), num_bytes / (1 << 30), verify_hot=verify_hot) as socket,
    ):
        for name, prompt in prompts.items():
            limits = _limits(report, prompt.num_bytes)
            for arena, pins in ARENAS.items():
                with _case(report, prompt, f"{name}, {arena}", socket, pins) as case:
                    with torch.inference_mode():
                        stores, loads = timed(case.store), timed(case.load)
                    prompt.check(report, f"{name}, {arena}, verify_hot {verify_hot}")
                    for what, seconds in (("store", stores), ("load", loads)):
                        title = f"{name}: {what}, {arena} arena, verify_hot {verify_hot}"
                        report.figure(Figure(title, prompt.num_bytes, seconds, limits[what]))
                    if pins and verify_hot == "always":
                        contention(report, name, case)


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
def _case(report: Report, prompt: Prompt, model: str, socket: Path, pins: bool) -> Iterator[Case]:
    """What a worker of vLLM has."""
    config, metadata = make_config(sidecar_socket=str(socket)), make_metadata(model)
    client = SidecarClient(f"vllm/{model}", loads_beside=True)
    with running_store(config, metadata, client) as (chunks, workers):
        connector = PagedGPUConnector(prompt.layout, 0 if report.is_dry else CHUNK_SIZE)
        transfer = KVTransfer(chunks, connector, metadata, Counters(), workers)
        case = Case(prompt, model, chunks, transfer)
        if pins:
            chunks.pin_memory(torch.device(report.device))
        case.store(ROUNDS + 1)
        is_expected = pins and not report.is_dry
        until(
            lambda: case.is_pinned() is is_expected,
            f"{model}: is_pinned is not {is_expected}",
            PIN_S,
        )
        yield case


def contention(report: Report, name: str, case: Case) -> None:
    """How much longer matrix products take while another thread stores, as vLLM's worker does."""
    size = 64 if report.is_dry else MATMUL_SIZE
    one = torch.ones(size, size, dtype=torch.bfloat16, device=report.device)

    def products() -> float:
        began = time.perf_counter()
        for _ in range(NUM_MATMULS):
            torch.mm(one, one)
        ended = record_event(one.device)  # not the stores, which run on other streams
        if ended is not None:
            ended.synchronize()
        return time.perf_counter() - began

    products()
    alone = products()
    has_begun, is_over = threading.Event(), threading.Event()
    streams = ThreadStreams()

    def storing() -> None:
        try:
            for turn in itertools.count(ROUNDS + 2):
                with torch.inference_mode(), streams.own(one.device):
                    case.store(turn)
                has_begun.set()
                if is_over.is_set():
                    return
        finally:
            has_begun.set()

    with ThreadPoolExecutor(1) as pool:
        stores = pool.submit(storing)
        try:
            has_begun.wait()
            with_stores = products()
        finally:
            is_over.set()
        stores.result()
    report.note(
        f"{name}: matrix products during stores", times_longer=round(with_stores / alone, 3)
    )


def _in_flight(report: Report, name: str, group: LayerGroup) -> None:
    """Bare kernels and copies between pages and pinned memory, without the engine."""
    prompt = Prompt.make(report, group)
    (group,), limits = prompt.layout.groups, _limits(report, prompt.num_bytes)
    shape, dtype = group.shape(CHUNK_SIZE), getattr(torch, group.dtype)
    slots = prompt.slots.split(CHUNK_SIZE)
    hosts = [torch.zeros(shape, dtype=dtype, pin_memory=not report.is_dry) for _ in slots]
    source, target = (
        kernel_pages.Pages.of(*(pages.views[side :: group.sides] for side in range(group.sides)))
        for pages in (prompt.source, prompt.target)
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

        for view in prompt.target.views:
            view.zero_()
        title = f"{name}: {{}}, bare, {number} chunks in flight"
        for what, work in (("store", store), ("load", load)):
            report.figure(Figure(title.format(what), prompt.num_bytes, timed(work), limits[what]))
        prompt.check(report, f"{name}, {number} chunks in flight")
