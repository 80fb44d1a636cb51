"""Reads of one peer over lm:// and through movers: GB/s, processor seconds per GB, and the cost of
an idle mover. `python -m tests.transports.compare`
"""

from __future__ import annotations

import asyncio
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from lmcache_core.record import Chunk, release_all
from lmcache_core.wire.client import ClientOptions, LmClient

from tests.fixtures.wire import Arena, MemoryStore, serving
from tests.suites.chunks import make_chunk, make_key
from tests.transports.movers import Node, running_node

MIB = 1 << 20
ARENA_BYTES = 512 * MIB
LOADS = ((1, 32 * MIB), (32, MIB))
"""Pieces, and bytes of each."""
SECONDS = 5.0
IDLE_S = 20.0
TICKS_IN_S = os.sysconf("SC_CLK_TCK")


def processor_s(pid: int) -> float:
    """Processor time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_IN_S


def resident_mb(pid: int) -> float:
    """Memory of a process that no other one has."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss_Anon:"):
            return int(line.split()[1]) / 1000
    raise ValueError(f"no memory of process {pid}")


async def measure(read: Callable[[], Awaitable[int]], pids: Sequence[int]) -> tuple[float, float]:
    """Read for a while; return GB/s (median) and processor seconds a GB of all these processes."""
    await read()
    rates, num_bytes = [], 0
    before, end = sum(map(processor_s, pids)), time.perf_counter() + SECONDS
    while time.perf_counter() < end:
        began = time.perf_counter()
        size = await read()
        rates.append(size / (time.perf_counter() - began) / 1e9)
        num_bytes += size
    return statistics.median(rates), (sum(map(processor_s, pids)) - before) / num_bytes * 1e9


async def by_lm(num_pieces: int, size: int) -> tuple[float, float]:
    """From a server in a process of its own."""
    command = [sys.executable, "-m", __spec__.name, "serve", str(num_pieces), str(size)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as peer:
        assert peer.stdout is not None
        port = int(peer.stdout.readline())
        arena = Arena(ARENA_BYTES)
        client = LmClient("127.0.0.1", port, None, ClientOptions())
        keys = [make_key(number) for number in range(num_pieces)]

        async def read() -> int:
            results = await client.get(keys, arena)
            assert all(isinstance(result, Chunk) for result in results), results
            release_all(results)
            return num_pieces * size

        try:
            return await measure(read, [os.getpid(), peer.pid])
        finally:
            await client.close()
            peer.kill()


async def serve(num_pieces: int, size: int) -> None:
    """Serve chunks over lm:// until killed; print the port."""
    store = MemoryStore(ARENA_BYTES)
    for number in range(num_pieces):
        chunk = make_chunk(number, payload=os.urandom(size), allocate=store.arena)
        store.chunks[chunk.key] = chunk
    async with serving(store) as server:
        print(server.port, flush=True)
        await asyncio.Event().wait()


@asynccontextmanager
async def two_nodes(transports: str) -> AsyncIterator[tuple[Node, Node]]:
    """Connected to their movers."""
    with (
        tempfile.TemporaryDirectory() as directory,
        tempfile.TemporaryDirectory(dir="/dev/shm") as shared,
        running_node(Path(directory) / "a", Path(shared) / "a", ARENA_BYTES, transports) as reader,
        running_node(Path(directory) / "b", Path(shared) / "b", ARENA_BYTES, transports) as peer,
    ):
        for node in (reader, peer):
            node.client.open()
            await node.attached()
        yield reader, peer
        for node in (reader, peer):
            await node.client.close()


async def by_mover(transports: str, num_pieces: int, size: int) -> tuple[float, float]:
    """From memory of another node; bytes are not verified, as those of lm:// are."""
    async with two_nodes(transports) as (reader, peer):
        theirs = [peer.allocate(size) for _ in range(num_pieces)]
        blob = await peer.attached()
        peer.attend()

        async def read() -> int:
            pieces = [reader.piece_from(peer, memory) for memory in theirs]
            await reader.client.read(blob, pieces, 60.0)
            for piece in pieces:
                piece.memory.ref_count_down()
            return num_pieces * size

        return await measure(read, [os.getpid(), reader.mover.worker, peer.mover.worker])


async def idle() -> None:
    """Print the cost of an idle mover, and how long a restart takes."""
    async with two_nodes("tcp") as (reader, _):
        pids = [reader.mover.process.pid, reader.mover.worker]
        before = sum(map(processor_s, pids))
        await asyncio.sleep(IDLE_S)
        share = (sum(map(processor_s, pids)) - before) / IDLE_S
        memory = sum(map(resident_mb, pids))
        os.kill(reader.mover.worker, 9)
        began = time.perf_counter()
        while reader.client.blob:
            await asyncio.sleep(0.001)
        await reader.attached()
        again_s = time.perf_counter() - began
    print(f"idle mover: {share:.2%} of a core, {memory:.0f} MB; ready {again_s:.2f} s after a kill")


async def main() -> None:
    """Print a row for each way and load."""
    print("| way | 1 x 32 MiB | processor s/GB | 32 x 1 MiB | processor s/GB |")
    print("|---|--:|--:|--:|--:|")
    for way in ("lm://", "tcp", "tcp,cma", "tcp,posix"):
        cells = []
        for num_pieces, size in LOADS:
            found = by_lm(num_pieces, size) if way == "lm://" else by_mover(way, num_pieces, size)
            rate, cost = await found
            cells += [f"{rate:.2f} GB/s", f"{cost:.2f}"]
        print("|", " | ".join([way if way == "lm://" else f"NIXL, {way}", *cells]), "|", flush=True)
    await idle()


if __name__ == "__main__":
    asyncio.run(serve(*map(int, sys.argv[2:])) if sys.argv[1:2] == ["serve"] else main())
