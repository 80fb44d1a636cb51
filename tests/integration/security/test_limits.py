"""A storage that serves each tenant so many requests a second, over REST and lm:// together."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import httpx
from lmcache_core.errors import UnavailableError
from lmcache_core.wire.client import LmClient

from tests.fixtures.service_process import running_service
from tests.fixtures.storage_app import TOKENS, bearer, write_tokens
from tests.suites.chunks import make_key

PER_SECOND = 4


async def test_one_tenants_haste_is_not_another_ones_trouble(tmp_path: Path) -> None:
    environ = {
        "PORT": "0",
        "LM_PORT": "0",
        "MEMORY_GB": "0.01",
        "AUTH_TOKENS_FILE": str(write_tokens(tmp_path / "tokens.yaml")),
        "RATE_LIMIT_PER_TENANT": str(PER_SECOND),
    }
    with running_service(
        "lmcache_storage",
        tmp_path,
        {f"LMCACHE_STORAGE_{name}": value for name, value in environ.items()},
    ) as storage:
        lm = {
            name: LmClient("127.0.0.1", storage.ports["lm_port"], TOKENS[name])
            for name in ("acme", "rival")
        }
        async with httpx.AsyncClient(
            base_url=storage.url, headers=bearer("acme"), trust_env=False
        ) as rest:
            begin = time.monotonic()
            refused = [
                answer
                for answer in [await rest.get("/v1/stats") for _ in range(60)]
                if answer.status_code != 200
            ]
            num_served = 60 - len(refused)
            assert PER_SECOND <= num_served <= PER_SECOND * (1 + time.monotonic() - begin) + 1
            assert {(answer.status_code, answer.headers["retry-after"]) for answer in refused} == {
                (429, "1")
            }
            answers = await asyncio.gather(
                *(lm["acme"].contains([make_key("a")]) for _ in range(60)), return_exceptions=True
            )
            busy = [answer for answer in answers if isinstance(answer, UnavailableError)]
            assert busy
            assert all("busy" in str(answer) for answer in busy)
            assert all(answer == [False] for answer in answers if answer not in busy)
            assert lm["acme"].is_connected, "it is told so, and may come again"
            assert await lm["rival"].contains([make_key("a")]) == [False]
            assert (await rest.get("/v1/stats", headers=bearer("operator"))).status_code == 200
        for client in lm.values():
            await client.close()
