"""Parts of both kinds of node: what one that cannot open leaves of the others."""

from __future__ import annotations

from pathlib import Path

import pytest
from lmcache_core.errors import ConfigError
from lmcache_core.lookup import InstanceReporter, LookupClient
from lmcache_core.p2p import BrokerClient, PeerRegistration
from lmcache_core.wire.client import ClientOptions, LmClient
from lmcache_core.wire.server import LmServer
from lmcache_servicekit.state import service_state

from tests.fixtures.nodes import KINDS, node_app, node_of
from tests.fixtures.waiting import threads_end
from tests.suites.chunks import make_chunk

PATIENT = ClientOptions(timeout_s=60.0, connect_timeout_s=60.0)
AWAY = {"lookup_url": "http://127.0.0.1:1", "broker_url": "http://127.0.0.1:1"}

pytestmark = pytest.mark.parametrize("kind", KINDS)


async def test_chunks_are_served_until_a_drain_begins(kind: str, tmp_path: Path) -> None:
    app = node_app(kind, tmp_path, **({"accept_handover": True} if kind == "sidecar" else {}))
    async with app.router.lifespan_context(app):
        node = node_of(app)
        client = LmClient("127.0.0.1", service_state(app).ports["lm_port"], None, PATIENT)
        assert await client.put([make_chunk("a")]) == [True]
        node.drain.begin()
        assert await client.put([make_chunk("b")]) == [False]
        assert await client.contains([make_chunk("a").key]) == [True]
        assert await node.pins.pin([make_chunk("a").key], 60), "what ends pins nothing"
        await client.close()


async def test_undrain_ends_a_drain_that_only_the_broker_has_ordered(
    kind: str, tmp_path: Path
) -> None:
    app = node_app(kind, tmp_path, **AWAY)
    async with app.router.lifespan_context(app):
        node = node_of(app)
        assert node.registration is not None
        node.registration.drain()
        assert node.is_draining
        await node.undrain()
        assert not node.is_draining


@pytest.mark.parametrize("part", [LmServer, InstanceReporter, PeerRegistration])
async def test_a_part_that_fails_closes_itself_and_all_before_it(
    kind: str, part: type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = (LookupClient, BrokerClient, LmServer, InstanceReporter, PeerRegistration)
    closed: list[type] = []
    for one in parts:

        async def close(self: object, *args: object, close=one.close, one=one) -> None:  # type: ignore[no-untyped-def]
            closed.append(one)
            await close(self, *args)

        monkeypatch.setattr(one, "close", close)

    async def fail(self: object, *args: object) -> None:
        raise ConfigError("no")

    monkeypatch.setattr(part, "open", fail)
    app = node_app(kind, tmp_path, disk_path=tmp_path / "disk", disk_gb=0.01, **AWAY)
    with pytest.raises(ConfigError, match="no"):
        async with app.router.lifespan_context(app):
            pass
    assert sorted(map(str, closed)) == sorted(map(str, parts[: parts.index(part) + 1]))
    threads_end("lmcache-disk")
