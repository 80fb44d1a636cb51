"""Sizes that a tenant declares cost other tenants nothing: REST, lm://, LMCache clients."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from lmcache_core.wire.messages import Put, build_frame
from lmcache_servicekit.state import service_state
from lmcache_storage.app import create_app
from lmcache_storage.settings import StorageSettings
from lmcache_storage.storage import StorageNode

from tests.fixtures.compat import PUT as COMPAT_PUT
from tests.fixtures.compat import request_bytes
from tests.fixtures.storage_app import TOKENS, assert_problem, bearer, write_tokens
from tests.fixtures.wire import connected
from tests.suites.chunks import make_chunk, make_key

pytestmark = pytest.mark.virtual_time

MEMORY_BYTES = 4 << 20
MAX_RECORD_BYTES = 1 << 20
QUOTA_BYTES = 512 << 10
CHUNK_BYTES = 100_000
NUM_CHUNKS = 38
"""Of `acme`: they all but fill the memory."""


@asynccontextmanager
async def full_storage(
    directory: Path, **options: Any
) -> AsyncIterator[tuple[httpx.AsyncClient, StorageNode, dict[str, int]]]:
    """A storage whose memory `acme` has filled: REST, its parts, its ports."""
    settings = StorageSettings(
        **{
            "lm_port": 0,
            "lmcache_compat_port": 0,
            "lmcache_compat_tenant": "rival",
            "memory_gb": MEMORY_BYTES / (1 << 30),
            "max_record_mb": MAX_RECORD_BYTES >> 20,
            "auth_tokens_file": write_tokens(directory / "tokens.yaml"),
        }
        | options
    )
    app = create_app(settings)
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://storage") as rest,
    ):
        parts: StorageNode = app.state.storage
        for i in range(NUM_CHUNKS):
            assert (await put(rest, "acme", i, CHUNK_BYTES)).status_code == 201
        assert held(parts, "acme") == NUM_CHUNKS
        yield rest, parts, service_state(app).ports
    assert parts.stack.hot.stats()["arena_used_bytes"] == 0, "a reference was not given back"


def held(parts: StorageNode, tenant: str) -> int:
    return sum(key.tenant == tenant for key, _ in parts.stack.hot.held())


def incoming_bytes(parts: StorageNode) -> int:
    figures = parts.stack.hot.stats()
    return figures["arena_used_bytes"] - figures["used_bytes"]


def head_of(name: object, num_bytes: int) -> bytes:
    """The head of a record with so many bytes of payload."""
    return make_chunk(name, payload=bytes(num_bytes)).head


async def put(rest: httpx.AsyncClient, tenant: str, name: object, num_bytes: int) -> httpx.Response:
    body = head_of(name, num_bytes) + bytes(num_bytes)
    return await rest.put(
        f"/v1/chunks/{make_key(name).key.to_url()}", content=body, headers=bearer(tenant)
    )


QUOTA = {"tenant_quotas": {"rival": {"memory_gb": QUOTA_BYTES / (1 << 30)}}}


async def test_a_record_above_the_quota_evicts_nothing(tmp_path: Path) -> None:
    async with full_storage(tmp_path, **QUOTA) as (rest, parts, _):
        assert_problem(await put(rest, "rival", "x", QUOTA_BYTES + 4096), 507, "capacity")
        assert held(parts, "acme") == NUM_CHUNKS


async def stalled_lm(exits: AsyncExitStack, ports: dict[str, int], i: int, num_bytes: int) -> None:
    raw = await exits.enter_async_context(connected(ports["lm_port"]))
    await raw.hello(TOKENS["rival"])
    head = head_of(i, num_bytes)
    await raw.send(build_frame(2, Put(), len(head) + num_bytes) + head + bytes(1024))


async def stalled_compat(
    exits: AsyncExitStack, ports: dict[str, int], i: int, num_bytes: int
) -> None:
    raw = await exits.enter_async_context(connected(ports["lmcache_compat_port"]))
    await raw.send(request_bytes("v0.3+", COMPAT_PUT, f"key-{i}", num_bytes) + bytes(1024))


Stall = Callable[[AsyncExitStack, dict[str, int], int, int], Any]


@pytest.mark.parametrize("stall", [stalled_lm, stalled_compat])
@pytest.mark.parametrize("num_bytes", [MAX_RECORD_BYTES - 8192, CHUNK_BYTES])
async def test_bytes_that_never_come_take_at_most_the_quota(
    tmp_path: Path, stall: Stall, num_bytes: int
) -> None:
    async with full_storage(tmp_path, **QUOTA) as (_, parts, ports), AsyncExitStack() as exits:
        for i in range(20):
            await stall(exits, ports, i, num_bytes)
        await asyncio.sleep(0.3)
        assert incoming_bytes(parts) <= QUOTA_BYTES
        assert held(parts, "acme") >= NUM_CHUNKS - (
            QUOTA_BYTES // CHUNK_BYTES if num_bytes < QUOTA_BYTES else 0
        )
