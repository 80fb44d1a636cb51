"""Time to live and quotas, in the host-memory tier and in the ledger of each tier."""

from __future__ import annotations

import threading

import pytest
from lmcache_core.errors import ConfigError, IntegrityError
from lmcache_core.keys import ChunkKey
from lmcache_core.memory import ArenaAllocator, MemoryObj
from lmcache_core.record import MissReason
from lmcache_core.storage.eviction import Ledger, TenantQuotas, TierLimits, create_policy
from lmcache_core.storage.hot import MAX_EXPIRED_PER_CALL, LocalCPUBackend

from tests.fixtures.disk_tier import Clock
from tests.suites.backend_suite import payload_of
from tests.suites.chunks import make_chunk, make_key, make_payload

SLOT_BYTES = 1024
NUM_SLOTS = 32
TTL_S = 60.0
QUOTA_SLOTS = 4


@pytest.fixture
def hot(removed, clock):
    quotas = TenantQuotas(QUOTA_SLOTS * SLOT_BYTES, {"default": NUM_SLOTS * SLOT_BYTES})
    limits = TierLimits(TTL_S, quotas)
    arena = ArenaAllocator.anonymous(SLOT_BYTES * NUM_SLOTS)
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


def get(hot: LocalCPUBackend, key: ChunkKey) -> bytes | MissReason:
    [chunk] = hot.get_many([key])
    return hot.miss(key).reason if chunk is None else payload_of(chunk)


def test_expired_chunks_are_evicted_first(hot, clock, removed):
    old = put(hot, *range(3))
    clock.now += TTL_S / 2
    put(hot, *range(3, NUM_SLOTS))
    for key in old:
        get(hot, key)
    clock.now += TTL_S / 2
    taken = [hot.allocate(SLOT_BYTES) for _ in range(3)]
    assert removed == old[::-1]
    for memory in taken:
        memory.ref_count_down()


def test_expired_chunks_are_dropped_a_bounded_number_at_a_time(hot, clock, removed):
    put(hot, *range(NUM_SLOTS))
    clock.now += TTL_S
    hot.get_many([make_key("another")])
    assert len(removed) == MAX_EXPIRED_PER_CALL
    hot.get_many([make_key("another")])
    assert len(removed) == NUM_SLOTS
    assert hot.stats()["expired_chunks"] == NUM_SLOTS


def test_head_of_a_chain_outlives_its_tail(removed):
    hot = LocalCPUBackend(ArenaAllocator.anonymous(SLOT_BYTES * 8), create_policy(), removed.append)
    chain = put(hot, *range(8))
    for chunk in hot.get_many(chain):
        chunk.release()
    put(hot, "x", "y")
    assert removed == [chain[7], chain[6]]


def receive(hot: LocalCPUBackend, tenant: str, slots: float = 1) -> MemoryObj | None:
    return hot.receive(int(slots * SLOT_BYTES), tenant)


def test_incoming_bytes_count_against_their_tenants_quota(hot, removed):
    own = put(hot, *"abcd", tenant="small")
    put(hot, *range(NUM_SLOTS - QUOTA_SLOTS))
    lent = [receive(hot, "small") for _ in range(QUOTA_SLOTS)]
    assert None not in lent
    assert removed == own[::-1], "a tenant at its quota evicts its own chunks"
    assert receive(hot, "small") is None
    assert hot.stats()["quota_refused_chunks"] == 1
    lent[0].ref_count_down()
    lent[0] = receive(hot, "small")
    assert lent[0] is not None, "released bytes no longer count"
    for memory in lent:
        memory.ref_count_down()


def test_without_a_quota_one_tenant_receives_half_and_all_together_seven_eighths():
    hot = LocalCPUBackend(ArenaAllocator.anonymous(SLOT_BYTES * NUM_SLOTS), create_policy("lru"))
    lent = [receive(hot, tenant) for tenant in ("a", "b", "c") for _ in range(NUM_SLOTS)]
    given = [
        sum(memory is not None for memory in lent[at : at + NUM_SLOTS])
        for at in (0, NUM_SLOTS, 2 * NUM_SLOTS)
    ]
    assert given == [NUM_SLOTS // 2, 3 * NUM_SLOTS // 8, 0]
    for memory in lent:
        if memory is not None:
            memory.ref_count_down()
    assert receive(hot, "a", NUM_SLOTS // 2 + 1) is None, "nor is one record alone lent more"


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
    monkeypatch.setattr("lmcache_core.storage.hot.LISTED_AT_ONCE", 4)
    monkeypatch.setattr("lmcache_core.storage.hot.REMOVED_AT_ONCE", 4)
    num_looks: list[int] = []

    def clock() -> float:
        if num_looks:
            num_looks[-1] += lock.locked()
        return 1000.0

    lock = threading.Lock()

    class Counting:
        """The tier's lock, which begins a new count whenever it is taken."""

        def __enter__(self) -> None:
            lock.acquire()
            num_looks.append(0)

        def __exit__(self, *_: object) -> None:
            lock.release()

    num_chunks = 40
    arena = ArenaAllocator.anonymous(num_chunks * SLOT_BYTES)
    hot = LocalCPUBackend(arena, create_policy(), limits=TierLimits(ttl_s=10), clock=clock)
    keys = put(hot, *range(num_chunks))
    monkeypatch.setattr(hot, "_lock", Counting())
    found = getattr(hot, listing)()
    if listing == "clear_now":
        assert found == num_chunks
        assert len(num_looks) > num_chunks // 4
    else:
        assert {key for key, _ in found} == set(keys)
        assert sum(num_looks) >= num_chunks
        assert max(num_looks) <= 4


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


@pytest.mark.parametrize("ttl_s", [0, float("nan")])
def test_time_to_live_must_be_positive(ttl_s):
    with pytest.raises(ConfigError, match="ttl_s"):
        TierLimits(ttl_s=ttl_s)


@pytest.mark.parametrize("quotas", [{"default_bytes": 0}, {"by_tenant": {"team-a": -5}}])
def test_quotas_must_be_positive(quotas):
    with pytest.raises(ConfigError, match="must be positive"):
        TenantQuotas(**quotas)


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


def test_nothing_is_evicted_for_a_payload_that_could_never_be_held(hot, removed):
    put(hot, *range(NUM_SLOTS))
    assert receive(hot, "small", QUOTA_SLOTS + 1) is None
    assert receive(hot, "default", NUM_SLOTS + 1) is None
    assert not removed


def test_stored_chunk_no_longer_counts_as_incoming(hot):
    for name in "abcd":
        chunk = make_chunk(
            name, tenant="small", allocate=lambda num_bytes: hot.receive(num_bytes, "small")
        )
        assert hot.put_many([chunk]) == [True]
        chunk.release()
    memory = receive(hot, "small")
    assert memory is not None
    memory.ref_count_down()


def test_head_of_a_batch_that_exceeds_the_quota_is_kept(hot):
    chunks = [make_chunk(i, tenant="mine") for i in range(QUOTA_SLOTS + 2)]
    assert hot.put_many(chunks) == [True] * QUOTA_SLOTS + [False] * 2


def test_lossless_chunk_that_replaces_a_lossy_one_needs_no_extra_room(hot, removed):
    keys = put(hot, *range(QUOTA_SLOTS), tenant="mine", lossy=True)
    put(hot, 0, tenant="mine", payload=make_payload("better"))
    assert removed == []
    assert get(hot, keys[0]) == make_payload("better")
