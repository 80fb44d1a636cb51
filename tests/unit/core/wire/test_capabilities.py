"""What a client says it can take, and what a server makes of it."""

from __future__ import annotations

import pytest
from lmcache_core.wire.capabilities import ONLY_LOSSLESS, Accepts
from lmcache_core.wire.frames import FrameType
from lmcache_core.wire.messages import MAX_CAPABILITIES, Hello, build_frame, parse_meta


def test_what_is_said_is_what_is_heard() -> None:
    accepts = Accepts(True, frozenset({"lossless", "cachegen"}))
    assert accepts.capabilities() == ("lossy", "serde:cachegen", "serde:lossless")
    assert Accepts.said_by(accepts.capabilities()) == accepts
    assert ONLY_LOSSLESS.capabilities() == ()
    assert Accepts.said_by([]) == ONLY_LOSSLESS


def test_names_of_later_versions_are_passed_over() -> None:
    assert Accepts.said_by(["zero-rtt", "serde:", "serde:kivi", "lossyish"]) == Accepts(
        False, frozenset({"", "kivi"})
    )


@pytest.mark.parametrize("num_serdes", [MAX_CAPABILITIES, 5 * MAX_CAPABILITIES])
def test_a_hello_has_room_for_them(num_serdes: int) -> None:
    names = Accepts(True, frozenset(f"serde-{i}" for i in range(num_serdes))).capabilities()
    assert names[0] == "lossy"
    frame = build_frame(1, Hello(1, 1, list(names), None, "client"))
    assert parse_meta(FrameType.HELLO, frame[32:]) == Hello(1, 1, list(names), None, "client")
