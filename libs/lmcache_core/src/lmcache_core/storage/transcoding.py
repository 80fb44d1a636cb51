"""One chunk encoded, one chunk decoded: blocking, for threads."""

from __future__ import annotations

import time
from concurrent.futures import Future
from dataclasses import dataclass

from lmcache_core.errors import SerdeError
from lmcache_core.memory.base import MemoryObj
from lmcache_core.memory.buffer import BytesBufferMemoryObj
from lmcache_core.record import (
    REPORT_EXTENSION,
    Chunk,
    Miss,
    MissReason,
    RecordHeader,
    Result,
    decoded_header,
    encode_head,
    payload_digest,
)
from lmcache_core.serde.codec import ChunkCodec, EncodingReport, encoding_report, report_extension
from lmcache_core.telemetry import CodecFigures, MeasuredError

PROFILE_SEPARATOR = "@"
"""Between the name of a profile and the id of its tables."""


def encoded_chunk(codec: ChunkCodec, chunk: Chunk, figures: CodecFigures) -> Chunk | None:
    """A raw chunk, encoded and sealed.

    Args:
        codec: Open.
        chunk: Raw; borrowed.
        figures: Where the work is counted.

    Returns:
        A chunk with memory of its own, outside any arena; None when its record would not be
        smaller: it stays as it is. Lossy if the codec is, and also if the chunk was decoded from a
        lossy record before.
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
    if (
        len(payload) < raw_bytes and len(head) + len(payload) >= chunk.num_bytes
    ):  # the longer head has eaten what the payload saved
        figures.left_raw(codec.serde, elapsed_s)
        return None
    figures.encoded(codec.serde, raw_bytes, len(payload), elapsed_s)
    _note_errors(figures, made, encoded.report)
    return Chunk(chunk.key, made, head, BytesBufferMemoryObj(payload), chunk.tier, chunk.stored_at)


@dataclass(frozen=True, slots=True)
class Decoding:
    """A chunk that is to be decoded into other memory; owns a reference on both until it has run or
    is abandoned.

    Attributes:
        codec: Decodes such records.
        chunk: Encoded.
        memory: For the decoded payload, of exactly its length.
        figures: Where the work is counted.
        seals: Also compute the digest of what was decoded.
    """

    codec: ChunkCodec
    chunk: Chunk
    memory: MemoryObj
    figures: CodecFigures
    seals: bool

    def run(self) -> Result:
        """Decode. The result takes over the decoded memory."""
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
        """Give both references back; it does not run."""
        self.memory.ref_count_down()
        self.chunk.release()

    def abandon(self, future: Future[Result]) -> None:
        """Nobody waits any more for the future that runs this: what it owns is given back as
        soon as its thread lets go.
        """
        if future.cancel() or future.cancelled():
            self.release()
        else:
            future.add_done_callback(_release_result)


def _release_result(future: Future[Result]) -> None:
    if future.exception() is None and isinstance(result := future.result(), Chunk):
        result.release()


def _note_errors(
    figures: CodecFigures, header: RecordHeader, report: EncodingReport | None
) -> None:
    if report is not None and report.groups:
        error = MeasuredError(
            max(group.max_relative for group in report.groups),
            max(group.rms_relative for group in report.groups),
        )
        figures.measured(_profile_name(header), error)


def _profile_name(header: RecordHeader) -> str:
    """Serde and profile, without the id of the tables."""
    profile = header.profile.partition(PROFILE_SEPARATOR)[0]
    return header.serde if profile in ("", header.serde) else f"{header.serde}/{profile}"
