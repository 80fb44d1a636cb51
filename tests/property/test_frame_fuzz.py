"""Frames from anywhere: only `ProtocolError` comes of bytes that are none."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lmcache_core.errors import ProtocolError, UnavailableError
from lmcache_core.record import MissReason
from lmcache_core.wire.frames import (
    HEADER_BYTES,
    MAX_BLOB_BYTES,
    MAX_META_BYTES,
    FrameHeader,
    FrameType,
    build_header,
    parse_header,
)
from lmcache_core.wire.incoming import IncomingRecord, Received
from lmcache_core.wire.stream import FrameStream

from tests.fixtures.wire import Arena
from tests.suites.chunks import make_key, make_record

types = st.sampled_from(FrameType)
RECORD = make_record("a")
EXPECTED = make_key("a").key


@given(st.binary(max_size=64) | st.binary(min_size=HEADER_BYTES, max_size=HEADER_BYTES))
def test_arbitrary_bytes_are_no_header(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        parse_header(data)


@given(
    types,
    st.integers(1, (1 << 64) - 1),
    st.integers(1, MAX_META_BYTES),
    st.integers(0, MAX_BLOB_BYTES),
    st.integers(0, 31),
    st.integers(1, 255),
)
def test_headers_go_there_and_back_and_changes_are_noticed(
    kind: FrameType, number: int, meta: int, blob: int, at: int, change: int
) -> None:
    header = FrameHeader(
        kind, number, meta, blob if kind in (FrameType.PUT, FrameType.CHUNK) else 0
    )
    data = bytearray(build_header(header))
    assert parse_header(data) == header
    data[at] ^= change
    with pytest.raises(ProtocolError):
        parse_header(data)


class Loopback(asyncio.Transport):
    """A transport to feed a stream by hand."""

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None: ...

    def abort(self) -> None: ...

    def is_closing(self) -> bool:
        return False


def feed(stream: FrameStream, data: bytes, cut: int) -> None:
    """Hand bytes over as a socket would: into whatever buffer the stream offers, at most `cut`
    at once.
    """
    view = memoryview(data)
    while len(view):
        buffer = stream.get_buffer(-1)
        taken = min(len(buffer), len(view), cut)
        buffer[:taken] = view[:taken]
        stream.buffer_updated(taken)
        view = view[taken:]


async def receive(blob: bytes, cut: int) -> tuple[str, bytes]:
    """Receive a blob that may be a record, and the next byte."""
    stream, arena = FrameStream(), Arena(1 << 20)
    stream.connection_made(Loopback())
    feed(stream, blob[:100], cut)
    task = asyncio.ensure_future(IncomingRecord(stream, len(blob), arena).receive(EXPECTED))
    await asyncio.sleep(0)
    feed(stream, blob[100:] + b"!", cut)
    result = await task
    verdict = "ok"
    if isinstance(result, Received):
        is_whole = await result.is_whole()
        verdict = "ok" if is_whole else "corrupt"
        result.memory.ref_count_down()
    else:
        verdict = result.reason.value
    arena.check_empty()
    following = bytearray(1)
    await stream.readinto(memoryview(following))
    return verdict, bytes(following)


@settings(max_examples=150)
@given(
    st.binary(max_size=300)
    | st.tuples(st.integers(0, len(RECORD) - 1), st.integers(1, 255)).map(
        lambda edit: _changed(*edit)
    ),
    st.integers(1, 2000),
)
def test_a_blob_is_consumed_to_its_end_whatever_it_is(blob: bytes, cut: int) -> None:
    verdict, following = asyncio.run(receive(blob, cut))
    assert verdict in (MissReason.CORRUPT, MissReason.IDENTITY, MissReason.NO_MEMORY)
    assert following == b"!"


@settings(max_examples=20)
@given(st.integers(1, 2000))
def test_a_good_record_is_received_in_pieces_of_any_size(cut: int) -> None:
    assert asyncio.run(receive(RECORD, cut)) == ("ok", b"!")


def _changed(at: int, change: int) -> bytes:
    data = bytearray(RECORD)
    data[at] ^= change
    return bytes(data)


@settings(max_examples=40)
@given(st.lists(st.binary(max_size=100), max_size=20), st.integers(1, 500))
def test_a_stream_of_garbage_ends_in_an_error(pieces: list[bytes], cut: int) -> None:
    async def run() -> None:
        stream = FrameStream()
        stream.connection_made(Loopback())
        feed(stream, b"".join(pieces), cut)
        stream.connection_lost(None)
        while True:
            header = await stream.read_header()
            await stream.read_message(header)

    with pytest.raises((ProtocolError, UnavailableError)):
        asyncio.run(run())
