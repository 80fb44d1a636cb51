"""Only a token of role storage announces a storage server."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import httpx
import pytest
from lmcache_core.wire.client import LmClient

from tests.fixtures.service_process import ServiceProcess, running_service
from tests.fixtures.storage_process import PATIENT, running_storage
from tests.fixtures.waiting import until
from tests.suites.chunks import make_chunk, make_key

TOKENS = {
    "acme": "acme-token-0123456789",
    "rival": "rival-token-0123456789",
    "servers": "servers-token-0123456789",
}
LOOKS = 2
"""Times that a storage asks the broker for its peers before nothing more is expected."""


@pytest.fixture
def options(tmp_path: Path) -> dict[str, Path]:
    """The token file of all services, and the token of the storage servers."""
    entries = [
        f"- {{name: {name}, tenant: {name}, role: {'storage' if name == 'servers' else 'client'}, "
        f"token_sha256: {hashlib.sha256(token.encode()).hexdigest()}}}"
        for name, token in TOKENS.items()
    ]
    (tmp_path / "tokens.yaml").write_text("tokens:\n" + "\n".join(entries))
    (tmp_path / "token").write_text(TOKENS["servers"])
    return {"auth_tokens_file": tmp_path / "tokens.yaml"}


@pytest.fixture
def broker(tmp_path: Path, options: dict[str, Path]) -> Iterator[ServiceProcess]:
    (tmp_path / "broker").mkdir()
    environ = {
        "LMCACHE_BROKER_PORT": "0",
        "LMCACHE_BROKER_AUTH_TOKENS_FILE": str(options["auth_tokens_file"]),
    }
    with running_service("lmcache_broker", tmp_path / "broker", environ) as service:
        yield service


class Listener:
    """Takes what comes, and answers nothing."""

    def __init__(self) -> None:
        self.received = b""
        self.num_connections = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        while data := await reader.read(65536):
            self.received += data
        writer.close()


@asynccontextmanager
async def listening() -> AsyncIterator[tuple[Listener, int]]:
    listener = Listener()
    server = await asyncio.start_server(listener.serve, "127.0.0.1", 0)
    try:
        yield listener, server.sockets[0].getsockname()[1]
    finally:
        server.close()


async def num_looks(broker: ServiceProcess) -> float:
    """Return how many requests for the list of peers the broker has answered."""
    async with httpx.AsyncClient(base_url=broker.url, trust_env=False) as rest:
        lines = (await rest.get("/metrics")).text.splitlines()
    return sum(
        float(line.rsplit(" ", 1)[1])
        for line in lines
        if line.startswith("lmcache_http_requests_total{")
        and '"GET"' in line
        and '"/v1/peers"' in line
    )


async def announce(
    broker: ServiceProcess, token: str, peer_id: str, kind: str, port: int
) -> httpx.Response:
    async with httpx.AsyncClient(base_url=broker.url, trust_env=False) as rest:
        body = {"incarnation": 1, "kind": kind, "distributed_url": f"lm://127.0.0.1:{port}"}
        headers = {"authorization": f"Bearer {TOKENS[token]}"}
        return await rest.put(f"/v1/peers/{peer_id}", json=body, headers=headers)


@contextmanager
def storage(
    directory: Path, name: str, broker: ServiceProcess, options: dict[str, Path]
) -> Iterator[ServiceProcess]:
    """Yield a storage that knows others by the broker alone."""
    (directory / name).mkdir()
    shown = {"service_token_file": directory / "token", "tenant": "servers"}
    own = {"instance_id": name, "broker_url": broker.url, "drain_timeout_s": 10}
    with running_storage(directory / name, **options, **shown, **own) as service:
        yield service


@asynccontextmanager
async def client_of(service: ServiceProcess, tenant: str) -> AsyncIterator[LmClient]:
    client = LmClient("127.0.0.1", service.ports["lm_port"], TOKENS[tenant], PATIENT)
    yield client
    await client.close()


async def test_a_client_is_no_storage_server(
    tmp_path: Path, options: dict[str, Path], broker: ServiceProcess
) -> None:
    """Neither the token of the servers nor a chunk leaves for an address that a client names."""
    async with listening() as (listener, port):
        with storage(tmp_path, "storage-0", broker, options) as one:
            for tenant in ("acme", "rival"):
                async with client_of(one, tenant) as client:
                    assert await client.put([make_chunk(i) for i in range(8)]) == [True] * 8
                for peer_id in ("rogue", "storage-0"):
                    refused = await announce(broker, tenant, peer_id, "storage", port)
                    assert refused.status_code == 403, refused.text
                    assert "role storage" in refused.json()["detail"]
                    taken = await announce(broker, tenant, peer_id, "sidecar", port)
                    assert taken.status_code == 200
            enough = await num_looks(broker) + LOOKS

            async def has_looked() -> bool:
                return await num_looks(broker) >= enough

            await until(has_looked)
            assert await asyncio.to_thread(one.stop) == 0
        assert (listener.num_connections, listener.received) == (0, b"")


async def test_servers_of_the_role_storage_find_one_another_and_move_chunks_of_all(
    tmp_path: Path, options: dict[str, Path], broker: ServiceProcess
) -> None:
    with (
        storage(tmp_path, "storage-0", broker, options) as staying,
        storage(tmp_path, "storage-1", broker, options) as leaving,
    ):
        for tenant in ("acme", "rival"):
            async with client_of(leaving, tenant) as client:
                assert await client.put([make_chunk(tenant)]) == [True]
        await until(lambda: "service=the broker servers=storage-0" in leaving.output)
        assert await asyncio.to_thread(leaving.stop) == 0
        for tenant in ("acme", "rival"):
            async with client_of(staying, tenant) as client:
                assert await client.contains([make_key(tenant)]) == [True]
