"""What quotas, pins and a time to live do to the hits of tenants that share a server, over REST,
as its own counters tell.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
from lmcache_core.memory import ArenaAllocator
from lmcache_core.record import Chunk, MissReason
from lmcache_core.storage.remote import create_remote_backend
from lmcache_core.testing.chunks import make_chunk, make_key, make_payload

from tests.fixtures.service_process import ServiceProcess, running_service
from tests.fixtures.storage_app import TOKENS, bearer, write_tokens

CHUNK_BYTES = 20_000
MEMORY_GB = 4 / 1024
QUOTA_GB = 1 / 1024
QUOTA_CHUNKS = int(QUOTA_GB * (1 << 30)) // CHUNK_BYTES
MANY = 400  # twice what memory holds


class Tenant:
    """Stores and reads over REST, and compares what it reads."""

    def __init__(self, service: ServiceProcess, name: str) -> None:
        self._tier = create_remote_backend(service.url, TOKENS[name], timeout_s=30)
        self._arena = ArenaAllocator.anonymous(16 << 20)

    async def open(self) -> None:
        await self._tier.open()

    async def close(self) -> None:
        await self._tier.close()
        assert self._arena.used_bytes == 0

    async def store(self, names: Sequence[int]) -> None:
        # one after the other: a batch arrives in any order, and which are the newest is compared
        for name in names:
            assert await self._tier.batched_put(
                [make_chunk(name, payload=make_payload(name, CHUNK_BYTES))]
            ) == [True]

    async def hits(self, names: Sequence[int]) -> list[int]:
        found = []
        keys = [make_key(name) for name in names]
        for name, result in zip(
            names,
            await self._tier.batched_get(keys, lambda size: self._arena.allocate((size,), None)),
            strict=True,
        ):
            if isinstance(result, Chunk):
                assert bytes(result.memory.byte_array) == make_payload(name, CHUNK_BYTES)
                result.release()
                found.append(name)
            else:
                assert result.reason is MissReason.NEVER_STORED
        return found


@asynccontextmanager
async def tenants(
    tmp_path: Path, **options: str
) -> AsyncIterator[tuple[httpx.AsyncClient, Tenant, Tenant]]:
    """An operator, and two tenants of a running server."""
    environ = {
        "PORT": "0",
        "LM_PORT": "0",
        "MEMORY_GB": str(MEMORY_GB),
        "EVICTION_POLICY": "lru",
    } | options
    environ["AUTH_TOKENS_FILE"] = str(write_tokens(tmp_path / "tokens.yaml"))
    with running_service(
        "lmcache_storage",
        tmp_path,
        {f"LMCACHE_STORAGE_{name}": value for name, value in environ.items()},
    ) as service:
        acme, rival = Tenant(service, "acme"), Tenant(service, "rival")
        async with httpx.AsyncClient(
            base_url=service.url, trust_env=False, headers=bearer("operator"), timeout=30
        ) as operator:
            for tenant in (acme, rival):
                await tenant.open()
            yield operator, acme, rival
            for tenant in (acme, rival):
                await tenant.close()


async def counted(operator: httpx.AsyncClient) -> tuple[int, dict[str, int]]:
    """Hits, and misses by their reasons, so far."""
    text = (await operator.get("/metrics")).text
    served = re.findall(r"^lmcache_storage_served_chunks_total\{.*\} (\S+)$", text, re.MULTILINE)
    missed = re.findall(
        r'^lmcache_storage_missed_chunks_total\{reason="(\w+)"\} (\S+)$', text, re.MULTILINE
    )
    return sum(int(float(value)) for value in served), {
        reason: int(float(value)) for reason, value in missed if float(value)
    }


async def test_a_quota_protects_the_others_and_a_pin_what_is_pinned(tmp_path: Path) -> None:
    quotas = json.dumps({"rival": {"memory_gb": QUOTA_GB}})
    async with tenants(tmp_path, TENANT_QUOTAS=quotas) as (operator, acme, rival):
        ours, prompt = list(range(60)), list(range(20))
        await acme.store(ours)
        await rival.store(range(MANY))
        assert await acme.hits(ours) == ours, "another tenant's flood costs us nothing"
        theirs = await rival.hits(range(MANY))
        assert theirs == list(range(MANY - len(theirs), MANY)), "the newest"
        assert QUOTA_CHUNKS - 5 <= len(theirs) <= QUOTA_CHUNKS
        hits, misses = await counted(operator)
        assert hits == len(ours) + len(theirs)
        assert misses == {"evicted": MANY - len(theirs)}

        keys = [make_key(name).key.to_url() for name in prompt]
        assert (await operator.post("/v1/admin/pin", json={"keys": keys, "tenant": "acme"})).json()[
            "num_pinned"
        ] == len(prompt)
        await acme.store(range(1000, 1000 + MANY))
        assert await acme.hits(ours) == prompt, "of the old ones, what is pinned"
        hits_later, misses_later = await counted(operator)
        assert hits_later == hits + len(prompt)
        assert misses_later == {"evicted": misses["evicted"] + len(ours) - len(prompt)}


async def test_a_time_to_live_ends_hits_of_pinned_chunks_too(tmp_path: Path) -> None:
    async with tenants(tmp_path, CHUNK_TTL_S="3") as (operator, acme, _):
        names = list(range(20))
        await acme.store(names)
        keys = [make_key(name).key.to_url() for name in names[:5]]
        assert (await operator.post("/v1/admin/pin", json={"keys": keys, "tenant": "acme"})).json()[
            "num_pinned"
        ] == 5
        assert await acme.hits(names) == names
        await asyncio.sleep(3.1)
        assert await acme.hits(names) == []
        assert await counted(operator) == (20, {"expired": 20})
