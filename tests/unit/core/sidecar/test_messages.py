"""Messages of the sidecar socket that nobody of ours writes."""

from __future__ import annotations

import msgspec
import pytest
from lmcache_core.errors import ProtocolError
from lmcache_core.keys import ChunkChain
from lmcache_core.sidecar import messages
from lmcache_core.sidecar.messages import (
    Describe,
    DescribeOk,
    Hello,
    HelloOk,
    Reject,
    RejectOk,
    Stage,
    StageOk,
    Unstage,
    UnstageOk,
    decode_answer,
    decode_request,
    encode,
)

LENGTH_BYTES = messages.LENGTH.size
HELLO = Hello(1, 1, "client", 7, 0, "model", "layout")
HELLO_OK = HelloOk(1, "server", "/arena", 1 << 20, 3, "always", "salt")


@pytest.mark.parametrize("text", [b"\xff", b"\xc3", b"\xed\xa0\x80"])
def test_text_that_is_not_utf_8_is_refused(text: bytes) -> None:
    request, answer = encode(HELLO)[LENGTH_BYTES:], encode(HELLO_OK)[LENGTH_BYTES:]
    assert decode_request(request) == HELLO
    assert decode_answer(answer) == HELLO_OK
    with pytest.raises(ProtocolError, match="not a request"):
        decode_request(request.replace(b"client", text + b"client"[len(text) :]))
    with pytest.raises(ProtocolError, match="not an answer"):
        decode_answer(answer.replace(b"server", text + b"server"[len(text) :]))


def test_a_field_of_a_later_version_may_not_be_nested_deeper_than_any_stack() -> None:
    request, answer = encode(HELLO)[LENGTH_BYTES:], encode(HELLO_OK)[LENGTH_BYTES:]
    later = b"\x91" * 20 + b"\x90"
    assert decode_request(bytes([request[0] + 1]) + request[1:] + later) == HELLO
    deep = b"\x91" * 100_000 + b"\x90"
    with pytest.raises(ProtocolError, match="not a request"):
        decode_request(bytes([request[0] + 1]) + request[1:] + deep)
    with pytest.raises(ProtocolError, match="not an answer"):
        decode_answer(bytes([answer[0] + 1]) + answer[1:] + deep)


CHAIN = ChunkChain("vllm", "model", 2, "", bytes(64))
STAGE = Stage("ticket", (CHAIN,), True, 1000, 7)
DESCRIBE = Describe("vllm", "model", 2, 256, bytes(32), ("", "window"))


@pytest.mark.parametrize(
    "message", [STAGE, Stage("t", (), False, 1), Unstage(("a", "b")), Reject((1, 2)), DESCRIBE]
)
def test_requests_come_out_as_they_went_in(message: messages.Request) -> None:
    assert decode_request(encode(message)[LENGTH_BYTES:]) == message


@pytest.mark.parametrize(
    "message", [StageOk(False, (b"\1\0", b"")), UnstageOk(), RejectOk(), DescribeOk()]
)
def test_answers_come_out_as_they_went_in(message: messages.Answer) -> None:
    assert decode_answer(encode(message)[LENGTH_BYTES:]) == message


def test_greetings_of_a_side_that_has_no_capabilities_are_understood() -> None:
    assert (
        decode_request(msgspec.msgpack.encode(["Hello", 1, 1, "client", 7, 0, "model", "layout"]))
        == HELLO
    )
    assert (
        decode_answer(
            msgspec.msgpack.encode(["HelloOk", 1, "server", "/arena", 1 << 20, 3, "always", "salt"])
        )
        == HELLO_OK
    )
    assert (HELLO.capabilities, HELLO.world_size, HELLO_OK.capabilities) == ((), 1, ())


def body_of(message: messages.Message, at: int, value: object) -> bytes:
    """The message with one of its fields replaced."""
    fields = msgspec.msgpack.decode(encode(message)[LENGTH_BYTES:])
    fields[at] = value
    return msgspec.msgpack.encode(fields)


@pytest.mark.parametrize(
    ("at", "value"),
    [
        (1, ""),
        (1, "x" * 129),
        (2, [["vllm", "model", 2, "", bytes(32)]] * 17),
        (2, [["vllm", "model", 2, "", bytes(33)]]),
        (2, [["vllm", "model", 0, "", bytes(32)]]),
        (2, [["vllm", "model", 1 << 32, "", bytes(32)]]),
        (2, [["vllm", "x" * 1025, 1, "", bytes(32)]]),
        (2, [["vllm", "model", 1, "", bytes(32), "more"]]),
        (2, [["vllm", "model", 1, "", bytes(32 << 10)], ["vllm", "model", 65536, "", bytes(32)]]),
        (2, [["vllm", "model", 1, "", "text"]]),
        (3, "yes"),
        (4, 0),
        (4, 1 << 40),
        (5, -1),
    ],
)
def test_a_question_out_of_bounds_is_refused(at: int, value: object) -> None:
    assert (
        decode_request(body_of(STAGE, at, msgspec.msgpack.decode(encode(STAGE)[LENGTH_BYTES:])[at]))
        == STAGE
    )
    with pytest.raises(ProtocolError, match="not a request"):
        decode_request(body_of(STAGE, at, value))


@pytest.mark.parametrize(
    ("at", "value"), [(3, 0), (4, 0), (5, bytes(31)), (5, bytes(33)), (6, []), (6, [""] * 17)]
)
def test_a_description_out_of_bounds_is_refused(at: int, value: object) -> None:
    with pytest.raises(ProtocolError, match="not a request"):
        decode_request(body_of(DESCRIBE, at, value))
