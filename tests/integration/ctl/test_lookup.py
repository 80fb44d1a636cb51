"""`lmcachectl lookup` beside a real lookup service."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from lmcache_core.lookup import LookupClient, StoreEvent

from tests.fixtures.sample_service import ADMIN_TOKEN, CLIENT_TOKEN, write_tokens
from tests.fixtures.service_process import ServiceProcess, running_service

A, B, C = (letter * 16 for letter in (b"a", b"b", b"c"))
TIMEOUT_S = 60


@pytest.fixture
def service(tmp_path: Path) -> Iterator[ServiceProcess]:
    tokens = write_tokens(tmp_path / "tokens.yaml")
    (tmp_path / "token").write_text(ADMIN_TOKEN)
    (tmp_path / "client-token").write_text(CLIENT_TOKEN)
    environ = {"LMCACHE_LOOKUP_PORT": "0", "LMCACHE_LOOKUP_AUTH_TOKENS_FILE": str(tokens)}
    with running_service("lmcache_lookup", tmp_path, environ) as process:
        asyncio.run(fill(process.url))
        yield process


async def fill(url: str) -> None:
    client = LookupClient(url, ADMIN_TOKEN, timeout_s=10)
    await client.open()
    for instance, held in (("pod-1", (A, B)), ("pod-2", (A,))):
        await client.renew_instance(instance, incarnation=1, kind="sidecar", ttl_ms=60_000)
        events = [StoreEvent("store", chunk_id.hex(), "Hot", 3 << 20) for chunk_id in held]
        events.append(StoreEvent("store", C.hex(), "Hot", 1, "rival"))
        await client.send_events(instance, incarnation=1, first_sequence=0, events=events)
    await client.close()


def ctl(service: ServiceProcess, directory: Path, *arguments: str, code: int = 0, token: str = "token") -> str:
    shown = ["--url", service.url, "--token-file", str(directory / token)]
    command = [sys.executable, "-m", "lmcache_ctl", "lookup", *arguments, *shown]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False, env={"COLUMNS": "200"})
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_who_holds_what_is_told(service: ServiceProcess, tmp_path: Path) -> None:
    table = ctl(service, tmp_path, "locations", A.hex())
    assert "pod-1" in table
    assert "pod-2" in table
    assert "3.0 MiB" in table
    assert json.loads(ctl(service, tmp_path, "locations", C.hex(), "-o", "json", code=1)) == {"holders": [], "degraded": False}
    routes = json.loads(ctl(service, tmp_path, "route", A.hex(), B.hex(), C.hex(), "-o", "json"))
    assert routes["instances"] == [{"instance": "pod-1", "num_prefix": 2}, {"instance": "pod-2", "num_prefix": 1}]
    assert "2 of 3" in ctl(service, tmp_path, "route", A.hex(), B.hex(), C.hex())
    ctl(service, tmp_path, "route", C.hex(), code=1)
    assert "is no chunk id" in ctl(service, tmp_path, "locations", "xyz", code=2)


def test_status_and_tenants(service: ServiceProcess, tmp_path: Path) -> None:
    table = ctl(service, tmp_path, "status")
    assert "embedded" in table
    assert "pod-2" in table
    assert json.loads(ctl(service, tmp_path, "status", "--tenant", "rival", "-o", "json"))["stats"]["num_chunks"] == 1
    assert ctl(service, tmp_path, "tenants").split() == ["acme", "rival"]
    assert "needs a token with the role admin" in ctl(service, tmp_path, "tenants", code=1, token="client-token")
