"""The host-memory tier against a dict: whatever happens, it serves the right bytes, none too
long, and its books balance.
"""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from lmcache_core.keys import ChunkKey
from lmcache_core.memory import ArenaAllocator
from lmcache_core.memory.base import MemoryObj
from lmcache_core.record import Chunk, MissReason
from lmcache_core.storage.eviction import POLICIES, TenantQuotas, TierLimits, create_policy
from lmcache_core.storage.hot import LocalCPUBackend

from tests.suites.chunks import held_keys, make_chunk, make_payload

CAPACITY_BYTES = 8192
NAMES = st.integers(0, 11)
SIZES = st.sampled_from([0, 1, 511, 512, 513, 1500, 4096])
TENANTS = st.sampled_from(["one", "two"])
TTL_S = 10.0
QUOTAS = TenantQuotas(None, {"one": 3072})


class HotTier(RuleBasedStateMachine):
    """The model knows what must be right whatever the policy does; which unread chunk goes, it
    learns from the tier.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = 1e9
        self.limits = TierLimits()
        self.model: dict[ChunkKey, tuple[bytes, float]] = {}
        self.readers: list[tuple[Chunk, bytes]] = []
        self.loose: list[MemoryObj] = []
        self.announced: list[tuple[MemoryObj, str]] = []
        self.gone: list[ChunkKey] = []

    @initialize(
        policy=st.sampled_from(sorted(POLICIES)), has_ttl=st.booleans(), has_quotas=st.booleans()
    )
    def make(self, policy: str, has_ttl: bool, has_quotas: bool) -> None:
        self.limits = TierLimits(TTL_S if has_ttl else None, QUOTAS if has_quotas else None)
        arena = ArenaAllocator.anonymous(CAPACITY_BYTES)
        self.hot = LocalCPUBackend(
            arena, create_policy(policy), self.forget, limits=self.limits, clock=lambda: self.now
        )

    def forget(self, key: ChunkKey) -> None:
        assert self.is_past(key) or not any(chunk.key == key for chunk, _ in self.readers), (
            "a referenced chunk was evicted"
        )
        del self.model[key]
        self.gone.append(key)

    def is_past(self, key: ChunkKey) -> bool:
        return self.limits.ttl_s is not None and self.model[key][1] + self.limits.ttl_s <= self.now

    def live(self) -> set[ChunkKey]:
        return {key for key in self.model if not self.is_past(key)}

    @rule(seconds=st.sampled_from([0.5, 3.0, 9.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(
        name=NAMES,
        size=SIZES,
        tenant=TENANTS,
        source=st.sampled_from(["foreign", "ours", "announced"]),
    )
    def put(self, name: int, size: int, tenant: str, source: str) -> None:
        data = make_payload(name, size)
        memory = None
        if source == "ours":
            memory = self.hot.allocate(size)
        elif source == "announced":
            memory = self.hot.receive(size, tenant)
        if memory is None:
            chunk = make_chunk(name, tenant, data)
        else:
            memory.byte_array[:] = data
            made = make_chunk(name, tenant, data)
            chunk = Chunk(made.key, made.header, made.head, memory, "test")
        was_live = chunk.key in self.live()
        [is_kept] = self.hot.put_many([chunk])
        if is_kept and not was_live:
            self.model[chunk.key] = (data, self.now)
        chunk.release()
        if not is_kept:
            assert not was_live
            assert memory is None or (self.limits.quotas is not None and tenant == "one"), (
                "there was room"
            )

    @rule(name=NAMES, tenant=TENANTS, is_kept=st.booleans())
    def get(self, name: int, tenant: str, is_kept: bool) -> None:
        key = make_chunk(name, tenant).key
        was_held, was_live = key in self.model, key in self.live()
        [chunk] = self.hot.get_many([key])
        assert (chunk is not None) == was_live
        if chunk is None:
            assert key not in self.model
            assert not was_held or self.hot.miss(key).reason is MissReason.EXPIRED
            assert was_held or (self.hot.miss(key).reason is MissReason.NEVER_STORED) == (
                key not in self.gone
            )
            return
        assert bytes(chunk.memory.byte_array) == self.model[key][0]
        if is_kept:
            self.readers.append((chunk, self.model[key][0]))
        else:
            chunk.release()

    @rule()
    def let_go(self) -> None:
        while self.readers:
            self.readers.pop()[0].release()

    @rule(size=SIZES)
    def take_memory(self, size: int) -> None:
        memory = self.hot.allocate(size)
        if memory is not None:
            self.loose.append(memory)

    @rule(size=SIZES, tenant=TENANTS)
    def announce(self, size: int, tenant: str) -> None:
        """Memory whose bytes never come: it costs others nothing where its tenant has a quota
        and is at it.
        """
        quota = None if self.limits.quotas is None else self.limits.quotas.of(tenant)
        held, past = dict(self.hot.held()), {key for key in self.model if self.is_past(key)}
        memory = self.hot.receive(size, tenant)
        lost = held.keys() - dict(self.hot.held()).keys()
        if (
            quota is not None
            and sum(held[key] for key in held if key.tenant == tenant) + size > quota
        ):
            assert all(key.tenant == tenant or key in past for key in lost)
        if memory is None:
            return
        self.loose.append(memory)
        self.announced.append((memory, tenant))
        self.announced = [entry for entry in self.announced if entry[0].get_ref_count() > 0]
        own = [each.metadata.phy_size for each, whose in self.announced if whose == tenant]
        assert quota is None or sum(own) - own[-1] + size <= quota
        assert sum(own) - own[-1] + size <= self.hot.stats()["capacity_bytes"] // 2

    @rule()
    def give_memory_back(self) -> None:
        if self.loose:
            self.loose.pop(0).ref_count_down()

    @rule(name=NAMES, tenant=TENANTS)
    def remove_unread(self, name: int, tenant: str) -> None:
        key = make_chunk(name, tenant).key
        if not any(chunk.key == key for chunk, _ in self.readers):
            was_held = key in self.model
            assert self.hot.remove_many([key]) == was_held
            assert key not in self.model
            if was_held:
                self.gone = [other for other in self.gone if other != key]

    @rule(num_bytes=st.integers(0, CAPACITY_BYTES))
    def evict(self, num_bytes: int) -> None:
        used = self.hot.stats()["used_bytes"]
        freed = self.hot.evict_bytes(num_bytes)
        assert self.hot.stats()["used_bytes"] == used - freed
        assert freed >= min(num_bytes, used) or self.readers

    @invariant()
    def books_balance(self) -> None:
        self.hot.check_integrity()
        assert set(held_keys(self.hot)) == self.live()
        assert self.hot.stats()["num_chunks"] == len(self.model)
        if self.limits.quotas is not None:
            taken = sum(
                -(-len(data) // 512) * 512
                for key, (data, _) in self.model.items()
                if key.tenant == "one"
            )
            assert taken <= QUOTAS.by_tenant["one"]
        for chunk, data in self.readers:
            assert bytes(chunk.memory.byte_array) == data

    def teardown(self) -> None:
        self.let_go()
        while self.loose:
            self.give_memory_back()
        self.hot.clear_now()
        assert self.hot.stats()["arena_used_bytes"] == 0


HotTier.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestHotTier = HotTier.TestCase
