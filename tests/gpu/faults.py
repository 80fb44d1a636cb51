"""What the CUDA runtime refuses, and a sidecar that is killed during a copy, must cost speed, never
a later call, and never a byte.
"""

from __future__ import annotations

import contextlib
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from lmcache_core.errors import CapacityError
from lmcache_core.gpu_connectors import KVLayout, LayerGroup, PagedGPUConnector
from lmcache_core.memory import HostMemoryAllocator, MemoryFormat
from lmcache_core.memory.tensor import pin
from lmcache_demo.processes import Processes
from lmcache_demo.settings import quiet_environment

from tests.fixtures.fake_vllm import imported_connector
from tests.fixtures.restarted_sidecar import ARENA_BYTES, RestartedSidecar
from tests.fixtures.vllm_engine import FULL, Engine, Shape, WrongKV, running
from tests.fixtures.vllm_engine.shapes import HND
from tests.fixtures.vllm_engine.worlds import make_model, prompt, with_sidecar
from tests.gpu.connectors import Pages
from tests.gpu.copies import LOADS, STORES, require_pinned
from tests.gpu.facts import SHARED_MEMORY
from tests.gpu.report import Report, WrongBytes
from tests.gpu.streams import compute_stream

GROUP = LayerGroup("", 4, 2, 64, "bfloat16", packing="kv_first")
NUM_TOKENS, BLOCK_SIZE = 256, 16
RENEWED = {"arena_gb": 2 * ARENA_BYTES / (1 << 30)}
KILLED = {
    "a store": (STORES, {}),
    "a load": (LOADS, {}),
    "a load, and its arena replaced": (LOADS, RENEWED),
}
"""Thread whose copy is hit, and settings of the sidecar that comes next, by name."""
SPIN_CYCLES = 400_000_000
"""0.2 s on a GPU of 2 GHz, in which the sidecar dies."""
STORED, OTHER, LENGTH = 1, 2, 45
"""Prompts by number, and their tokens."""
BACK_S = 20.0
"""In which the engine must find a sidecar that is back."""


def run(report: Report) -> None:
    """Each fault, and the same copies afterwards."""
    _pinned_twice(report)
    _copies(report, "after memory was pinned twice")
    _no_room(report)
    _copies(report, "after the device was full")
    try:
        import lmcache_sidecar.app  # noqa: F401 (as the services' processes do)
    except ImportError as exc:
        report.note("without a sidecar", text=str(exc))
        return
    for name, (thread, settings) in KILLED.items():
        try:
            _killed(report, name, thread, settings)
        except WrongKV as exc:
            raise WrongBytes(f"sidecar killed during {name}: {exc}") from exc


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
    except CapacityError:
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


def _killed(report: Report, name: str, thread: str, settings: dict[str, float]) -> None:
    """Kill a sidecar during a copy. The engine works without a cache, and finds the next one."""
    with contextlib.ExitStack() as opened:
        place = Path(opened.enter_context(tempfile.TemporaryDirectory(dir=SHARED_MEMORY)))
        processes = opened.enter_context(Processes(place, quiet_environment()))
        sidecar = RestartedSidecar(processes, place)
        module = opened.enter_context(imported_connector())
        copies = opened.enter_context(compute_stream(report)).copies
        extra = with_sidecar(sidecar.socket, layout="tokens")
        shape = Shape((FULL,), 4, 48, HND, device=report.device)
        engine = opened.enter_context(running(module, make_model(place), extra, shape=shape))
        engine.ask(prompt(STORED, LENGTH))
        if not _num_loaded(engine, STORED):
            raise AssertionError("nothing was loaded before the fault")
        if not report.is_dry:
            require_pinned(copies.are_pinned)
        with _killing(report, sidecar, thread):
            is_store = thread == STORES
            during = _num_loaded(engine, OTHER if is_store else STORED)
        without = [_num_loaded(engine, number) for number in (STORED, OTHER)]
        if sidecar.process.is_alive or any(without):
            raise AssertionError(f"{without} tokens were loaded without a sidecar")
        copies.are_pinned.clear()
        sidecar.start(**settings)
        began = time.monotonic()
        # Arenas are pinned again in the background: what is loaded until then is pageable.
        while not (
            (after := _num_loaded(engine, OTHER))
            and (report.is_dry or copies.are_pinned.get(LOADS))
        ):
            if time.monotonic() > began + BACK_S:
                raise AssertionError(
                    f"the sidecar is back: {after} tokens were loaded,"
                    f" out of pinned memory: {copies.are_pinned}"
                )
        report.note(
            f"sidecar killed during {name}",
            promised_during=during,
            loaded_after=after,
            is_arena_renewed=bool(settings),
            back_s=round(time.monotonic() - began, 2),
        )


def _num_loaded(engine: Engine, number: int) -> int:
    """Ask for a prompt that vLLM itself has forgotten; how many tokens the connector promised."""
    engine.forget()
    return engine.tally(engine.ask(prompt(number, LENGTH))).num_external


@contextlib.contextmanager
def _killing(report: Report, sidecar: RestartedSidecar, thread: str) -> Iterator[None]:
    """Within, kill the sidecar during a thread's first copy between arena and device."""
    copy, hit = torch.Tensor.copy_, threading.Event()

    def copy_and_kill(
        target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False
    ) -> object:
        if not non_blocking or hit.is_set() or threading.current_thread().name != thread:
            return copy(target, source, non_blocking)
        hit.set()
        # The copy waits for this kernel. A thread kills, because a copy of memory that is not
        # pinned returns only when it has ended.
        if not report.is_dry:
            torch.cuda._sleep(SPIN_CYCLES)
        killer = threading.Thread(target=sidecar.process.kill)
        killer.start()
        copied = copy(target, source, non_blocking)
        killer.join()
        return copied

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "copy_", copy_and_kill)
        yield
    if not hit.is_set():
        raise AssertionError(f"{thread} has copied nothing")
