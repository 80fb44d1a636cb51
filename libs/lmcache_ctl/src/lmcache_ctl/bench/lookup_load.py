"""Ask a lookup service for prefixes that are fully cached, announced by a temporary instance."""

from __future__ import annotations

import asyncio
import contextlib
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
    ServiceTransport,
    asking_for_nothing,
    run_phase,
    way_phases,
)
from lmcache_ctl.bench.report import BENCH_NAME, TIER, BenchLoad, Report
from lmcache_ctl.errors import CtlError, UsageError
from lmcache_ctl.output import Tell
from lmcache_ctl.services import Endpoint
from lmcache_ctl.settings import CtlSettings

LEASE_MS: Final = 30_000
RENEW_S: Final = 5.0
SEEN_S: Final = 5.0
"""Until what was announced must be found."""
LOOK_S: Final = 0.05
ID_BYTES: Final = 16


async def run_lookup_load(
    settings: CtlSettings, service: Endpoint, load: BenchLoad, tell: Tell
) -> Report:
    """Measure the network; announce a prefix, look it up repeatedly, remove it.

    Raises:
        CtlError: The service cannot be reached or refuses, or does not find what it was told.
        UsageError: Its URL, token or TLS files are wrong.
    """
    chunk_ids = [secrets.token_bytes(ID_BYTES) for _ in range(load.num_chunks)]
    async with _opened(settings, service, load) as client:
        async with asking_for_nothing(service, settings) as call:
            way = await way_phases(service, call, load, tell)
        instance = f"{BENCH_NAME}-{secrets.token_hex(8)}"
        try:
            await _announce(client, instance, chunk_ids)
            renewing = asyncio.create_task(_renew_again_and_again(client, instance))
            try:
                looking_up = _looking_up(client, chunk_ids)
                found = await run_phase("lookup", looking_up, load.concurrency, load.seconds, tell)
            finally:
                renewing.cancel()
                await asyncio.gather(renewing, return_exceptions=True)
        except (LMCacheError, TimeoutError) as exc:
            raise CtlError(f"{service.url} cannot be used: {exc or 'no answer in time'}") from exc
        finally:
            num_left = await _take_back(client, instance, chunk_ids)
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


async def _announce(client: LookupClient, instance: str, chunk_ids: list[bytes]) -> None:
    """Announce the chunks, and wait until they are found.

    Raises:
        UnavailableError: They are not found in time.
    """
    await _renew(client, instance)
    await _send(client, instance, "store", 0, chunk_ids)
    deadline = time.monotonic() + SEEN_S
    while (found := await client.lookup(chunk_ids)).num_prefix < len(chunk_ids):
        if time.monotonic() > deadline:
            what = f"it finds {found.num_prefix} of {len(chunk_ids)} chunks"
            what = "its index does not answer" if found.degraded else what
            raise UnavailableError(f"{what} that it was told of")
        await asyncio.sleep(LOOK_S)


async def _renew_again_and_again(client: LookupClient, instance: str) -> None:
    """Renew the lease until cancelled; a failed renewal shows in chunks that are missing."""
    while True:
        await asyncio.sleep(RENEW_S)
        with contextlib.suppress(UnavailableError):
            await _renew(client, instance)


async def _take_back(client: LookupClient, instance: str, chunk_ids: list[bytes]) -> int:
    """Remove the chunks; return how many are left. Those expire with the lease."""
    try:
        async with asyncio.timeout(CALL_TIMEOUT_S):
            await _send(client, instance, "remove", len(chunk_ids), chunk_ids)
            await client.end_instance(instance)
            return sum((await client.contains(chunk_ids)).present)
    except (LMCacheError, TimeoutError):
        return len(chunk_ids)


async def _renew(client: LookupClient, instance: str) -> None:
    await client.renew_instance(instance, incarnation=1, kind="sidecar", ttl_ms=LEASE_MS)


async def _send(
    client: LookupClient, instance: str, op: EventOp, first: int, chunk_ids: list[bytes]
) -> None:
    events = [StoreEvent(op, chunk_id.hex(), TIER, 1) for chunk_id in chunk_ids]
    await client.send_events(instance, incarnation=1, first_sequence=first, events=events)


def _looking_up(client: LookupClient, chunk_ids: list[bytes]) -> Call:
    async def call() -> Done | None:
        done, started = Done(), time.perf_counter()
        found = await client.lookup(chunk_ids)
        done.seconds = time.perf_counter() - started
        done.num_chunks = found.num_prefix
        if found.num_prefix < len(chunk_ids):
            done.not_done["not found"] += len(chunk_ids) - found.num_prefix
        return done

    return call
