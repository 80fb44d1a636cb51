"""The bounds of the embedded index, and the breaker before Redis; `tests/contract/lookup_index` has
what every index does.
"""

from __future__ import annotations

from collections import Counter

import pytest
from lmcache_core.errors import UnavailableError
from lmcache_core.wire.backoff import Backoff
from lmcache_lookup.index import ClaimedElsewhereError, EventBatch, IndexEvent, LeaseClaim
from lmcache_lookup.index import breaker as breaker_module
from lmcache_lookup.index.breaker import FAILURES_BEFORE_PAUSE, IndexBreaker
from lmcache_lookup.index.embedded import DROPS_PER_LOOK, SWEEP_CHUNKS, EmbeddedIndex
from lmcache_lookup.index.redis_index import RedisIndex, RedisIndexOptions
from lmcache_servicekit.errors import StoreRefusedError
from lmcache_servicekit.redis_client import RedisAccess

from tests.fixtures.broker import FakeClock


async def test_a_full_embedded_index_forgets_chunks_of_the_tenant_with_the_most() -> None:
    index = EmbeddedIndex(max_chunks=1000, max_instances=4)
    ids = [number.to_bytes(16, "big") for number in range(3000)]
    for tenant, mine in (
        ("small", ids[:100]),
        ("large", ids),
        ("late", ids[:500]),
        ("later", ids[:300]),
    ):
        await index.renew(tenant, LeaseClaim("a", 1, "sidecar", 100_000))
        await index.apply(
            tenant,
            EventBatch(
                "a", 1, 0, [IndexEvent("store", tenant, chunk_id, "hot", 1) for chunk_id in mine]
            ),
        )
        await index.sweep()
    known = {tenant: (await index.stats(tenant)).num_chunks for tenant in await index.tenants()}
    assert (known["small"], sum(known.values())) == (100, 1000)
    assert min(known["large"], known["late"], known["later"]) >= 1000 // len(known)
    assert [len(found) for found in await index.holders("large", ids)].index(1) == 3000 - known[
        "large"
    ]


class Tenants:
    """Stores numbered chunks of many tenants in a full index."""

    def __init__(self, index: EmbeddedIndex) -> None:
        self._index = index
        self._num_stored: Counter[tuple[str, str]] = Counter()

    async def store(
        self, tenant: str, count: int, instance: str = "i", ttl_ms: int = 10**9
    ) -> None:
        first = self._num_stored[tenant, instance]
        await self._index.renew(tenant, LeaseClaim(instance, 1, "sidecar", ttl_ms))
        ids = [
            instance.encode() * 8 + number.to_bytes(8, "big")
            for number in range(first, first + count)
        ]
        events = [IndexEvent("store", tenant, chunk_id, "hot", 1) for chunk_id in ids]
        assert not (await self._index.apply(tenant, EventBatch(instance, 1, first, events))).resync
        self._num_stored[tenant, instance] += count

    async def sizes(self, *tenants: str) -> list[int]:
        return [(await self._index.stats(tenant)).num_chunks for tenant in tenants]


async def test_a_tenant_that_shrank_gives_up_no_more_chunks_than_the_largest() -> None:
    """Its dead chunks were swept after it was found to be the one with the most."""
    clock = FakeClock()
    index = EmbeddedIndex(10_000, 100, clock=clock)
    tenants = Tenants(index)
    await tenants.store("a", 3000)
    await tenants.store("a", 5500, "j", ttl_ms=1000)
    for number in range(20):
        await tenants.store(f"s{number}", 75)
    await tenants.store("s0", 5)
    clock.now_s += 5
    for _ in range(40):
        await index.sweep()
    await tenants.store("b", 10_000 - sum(await tenants.sizes(*await index.tenants())))
    before = await tenants.sizes("a", "b")
    assert before[0] < before[1]
    await tenants.store("c", 300)
    after = await tenants.sizes("a", "b")
    assert before[0] - after[0] <= DROPS_PER_LOOK
    assert sum(before) - sum(after) == 300


async def test_sweeping_keeps_the_order_and_looks_at_a_bounded_number() -> None:
    index = EmbeddedIndex(max_chunks=3 * SWEEP_CHUNKS, max_instances=4)
    ids = [number.to_bytes(16, "big") for number in range(3 * SWEEP_CHUNKS + 2)]
    await index.renew("t", LeaseClaim("a", 1, "sidecar", 100_000))
    await index.apply(
        "t",
        EventBatch(
            "a", 1, 0, [IndexEvent("store", "t", chunk_id, "hot", 1) for chunk_id in ids[:-2]]
        ),
    )
    for _ in range(3):
        assert await index.sweep() == 0
    for number, chunk_id in enumerate(ids[-2:]):
        await index.apply(
            "t",
            EventBatch(
                "a", 1, len(ids) - 2 + number, [IndexEvent("store", "t", chunk_id, "hot", 1)]
            ),
        )
        await index.sweep()
    assert [len(holders) for holders in await index.holders("t", [*ids[:3], *ids[-2:]])] == [
        0,
        0,
        1,
        1,
        1,
    ]
    await index.end("t", "a")
    swept = [await index.sweep() for _ in range(8)]
    assert (sum(swept), max(swept)) == (3 * SWEEP_CHUNKS, SWEEP_CHUNKS)
    assert (await index.stats("t")).num_chunks == 0


class Away:
    """Raises `error`, if there is one, and counts calls."""

    def __init__(self) -> None:
        self.error: UnavailableError | None = UnavailableError("the index is away")
        self.num_calls = 0

    async def __call__(self) -> None:
        self.num_calls += 1
        if self.error is not None:
            raise self.error


async def test_calls_stop_after_failures_and_a_ping_admits_them_again() -> None:
    clock, away = FakeClock(), Away()
    breaker = IndexBreaker("redis", Backoff(1.0, 4.0, clock, jitter=lambda: 1.0))
    for _ in range(FAILURES_BEFORE_PAUSE):
        with pytest.raises(UnavailableError):
            await breaker.call(away)
    with pytest.raises(UnavailableError, match=r"next try in 1\.0 s"):
        await breaker.call(away)
    assert (breaker.is_open, away.num_calls) == (True, FAILURES_BEFORE_PAUSE)
    clock.now_s += 1.0
    with pytest.raises(UnavailableError, match="the index is away"):
        await breaker.call(away)
    with pytest.raises(UnavailableError, match=r"next try in 2\.0 s"):
        await breaker.call(away)
    away.error = None
    await breaker.ping(away)
    await breaker.call(away)


async def test_claims_of_other_replicas_and_single_failures_stop_no_calls() -> None:
    away, breaker = Away(), IndexBreaker("redis")
    for _ in range(FAILURES_BEFORE_PAUSE):
        for error in (UnavailableError("slow"), ClaimedElsewhereError("another replica has it")):
            away.error = error
            with pytest.raises(type(error)):
                await breaker.call(away, write="apply")
    assert not breaker.is_open


async def test_refused_writes_stop_no_calls_and_fail_pings_for_a_minute() -> None:
    clock, here, full = FakeClock(), Away(), Away()
    breaker = IndexBreaker("redis", clock=clock)
    here.error, full.error = None, StoreRefusedError("redis at h:1 is full")
    for _ in range(2 * FAILURES_BEFORE_PAUSE):
        with pytest.raises(StoreRefusedError):
            await breaker.call(full, write="apply")
    await breaker.call(here)
    with pytest.raises(StoreRefusedError, match="full"):
        await breaker.ping(here)
    clock.now_s += 61
    await breaker.ping(here)
    with pytest.raises(StoreRefusedError):
        await breaker.call(full, write="apply")
    await breaker.call(here, write="apply")
    await breaker.ping(here)


async def test_the_breaker_guards_every_call_of_the_index_in_redis(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for pause in ("FIRST_PAUSE_S", "LONGEST_PAUSE_S"):
        monkeypatch.setattr(breaker_module, pause, 600.0)
    index = RedisIndex(RedisAccess.parse("redis://127.0.0.1:1"), RedisIndexOptions())
    calls = [
        lambda: index.renew("t", LeaseClaim("a", 1, "sidecar", 1000)),
        lambda: index.end("t", "a"),
        lambda: index.apply("t", EventBatch("a", 1, 0, [])),
        lambda: index.holders("t", [b"x" * 16]),
        lambda: index.instances("t"),
        lambda: index.evict("t", [b"x" * 16]),
        lambda: index.clear("t"),
        lambda: index.stats("t"),
        lambda: index.tenants(),
    ]
    for _ in range(FAILURES_BEFORE_PAUSE):
        with pytest.raises(UnavailableError):
            await index.ping()
    for call in calls:
        with pytest.raises(UnavailableError, match="the redis index is unavailable; next try in"):
            await call()
    assert await index.sweep() == 0
    await index.close()
