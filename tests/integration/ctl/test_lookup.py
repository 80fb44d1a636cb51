"""`lmcachectl lookup` with a real lookup service."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from lmcache_core.lookup import LookupClient, StoreEvent

from tests.fixtures.ctl import Ctl
from tests.fixtures.sample_service import ADMIN_TOKEN, CLIENT_TOKEN, write_tokens
from tests.fixtures.service_process import ServiceProcess, running_service

A, B, C = (letter * 16 for letter in (b"a", b"b", b"c"))


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("lookup")


@pytest.fixture(scope="module")
def service(directory: Path) -> Iterator[ServiceProcess]:
    tokens = write_tokens(directory / "tokens.yaml")
    (directory / "token").write_text(ADMIN_TOKEN)
    (directory / "client-token").write_text(CLIENT_TOKEN)
    environ = {"LMCACHE_LOOKUP_PORT": "0", "LMCACHE_LOOKUP_AUTH_TOKENS_FILE": str(tokens)}
    with running_service("lmcache_lookup", directory, environ) as process:
        asyncio.run(fill(process.url))
        yield process


async def fill(url: str) -> None:
    client = LookupClient(url, ADMIN_TOKEN, timeout_s=10)
    await client.open()
    for instance, held in (("pod-1", (A, B)), ("pod-2", (A,))):
        await client.renew_instance(instance, incarnation=1, kind="sidecar", ttl_ms=60_000)
        events = [StoreEvent("store", chunk_id, "memory", 3 << 20) for chunk_id in held]
        events.append(StoreEvent("store", C, "memory", 1, "rival"))
        await client.send_events(instance, incarnation=1, first_sequence=0, events=events)
    await client.close()


def ctl(
    service: ServiceProcess, directory: Path, *arguments: str, code: int = 0, token: str = "token"
) -> str:
    return Ctl([f"--url={service.url}", f"--token-file={directory / token}"]).text(
        "lookup", *arguments, code=code
    )


def test_holders_of_chunks_are_shown(service: ServiceProcess, directory: Path) -> None:
    table = ctl(service, directory, "locations", A.hex())
    assert "pod-1" in table
    assert "pod-2" in table
    assert "3.0 MiB" in table
    assert json.loads(ctl(service, directory, "locations", C.hex(), "-o", "json", code=1)) == {
        "holders": [],
        "degraded": False,
    }
    routes = json.loads(ctl(service, directory, "route", A.hex(), B.hex(), C.hex(), "-o", "json"))
    assert routes["instances"] == [
        {"instance": "pod-1", "num_prefix": 2},
        {"instance": "pod-2", "num_prefix": 1},
    ]
    assert "2 of 3" in ctl(service, directory, "route", A.hex(), B.hex(), C.hex())
    ctl(service, directory, "route", C.hex(), code=1)
    assert "is not a chunk id" in ctl(service, directory, "locations", "xyz", code=2)


def test_status_and_tenants(service: ServiceProcess, directory: Path) -> None:
    table = ctl(service, directory, "status")
    assert "embedded" in table
    assert "pod-2" in table
    assert (
        json.loads(ctl(service, directory, "status", "--tenant", "rival", "-o", "json"))["stats"][
            "num_chunks"
        ]
        == 1
    )
    assert ctl(service, directory, "tenants").split() == ["acme", "rival"]
    assert "needs a token with the role admin" in ctl(
        service, directory, "tenants", code=1, token="client-token"
    )
