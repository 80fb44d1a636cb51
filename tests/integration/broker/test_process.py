"""The broker as a process: killed, restarted, guarded by tokens, driven by the library's own
client and registration.
"""

import asyncio
import base64
import json
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
from lmcache_core.errors import AuthenticationError, UnavailableError
from lmcache_core.p2p import BrokerClient, Peer, PeerRegistration
from lmcache_core.security import TicketVerifier, read_ticket_keys

CLIENT_TOKEN = "client-token-0123456789"
ADMIN_TOKEN = "admin-token-0123456789"
CHUNKS = [bytes([i]) * 16 for i in range(4)]
LEASE_MS = 2_000
SLOW_S = 60.0
"""Longer than anything here takes on a machine that is busy with other tests."""


class Broker:
    """`lmcache-broker` on a fixed port, with tokens and ticket keys."""

    def __init__(self, folder: Path) -> None:
        self.keys_file = folder / "ticket-keys"
        self.keys_file.write_text(f"k1:{base64.b64encode(b'k' * 32).decode()}\n")
        tokens = folder / "tokens.yaml"
        tokens.write_text(
            f"tokens:\n- {{name: vllm, tenant: acme, role: client, token: {CLIENT_TOKEN}}}\n"
            f"- {{name: operator, tenant: acme, role: admin, token: {ADMIN_TOKEN}}}\n"
        )
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self._config = folder / "config.yaml"
        self._config.write_text(
            json.dumps(
                {
                    "port": self.port,
                    "auth_tokens_file": str(tokens),
                    "ticket_keys_file": str(self.keys_file),
                    "ticket_ttl_ms": 1000,
                }
            )
        )
        self._port_file = folder / "port.json"
        self._log = (folder / "log").open("wb")
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        self._port_file.unlink(missing_ok=True)
        command = [
            sys.executable,
            "-m",
            "lmcache_broker",
            "--config",
            str(self._config),
            "--port-file",
            str(self._port_file),
        ]
        self._process = subprocess.Popen(command, stdout=self._log, stderr=self._log)

    async def ready(self) -> None:
        await until(self._port_file.exists)

    def end(self, number: signal.Signals) -> int:
        assert self._process is not None
        self._process.send_signal(number)
        code = self._process.wait(SLOW_S)
        self._process = None
        return code

    def close(self) -> None:
        if self._process is not None:
            self.end(signal.SIGKILL)
        self._log.close()


async def until(condition: Callable[[], bool], timeout_s: float = SLOW_S) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.02)


@pytest.fixture
def stopped(tmp_path: Path) -> Iterator[Broker]:
    broker = Broker(tmp_path)
    yield broker
    broker.close()


@pytest.fixture
async def broker(stopped: Broker) -> Broker:
    stopped.start()
    await stopped.ready()
    return stopped


@asynccontextmanager
async def client_of(
    broker: Broker, token: str | None = CLIENT_TOKEN
) -> AsyncIterator[BrokerClient]:
    client = BrokerClient(broker.url, token, SLOW_S)
    await client.open()
    yield client
    await client.close()


@asynccontextmanager
async def registered(client: BrokerClient, *names: str) -> AsyncIterator[list[PeerRegistration]]:
    peers = [
        Peer(name, 1, f"lm://10.0.0.{i}:65433", "sidecar", "z1", f"node-{i}")
        for i, name in enumerate(names, 1)
    ]
    registrations = [PeerRegistration(client, peer, ttl_ms=LEASE_MS) for peer in peers]
    for registration in registrations:
        await registration.open()
    yield registrations
    for registration in registrations:
        await registration.close()


async def names(client: BrokerClient) -> list[str]:
    return [peer.id for peer in await client.peers()]


async def until_drains(client: BrokerClient, expected: dict[str, bool]) -> None:
    async with asyncio.timeout(SLOW_S):
        while {peer.id: peer.draining for peer in await client.peers()} != expected:
            await asyncio.sleep(0.02)


async def test_pulls_are_assigned_with_tickets_that_the_serving_peer_takes(broker: Broker) -> None:
    async with client_of(broker) as client, registered(client, "a", "b", "me") as registrations:
        await until(lambda: all(registration.registered for registration in registrations))
        wanted = [
            (CHUNKS[0], ["a"]),
            (CHUNKS[1], ["b", "me"]),
            (CHUNKS[2], ["me"]),
            (CHUNKS[3], ["a", "gone"]),
        ]
        assignments = {
            assignment.instance: assignment for assignment in await client.transfers("me", wanted)
        }
        assert {name: assignment.chunk_ids for name, assignment in assignments.items()} == {
            "a": [CHUNKS[0].hex(), CHUNKS[3].hex()],
            "b": [CHUNKS[1].hex()],
        }
        assert assignments["a"].distributed_url == "lm://10.0.0.1:65433"
        keys = read_ticket_keys(broker.keys_file)
        ticket = TicketVerifier(keys, "a").verify(assignments["a"].ticket)
        assert (ticket.requester, ticket.tenant) == ("me", "acme")
        with pytest.raises(AuthenticationError, match="another instance"):
            TicketVerifier(keys, "b").verify(assignments["a"].ticket)
    async with client_of(broker) as client:
        assert await names(client) == []


async def test_a_killed_broker_learns_everything_again_from_heartbeats(broker: Broker) -> None:
    async with client_of(broker) as client, registered(client, "a", "b") as registrations:
        await until(lambda: all(registration.registered for registration in registrations))
        registrations[1].drain()
        await until_drains(client, {"a": False, "b": True})
        broker.end(signal.SIGKILL)
        with pytest.raises(UnavailableError):
            await client.peers()
        await until(lambda: not any(registration.registered for registration in registrations))
        broker.start()
        await broker.ready()
        await until(lambda: all(registration.registered for registration in registrations))
        await until_drains(client, {"a": False, "b": True})
        assert [
            assignment.instance
            for assignment in await client.transfers("me", [(CHUNKS[0], ["a", "b"])])
        ] == ["a"]


async def test_a_broker_that_comes_late_finds_everyone(stopped: Broker) -> None:
    async with client_of(stopped) as client, registered(client, "a") as registrations:
        await asyncio.sleep(0.3)
        assert not registrations[0].registered
        stopped.start()
        await stopped.ready()
        await until(lambda: registrations[0].registered)


async def test_a_peer_that_dies_leaves_when_its_lease_ends(broker: Broker) -> None:
    async with client_of(broker) as client:
        await client.register(Peer("a", 1, "lm://10.0.0.1:1"), load=0.0, ttl_ms=LEASE_MS)
        assert await names(client) == ["a"]
        await until_drains(client, {})
        assert await client.transfers("me", [(CHUNKS[0], ["a"])]) == []


async def test_a_drain_reaches_the_peer_with_its_next_heartbeat(broker: Broker) -> None:
    async with client_of(broker, ADMIN_TOKEN) as admin, registered(admin, "a") as registrations:
        await until(lambda: registrations[0].registered)
        await admin.drain("a")
        assert await admin.transfers("me", [(CHUNKS[0], ["a"])]) == []
        await until(lambda: registrations[0].draining)


async def test_tokens_and_roles(broker: Broker) -> None:
    client, stranger = (
        {"authorization": f"Bearer {token}"} for token in (CLIENT_TOKEN, "no-such-token-000")
    )
    async with httpx.AsyncClient(base_url=broker.url, timeout=SLOW_S) as http:
        for refused, status in (
            (await http.get("/v1/peers"), 401),
            (await http.get("/v1/peers", headers=stranger), 401),
            (await http.post("/v1/peers/a:drain", headers=client), 403),
            (await http.put("/v1/peers/a", json={"incarnation": 1}, headers=client), 422),
        ):
            assert refused.status_code == status
            assert refused.headers["content-type"] == "application/problem+json"
        assert refused.json()["type"] == "urn:lmcache:problem:invalid"
        assert (await http.get("/readyz")).status_code == 200
    async with client_of(broker, None) as anonymous:
        with pytest.raises(UnavailableError, match="status 401"):
            await anonymous.peers()


async def test_sigterm_ends_it_well(broker: Broker) -> None:
    assert broker.end(signal.SIGTERM) == 0


async def test_bad_settings_end_it_with_code_2_and_a_fix(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("ticket_keys: k1:c2hvcnQ=\nmax_pulls_per_per: 3\n")
    done = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-m", "lmcache_broker", "--config", str(path)],
        capture_output=True,
        timeout=SLOW_S,
        check=False,
    )
    assert done.returncode == 2
    assert b"did you mean 'max_pulls_per_peer'?" in done.stderr
    assert b"c2hvcnQ" not in done.stderr


WITHOUT_TORCH = """
import sys
sys.modules.update(torch=None, numpy=None)
from lmcache_broker.app import create_app
from lmcache_broker.settings import BrokerSettings
print(create_app(BrokerSettings()).title)
"""


async def test_it_needs_no_torch() -> None:
    done = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-c", WITHOUT_TORCH],
        capture_output=True,
        timeout=SLOW_S,
        check=False,
    )
    assert done.stdout.decode().strip() == "lmcache-broker", done.stderr.decode()
