"""The codecs of one process, opened once for all tiers that use them, and the threads that run
them.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from lmcache_core.errors import ConfigError, RecordError, SerdeError
from lmcache_core.memory.base import MemoryObj
from lmcache_core.memory.buffer import BytesBufferMemoryObj
from lmcache_core.record import (
    REPORT_EXTENSION,
    Allocate,
    Chunk,
    Miss,
    MissReason,
    RecordHeader,
    Result,
    decoded_bytes,
    decoded_header,
    encode_head,
    payload_digest,
)
from lmcache_core.serde import DOCUMENTED_NAMES, create_codec
from lmcache_core.serde.codec import (
    TABLES_MARK,
    ChunkCodec,
    EncodingReport,
    encoding_report,
    report_extension,
)
from lmcache_core.serde.stated_size import check_stated_size
from lmcache_core.storage.disk.pool import ChunkJob, FilePool
from lmcache_core.telemetry import CodecFigures, Counters, MeasuredError

logger = logging.getLogger(__name__)

MAX_CODEC_THREADS = 4
"""Chunks decoded at the same time; as many are encoded in other threads. A codec may use threads of
its own for each chunk.
"""
CLOSE_WAIT_S = 10.0
ALSO_DECODED = MappingProxyType({"cachegen": ("lossless",)})
"""Serdes that a codec decodes in addition to its own: CacheGen stores losslessly what it cannot
quantise.
"""


def create_codecs(
    serdes: Mapping[str, str | None],
    decode_documented: bool = False,
    counters: Counters | None = None,
) -> Codecs:
    """Return the codecs that options name, not yet opened.

    Args:
        serdes: Values of `remote_serde` and similar options, by option; None and "naive" name no
            codec.
        decode_documented: Also decode `torch`, `safetensor` and `fast` if their packages are
            installed.

    Raises:
        ConfigError: A serde is unknown, or needs a package that is missing.
    """
    named: dict[str, ChunkCodec] = {}
    options: dict[str, str] = {}
    for option, serde in serdes.items():
        if serde is None or serde in named:
            continue
        try:
            codec = create_codec(serde)
        except ConfigError as exc:
            raise ConfigError(f"{option}={serde!r}: {exc}") from exc
        if codec is not None:
            named[serde], options[serde] = codec, option
    documented: list[ChunkCodec] = []
    if decode_documented:
        try:
            further = (create_codec(serde) for serde in DOCUMENTED_NAMES if serde not in named)
            documented += (codec for codec in further if codec is not None)
        except ConfigError as exc:
            logger.info("not decoding records of the documented serdes: error=%s", exc)
    return Codecs(named, documented, counters, options)


class Codecs:
    """Codecs shared by several users. For one event loop, except `decoder_of`.

    Only an open codec decodes: a record of another serde is a miss, and never causes an import or a
    compilation.

    Args:
        named: Codecs that options name, by that name. Either all of them open or none does.
        further: Codecs that only decode; skipped if they cannot be opened.
        options: The option that names each codec, for errors.

    Attributes:
        decoding: Threads that decode, separate so that reads never queue behind writes.
    """

    def __init__(
        self,
        named: dict[str, ChunkCodec],
        further: Sequence[ChunkCodec] = (),
        counters: Counters | None = None,
        options: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self._named = named
        self._options = options
        self._further = tuple(further)
        self._open: tuple[ChunkCodec, ...] = ()
        self._num_users = 0
        self._lock = asyncio.Lock()
        num_threads = min(MAX_CODEC_THREADS, len(os.sched_getaffinity(0)))
        self.decoding = FilePool("lmcache-decoding", num_threads)
        self.encoding = FilePool("lmcache-encoding", -(-num_threads // 2))
        self.figures = CodecFigures(counters)

    def named(self, serde: str | None) -> ChunkCodec | None:
        """Return the codec that an option names; None for None and "naive"."""
        return None if serde is None else self._named.get(serde)

    def is_lossy(self, serde: str | None) -> bool:
        """Return whether the codec that an option names may be lossy."""
        codec = self.named(serde)
        return codec is not None and codec.lossy

    def decodable(self) -> list[str]:
        """Return the serdes that are certain to be decoded here, those that options name; known
        before the codecs are open.
        """
        named = [codec.serde for codec in self._named.values()]
        return list(
            dict.fromkeys(
                [*named, *(other for serde in named for other in ALSO_DECODED.get(serde, ()))]
            )
        )

    async def open(self) -> None:
        """Open all codecs for one more user, which must call `close`.

        Raises:
            ConfigError: A codec that an option names is unavailable.
            UnavailableError: Its threads cannot be started.
        """
        async with self._lock:
            if self._num_users == 0:
                try:
                    self.decoding.open()
                    self.encoding.open()
                    self._open = await self.decoding.run(
                        _open_all, self._named, self._further, self._options, discard=_close_all
                    )
                except BaseException:
                    await self._close_all()
                    raise
            self._num_users += 1

    async def close(self) -> None:
        """Release one user's hold; the last one stops the threads."""
        async with self._lock:
            self._num_users -= 1
            if self._num_users == 0:
                await self._close_all()

    def decoder_of(self, header: RecordHeader) -> ChunkCodec | MissReason:
        """Return the codec that decodes a record, or the reason why there is none."""
        for codec in self._open:
            if codec.decodes(header):
                return codec
        families = {codec.serde.partition(":")[0] for codec in self._open}
        is_known = header.serde.partition(":")[0] in families
        return MissReason.PROFILE if is_known else MissReason.ENCODING

    def begin_decoding(
        self, chunk: Chunk, allocate: Allocate | None, figures: CodecFigures, seals: bool
    ) -> ChunkJob[Result] | Miss:
        """Begin to decode a chunk in a thread.

        Args:
            chunk: An encoded chunk; the job takes over its reference, a miss does not.
            allocate: Allocates memory for the decoded payload; None: it is too late.
            seals: Whether to compute the digest of the decoded payload, too.
        """
        codec = self.decoder_of(chunk.described)
        if isinstance(codec, MissReason):
            return Miss(codec)
        try:
            num_bytes = decoded_bytes(chunk.described)
            check_stated_size(chunk.described, chunk.memory.byte_array)
        except (RecordError, SerdeError):
            return Miss(MissReason.CORRUPT)
        memory = None if allocate is None else allocate(num_bytes)
        if memory is None:
            return Miss(MissReason.DEADLINE if allocate is None else MissReason.NO_MEMORY)
        decoding = Decoding(codec, chunk, memory, figures, seals)
        return self.decoding.begin(decoding.run, unrun=decoding.release)

    async def _close_all(self) -> None:
        opened, self._open = self._open, ()
        try:
            have_ended = await asyncio.gather(
                self.decoding.close(CLOSE_WAIT_S), self.encoding.close(CLOSE_WAIT_S)
            )
            if not all(have_ended):
                logger.warning("codecs did not stop in time, leaving their threads")
        finally:
            _close_all(opened)


def _open_all(
    named: Mapping[str, ChunkCodec], further: Sequence[ChunkCodec], options: Mapping[str, str]
) -> tuple[ChunkCodec, ...]:
    """Open all or none. Blocking.

    Raises:
        ConfigError: A codec that an option names is unavailable.
    """
    opened: list[ChunkCodec] = []
    try:
        for serde, codec in named.items():
            try:
                codec.open()
            except ConfigError as exc:
                raise ConfigError(f"{options.get(serde, 'serde')}={serde!r}: {exc}") from exc
            opened.append(codec)
        for codec in further:
            try:
                codec.open()
            except ConfigError as exc:
                logger.info(
                    "serde unavailable, not decoding its records: serde=%s error=%s",
                    codec.serde,
                    exc,
                )
            else:
                opened.append(codec)
    except BaseException:
        _close_all(opened)
        raise
    return tuple(opened)


def _close_all(opened: Sequence[ChunkCodec]) -> None:
    for codec in opened:
        codec.close()


def encoded_chunk(codec: ChunkCodec, chunk: Chunk, figures: CodecFigures) -> Chunk | None:
    """Return a raw chunk encoded and sealed.

    Args:
        codec: An open codec.
        chunk: A raw chunk; borrowed.

    Returns:
        A chunk with its own memory, outside any arena; None if its record would not be smaller. It
            is lossy if the codec is, or if the chunk was once decoded from a lossy record.
    """
    header = chunk.described
    began = time.perf_counter()
    encoded = codec.encode(header.tensors, chunk.memory.byte_array)
    if encoded is None:
        figures.left_raw(codec.serde, time.perf_counter() - began)
        return None
    payload = encoded.payload
    extensions = [extension for extension in header.extensions if extension.id != REPORT_EXTENSION]
    if (report := report_extension(encoded.report)) is not None:
        extensions.append(report)
    made = RecordHeader(
        header.key,
        encoded.serde,
        encoded.profile,
        encoded.lossy or header.lossy,
        encoded.tensors,
        payload_digest(payload),
        tuple(extensions),
    )
    head = encode_head(made, len(payload))
    elapsed_s = time.perf_counter() - began
    raw_bytes = chunk.memory.get_size()
    # The longer head may have used up what the payload saved.
    if len(payload) < raw_bytes and len(head) + len(payload) >= chunk.num_bytes:
        figures.left_raw(codec.serde, elapsed_s)
        return None
    figures.encoded(codec.serde, raw_bytes, len(payload), elapsed_s)
    _note_errors(figures, made, encoded.report)
    return Chunk(chunk.key, made, head, BytesBufferMemoryObj(payload), chunk.tier, chunk.stored_at)


@dataclass(frozen=True, slots=True)
class Decoding:
    """A chunk waiting to be decoded into other memory; owns a reference on both until it has run or
    is released.

    Attributes:
        memory: Memory for the decoded payload, of exactly its length.
        seals: Whether to compute the digest of the decoded payload, too.
    """

    codec: ChunkCodec
    chunk: Chunk
    memory: MemoryObj
    figures: CodecFigures
    seals: bool

    def run(self) -> Result:
        """Decode. The result takes over the memory of the decoded payload."""
        began = time.perf_counter()
        encoded, memory = self.chunk, self.memory
        header = encoded.described
        try:
            self.codec.decode(header, encoded.memory.byte_array, memory.byte_array)
            chunk = Chunk(
                encoded.key, decoded_header(header), None, memory, encoded.tier, encoded.stored_at
            )
            if self.seals:
                chunk.sealed()
            self.figures.decoded(
                self.codec.serde,
                memory.get_size(),
                encoded.memory.get_size(),
                time.perf_counter() - began,
            )
        except SerdeError:
            memory.ref_count_down()
            return Miss(MissReason.CORRUPT)
        except BaseException:
            memory.ref_count_down()
            raise
        finally:
            encoded.release()
        _note_errors(self.figures, header, encoding_report(header))
        return chunk

    def release(self) -> None:
        """Release both references without decoding."""
        self.memory.ref_count_down()
        self.chunk.release()


def _note_errors(
    figures: CodecFigures, header: RecordHeader, report: EncodingReport | None
) -> None:
    if report is not None and report.groups:
        error = MeasuredError(
            max(group.max_relative for group in report.groups),
            max(group.rms_relative for group in report.groups),
        )
        profile = header.profile.partition(TABLES_MARK)[0]  # without the id of the tables
        name = header.serde if profile in ("", header.serde) else f"{header.serde}/{profile}"
        figures.measured(name, error)
