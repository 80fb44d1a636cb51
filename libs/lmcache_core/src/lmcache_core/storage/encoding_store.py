"""What a process serves to its peers, encoded for those who can decode it."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future

from lmcache_core._typing import override
from lmcache_core.keys import ChunkKey
from lmcache_core.memory.buffer import BufferAllocator
from lmcache_core.record import RAW_SERDE, Chunk, Result
from lmcache_core.serde.codec import ChunkCodec
from lmcache_core.storage.client_view import ClientView, WrappedStore
from lmcache_core.storage.codecs import Codecs
from lmcache_core.storage.disk.pool import wait_all
from lmcache_core.storage.transcoding import encoded_chunk
from lmcache_core.telemetry import CodecFigures
from lmcache_core.wire import ServedStore
from lmcache_core.wire.capabilities import Accepts

MAX_ENCODING_BYTES = 128 << 20
"""Raw bytes that are being encoded for peers at once; what more is asked for goes out raw, since
waiting may take longer than sending.
"""
MAX_SENDING_BYTES = 256 << 20
"""Encoded bytes that are held until they are sent."""


class EncodingStore(ClientView):
    """Serves raw chunks encoded, to clients who say that they decode the serde (and, if it loses
    something, that they take that).

    All others get raw chunks, and nothing lossy unless they take it.

    Args:
        store: What is wrapped.
        codecs: Open while this store serves.
        serde: How chunks are encoded, one that `codecs` was made with; "naive": not at all.
    """

    def __init__(self, store: ServedStore, codecs: Codecs, serde: str) -> None:
        super().__init__(store)
        self._codec = codecs.named(serde)
        self._codecs = codecs
        self._work = _Work(codecs)

    @property
    @override
    def offers(self) -> Accepts:
        return Accepts(True, frozenset() if self._codec is None else frozenset({self._codec.serde}))

    @override
    def for_client(self, accepts: Accepts) -> ServedStore:
        store, codec = super().for_client(accepts), self._codec
        if (
            codec is None
            or codec.serde not in accepts.serdes
            or (codec.lossy and not accepts.lossy)
        ):
            return store
        return _EncodedView(store, codec, self._work)

    def stats(self) -> dict[str, int]:
        """What was encoded, and how many encoded bytes wait to be sent."""
        return self._work.figures.stats() | {"sending_bytes": self._work.memory.used_bytes}


class _Work:
    """What all views of a store share: threads, bounds, figures."""

    def __init__(self, codecs: Codecs) -> None:
        self.threads = codecs.encoding
        self.figures = CodecFigures(whole=codecs.figures)
        self.memory = BufferAllocator(capacity_bytes=MAX_SENDING_BYTES)
        self.encoding_bytes = 0

    def run(self, codec: ChunkCodec, chunk: Chunk) -> Chunk | None:
        """The chunk, encoded, in memory that is counted; None: it goes out as it is. Takes over
        a reference.
        """
        try:
            encoded = encoded_chunk(codec, chunk, self.figures)
            memory = (
                None
                if encoded is None
                else self.memory.allocate((encoded.memory.get_size(),), None)
            )
            if encoded is None or memory is None:
                return None
            memory.byte_array[:] = encoded.memory.byte_array
            return encoded.moved(memory, encoded.tier)
        finally:
            chunk.release()


class _EncodedView(WrappedStore):
    def __init__(self, store: ServedStore, codec: ChunkCodec, work: _Work) -> None:
        super().__init__(store)
        self._codec = codec
        self._work = work

    @override
    async def get(self, keys: Sequence[ChunkKey]) -> list[Result]:
        results = await self._store.get(keys)
        work = self._work
        futures: dict[int, Future[Chunk | None]] = {}
        num_bytes = 0
        try:
            for i, result in enumerate(results):
                if isinstance(result, Chunk) and self._is_worth_it(result):
                    futures[i] = self._submit(result)
                    work.encoding_bytes += result.memory.get_size()
                    num_bytes += result.memory.get_size()
            await wait_all(list(futures.values()))
            encoded = {
                i: future.result() for i, future in futures.items() if not future.cancelled()
            }
        except BaseException:
            for future in futures.values():
                _abandon(future)
            for result in results:
                if isinstance(result, Chunk):
                    result.release()
            raise
        finally:
            work.encoding_bytes -= num_bytes
        for i, chunk in encoded.items():
            raw = results[i]
            if chunk is not None and isinstance(raw, Chunk):
                raw.release()
                results[i] = chunk
        return results

    def _is_worth_it(self, chunk: Chunk) -> bool:
        is_raw = chunk.described.serde == RAW_SERDE
        return is_raw and self._work.encoding_bytes + chunk.memory.get_size() <= MAX_ENCODING_BYTES

    def _submit(self, chunk: Chunk) -> Future[Chunk | None]:
        chunk.memory.ref_count_up()
        try:
            future = self._work.threads.submit(self._work.run, self._codec, chunk)
        except BaseException:
            chunk.release()
            raise
        future.add_done_callback(lambda done: chunk.release() if done.cancelled() else None)
        return future


def _abandon(future: Future[Chunk | None]) -> None:
    if not future.cancel():
        future.add_done_callback(_release_encoded)


def _release_encoded(future: Future[Chunk | None]) -> None:
    if (
        not future.cancelled()
        and future.exception() is None
        and (chunk := future.result()) is not None
    ):
        chunk.release()
