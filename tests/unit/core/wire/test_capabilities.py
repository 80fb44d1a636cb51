"""What a client can take, as it says so and as a server reads it."""

from __future__ import annotations

from lmcache_core.wire.capabilities import ONLY_LOSSLESS, Accepts
from lmcache_core.wire.frames import FrameType
from lmcache_core.wire.messages import MAX_CAPABILITIES, Hello, build_frame, parse_meta


def test_capabilities_are_read_as_they_were_written() -> None:
    accepts = Accepts(True, frozenset({"lossless", "cachegen"}))
    assert accepts.capabilities() == ("lossy", "serde:cachegen", "serde:lossless")
    assert Accepts.said_by(accepts.capabilities()) == accepts
    assert ONLY_LOSSLESS.capabilities() == ()
    assert Accepts.said_by([]) == ONLY_LOSSLESS


def test_unknown_names_of_later_versions_are_ignored() -> None:
    assert Accepts.said_by(["zero-rtt", "serde:", "serde:kivi", "lossyish"]) == Accepts(
        False, frozenset({"", "kivi"})
    )


def test_hello_holds_as_many_as_it_may() -> None:
    serdes = frozenset(f"serde-{i}" for i in range(5 * MAX_CAPABILITIES))
    names = Accepts(True, serdes).capabilities()
    assert names[0] == "lossy"
    frame = build_frame(1, Hello(1, 1, list(names), None, "client"))
    assert parse_meta(FrameType.HELLO, frame[32:]) == Hello(1, 1, list(names), None, "client")
