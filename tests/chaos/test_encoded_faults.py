"""Encoded tiers on a disk that fails, with callers that have little time or go away: nothing
wrong is served, nothing leaks.
"""

from __future__ import annotations

import asyncio
import random
import secrets
from collections import Counter
from pathlib import Path

import pytest
from lmcache_core.errors import UnavailableError
from lmcache_core.record import Chunk, MissReason
from lmcache_core.storage.codecs import create_codecs
from lmcache_core.storage.disk import DiskBackend
from lmcache_core.storage.encoded import EncodedBackend

from tests.fixtures.codecs import decoded_from_lossy
from tests.fixtures.wire import Arena
from tests.suites.chunks import make_chunk, make_key
from tests.suites.faults import FaultPlan, FaultyBackend

NUM_NAMES = 12
NUM_STEPS = 150
NUM_CALLERS = 4
CAPACITY_BYTES = 256 << 10
PAYLOAD_BYTES = 20_000


def payload_of(name: int) -> bytes:
    """Compresses, and says whose it is in every byte."""
    return bytes((i * i + name) % 64 for i in range(PAYLOAD_BYTES))


class Caller:
    """One user of two views of the same records: one takes loss, one does not."""

    def __init__(
        self, lossless: EncodedBackend, lossy: EncodedBackend, arena: Arena, seed: str
    ) -> None:
        self._views = {True: lossy, False: lossless}
        self._arena = arena
        self._random = random.Random(seed)
        self.seen: Counter[str] = Counter()

    async def run(self) -> None:
        for _ in range(NUM_STEPS):
            try:
                async with asyncio.timeout(self._random.choice([0.001, 0.003, 1.0])):
                    await self._step()
            except TimeoutError:
                self.seen["cancelled"] += 1
            except UnavailableError:
                self.seen["failed"] += 1

    async def _step(self) -> None:
        rng = self._random
        takes_loss = rng.random() < 0.5
        view = self._views[takes_loss]
        names = [rng.randrange(NUM_NAMES) for _ in range(rng.randint(1, 4))]
        call = rng.randrange(8)
        if call < 3:
            chunks = [make_chunk(name, payload=payload_of(name)) for name in names]
            await view.batched_put(
                [decoded_from_lossy(chunk) if takes_loss else chunk for chunk in chunks]
            )
        elif call < 6:
            timeout_s = rng.choice([None, 0.002, 0.5])
            for name, result in zip(
                names,
                await view.batched_get([make_key(name) for name in names], self._arena, timeout_s),
                strict=True,
            ):
                if isinstance(result, Chunk):
                    data, is_lossy = bytes(result.memory.byte_array), result.lossy
                    result.release()
                    assert data == payload_of(name)
                    assert takes_loss or not is_lossy
                    self.seen["served lossy" if is_lossy else "served"] += 1
                else:
                    assert result.reason is not MissReason.PROFILE, (
                        "every record is one that is decoded here"
                    )
                    self.seen[result.reason.value] += 1
        elif call == 6:
            await view.batched_contains([make_key(name) for name in names])
        else:
            await view.batched_remove([make_key(names[0])])


@pytest.mark.parametrize("round_", range(3))
async def test_nothing_wrong_is_served_and_nothing_leaks(tmp_path: Path, round_: int) -> None:
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    arena = Arena(1 << 20)
    codecs = create_codecs({"disk_serde": "lossless"})
    disk = DiskBackend(tmp_path, CAPACITY_BYTES)
    plan = FaultPlan(
        seed,
        delayed_calls=0.2,
        delay_s=0.005,
        failed_calls=0.03,
        lost_chunks=0.03,
        damaged_chunks=0.05,
    )
    lossless = EncodedBackend(FaultyBackend(disk, plan), codecs, "lossless")
    lossy = EncodedBackend(FaultyBackend(disk, plan), codecs, "lossless", accepts_lossy=True)
    await lossless.open()
    await codecs.open()
    callers = [Caller(lossless, lossy, arena, f"{seed}/{i}") for i in range(NUM_CALLERS)]
    await asyncio.gather(*(caller.run() for caller in callers))
    await arena.until_empty()
    disk.check_integrity()
    await codecs.close()
    await lossless.close()
    seen = sum((caller.seen for caller in callers), Counter[str]())
    assert seen["served"] > 0
    assert seen["encoding"] > 0
    assert seen["cancelled"] > 0
    assert lossless.stats()["encoded_chunks"] > 0
