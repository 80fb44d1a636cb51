"""Digests of chunks that are about to leave the process, without holding up the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from lmcache_core.record import Chunk

INLINE_SEAL_BYTES = 1 << 20


async def seal_all(chunks: Sequence[Chunk]) -> None:
    """Compute the digests that chunks still lack, large ones in threads: nothing leaves the
    process without.
    """
    loop = asyncio.get_running_loop()
    sealing = []
    for chunk in chunks:
        if chunk.is_sealed:
            continue
        if chunk.memory.get_size() <= INLINE_SEAL_BYTES:
            chunk.sealed()
            continue
        chunk.memory.ref_count_up()
        # Shielded: it must run, or nothing gives the reference back.
        sealing.append(asyncio.shield(loop.run_in_executor(None, _seal_and_release, chunk)))
    await asyncio.gather(*sealing)


def _seal_and_release(chunk: Chunk) -> None:
    try:
        chunk.sealed()
    finally:
        chunk.release()
