"""A broker process without Redis is killed and restarted."""

from __future__ import annotations

import signal
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from lmcache_core.errors import UnavailableError
from lmcache_core.p2p import BrokerClient, Peer, PeerRegistration

from tests.fixtures.service_process import running_service
from tests.fixtures.waiting import opened, until

LEASE_MS = 6_000
CHUNK = bytes(16)


async def test_a_restarted_broker_learns_its_peers_from_heartbeats(tmp_path: Path) -> None:
    with running_service("lmcache_broker", tmp_path, {"LMCACHE_BROKER_PORT": "0"}) as broker:
        broker.environ["LMCACHE_BROKER_PORT"] = str(broker.ports["port"])
        async with AsyncExitStack() as exits:
            client = await exits.enter_async_context(opened(BrokerClient(broker.url, None, 60.0)))

            async def registered(name: str) -> PeerRegistration:
                peer = Peer(name, 1, f"lm://{name}.example:65433")
                registration = PeerRegistration(client, peer, ttl_ms=LEASE_MS)
                return await exits.enter_async_context(opened(registration))

            async def drains(expected: dict[str, bool]) -> bool:
                return {peer.id: peer.draining for peer in await client.peers()} == expected

            known = [await registered("a"), await registered("b")]
            known[1].drain()
            await until(lambda: drains({"a": False, "b": True}))
            broker.stop(signal.SIGKILL)
            with pytest.raises(UnavailableError):
                await client.peers()
            await until(lambda: not any(one.registered for one in known))
            known.append(await registered("late"))
            broker.start()
            await until(lambda: all(one.registered for one in known))
            await until(lambda: drains({"a": False, "b": True, "late": False}))
            (pull,) = await client.transfers("me", [(CHUNK, ["a", "b"])])
            assert pull.instance == "a"
