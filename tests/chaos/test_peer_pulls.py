"""A serving process is killed, or stopped, in the middle of a pull: the rest comes from another,
and nothing is ever partial.
"""

from __future__ import annotations

import asyncio
import random
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from lmcache_core.record import Chunk, Miss, MissReason

from tests.fixtures.peers import Proxy, Town, town

NUM_CHUNKS = 48
PAYLOAD_BYTES = 200_000
BYTES_PER_S = 20_000_000
SEEDS = range(6)


@asynccontextmanager
async def serving_process(
    world: Town, name: str, load: float, bytes_per_s: float | None
) -> AsyncIterator[subprocess.Popen[str]]:
    arguments = [
        "-m",
        "tests.integration.wire.serve_chunks",
        "0",
        str(NUM_CHUNKS),
        str(PAYLOAD_BYTES),
    ]
    process = subprocess.Popen([sys.executable, *arguments], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    proxy = world.proxies[name] = Proxy(
        int(await asyncio.to_thread(process.stdout.readline)), bytes_per_s
    )
    await proxy.open()
    await world.announce(name, proxy.port, load)
    try:
        yield process
    finally:
        await proxy.close()
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("blow", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_peer_that_dies_in_the_middle(seed: int, blow: signal.Signals) -> None:
    after_bytes = random.Random(seed).randrange(NUM_CHUNKS * PAYLOAD_BYTES)
    async with (
        town(2 * NUM_CHUNKS * PAYLOAD_BYTES) as world,
        serving_process(world, "a", 0.0, BYTES_PER_S) as victim,
        serving_process(world, "b", 0.9, None),
    ):
        pulling = asyncio.create_task(world.pull(range(NUM_CHUNKS), ["a", "b"], timeout_s=6.0))
        async with asyncio.timeout(60):
            while world.proxies["a"].num_passed < after_bytes and not pulling.done():
                await asyncio.sleep(0.001)
        victim.send_signal(blow)
        results = await pulling
        for i, result in enumerate(results):
            assert isinstance(result, Chunk), f"seed {seed}: chunk {i} is missing: {result}"
            assert bytes(result.memory.byte_array) == bytes([i]) * PAYLOAD_BYTES
            result.release()


@pytest.mark.parametrize("seed", SEEDS)
async def test_the_only_holder_dies(seed: int) -> None:
    after_bytes = random.Random(seed).randrange(NUM_CHUNKS * PAYLOAD_BYTES // 3)
    async with (
        town(2 * NUM_CHUNKS * PAYLOAD_BYTES) as world,
        serving_process(world, "a", 0.0, BYTES_PER_S) as victim,
    ):
        pulling = asyncio.create_task(world.pull(range(NUM_CHUNKS), ["a"], timeout_s=6.0))
        async with asyncio.timeout(60):
            while world.proxies["a"].num_passed < after_bytes:
                await asyncio.sleep(0.001)
        victim.kill()
        results = await pulling
        assert {result.reason for result in results if isinstance(result, Miss)} == {
            MissReason.UNAVAILABLE
        }
        for i, result in enumerate(results):
            if isinstance(result, Chunk):
                assert bytes(result.memory.byte_array) == bytes([i]) * PAYLOAD_BYTES
                result.release()
