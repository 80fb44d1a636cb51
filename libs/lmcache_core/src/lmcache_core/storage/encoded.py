"""A tier whose records are encoded: raw chunks above it, smaller records below."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial

from lmcache_core._typing import override
from lmcache_core.errors import UnavailableError, one_line
from lmcache_core.keys import ChunkKey
from lmcache_core.record import (
    RAW_SERDE,
    Allocate,
    Chunk,
    Miss,
    MissReason,
    Result,
    release_all,
)
from lmcache_core.storage.base import StorageBackend
from lmcache_core.storage.byte_gate import ByteGate
from lmcache_core.storage.codecs import Codecs, encoded_chunk
from lmcache_core.storage.disk.pool import ChunkJob, finish, wait_all
from lmcache_core.storage.unusable import UnusableRecords
from lmcache_core.telemetry import CodecFigures

logger = logging.getLogger(__name__)

MAX_ENCODING_BYTES = 128 << 20
"""Raw bytes being encoded or written for one tier; further puts wait."""
MAX_DECODE_SHARE = 0.5
"""Part of a caller's time reserved for decoding: as long as decoding took recently, up to this."""
NEWEST_WEIGHT = 0.5
MAX_NAMED_SERDES = 16


class EncodedBackend(StorageBackend):
    """Encodes on put, decodes on get, and lets only acceptable records through.

    Raw records pass unchanged. With a lossy serde, every record that can be decoded here is
    accepted. Otherwise a lossy record is a miss (`encoding`), its key is reported as absent, and a
    lossless chunk of that key replaces it. A record that fails to decode (`corrupt`) is treated the
    same way. A record that only this process cannot decode (`encoding`, `profile`) is also reported
    as absent, but stays, since other readers may use it. Work on bytes runs in the threads of
    `codecs`, never on the event loop.

    Args:
        backend: The tier; opened and closed with this one.
        codecs: Opened with this tier, and closed when all its users have closed.
        serde: Encoding of raw chunks, one that `codecs` was made with; None or "naive": none.
        accepts_lossy: Whether lossy records are let through; by default if `serde` is lossy.
        seals: Compute digests of decoded chunks in the same threads, for readers that will need
            them.
        stays_encoded: Whether an acceptable record is let through still encoded: its readers
            decode it.
    """

    def __init__(
        self,
        backend: StorageBackend,
        codecs: Codecs,
        serde: str | None = None,
        accepts_lossy: bool | None = None,
        seals: bool = False,
        stays_encoded: Callable[[Chunk], bool] = lambda record: False,
    ) -> None:
        self.name = backend.name
        self.wrapped = backend
        self._backend = backend
        self._codecs = codecs
        self._encoder = codecs.named(serde)
        self._accepts_lossy = codecs.is_lossy(serde) if accepts_lossy is None else accepts_lossy
        self._seals = seals
        self._stays_encoded = stays_encoded
        self._figures = CodecFigures(whole=codecs.figures)
        self._gate = ByteGate(MAX_ENCODING_BYTES)
        self._replaceable = UnusableRecords()
        self._undecodable = UnusableRecords()
        self._decode_s = 0.0
        self._num_refused = 0
        self._named_serdes: set[tuple[str, str]] = set()
        self._is_open = False

    def __repr__(self) -> str:
        return f"EncodedBackend({self._backend!r})"

    @property
    @override
    def is_asked_first(self) -> bool:
        """Return True for a tier that would encode what it is given."""
        return self._encoder is not None or super().is_asked_first

    @override
    async def open(self) -> None:
        """Open the codecs, which may take a minute the first time, then the tier.

        Raises:
            ConfigError: A package that the serde needs is not installed.
            UnavailableError: The tier cannot be opened.
        """
        await self._codecs.open()
        try:
            await self._backend.open()
        except BaseException:
            await self._codecs.close()
            raise
        self._is_open = True

    @override
    async def close(self) -> None:
        """Close the tier once running decodes have ended. Idempotent."""
        was_open, self._is_open = self._is_open, False
        try:
            await self._backend.close()
        finally:
            if was_open:
                await self._codecs.close()

    @override
    def contains_now(self, keys: Sequence[ChunkKey]) -> list[bool] | None:
        found = self._backend.contains_now(keys)
        return None if found is None else self._usable(keys, found)

    @override
    async def batched_contains(self, keys: Sequence[ChunkKey]) -> list[bool]:
        """Return which chunks a `batched_get` would find now; records known to be unusable here
        count as absent.
        """
        return self._usable(keys, await self._backend.batched_contains(keys))

    def _usable(self, keys: Sequence[ChunkKey], found: Sequence[bool]) -> list[bool]:
        return [
            is_there and key not in self._replaceable and key not in self._undecodable
            for key, is_there in zip(keys, found, strict=True)
        ]

    @override
    async def batched_get(
        self, keys: Sequence[ChunkKey], allocate: Allocate, timeout_s: float | None = None
    ) -> list[Result]:
        """Read and decode chunks. Until they are decoded, encoded payloads also occupy memory from
        `allocate`.
        """
        now = asyncio.get_running_loop().time
        deadline = None if timeout_s is None else now() + timeout_s
        results = await self._backend.batched_get(
            keys, allocate, self._time_to_read(timeout_s, len(keys))
        )
        began = now()
        is_late = deadline is not None and began >= deadline
        jobs: dict[int, ChunkJob[Result]] = {}
        try:
            for i, (key, result) in enumerate(zip(keys, results, strict=True)):
                if isinstance(result, Chunk):
                    results[i] = Miss(MissReason.DEADLINE)  # `_let_in` owns the chunk now
                    let_in = self._let_in(result, None if is_late else allocate)
                    if isinstance(let_in, ChunkJob):
                        jobs[i] = let_in
                    else:
                        results[i] = let_in
                elif result.reason is MissReason.ENCODING and not self._accepts_lossy:
                    self._replaceable.note(key)  # the server filters what would be refused here
            await finish(jobs.values(), None if deadline is None else max(0.0, deadline - began))
        except BaseException:
            for job in jobs.values():
                job.abandon()
            release_all(results)
            raise
        for i, job in jobs.items():
            results[i] = result = job.take(Miss(MissReason.DEADLINE), Miss(MissReason.UNAVAILABLE))
            if isinstance(result, Miss) and result.reason is MissReason.CORRUPT:
                self._replaceable.note(keys[i])
        if jobs:
            self._decode_s += NEWEST_WEIGHT * ((now() - began) / len(jobs) - self._decode_s)
        return results

    @override
    async def batched_put(self, chunks: Sequence[Chunk]) -> list[bool]:
        """Encode and store chunks; lossy ones are refused where only lossless ones are served."""
        kept: list[bool] = []
        for group in _groups(chunks):
            async with self._gate.using(sum(chunk.memory.get_size() for chunk in group)):
                kept += await self._put(group)
        return kept

    @override
    async def batched_remove(self, keys: Sequence[ChunkKey]) -> int:
        num_removed = await self._backend.batched_remove(keys)
        self._forget(keys)
        return num_removed

    @override
    async def clear(self, tenant: str | None = None) -> int:
        num_removed = await self._backend.clear(tenant)
        self._replaceable.clear()
        self._undecodable.clear()
        return num_removed

    @override
    def stats(self) -> dict[str, int]:
        """Return the tier's figures, those of the codecs, and how many records were refused for
        their encoding.
        """
        return (
            self._backend.stats() | self._figures.stats() | {"refused_encodings": self._num_refused}
        )

    def _time_to_read(self, timeout_s: float | None, num_chunks: int) -> float | None:
        return (
            None
            if timeout_s is None
            else timeout_s - min(self._decode_s * num_chunks, timeout_s * MAX_DECODE_SHARE)
        )

    def _let_in(self, chunk: Chunk, allocate: Allocate | None) -> Result | ChunkJob[Result]:
        """Return the chunk if it passes unchanged, the job that decodes it, or the miss to report.

        Takes over the chunk's reference. Without `allocate` it is too late to decode anything.
        """
        header = chunk.described
        self._forget([chunk.key])
        if header.lossy and not self._accepts_lossy:
            self._replaceable.note(chunk.key)
            return self._refused(chunk, MissReason.ENCODING)
        if header.serde == RAW_SERDE:
            return chunk
        if self._stays_encoded(chunk):
            return chunk
        begun = self._codecs.begin_decoding(chunk, allocate, self._figures, self._seals)
        if isinstance(begun, ChunkJob):
            return begun
        if begun.reason in (MissReason.ENCODING, MissReason.PROFILE):
            self._undecodable.note(chunk.key)
        elif begun.reason is MissReason.CORRUPT:
            self._replaceable.note(chunk.key)
        else:
            chunk.release()
            return begun
        return self._refused(chunk, begun.reason)

    def _forget(self, keys: Sequence[ChunkKey]) -> None:
        self._replaceable.forget(keys)
        self._undecodable.forget(keys)

    def _refused(self, chunk: Chunk, reason: MissReason) -> Miss:
        header = chunk.described
        name = (header.serde, reason.value)
        if name not in self._named_serdes and len(self._named_serdes) < MAX_NAMED_SERDES:
            self._named_serdes.add(name)
            logger.warning(
                "records cannot be used here, counting them as misses: tier=%s serde=%s lossy=%s"
                " reason=%s",
                self.name,
                one_line(header.serde),
                header.lossy,
                reason.value,
            )
        self._num_refused += 1
        chunk.release()
        return Miss(reason)

    async def _put(self, chunks: Sequence[Chunk]) -> list[bool]:
        """Encode and write chunks, few enough that their raw and encoded forms fit in memory
        together.
        """
        accepted = [
            i
            for i, c in enumerate(chunks)
            if (self._accepts_lossy or not c.lossy) and c.key not in self._undecodable
        ]
        records = await self._encoded([chunks[i] for i in accepted])
        replaced = [record.key for record in records if record.key in self._replaceable]
        if replaced:
            await self._backend.batched_remove(replaced)
        kept = [False] * len(chunks)
        for i, record, is_kept in zip(
            accepted, records, await self._backend.batched_put(records), strict=True
        ):
            kept[i] = is_kept
            if is_kept:
                self._replaceable.forget([record.key])
        return kept

    async def _encoded(self, chunks: Sequence[Chunk]) -> list[Chunk]:
        """Return these chunks as they are to be written. Encoded ones lie outside any arena; the
        others are the caller's own.
        """
        encoder = self._encoder
        if encoder is None:
            return list(chunks)
        futures: dict[int, Future[Chunk | None]] = {}
        for i, chunk in enumerate(chunks):
            if chunk.described.serde == RAW_SERDE:
                chunk.memory.ref_count_up()
                try:
                    futures[i] = self._codecs.encoding.submit(
                        encoded_chunk, encoder, chunk, self._figures
                    )
                except BaseException:
                    chunk.release()
                    raise
                futures[i].add_done_callback(partial(_release_chunk, chunk))
        try:
            await wait_all(list(futures.values()))
        except BaseException:
            for future in futures.values():
                future.cancel()
            raise
        if any(future.cancelled() for future in futures.values()):
            raise UnavailableError("the codecs were closed")
        return [
            (futures[i].result() if i in futures else None) or chunk
            for i, chunk in enumerate(chunks)
        ]


def _groups(chunks: Sequence[Chunk]) -> Iterator[Sequence[Chunk]]:
    """Yield the chunks in runs of at most `MAX_ENCODING_BYTES`, or of one larger chunk; one empty
    run if there are none.
    """
    begin = num_bytes = 0
    for i, chunk in enumerate(chunks):
        size = chunk.memory.get_size()
        if i > begin and num_bytes + size > MAX_ENCODING_BYTES:
            yield chunks[begin:i]
            begin, num_bytes = i, 0
        num_bytes += size
    yield chunks[begin:]


def _release_chunk(chunk: Chunk, _: Future[Chunk | None]) -> None:
    chunk.release()
