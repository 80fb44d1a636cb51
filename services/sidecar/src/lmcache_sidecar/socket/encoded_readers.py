"""Encoded records in the arena: which clients decode them, and decoding for the others."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Collection

from lmcache_core.errors import SerdeError
from lmcache_core.record import RAW_SERDE, Chunk, Miss, MissReason, Result, release_all
from lmcache_core.serde.codec import encoding_of
from lmcache_core.storage.codecs import Codecs
from lmcache_core.storage.disk.pool import ChunkJob, finish
from lmcache_core.storage.hot import LocalCPUBackend
from lmcache_core.telemetry import CodecFigures


class EncodedReaders:
    """The encodings that connected clients decode by themselves, on their GPUs.

    While there is such a client, records stay encoded in the arena: fewer bytes of memory, and
    fewer over the link to the GPU.

    Args:
        codecs: Codecs that are open while clients are served.
    """

    def __init__(self, codecs: Codecs) -> None:
        self._codecs = codecs
        self._figures = CodecFigures(whole=codecs.figures)
        self._num_clients: Counter[str] = Counter()

    def join(self, encodings: Collection[str]) -> None:
        """Note what a client decodes, to be followed by `leave`."""
        self._num_clients.update(encodings)

    def leave(self, encodings: Collection[str]) -> None:
        """Forget a client."""
        self._num_clients.subtract(encodings)

    def stays_encoded(self, record: Chunk) -> bool:
        """Return whether a connected client decodes this record."""
        if self._num_clients[encoding_of(record.described)] <= 0:
            return False
        from lmcache_core.serde.quantised_blob import is_quantised

        try:
            return is_quantised(record.described, record.memory.byte_array)
        except SerdeError:
            return False  # decoding it says so, too

    async def readable(
        self,
        results: list[Result],
        encodings: Collection[str],
        hot: LocalCPUBackend,
        timeout_s: float,
    ) -> list[Result]:
        """Return chunks for a client, those that it cannot decode decoded. In the arena they then
        replace the encoded ones, so that this happens once.

        Args:
            results: Chunks and misses; their references pass to the result.
            encodings: What the client decodes.
            hot: The arena's tier.
            timeout_s: Limit on the decoding; what is late is a miss.
        """
        now = asyncio.get_running_loop().time
        deadline = now() + timeout_s
        try:
            for i, result in enumerate(results):
                if isinstance(result, Chunk) and not _is_readable(result, encodings):
                    results[i] = Miss(MissReason.DEADLINE)  # `_decoded` owns the chunk now
                    results[i] = await self._decoded(result, hot, max(0.0, deadline - now()))
        except BaseException:
            release_all(results)
            raise
        return results

    async def _decoded(self, chunk: Chunk, hot: LocalCPUBackend, timeout_s: float) -> Result:
        begun = self._codecs.begin_decoding(chunk, hot.allocate, self._figures, seals=True)
        if not isinstance(begun, ChunkJob):
            chunk.release()
            return begun
        try:
            await finish([begun], timeout_s)
        except BaseException:
            begun.abandon()
            raise
        decoded = begun.take(Miss(MissReason.DEADLINE), Miss(MissReason.UNAVAILABLE))
        if isinstance(decoded, Chunk):
            hot.remove_many([decoded.key])
            hot.put_many([decoded])
        return decoded


def _is_readable(chunk: Chunk, encodings: Collection[str]) -> bool:
    header = chunk.described
    return header.serde == RAW_SERDE or encoding_of(header) in encodings
