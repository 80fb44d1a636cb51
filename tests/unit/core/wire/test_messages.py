"""Bounds of frames: their headers, their MessagePack part, and the capabilities in them. What fits
is in the golden vectors.
"""

from __future__ import annotations

import struct

import msgspec
import pytest
import xxhash
from lmcache_core.errors import ProtocolError
from lmcache_core.keys import MAX_CANONICAL_KEY_BYTES, MAX_KEY_FIELD_BYTES, ChunkChain
from lmcache_core.wire import messages
from lmcache_core.wire.capabilities import Accepts
from lmcache_core.wire.frames import (
    HEADER_BYTES,
    MAX_ARENA_META_BYTES,
    MAX_BLOB_BYTES,
    MAX_META_BYTES,
    FrameType,
    parse_header,
)
from lmcache_core.wire.messages import (
    MAX_BATCH_KEYS,
    MAX_CAPABILITIES,
    MAX_LANES,
    Hello,
    build_frame,
    parse_meta,
)


def raw(
    magic: bytes = b"LMF1",
    kind: int = 12,
    reserved: bytes = bytes(3),
    correlation_id: int = 1,
    meta: int = 1,
    blob: int = 0,
) -> bytes:
    """A header with the checksum that the specification asks for."""
    data = struct.pack("<4sB3sQIIQ", magic, kind, reserved, correlation_id, meta, 0, blob)
    checksum = xxhash.xxh3_64_intdigest(data[:20] + data[24:32]) & 0xFFFFFFFF
    return data[:20] + struct.pack("<I", checksum) + data[24:]


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(raw(magic=b"LMF2"), id="magic"),
        pytest.param(raw(kind=0), id="type 0"),
        pytest.param(raw(kind=max(FrameType) + 1), id="type"),
        pytest.param(raw(reserved=b"\0\0\1"), id="reserved"),
        pytest.param(raw(correlation_id=0), id="correlation id"),
        pytest.param(raw(meta=0), id="no meta"),
        pytest.param(raw(meta=MAX_META_BYTES + 1), id="meta too long"),
        pytest.param(raw(kind=23, meta=MAX_ARENA_META_BYTES + 1), id="meta of STAGE too long"),
        pytest.param(raw(kind=22, blob=1), id="a blob where extents belong"),
        pytest.param(raw(blob=1), id="a blob where none belongs"),
        pytest.param(raw(kind=8, blob=MAX_BLOB_BYTES + 1), id="blob too long"),
        pytest.param(raw()[:-1], id="short"),
        pytest.param(raw() + b"\0", id="long"),
    ],
)
def test_header_out_of_bounds_is_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        parse_header(data)


ENGINE = messages.EngineInfo("vllm/e", 7, 1, "org/m", "layout", 2)


@pytest.mark.parametrize(
    ("frame_type", "plain"),
    [
        (FrameType.CONTAINS, [[[None, b""]] * (MAX_BATCH_KEYS + 1)]),
        (FrameType.CONTAINS, [[[None, bytes(MAX_CANONICAL_KEY_BYTES + 1)]]]),
        (FrameType.CONTAINS, [[[0, bytes(MAX_CANONICAL_KEY_BYTES + 1)]]]),
        (FrameType.CONTAINS, [[[MAX_LANES, b""]]]),
        (FrameType.CONTAINS, [[[-1, b""]]]),
        (FrameType.CONTAINS, [[[0, "text"]]]),
        (FrameType.LANE, [MAX_LANES, ["f", "m", 1, 0, ""]]),
        (FrameType.LANE, [0, ["f", "m" * (MAX_KEY_FIELD_BYTES + 1), 1, 0, ""]]),
        (FrameType.LANE, [0, ["f", "m", 1 << 32, 0, ""]]),
        (FrameType.LANE, [0, ["f", "m", 1, -1, ""]]),
        (FrameType.HANDOVER, ["a tenant", 0, True]),
        (FrameType.HANDOVER, ["acme\n", 0, True]),
        (FrameType.HANDOVER, ["acme", -1, True]),
        (FrameType.HELD, ["a tenant", []]),
        (FrameType.HELD, ["acme", [[None, b""]] * (MAX_BATCH_KEYS + 1)]),
        (FrameType.CONTAINS, [[], 1]),
        (FrameType.CHUNK, [-1]),
        (FrameType.CHUNK, [MAX_BATCH_KEYS]),
        (FrameType.GET, [[], True, "t" * 4097]),
        (FrameType.GET_END, [[[0, "x" * 129]]]),
        (FrameType.HELLO, [1, 70000, [], None, ""]),
        (FrameType.HELLO, [1, 1, [], "t" * 513, ""]),
        (FrameType.HELLO, [1, 1, ["x"] * 33, None, ""]),
        (FrameType.HELLO_OK, [1, "", 0]),
        (FrameType.HELLO_OK, [1, "", messages.MAX_NAMES + 1]),
        (FrameType.HELLO, [1, 1, [], None, "", ["e", -1, 0, "m", ""]]),
        (FrameType.REMOVE_OK, [-1]),
        (FrameType.ERROR, ["code", "m" * 513]),
        (FrameType.RESERVE, [[0]]),
        (FrameType.RESERVE, [[(4 << 30) + 1]]),
        (FrameType.RESERVE, [[1] * (messages.MAX_NAMES + 1)]),
        (FrameType.LOAD, [[[0, bytes(32 * messages.MAX_NAMES + 1)]], 1000, 0]),
        (FrameType.LOAD, [[[None, b""]] * (messages.MAX_NAMES + 1), 1000, 0]),
        (FrameType.LOAD, [[], 0, 0]),
        (FrameType.COMMIT, [[[1, bytes((64 << 10) + 1)]]]),
        (FrameType.COMMIT, [[[-1, b""]]]),
        (FrameType.STAGE, ["", [], True, 1000, 0]),
        (FrameType.STAGE, ["x" * 129, [], True, 1000, 0]),
        (FrameType.STAGE, ["t", [[0, b""]] * 17, True, 1000, 0]),
        (FrameType.STAGE, ["t", [[None, b""]], True, 1000, 0]),
        (FrameType.STAGE, ["t", [[0, bytes((2 << 20) + 1)]], True, 1000, 0]),
        (FrameType.STAGE, ["t", [], True, 1 << 40, 0]),
        (FrameType.STAGE, ["t", [], True, 1000, -1]),
        (FrameType.DONE, [[1] * (messages.MAX_NAMES + 1), []]),
        (FrameType.DONE, [[], ["t"] * (messages.MAX_NAMES + 1)]),
        (FrameType.DESCRIBE, ["f", "m", 0, 16, bytes(32), [""]]),
        (FrameType.DESCRIBE, ["f", "m", messages.MAX_RANKS + 1, 16, bytes(32), [""]]),
        (FrameType.DESCRIBE, ["f", "m", 1, 0, bytes(32), [""]]),
        (FrameType.DESCRIBE, ["f", "m", 1, 16, bytes(31), [""]]),
        (FrameType.DESCRIBE, ["f", "m", 1, 16, bytes(33), [""]]),
        (FrameType.DESCRIBE, ["f", "m", 1, 16, bytes(32), []]),
        (FrameType.DESCRIBE, ["f", "m", 1, 16, bytes(32), [""] * 17]),
        (FrameType.LOOKUP, [[], ["x"] * 17, 1000]),
    ],
)
def test_message_out_of_bounds_is_refused(frame_type: FrameType, plain: object) -> None:
    with pytest.raises(ProtocolError):
        parse_meta(frame_type, msgspec.msgpack.encode(plain))


@pytest.mark.parametrize(
    ("frame_type", "plain", "message"),
    [
        (FrameType.HELLO, [1, 9, [], None, "x", None, "new"], messages.Hello(1, 9, [], None, "x")),
        (
            FrameType.HELLO,
            [1, 1, [], None, "x", ["vllm/e", 7, 1, "org/m", "layout", 2, {"more": 1}]],
            messages.Hello(1, 1, [], None, "x", ENGINE),
        ),
        (FrameType.HELLO_OK, [1, "x", 4, None, {}], messages.HelloOk(1, "x", 4)),
        (FrameType.ERROR, ["c", "m", 1], messages.ErrorMessage("c", "m")),
    ],
)
def test_messages_that_cross_versions_may_have_more_fields(
    frame_type: FrameType, plain: object, message: messages.Message
) -> None:
    assert parse_meta(frame_type, msgspec.msgpack.encode(plain)) == message


def test_the_largest_request_fits_its_bound() -> None:
    names = [(None, bytes(MAX_CANONICAL_KEY_BYTES))] * MAX_BATCH_KEYS
    frame = build_frame(1, messages.Get(names, True, "t" * 4096))
    assert parse_header(frame[:HEADER_BYTES]).meta_bytes < MAX_META_BYTES


def test_unknown_names_of_later_versions_are_ignored() -> None:
    assert Accepts.said_by(["zero-rtt", "serde:", "serde:kivi", "lossyish"]) == Accepts(
        False, frozenset({"", "kivi"})
    )


@pytest.mark.parametrize(
    ("chains", "text"),
    [
        ([ChunkChain("f", "m", 1025, "", bytes(32))], "a chain of 1025 ranks; the limit is 1024"),
        ([ChunkChain("f", "m", 1024, "", bytes(32 * 65))], "66560 keys in one STAGE"),
    ],
)
def test_question_that_exceeds_one_stage_is_refused(chains: list[ChunkChain], text: str) -> None:
    messages.check_chains([ChunkChain("f", "m", 1024, "", bytes(32 * 64))])
    with pytest.raises(ValueError, match=text):
        messages.check_chains(chains)


def test_hello_holds_as_many_as_it_may() -> None:
    serdes = frozenset(f"serde-{i}" for i in range(5 * MAX_CAPABILITIES))
    names = Accepts(True, serdes).capabilities()
    assert names[0] == "lossy"
    frame = build_frame(1, Hello(1, 1, list(names), None, "client"))
    assert parse_meta(FrameType.HELLO, frame[32:]) == Hello(1, 1, list(names), None, "client")
