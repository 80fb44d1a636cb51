"""Handshakes that are underway are counted until they end, fail, or nobody has them any more."""

from __future__ import annotations

import ssl
from pathlib import Path

import pytest
from lmcache_core.security.handshakes import BoundedContext, CountedObject
from lmcache_core.security.tls import TlsFiles, client_context, server_context

from tests.fixtures.tls import Authority


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@pytest.fixture
def bounded(authority: Authority) -> BoundedContext:
    pair = authority.sign("server", "server.example")
    return BoundedContext(server_context(TlsFiles(pair.cert, pair.key)), 2, 5.0)


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


def test_what_is_over_does_not_count(bounded: BoundedContext, authority: Authority) -> None:
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


def test_what_nobody_has_any_more_does_not_count(
    bounded: BoundedContext, authority: Authority
) -> None:
    ends = [Ends(bounded, authority) for _ in range(2)]
    for each in ends:
        each.begin()
    del each
    ends.clear()
    later = [Ends(bounded, authority) for _ in range(2)]
    for each in later:
        each.begin()


def test_what_should_long_be_over_does_not_count(
    bounded: BoundedContext, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr("lmcache_core.security.handshakes.time.monotonic", lambda: now)
    ends = [Ends(bounded, authority) for _ in range(3)]
    ends[0].begin()
    now += 5.5
    ends[1].begin()
    ends[2].is_refused()
    now += 1.0
    late = Ends(bounded, authority)
    late.begin()
    Ends(bounded, authority).is_refused()


def test_each_listener_has_a_bound_of_its_own(authority: Authority) -> None:
    pair = authority.sign("server", "server.example")
    shared = server_context(TlsFiles(pair.cert, pair.key))
    first, second = BoundedContext(shared, 1), BoundedContext(shared, 1)
    ends = [Ends(first, authority), Ends(second, authority)]
    for each in ends:
        each.begin()
    Ends(first, authority).is_refused()
    Ends(second, authority).is_refused()
    assert isinstance(ends[0].server, CountedObject)
