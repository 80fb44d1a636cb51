"""What request ids and traces cost: `python -m tests.bench.telemetry` (docs/adr/0017-traces.md
has the figures).
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from lmcache_core.keys import CacheEngineKey, ChunkKey
from lmcache_core.lookup import LookupClient
from lmcache_core.storage.remote import create_remote_backend
from lmcache_core.telemetry.request_context import Carried, RequestIds, step, working_for

from tests.fixtures.otlp import collector
from tests.fixtures.service_process import running_service

NUM_CALLS = 200_000
NUM_REQUESTS = 1000
NUM_ROUNDS = 400
KEYS = [
    ChunkKey.of("default", CacheEngineKey("vllm", "bench", 1, 0, f"{i:064x}")) for i in range(16)
]
IDS = RequestIds()
Way = Callable[[], AbstractContextManager[None]]
WAYS: dict[str, Way] = {
    "without an id": nullcontext,
    "with one": lambda: working_for("bench", Carried(IDS.next()), None),
}


def in_process() -> dict[str, float]:
    """Nanoseconds of each call, the best round."""

    def of(call: Callable[[], object]) -> float:
        rounds = []
        for _ in range(NUM_ROUNDS):
            began = time.perf_counter()
            for _ in range(NUM_CALLS // NUM_ROUNDS):
                call()
            rounds.append(time.perf_counter() - began)
        return min(rounds) / (NUM_CALLS // NUM_ROUNDS) * 1e9

    def a_step() -> None:
        with step("tier memory get"):
            pass

    def a_request() -> None:
        with working_for("sidecar LOAD", Carried(IDS.next()), None):
            pass

    return {
        "nothing": of(lambda: None),
        "a step, off": of(a_step),
        "an id made and set": of(a_request),
    }


async def _asked(ask: Callable[[], Awaitable[object]]) -> dict[str, float]:
    """Microseconds of a request each way, medians; both ways in turn, so that the machine's
    moods reach both.
    """
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    for turn in range(NUM_REQUESTS + 50):
        for way, enter in WAYS.items():
            began = time.perf_counter()
            with enter():
                await ask()
            if turn >= 50:
                seconds[way].append(time.perf_counter() - began)
    return {way: statistics.median(each) * 1e6 for way, each in seconds.items()}


async def across(lookup_url: str, storage_url: str) -> dict[str, dict[str, float]]:
    """What asking real services takes."""
    lookup = LookupClient(lookup_url, None, 5.0)
    await lookup.open()
    remote = create_remote_backend(storage_url, None, 5.0)
    await remote.open()
    ids = [key.key.chunk_id() for key in KEYS]
    try:
        return {
            "lookup of 16 chunks": await _asked(lambda: lookup.lookup(ids)),
            "lm:// CONTAINS of 16 chunks": await _asked(lambda: remote.batched_contains(KEYS)),
        }
    finally:
        await remote.close()
        await lookup.close()


def main() -> None:
    """Measure and print."""
    for name, nanoseconds in in_process().items():
        print(f"{name}: {nanoseconds:.0f} ns")
    for traced in (False, True):
        with tempfile.TemporaryDirectory() as directory, collector() as collecting:
            place = Path(directory)
            tracing = {"OTLP_ENDPOINT": collecting.url, "TRACE_SAMPLE_RATIO": "0"} if traced else {}
            of = {
                name: {f"LMCACHE_{name}_{option}": value for option, value in tracing.items()}
                for name in ("LOOKUP", "STORAGE")
            }
            with (
                running_service(
                    "lmcache_lookup", place, {"LMCACHE_LOOKUP_PORT": "0", **of["LOOKUP"]}
                ) as lookup,
                running_service(
                    "lmcache_storage",
                    place,
                    {
                        "LMCACHE_STORAGE_PORT": "0",
                        "LMCACHE_STORAGE_LM_PORT": "0",
                        "LMCACHE_STORAGE_MEMORY_GB": "0.03",
                        **of["STORAGE"],
                    },
                ) as storage,
            ):
                found = asyncio.run(
                    across(lookup.url, f"lm://127.0.0.1:{storage.ports['lm_port']}")
                )
            for name, ways in found.items():
                told = ", ".join(
                    f"{way} {microseconds:.0f} us" for way, microseconds in ways.items()
                )
                print(
                    f"{name}, services {'that may trace' if traced else 'without traces'}: {told}"
                )


if __name__ == "__main__":
    main()
