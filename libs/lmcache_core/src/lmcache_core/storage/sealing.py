"""Computes digests of chunks that are about to leave the process, without blocking the event
loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from lmcache_core.record import INLINE_DIGEST_BYTES, Chunk


async def seal_all(chunks: Sequence[Chunk]) -> None:
    """Compute missing digests, those of large chunks in threads: no chunk leaves the process
    without one.
    """
    loop = asyncio.get_running_loop()
    sealing = []
    for chunk in chunks:
        if chunk.is_sealed:
            continue
        if chunk.memory.get_size() <= INLINE_DIGEST_BYTES:
            chunk.sealed()
            continue
        chunk.memory.ref_count_up()
        # Shielded: if it did not run, the reference would never be released.
        sealing.append(asyncio.shield(loop.run_in_executor(None, _seal_and_release, chunk)))
    await asyncio.gather(*sealing)


def _seal_and_release(chunk: Chunk) -> None:
    try:
        chunk.sealed()
    finally:
        chunk.release()
