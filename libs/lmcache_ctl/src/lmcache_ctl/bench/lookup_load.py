"""Ask a lookup service for prefixes that are all cached, announced by an instance of its own."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from lmcache_core.errors import ConfigError, LMCacheError, UnavailableError
from lmcache_core.lookup import LookupClient, StoreEvent
from lmcache_core.lookup.messages import EventOp

from lmcache_ctl.asking import given_token
from lmcache_ctl.bench.calls import (
    CALL_TIMEOUT_S,
    Call,
    Done,
    PhaseRun,
    ServiceTransport,
    asking_for_nothing,
    way_phases,
)
from lmcache_ctl.bench.report import BENCH_NAME, TIER, BenchLoad, Report, Tell
from lmcache_ctl.errors import CtlError, UsageError
from lmcache_ctl.services import Endpoint
from lmcache_ctl.settings import CtlSettings

LEASE_MS: Final = 30_000
RENEW_S: Final = 5.0
SEEN_S: Final = 5.0
"""Until what was announced must be found."""
LOOK_S: Final = 0.05
ID_BYTES: Final = 16
NOT_FOUND: Final = "not found"


async def run_lookup_load(
    settings: CtlSettings, service: Endpoint, load: BenchLoad, tell: Tell
) -> Report:
    """Measure the way there; announce a prefix, look it up again and again, take it back.

    Raises:
        CtlError: The service cannot be reached or refuses, or does not find what it was told.
        UsageError: Its URL, token or TLS files are wrong.
    """
    chunk_ids = [secrets.token_bytes(ID_BYTES) for _ in range(load.num_chunks)]
    async with _opened(settings, service, load) as client:
        async with asking_for_nothing(service, settings) as call:
            way = await way_phases(service, call, load, tell)
        prefix = _Prefix(client, chunk_ids)
        try:
            await prefix.announce()
            renewing = asyncio.create_task(prefix.renew())
            try:
                found = await PhaseRun("lookup", load.concurrency, load.seconds, tell).run(
                    _looking_up(client, chunk_ids)
                )
            finally:
                renewing.cancel()
                await asyncio.gather(renewing, return_exceptions=True)
        except (LMCacheError, TimeoutError) as exc:
            raise CtlError(f"{service.url} cannot be used: {exc or 'no answer in time'}") from exc
        finally:
            num_left = await prefix.take_back()
    return Report(load, [*way, found], load.num_chunks - num_left, num_left)


@asynccontextmanager
async def _opened(
    settings: CtlSettings, service: Endpoint, load: BenchLoad
) -> AsyncIterator[LookupClient]:
    try:
        token = given_token(settings) or service.token
        way = ServiceTransport(service, settings, load.concurrency)
        client = LookupClient(service.url, token, CALL_TIMEOUT_S, transport=way)
    except ConfigError as exc:
        raise UsageError(str(exc)) from exc
    await client.open()
    try:
        yield client
    finally:
        await client.close()


class _Prefix:
    """Chunks that only an instance of this bench says it holds."""

    def __init__(self, client: LookupClient, chunk_ids: list[bytes]) -> None:
        self._client = client
        self._chunk_ids = chunk_ids
        self._instance = f"{BENCH_NAME}-{secrets.token_hex(8)}"

    async def announce(self) -> None:
        """Announce it, and wait until it is found; raises `UnavailableError` where it is not."""
        await self._renew_once()
        await self._send("store", 0)
        deadline = time.monotonic() + SEEN_S
        wanted = len(self._chunk_ids)
        while (found := await self._client.lookup(self._chunk_ids)).num_prefix < wanted:
            if time.monotonic() > deadline:
                what = f"it finds {found.num_prefix} of {wanted} chunks"
                what = "its index does not answer" if found.degraded else what
                raise UnavailableError(f"{what} that it was told of")
            await asyncio.sleep(LOOK_S)

    async def renew(self) -> None:
        """Renew the lease until cancelled; a failed renewal shows in chunks that are missing."""
        while True:
            await asyncio.sleep(RENEW_S)
            try:
                await self._renew_once()
            except UnavailableError:
                continue

    async def take_back(self) -> int:
        """Remove the chunks; return how many are left, which the lease ends with."""
        try:
            async with asyncio.timeout(CALL_TIMEOUT_S):
                await self._send("remove", len(self._chunk_ids))
                await self._client.end_instance(self._instance)
                return sum((await self._client.contains(self._chunk_ids)).present)
        except (LMCacheError, TimeoutError):
            return len(self._chunk_ids)

    async def _renew_once(self) -> None:
        await self._client.renew_instance(
            self._instance, incarnation=1, kind="sidecar", ttl_ms=LEASE_MS
        )

    async def _send(self, op: EventOp, first: int) -> None:
        events = [StoreEvent(op, chunk_id.hex(), TIER, 1) for chunk_id in self._chunk_ids]
        await self._client.send_events(
            self._instance, incarnation=1, first_sequence=first, events=events
        )


def _looking_up(client: LookupClient, chunk_ids: list[bytes]) -> Call:
    async def call() -> Done | None:
        done, started = Done(), time.perf_counter()
        found = await client.lookup(chunk_ids)
        done.seconds = time.perf_counter() - started
        done.num_chunks = found.num_prefix
        if found.num_prefix < len(chunk_ids):
            done.not_done[NOT_FOUND] += len(chunk_ids) - found.num_prefix
        return done

    return call
