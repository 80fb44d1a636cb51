"""The host-memory tier against a dict: whatever happens, it serves the right bytes, and its books balance."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from lmcache_core.keys import ChunkKey
from lmcache_core.memory import ArenaAllocator
from lmcache_core.memory.base import MemoryObj
from lmcache_core.record import Chunk
from lmcache_core.storage.eviction import create_policy
from lmcache_core.storage.hot import LocalCPUBackend
from lmcache_core.testing.chunks import make_chunk, make_payload

CAPACITY_BYTES = 8192
NAMES = st.integers(0, 11)
SIZES = st.sampled_from([0, 1, 511, 512, 513, 1500, 4096])
TENANTS = st.sampled_from(["one", "two"])


class HotTier(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.hot = LocalCPUBackend(ArenaAllocator.anonymous(CAPACITY_BYTES), create_policy(), self.forget)
        self.model: dict[ChunkKey, bytes] = {}
        self.readers: list[tuple[Chunk, bytes]] = []
        self.loose: list[MemoryObj] = []

    def forget(self, key: ChunkKey) -> None:
        assert not any(chunk.key == key for chunk, _ in self.readers), "a referenced chunk was evicted"
        del self.model[key]

    @rule(name=NAMES, size=SIZES, tenant=TENANTS, is_foreign=st.booleans())
    def put(self, name: int, size: int, tenant: str, is_foreign: bool) -> None:
        data = make_payload(name, size)
        memory = None if is_foreign else self.hot.allocate(size)
        if memory is None:
            chunk = make_chunk(name, tenant, data)
        else:
            memory.byte_array[:] = data
            made = make_chunk(name, tenant, data)
            chunk = Chunk(made.key, made.header, made.head, memory, "test")
        if self.hot.put_many([chunk]) == [True]:
            self.model.setdefault(chunk.key, data)
        chunk.release()

    @rule(name=NAMES, tenant=TENANTS, is_kept=st.booleans())
    def get(self, name: int, tenant: str, is_kept: bool) -> None:
        key = make_chunk(name, tenant).key
        [chunk] = self.hot.get_many([key])
        assert (chunk is not None) == (key in self.model)
        if chunk is not None:
            assert bytes(chunk.memory.byte_array) == self.model[key]
            if is_kept:
                self.readers.append((chunk, self.model[key]))
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

    @rule(num_bytes=st.integers(0, CAPACITY_BYTES))
    def evict(self, num_bytes: int) -> None:
        used = self.hot.stats()["used_bytes"]
        freed = self.hot.evict_bytes(num_bytes)
        assert self.hot.stats()["used_bytes"] == used - freed
        assert freed >= min(num_bytes, used) or self.readers

    @invariant()
    def books_balance(self) -> None:
        self.hot.check_integrity()
        assert set(self.hot.keys()) == set(self.model)
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
