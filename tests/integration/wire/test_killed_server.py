"""A server process that is killed in the middle of a GET, and comes back."""

from __future__ import annotations

import asyncio
import signal
import sys
from pathlib import Path

import pytest
from lmcache_core.errors import UnavailableError
from lmcache_core.record import Chunk, Miss, MissReason

from tests.fixtures.wire import Arena, client_of, keys_of

ROOT = Path(__file__).resolve().parents[3]
NUM_CHUNKS = 12
PAYLOAD_BYTES = 4 << 20


async def start(port: int) -> tuple[asyncio.subprocess.Process, int]:
    arguments = [
        "-m",
        "tests.integration.wire.serve_chunks",
        str(port),
        str(NUM_CHUNKS),
        str(PAYLOAD_BYTES),
    ]
    process = await asyncio.create_subprocess_exec(
        sys.executable, *arguments, cwd=ROOT, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    async with asyncio.timeout(30):
        return process, int(await process.stdout.readline())


async def kill(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.send_signal(signal.SIGKILL)
    await process.wait()


@pytest.mark.parametrize("num_whole", [0, 3])
async def test_misses_no_lost_memory_and_a_new_connection(num_whole: int) -> None:
    arena = Arena(NUM_CHUNKS * PAYLOAD_BYTES)
    names = range(NUM_CHUNKS)
    process, port = await start(0)
    try:
        async with client_of(port, timeout_s=10.0) as client:
            await client.ping()
            reading = asyncio.create_task(client.get(keys_of(*names), arena))
            while arena.allocator.used_bytes <= num_whole * PAYLOAD_BYTES:
                await asyncio.sleep(0)
            await kill(process)
            async with asyncio.timeout(9):
                results = await reading
            chunks = [result for result in results if isinstance(result, Chunk)]
            assert num_whole <= len(chunks) < NUM_CHUNKS
            assert {r.reason for r in results if isinstance(r, Miss)} == {MissReason.UNAVAILABLE}
            for chunk in chunks:
                assert (
                    chunk.memory.byte_array[0]
                    == chunk.memory.byte_array[-1]
                    == results.index(chunk)
                )
                chunk.release()
            arena.check_empty()
            with pytest.raises(UnavailableError):
                await client.ping()

            process, _ = await start(port)
            async with asyncio.timeout(60):
                while True:
                    try:
                        results = await client.get(keys_of(*names), arena)
                        break
                    except UnavailableError:
                        await asyncio.sleep(0.02)
            assert all(isinstance(result, Chunk) for result in results)
            for result in results:
                assert isinstance(result, Chunk)
                result.release()
        arena.check_empty()
    finally:
        await kill(process)
