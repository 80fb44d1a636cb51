"""A storage that bounds the rate of each tenant, over REST and lm:// together."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
from lmcache_core.errors import UnavailableError
from lmcache_core.wire.client import LmClient

from tests.fixtures.storage_app import TOKENS, bearer, write_tokens
from tests.fixtures.storage_process import PATIENT, running_storage
from tests.suites.chunks import make_key


async def test_a_tenant_above_its_rate_is_refused_and_others_are_served(tmp_path: Path) -> None:
    tokens = write_tokens(tmp_path / "tokens.yaml")
    with running_storage(tmp_path, auth_tokens_file=tokens, rate_limit_per_tenant=1) as storage:
        lm = {
            name: LmClient("127.0.0.1", storage.ports["lm_port"], TOKENS[name], PATIENT)
            for name in ("acme", "rival")
        }
        async with httpx.AsyncClient(
            base_url=storage.url, headers=bearer("acme"), trust_env=False
        ) as rest:
            answers = await asyncio.gather(*(rest.get("/v1/stats") for _ in range(60)))
            statuses = {answer.status_code for answer in answers}
            assert statuses == {200, 429}
            assert {answer.headers.get("retry-after") for answer in answers} == {None, "1"}
            found = await asyncio.gather(
                *(lm["acme"].contains([make_key("a")]) for _ in range(60)), return_exceptions=True
            )
            busy = [one for one in found if isinstance(one, UnavailableError)]
            assert busy
            assert all("busy" in str(one) for one in busy)
            assert all(one == [False] for one in found if one not in busy)
            assert lm["acme"].is_connected, "its connection stays"
            assert await lm["rival"].contains([make_key("a")]) == [False]
            assert (await rest.get("/v1/stats", headers=bearer("operator"))).status_code == 200
        for client in lm.values():
            await client.close()
