"""Messages of the sidecar socket that nobody of ours writes."""

from __future__ import annotations

import pytest
from lmcache_core.errors import ProtocolError
from lmcache_core.sidecar import messages
from lmcache_core.sidecar.messages import Hello, HelloOk, decode_answer, decode_request, encode

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
