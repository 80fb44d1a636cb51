"""Encoded records in the arena: which clients decode them, and decoding for the others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from functools import partial

from lmcache_core.errors import SerdeError
from lmcache_core.record import RAW_SERDE, Chunk, Miss, MissReason, Result, release_all
from lmcache_core.serde.codec import encoding_of
from lmcache_core.storage.codecs import Codecs
from lmcache_core.storage.disk.pool import ChunkJob, finish
from lmcache_core.storage.stack import TierStack
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
        stack: TierStack,
        timeout_s: float,
        most_bytes: int | None = None,
    ) -> list[Result]:
        """Return a prefix of chunks for a client, those that it cannot decode decoded, several at a
        time. In the arena they then replace the encoded ones, so that this happens once.

        Args:
            results: Chunks and misses; their references pass to the result.
            timeout_s: Limit on the decoding; what is late is a miss.
            most_bytes: Size of the largest payload that the client can use; None: unknown.
        """
        allocate = partial(stack.hot.receive_asked, most_bytes=most_bytes)
        jobs: dict[int, tuple[Chunk, ChunkJob[Result]]] = {}
        try:
            for i, result in enumerate(results):
                if isinstance(result, Miss):
                    break  # what lies behind is of no use to the client
                if _is_readable(result, encodings):
                    continue
                results[i] = Miss(MissReason.UNAVAILABLE)  # the job owns the chunk now
                begun = self._codecs.begin_decoding(result, allocate, self._figures, seals=True)
                if isinstance(begun, Miss):
                    result.release()
                    results[i] = begun
                    break
                jobs[i] = result, begun
            await finish([job for _, job in jobs.values()], timeout_s)
        except BaseException:
            for _, job in jobs.values():
                job.abandon()
            release_all(results)
            raise
        for i, (encoded, job) in jobs.items():
            decoded = job.take(Miss(MissReason.DEADLINE), Miss(MissReason.UNAVAILABLE))
            results[i] = decoded
            if isinstance(decoded, Chunk):
                stack.replace_hot(encoded, decoded)
        return results


def _is_readable(chunk: Chunk, encodings: Collection[str]) -> bool:
    header = chunk.described
    return header.serde == RAW_SERDE or encoding_of(header) in encodings
