"""The remote tiers against the contract of tiers, each over a real socket."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import msgspec
import pytest
import pytest_asyncio
import redis
from lmcache_core.keys import ChunkKey
from lmcache_core.record import UNSEALED_DIGEST, Chunk, Miss, MissReason
from lmcache_core.storage.base import StorageBackend
from lmcache_core.storage.remote import create_remote_backend
from lmcache_core.storage.remote.redis import Replies
from lmcache_core.wire.incoming import Received

from tests.fixtures.encoded_suite import EncodedReadingSuite, encoding
from tests.fixtures.redis_server import RedisServer, running_redis
from tests.fixtures.wire import MemoryStore, serving
from tests.suites.backend_suite import (
    Arena,
    BackendUnderTest,
    ReadingBackendSuite,
    payload_of,
)
from tests.suites.chunks import make_chunk, make_key, make_payload


class RemoteSuite(ReadingBackendSuite):
    """What a remote tier cannot know is left out: how much its server holds."""

    async def test_stats_have_their_figures(self, backend: StorageBackend) -> None:
        await backend.batched_put([make_chunk("a")])
        figures = backend.stats()
        assert figures["stored_chunks"] == 1
        assert figures["used_bytes"] <= figures["capacity_bytes"]

    @pytest.mark.parametrize("num_bytes", [100, 2 << 20])
    async def test_a_chunk_without_a_digest_gets_one_on_its_way(
        self, backend: StorageBackend, under_test: BackendUnderTest, num_bytes: int
    ) -> None:
        whole = make_chunk("a", payload=make_payload("a", num_bytes))
        bare = Chunk.unsealed(
            whole.key,
            msgspec.structs.replace(whole.header, digest=UNSEALED_DIGEST),
            whole.memory,
            "test",
        )
        assert await backend.batched_put([bare]) == [True]
        assert under_test.raw_get(whole.key) == whole.head + make_payload("a", num_bytes)

    async def test_its_name_is_documented(self, backend: StorageBackend) -> None:
        assert backend.name == "storage"


class SharedServerSuite(RemoteSuite):
    """Where the server names the tenant, and is cleared by its operators alone."""

    test_tenants_are_kept_apart = None  # not by the key: the server names the tenant by the token

    async def test_the_tenant_of_a_key_is_not_sent(self, backend: StorageBackend) -> None:
        await backend.batched_put([make_chunk("a", tenant="one")])
        assert await backend.batched_contains([make_key("a", tenant="two")]) == [True]

    async def test_what_is_removed_is_gone(
        self, backend: StorageBackend, under_test: BackendUnderTest, arena: Arena
    ) -> None:
        await backend.batched_put([make_chunk(i) for i in range(3)])
        keys = [make_key(i) for i in range(3)]
        assert await backend.batched_remove([keys[0], make_key("never"), keys[2]]) == 2
        assert await backend.batched_contains(keys) == [False, True, False]
        assert under_test.raw_get(keys[0]) is None

    async def test_clearing_touches_nothing(self, backend: StorageBackend) -> None:
        await backend.batched_put([make_chunk("a")])
        assert await backend.clear() == 0
        assert await backend.batched_contains([make_key("a")]) == [True]


class RedisUnderTest(BackendUnderTest):
    def __init__(self, server: RedisServer, plain: redis.Redis) -> None:
        self.backend = create_remote_backend(server.url, timeout_s=10)
        self._plain = plain

    def raw_set(self, key: ChunkKey, record: bytes) -> None:
        self._plain.set(self._name(key), record)

    def raw_get(self, key: ChunkKey) -> bytes | None:
        value = self._plain.get(self._name(key))
        assert value is None or isinstance(value, bytes)
        return value

    def _name(self, key: ChunkKey) -> str:
        return f"lmc:{key.tenant}:{key.key.to_url()}"


@pytest.fixture(scope="module")
def redis_server() -> Iterator[RedisServer]:
    with running_redis() as server:
        yield server


class TestRedis(RemoteSuite):
    @pytest.fixture
    def under_test(self, redis_server: RedisServer) -> Iterator[RedisUnderTest]:
        with redis_server.client() as plain:
            plain.flushall()
            yield RedisUnderTest(redis_server, plain)

    async def test_a_damaged_value_is_deleted_and_one_of_a_later_version_is_not(
        self, backend: StorageBackend, under_test: RedisUnderTest, arena: Arena
    ) -> None:
        for name, at in (("damaged", 600), ("later", 4)):
            await backend.batched_put([make_chunk(name)])
            record = bytearray(under_test.raw_get(make_key(name)) or b"")
            record[at] ^= 2
            under_test.raw_set(make_key(name), bytes(record))
        results = await backend.batched_get([make_key("damaged"), make_key("later")], arena)
        assert not any(isinstance(result, Chunk) for result in results)
        assert await backend.batched_contains([make_key("damaged"), make_key("later")]) == [
            False,
            True,
        ]
        assert backend.stats()["corrupt_chunks"] == 2

    @pytest.mark.parametrize("part", [0, 1, 2], ids=["prefix", "header", "payload"])
    async def test_a_value_that_reads_wrong_once_stays(
        self,
        backend: StorageBackend,
        under_test: RedisUnderTest,
        arena: Arena,
        monkeypatch: pytest.MonkeyPatch,
        part: int,
    ) -> None:
        readinto, num_reads = Replies.readinto, 0

        async def flipping(replies: Replies, view: memoryview) -> None:
            nonlocal num_reads
            await readinto(replies, view)
            view[len(view) // 2] ^= num_reads == part
            num_reads += 1

        await backend.batched_put([make_chunk("a")])
        with monkeypatch.context() as patch:
            patch.setattr(Replies, "readinto", flipping)
            [result] = await backend.batched_get([make_key("a")], arena)
        assert num_reads > part
        assert result == Miss(MissReason.UNAVAILABLE)
        figures = backend.stats()
        assert (figures["failed_reads"], figures["corrupt_chunks"]) == (1, 0)
        assert [
            payload_of(result) for result in await backend.batched_get([make_key("a")], arena)
        ] == [make_payload("a")]

    async def test_memory_with_a_bad_bit_does_not_cost_others_their_value(
        self, backend: StorageBackend, under_test: RedisUnderTest, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The value arrives as it is, and its copy in the arena is another one, every time."""

        async def never_whole(record: Received) -> bool:
            return False

        await backend.batched_put([make_chunk("a")])
        monkeypatch.setattr(Received, "is_whole", never_whole)
        assert await backend.batched_get([make_key("a")], Arena()) == [Miss(MissReason.UNAVAILABLE)]
        assert await backend.batched_contains([make_key("a")]) == [True]


class LmUnderTest(BackendUnderTest):
    def __init__(self, store: MemoryStore, port: int) -> None:
        self._store = store
        self.backend = create_remote_backend(f"lm://127.0.0.1:{port}", timeout_s=10)

    def raw_set(self, key: ChunkKey, record: bytes) -> None:
        self._store.tampered[key] = record

    def raw_get(self, key: ChunkKey) -> bytes | None:
        chunk = self._store.chunks.get(key)
        return None if chunk is None else chunk.head + bytes(chunk.memory.byte_array)


class TestLm(SharedServerSuite):
    @pytest_asyncio.fixture
    async def under_test(self) -> AsyncIterator[LmUnderTest]:
        store = MemoryStore()
        async with serving(store) as server:
            yield LmUnderTest(store, server.port)


class ReplicasUnderTest(BackendUnderTest):
    """Three servers behind one URL."""

    def __init__(self, stores: list[MemoryStore], ports: list[int]) -> None:
        self._stores = stores
        self.backend = create_remote_backend(
            "lm://" + ",".join(f"127.0.0.1:{port}" for port in ports), timeout_s=10
        )

    def raw_set(self, key: ChunkKey, record: bytes) -> None:
        for store in self._stores:
            store.tampered[key] = record

    def raw_get(self, key: ChunkKey) -> bytes | None:
        chunks = [store.chunks[key] for store in self._stores if key in store.chunks]
        assert len(chunks) <= 1, "a chunk is at one server"
        return chunks[0].head + bytes(chunks[0].memory.byte_array) if chunks else None


class TestLmReplicas(SharedServerSuite):
    @pytest_asyncio.fixture
    async def under_test(self) -> AsyncIterator[ReplicasUnderTest]:
        async with AsyncExitStack() as exits:
            stores = [MemoryStore() for _ in range(3)]
            servers = [await exits.enter_async_context(serving(store)) for store in stores]
            yield ReplicasUnderTest(stores, [server.port for server in servers])


class FileUnderTest(BackendUnderTest):
    def __init__(self, root: Path) -> None:
        self._root = root
        self.backend = create_remote_backend(f"file://{root}", timeout_s=10)

    def raw_set(self, key: ChunkKey, record: bytes) -> None:
        path = self._path(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(record)

    def raw_get(self, key: ChunkKey) -> bytes | None:
        path = self._path(key)
        return path.read_bytes() if path.exists() else None

    def _path(self, key: ChunkKey) -> Path:
        name = hashlib.sha256(key.key.canonical()).hexdigest()
        return self._root / key.tenant / name[:2] / f"{name}.kvr"


class TestFile(RemoteSuite):
    @pytest.fixture
    def under_test(self, tmp_path: Path) -> Iterator[FileUnderTest]:
        yield FileUnderTest(tmp_path)
        assert not list(tmp_path.glob(".tmp/*")), "a temporary file stayed"


class TestEncodedLm(EncodedReadingSuite, SharedServerSuite):
    test_a_chunk_without_a_digest_gets_one_on_its_way = None

    @pytest_asyncio.fixture
    async def under_test(self) -> AsyncIterator[LmUnderTest]:
        store = MemoryStore()
        async with serving(store) as server:
            under_test = LmUnderTest(store, server.port)
            under_test.backend = encoding(under_test.backend)
            yield under_test
