"""The host-memory tier: references, room, time to live and quotas, and threads that use it at the
same time.
"""

from __future__ import annotations

import asyncio
from unittest import mock

import pytest
from lmcache_core.errors import ConfigError, IntegrityError
from lmcache_core.keys import ChunkKey
from lmcache_core.memory import ArenaAllocator, MemoryAllocatorInterface, MemoryObj
from lmcache_core.record import Miss, MissReason
from lmcache_core.storage import hot as hot_module
from lmcache_core.storage.eviction import Ledger, TenantQuotas, TierLimits, create_policy
from lmcache_core.storage.hot import (
    MAX_EXPIRED_PER_CALL,
    TAIL_S,
    TAILS_SHARE,
    HeldChunk,
    LocalCPUBackend,
)

from tests.fixtures.disk_tier import Clock
from tests.suites.backend_suite import payload_of
from tests.suites.chunks import make_chunk, make_key, make_payload

SLOT_BYTES = 1024
NUM_SLOTS = 8
TAIL_BYTES = SLOT_BYTES // 2


@pytest.fixture
def hot(removed):
    backend = LocalCPUBackend(
        ArenaAllocator.anonymous(SLOT_BYTES * NUM_SLOTS), create_policy(), removed.append
    )
    yield backend
    backend.check_integrity()


def test_least_recently_used_chunk_is_evicted_and_contains_is_no_use(hot, removed):
    keys = [put_one(hot, i) for i in range(NUM_SLOTS)]
    assert get(hot, keys[0]) == make_payload(0)
    assert hot.contains_many([keys[1]]) == [True]
    put_one(hot, "one more")
    assert removed == [keys[1]]
    assert hot.contains_many(keys[:2]) == [True, False]


def test_removed_chunk_keeps_its_memory_until_readers_release_it(hot, removed):
    key = put_one(hot, "a")
    [chunk] = hot.get_many([key])
    assert hot.remove_many([key, key, make_key("other")]) == 1
    assert removed == [key]
    assert hot.contains_many([key]) == [False]
    assert bytes(chunk.memory.byte_array) == make_payload("a")
    assert hot.stats()["arena_used_bytes"] == SLOT_BYTES
    chunk.release()
    assert hot.stats()["arena_used_bytes"] == 0


@pytest.mark.parametrize("call", ["clear", "evict"])
async def test_removal_of_many_chunks_lets_other_tasks_run(
    monkeypatch: pytest.MonkeyPatch, hot: LocalCPUBackend, removed: list[ChunkKey], call: str
) -> None:
    monkeypatch.setattr(hot_module, "REMOVED_AT_ONCE", 2)
    monkeypatch.setattr(hot_module, "EVICTED_AT_ONCE_BYTES", 2 * SLOT_BYTES)
    for i in range(NUM_SLOTS):
        put_one(hot, i)
    seen = []

    async def look() -> None:
        while len(removed) < NUM_SLOTS:
            seen.append(len(removed))
            await asyncio.sleep(0)

    looking = asyncio.create_task(look())
    if call == "clear":
        assert await hot.clear() == NUM_SLOTS
    else:
        assert await hot.evict(1 << 40) == NUM_SLOTS * SLOT_BYTES
    await looking
    assert {2, 4, 6} <= set(seen)


def test_peek_reports_size_age_holders_and_loss():
    hot = LocalCPUBackend(ArenaAllocator.anonymous(1 << 16), create_policy(), clock=lambda: 1000.0)
    key = put_one(hot, "a")
    [chunk] = hot.get_many([key])
    assert hot.peek_many([key, make_key("b")]) == [
        HeldChunk(chunk.num_bytes, 1000.0, num_holders=1, lossy=False),
        Miss(MissReason.NEVER_STORED),
    ]
    chunk.release()
    [held] = hot.peek_many([key])
    assert held.num_holders == 0


def test_unbounded_allocator_is_refused():
    with pytest.raises(TypeError, match="bounded"):
        LocalCPUBackend(mock.Mock(spec=MemoryAllocatorInterface), create_policy())


async def test_close_empties_the_arena_without_reporting(hot, removed):
    put_one(hot, "a")
    await hot.close()
    await hot.close()
    assert hot.stats()["arena_used_bytes"] == 0
    assert removed == []


NUM_LIMITED = 32
TTL_S = 60.0
QUOTA_SLOTS = 4


@pytest.fixture
def limited(removed, clock):
    quotas = TenantQuotas(QUOTA_SLOTS * SLOT_BYTES, {"default": NUM_LIMITED * SLOT_BYTES})
    limits = TierLimits(TTL_S, quotas)
    arena = ArenaAllocator.anonymous(SLOT_BYTES * NUM_LIMITED)
    backend = LocalCPUBackend(
        arena, create_policy("lru"), removed.append, limits=limits, clock=clock
    )
    yield backend
    backend.check_integrity()
    backend.clear_now()
    assert arena.used_bytes == 0


def put(
    hot: LocalCPUBackend, *names: object, is_kept: bool = True, **options: object
) -> list[ChunkKey]:
    chunks = [make_chunk(name, allocate=hot.allocate, **options) for name in names]
    assert hot.put_many(chunks) == [is_kept] * len(chunks)
    for chunk in chunks:
        chunk.release()
    return [chunk.key for chunk in chunks]


def put_one(hot: LocalCPUBackend, name: object) -> ChunkKey:
    [key] = put(hot, name)
    return key


def get(hot: LocalCPUBackend, key: ChunkKey) -> bytes | MissReason:
    [chunk] = hot.get_many([key])
    return hot.miss(key).reason if chunk is None else payload_of(chunk)


def tail_in(
    hot: LocalCPUBackend, name: object, num_bytes: int = TAIL_BYTES
) -> tuple[ChunkKey, bool]:
    """Store a tail; whether it is held."""
    chunk = make_chunk(name, payload=make_payload(name, num_bytes), lane=make_key(name).lane.tail)
    [is_held] = hot.put_many([chunk])
    return chunk.key, is_held


def test_tails_go_first_and_have_a_share_of_their_own(removed, clock):
    """Tails may take one slot of all: two tails of half a slot."""
    hot = LocalCPUBackend(
        ArenaAllocator.anonymous(SLOT_BYTES * TAILS_SHARE),
        create_policy(),
        removed.append,
        clock=clock,
    )
    tails = [tail_in(hot, f"tail {i}")[0] for i in range(3)]
    assert removed == [tails[0]]
    keys = put(hot, *range(TAILS_SHARE))
    assert removed == tails, "whole chunks do not make room for each other yet"
    assert hot.contains_many(keys) == [True] * TAILS_SHARE
    tails += [tail_in(hot, f"late tail {i}")[0] for i in range(10)]
    assert hot.contains_many(keys).count(False) == 1, "the share of all tails together"
    assert hot.contains_many(tails[-2:]) == [True, True]
    assert not tail_in(hot, "large tail", SLOT_BYTES + 1)[1]
    clock.now += TAIL_S + 1
    assert get(hot, tails[-1]) == make_payload("late tail 9", TAIL_BYTES), "it is right at any age"
    new, is_held = tail_in(hot, "after a minute", TAIL_BYTES // 2)
    assert is_held
    assert hot.contains_many([*tails, new]) == [False] * len(tails) + [True]
    hot.check_integrity()


def test_expired_chunks_are_evicted_first(limited, clock, removed):
    old = put(limited, *range(3))
    clock.now += TTL_S / 2
    put(limited, *range(3, NUM_LIMITED))
    for key in old:
        get(limited, key)
    clock.now += TTL_S / 2
    taken = [limited.allocate(SLOT_BYTES) for _ in range(3)]
    assert removed == old[::-1]
    for memory in taken:
        memory.ref_count_down()


def test_expired_chunks_are_dropped_a_bounded_number_at_a_time(limited, clock, removed):
    put(limited, *range(NUM_LIMITED))
    clock.now += TTL_S
    limited.get_many([make_key("another")])
    assert len(removed) == MAX_EXPIRED_PER_CALL
    limited.get_many([make_key("another")])
    assert len(removed) == NUM_LIMITED
    assert limited.stats()["expired_chunks"] == NUM_LIMITED


def test_head_of_a_chain_outlives_its_tail(removed):
    hot = LocalCPUBackend(ArenaAllocator.anonymous(SLOT_BYTES * 8), create_policy(), removed.append)
    chain = put(hot, *range(8))
    for chunk in hot.get_many(chain):
        chunk.release()
    put(hot, "x", "y")
    assert removed == [chain[7], chain[6]]


def receive(hot: LocalCPUBackend, tenant: str, slots: float = 1) -> MemoryObj | None:
    return hot.receive(int(slots * SLOT_BYTES), tenant)


def test_incoming_bytes_count_against_their_tenants_quota(limited, removed):
    own = put(limited, *"abcd", tenant="small")
    put(limited, *range(NUM_LIMITED - QUOTA_SLOTS))
    lent = [receive(limited, "small") for _ in range(QUOTA_SLOTS)]
    assert None not in lent
    assert removed == own[::-1], "a tenant at its quota evicts its own chunks"
    assert receive(limited, "small") is None
    assert limited.stats()["quota_refused_chunks"] == 1
    lent[0].ref_count_down()
    lent[0] = receive(limited, "small")
    assert lent[0] is not None, "released bytes no longer count"
    for memory in lent:
        memory.ref_count_down()


def test_without_a_quota_one_tenant_receives_half_and_all_together_seven_eighths():
    hot = LocalCPUBackend(ArenaAllocator.anonymous(SLOT_BYTES * NUM_LIMITED), create_policy("lru"))
    lent = [receive(hot, tenant) for tenant in ("a", "b", "c") for _ in range(NUM_LIMITED)]
    given = [
        sum(memory is not None for memory in lent[at : at + NUM_LIMITED])
        for at in (0, NUM_LIMITED, 2 * NUM_LIMITED)
    ]
    assert given == [NUM_LIMITED // 2, 3 * NUM_LIMITED // 8, 0]
    for memory in lent:
        if memory is not None:
            memory.ref_count_down()
    assert receive(hot, "a", NUM_LIMITED // 2 + 1) is None, "nor is one record alone lent more"


@pytest.mark.parametrize("policy", ["lru", "adaptive"])
@pytest.mark.parametrize("slots", [2, 32])
def test_payload_that_finds_no_room_evicts_little_more_than_its_size(removed, policy, slots):
    """Readers hold chunks in so many places that no run of free memory is long enough."""
    num_slots = 64
    hot = LocalCPUBackend(
        ArenaAllocator.anonymous(num_slots * SLOT_BYTES), create_policy(policy), removed.append
    )
    keys = put(hot, *range(num_slots))
    held = hot.get_many(keys[:: slots // 2])
    assert hot.receive(slots * SLOT_BYTES, "default") is None
    assert len(removed) <= slots + min(slots, num_slots // 8)
    for chunk in held:
        chunk.release()


@pytest.mark.parametrize("listing", ["held", "hottest", "clear_now"])
def test_listing_releases_the_lock_repeatedly(
    monkeypatch: pytest.MonkeyPatch, listing: str
) -> None:
    """The engine's thread and the event loop wait for the tier's lock, however much it holds."""
    monkeypatch.setattr(hot_module, "LISTED_AT_ONCE", 4)
    monkeypatch.setattr(hot_module, "REMOVED_AT_ONCE", 4)
    lock, num_chunks = mock.MagicMock(), 40
    arena = ArenaAllocator.anonymous(num_chunks * SLOT_BYTES)
    with mock.patch("threading.Lock", return_value=lock):
        hot = LocalCPUBackend(arena, create_policy())
    keys = put(hot, *range(num_chunks))
    lock.reset_mock()
    found = getattr(hot, listing)()
    assert found == num_chunks or {key for key, _ in found} == set(keys)
    assert lock.__enter__.call_count > num_chunks // 4


A, B, C = (make_key(name) for name in "abc")


def test_chunk_stored_while_the_clock_was_ahead_lives_no_longer_than_others():
    clock = Clock(1000.0)
    ledger = Ledger(create_policy(), TierLimits(10), clock)
    clock.now = 4600
    ledger.add(A, 10)
    ledger.add(B, 10)
    clock.now = 1000
    assert all(ledger.is_live(key) for key in (A, B))
    assert ledger.past(5) == []
    ledger.add(C, 10)
    clock.now = 1009.9
    assert ledger.is_live(A)
    clock.now = 1010
    assert not ledger.is_live(A), "its time began when it was next looked at"
    assert ledger.past(5) == [A, B, C]


def test_old_chunk_stored_after_younger_ones_is_not_served_and_none_comes_from_the_future():
    clock = Clock(1000.0)
    ledger = Ledger(create_policy(), TierLimits(10), clock)
    ledger.add(A, 10)
    ledger.add(B, 10, 992)
    ledger.add(C, 10, 2000)
    clock.now = 1005
    assert [ledger.is_live(key) for key in (A, B, C)] == [True, False, True]
    assert ledger.past(5) == []
    clock.now = 1010
    assert not ledger.is_live(C)
    assert ledger.past(5) == [A, B, C]


@pytest.mark.parametrize(
    ("limits", "options"),
    [
        (TierLimits, {"ttl_s": 0}),
        (TierLimits, {"ttl_s": float("nan")}),
        (TenantQuotas, {"default_bytes": 0}),
        (TenantQuotas, {"by_tenant": {"team-a": -5}}),
    ],
)
def test_limits_must_be_positive(limits, options):
    with pytest.raises(ConfigError, match="must be positive"):
        limits(**options)


MINE, YOURS = make_key("a", "mine"), make_key("a", "yours")


@pytest.mark.parametrize(
    "sizes", [{}, {MINE: 10}, {MINE: 10, YOURS: 11}, {MINE: 10, YOURS: 10, A: 10}]
)
def test_accounts_that_differ_are_detected(clock, sizes):
    ledger = Ledger(create_policy(), TierLimits(10, TenantQuotas(100)), clock)
    for key in (MINE, YOURS):
        ledger.add(key, 10)
    ledger.check_integrity({MINE: 10, YOURS: 10})
    with pytest.raises(IntegrityError):
        ledger.check_integrity(sizes)


def test_nothing_is_evicted_for_a_payload_that_could_never_be_held(limited, removed):
    put(limited, *range(NUM_LIMITED))
    assert receive(limited, "small", QUOTA_SLOTS + 1) is None
    assert receive(limited, "default", NUM_LIMITED + 1) is None
    assert limited.allocate(SLOT_BYTES * NUM_LIMITED + 1) is None
    assert not removed


def test_head_of_a_batch_that_exceeds_the_quota_is_kept(limited):
    chunks = [make_chunk(i, tenant="mine") for i in range(QUOTA_SLOTS + 2)]
    assert limited.put_many(chunks) == [True] * QUOTA_SLOTS + [False] * 2


def test_lossless_chunk_that_replaces_a_lossy_one_needs_no_extra_room(limited, removed):
    keys = put(limited, *range(QUOTA_SLOTS), tenant="mine", lossy=True)
    put(limited, 0, tenant="mine", payload=make_payload("better"))
    assert removed == []
    assert get(limited, keys[0]) == make_payload("better")
