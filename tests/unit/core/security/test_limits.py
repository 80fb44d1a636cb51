"""Bounds for callers: requests a second, and TLS handshakes that are underway."""

from __future__ import annotations

import ssl
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lmcache_core.security import RateLimiter, handshakes
from lmcache_core.security.handshakes import BoundedContext
from lmcache_core.security.tls import TlsFiles, client_context, server_context
from lmcache_core.security.tokens import MAX_BUCKETS

from tests.fixtures.held_clock import HeldClock
from tests.fixtures.tls import Authority


def test_caller_has_so_many_requests_a_second_and_learns_how_long_to_wait() -> None:
    clock = HeldClock()
    limiter = RateLimiter(4.0, clock)
    assert [limiter.wait_s("a") for _ in range(4)] == [0.0] * 4
    assert limiter.wait_s("a") == pytest.approx(0.25)
    assert limiter.wait_s("a") == pytest.approx(0.25), "a refusal costs nothing"
    assert limiter.wait_s("b") == 0.0, "callers do not pay for one another"
    clock.now_s += 0.25
    assert limiter.wait_s("a") == 0.0
    assert limiter.wait_s("a") > 0
    clock.now_s += 1000
    assert [limiter.wait_s("a") > 0 for _ in range(5)] == [False] * 4 + [True]


def test_caller_that_was_idle_longest_is_forgotten() -> None:
    limiter = RateLimiter(1.0, HeldClock())
    for number in range(MAX_BUCKETS):
        assert limiter.wait_s(str(number)) == 0.0
    assert limiter.wait_s("0") > 0
    assert limiter.wait_s("new") == 0.0
    assert limiter.wait_s("0") > 0, "it has been asked about since"
    assert limiter.wait_s("1") == 0.0, "it was forgotten"


@given(st.lists(st.floats(0, 0.5), max_size=200), st.floats(0.5, 50))
def test_no_span_of_time_has_more_than_its_share(pauses: list[float], per_second: float) -> None:
    clock = HeldClock()
    limiter = RateLimiter(per_second, clock)
    served: list[float] = []
    for pause in pauses:
        clock.now_s += pause
        if not limiter.wait_s("a"):
            served.append(clock.now_s)
    for begin in range(len(served)):
        for end in range(begin, len(served)):
            share = max(per_second, 1.0) + (served[end] - served[begin]) * per_second
            assert end - begin + 1 <= share + 1e-6


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@pytest.fixture
def context(authority: Authority) -> ssl.SSLContext:
    pair = authority.sign("server", "server.example")
    return server_context(TlsFiles(pair.cert, pair.key))


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> HeldClock:
    held = HeldClock()
    monkeypatch.setattr(handshakes.time, "monotonic", held)
    return held


class Ends:
    """Both ends of a connection."""

    def __init__(self, bounded: BoundedContext, authority: Authority) -> None:
        self.to_server, self.to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
        self.server = bounded.wrap_bio(self.to_server, self.to_client, server_side=True)
        trusted = client_context(TlsFiles(None, None, authority.file))
        self.client = trusted.wrap_bio(
            self.to_client, self.to_server, server_hostname="server.example"
        )

    def begin(self) -> None:
        with pytest.raises(ssl.SSLWantReadError):
            self.server.do_handshake()

    def is_refused(self) -> None:
        with pytest.raises(ssl.SSLError, match="too many TLS handshakes"):
            self.server.do_handshake()

    def finish(self) -> None:
        done: set[ssl.SSLObject] = set()
        for _ in range(4):
            for side in (self.client, self.server):
                if side not in done:
                    try:
                        side.do_handshake()
                    except ssl.SSLWantReadError:
                        continue
                    done.add(side)
        assert len(done) == 2


def test_handshake_that_is_over_does_not_count(
    context: ssl.SSLContext, authority: Authority
) -> None:
    bounded = BoundedContext(context, 2)
    ends = [Ends(bounded, authority) for _ in range(4)]
    ends[0].begin()
    ends[0].begin()
    ends[1].begin()
    ends[2].is_refused()
    ends[0].finish()
    ends[3].finish()
    ends[1].to_server.write(b"no TLS at all, not in the least")
    with pytest.raises(ssl.SSLError):
        ends[1].server.do_handshake()
    later = [Ends(bounded, authority) for _ in range(2)]
    for each in later:
        each.begin()


def test_handshake_of_a_lost_connection_does_not_count(
    context: ssl.SSLContext, authority: Authority
) -> None:
    bounded = BoundedContext(context, 2)
    ends = Ends(bounded, authority)
    ends.begin()
    del ends
    later = [Ends(bounded, authority) for _ in range(2)]
    for each in later:
        each.begin()


def test_handshake_beyond_its_timeout_does_not_count(
    context: ssl.SSLContext, authority: Authority, clock: HeldClock
) -> None:
    bounded = BoundedContext(context, 2, 5.0)
    ends = [Ends(bounded, authority) for _ in range(4)]
    ends[0].begin()
    clock.now_s += 5.5
    ends[1].begin()
    ends[2].is_refused()
    clock.now_s += 1.0
    ends[3].begin()
    Ends(bounded, authority).is_refused()


def test_each_listener_has_its_own_bound(context: ssl.SSLContext, authority: Authority) -> None:
    bounds = BoundedContext(context, 1), BoundedContext(context, 1)
    ends = [Ends(bounded, authority) for bounded in bounds]
    for each in ends:
        each.begin()
    for bounded in bounds:
        Ends(bounded, authority).is_refused()
