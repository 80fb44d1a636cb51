"""The broker as a process, killed and restarted, driven by the library's client."""

import base64
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import pytest
from lmcache_core.errors import AuthenticationError, UnavailableError
from lmcache_core.p2p import BrokerClient, Peer, PeerRegistration
from lmcache_core.security import TicketVerifier

from tests.fixtures.service_process import ServiceProcess
from tests.fixtures.waiting import opened, until

CLIENT_TOKEN = "client-token-0123456789"
ADMIN_TOKEN = "admin-token-0123456789"
KEYS = {"k1": b"k" * 32}
CHUNKS = [bytes([i]) * 16 for i in range(4)]
LEASE_MS = 6_000
SLOW_S = 60.0


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[ServiceProcess]:
    """`lmcache-broker` with tokens and ticket keys; it keeps its port when it starts again."""
    keys, tokens = tmp_path / "ticket-keys", tmp_path / "tokens.yaml"
    keys.write_text(f"k1:{base64.b64encode(KEYS['k1']).decode()}\n")
    tokens.write_text(
        f"tokens:\n- {{name: vllm, tenant: acme, role: client, token: {CLIENT_TOKEN}}}\n"
        f"- {{name: operator, tenant: acme, role: admin, token: {ADMIN_TOKEN}}}\n"
    )
    environ = {
        "LMCACHE_BROKER_PORT": "0",
        "LMCACHE_BROKER_AUTH_TOKENS_FILE": str(tokens),
        "LMCACHE_BROKER_TICKET_KEYS_FILE": str(keys),
    }
    process = ServiceProcess("lmcache_broker", tmp_path, environ)
    process.start()
    process.environ["LMCACHE_BROKER_PORT"] = str(process.ports["port"])
    yield process
    process.stop(signal.SIGKILL)


def client_of(
    broker: ServiceProcess, token: str | None = CLIENT_TOKEN
) -> AbstractAsyncContextManager[BrokerClient]:
    return opened(BrokerClient(broker.url, token, SLOW_S))


@asynccontextmanager
async def registered(client: BrokerClient, *names: str) -> AsyncIterator[list[PeerRegistration]]:
    registrations = [
        PeerRegistration(client, Peer(name, 1, f"lm://10.0.0.{i}:65433"), ttl_ms=LEASE_MS)
        for i, name in enumerate(names, 1)
    ]
    for registration in registrations:
        await registration.open()
    yield registrations
    for registration in registrations:
        await registration.close()


async def until_registered(registrations: list[PeerRegistration], expected: bool = True) -> None:
    await until(lambda: {one.registered for one in registrations} == {expected})


async def until_drains(client: BrokerClient, expected: dict[str, bool]) -> None:
    async def is_so() -> bool:
        return {peer.id: peer.draining for peer in await client.peers()} == expected

    await until(is_so)


async def test_tickets_of_assigned_pulls_are_valid_at_the_serving_peer_alone(
    broker: ServiceProcess,
) -> None:
    async with client_of(broker) as client, registered(client, "a", "b", "me") as registrations:
        await until_registered(registrations)
        wanted = [
            (CHUNKS[0], ["a"]),
            (CHUNKS[1], ["b", "me"]),
            (CHUNKS[2], ["me"]),
            (CHUNKS[3], ["a", "gone"]),
        ]
        assignments = {pull.instance: pull for pull in await client.transfers("me", wanted)}
        assert {name: pull.chunk_ids for name, pull in assignments.items()} == {
            "a": [CHUNKS[0].hex(), CHUNKS[3].hex()],
            "b": [CHUNKS[1].hex()],
        }
        assert assignments["a"].distributed_url == "lm://10.0.0.1:65433"
        ticket = TicketVerifier(KEYS, "a").verify(assignments["a"].ticket)
        assert (ticket.requester, ticket.tenant) == ("me", "acme")
        with pytest.raises(AuthenticationError, match="another instance"):
            TicketVerifier(KEYS, "b").verify(assignments["a"].ticket)
    async with client_of(broker) as client:
        assert await client.peers() == [], "each has ended its lease"


async def test_a_restarted_broker_learns_its_peers_from_heartbeats(
    broker: ServiceProcess,
) -> None:
    async with client_of(broker) as client, registered(client, "a", "b") as registrations:
        await until_registered(registrations)
        registrations[1].drain()
        await until_drains(client, {"a": False, "b": True})
        broker.stop(signal.SIGKILL)
        with pytest.raises(UnavailableError):
            await client.peers()
        await until_registered(registrations, expected=False)
        async with registered(client, "late") as late:
            broker.start()
            await until_registered([*registrations, *late])
            await until_drains(client, {"a": False, "b": True, "late": False})
        (pull,) = await client.transfers("me", [(CHUNKS[0], ["a", "b"])])
        assert pull.instance == "a"
