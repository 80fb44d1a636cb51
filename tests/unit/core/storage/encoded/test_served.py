"""Which records a server sends to which client, over real connections."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from types import SimpleNamespace

import pytest
import pytest_asyncio
from lmcache_core.keys import ChunkKey
from lmcache_core.record import Miss, MissReason, Result
from lmcache_core.storage import served as served_module
from lmcache_core.storage.served import EncodingStore
from lmcache_core.wire.capabilities import ONLY_LOSSLESS, Accepts
from lmcache_core.wire.client import ClientOptions, LmClient
from lmcache_core.wire.served import ServedStore
from lmcache_core.wire.server import LmServer

from tests.fixtures.codecs import ZlibCodec, codecs_of, decoded_from_lossy, encoded_by
from tests.fixtures.encoded_tier import DATA, content
from tests.fixtures.waiting import until
from tests.fixtures.wire import Arena, MemoryStore, anyone
from tests.suites.chunks import make_chunk, make_key

EVERYTHING = Accepts(True, frozenset({"flate", "half"}))
NAMES = ("raw", "lossless", "lossy", "decoded", "absent")


@pytest.fixture
def store(lossless: ZlibCodec, lossy: ZlibCodec) -> Iterator[MemoryStore]:
    """A store with one chunk of each kind, in memory that must be released."""
    store = MemoryStore()
    chunks = [
        make_chunk("raw", payload=DATA),
        encoded_by(lossless, make_chunk("lossless", payload=DATA)),
        encoded_by(lossy, make_chunk("lossy", payload=DATA)),
        decoded_from_lossy(make_chunk("decoded", payload=DATA)).sealed(),
    ]
    for chunk in chunks:
        memory = store.allocate(chunk.memory.get_size(), chunk.key.tenant)
        assert memory is not None
        memory.byte_array[:] = chunk.memory.byte_array
        store.chunks[chunk.key] = chunk.moved(memory, "memory")
    yield store
    store.clear()
    store.arena.check_empty()


@pytest_asyncio.fixture
async def door(store: MemoryStore) -> EncodingStore:
    return EncodingStore(store, codecs_of(), "naive")


@asynccontextmanager
async def encoding(
    store: MemoryStore, codec: ZlibCodec, serde: str | None = None
) -> AsyncIterator[EncodingStore]:
    codecs = codecs_of(codec)
    await codecs.open()
    served = EncodingStore(store, codecs, serde or codec.serde)
    try:
        yield served
    finally:
        await codecs.close()
    assert served.stats()["sending_bytes"] == 0


@asynccontextmanager
async def serving(store: ServedStore) -> AsyncIterator[LmServer]:
    server = LmServer(store, anyone)
    await server.open()
    try:
        yield server
    finally:
        await server.close()


@asynccontextmanager
async def client_of(store: ServedStore, accepts: Accepts) -> AsyncIterator[LmClient]:
    async with serving(store) as server:
        client = LmClient("127.0.0.1", server.port, None, ClientOptions(accepts=accepts))
        try:
            yield client
        finally:
            await client.close()


async def kinds(client: LmClient, arena: Arena, names: Sequence[str] = NAMES) -> list[str]:
    """Return how each chunk came: its serde, with `!` if lossy, or the reason of its miss."""
    said = []
    for result in await client.get([make_key(name) for name in names], arena):
        said.append(_kind(result))
        content(result)
    return said


def _kind(result: Result) -> str:
    return (
        result.reason.value
        if isinstance(result, Miss)
        else result.header.serde + "!" * result.lossy
    )


REFUSED = MissReason.ENCODING.value


@pytest.mark.parametrize(
    ("encoder", "accepts", "expected"),
    [
        (None, EVERYTHING, ["naive", "flate", "half!", "naive!"]),
        (None, ONLY_LOSSLESS, ["naive", "flate", REFUSED, REFUSED]),
        ("lossless", Accepts(False, frozenset({"flate"})), ["flate", "flate", REFUSED, REFUSED]),
        ("lossless", EVERYTHING, ["flate", "flate", "half!", "flate!"]),
        ("lossless", Accepts(True, frozenset({"half"})), ["naive", "flate", "half!", "naive!"]),
        ("lossless", ONLY_LOSSLESS, ["naive", "flate", REFUSED, REFUSED]),
        ("lossy", Accepts(False, frozenset({"half"})), ["naive", "flate", REFUSED, REFUSED]),
        ("lossy", EVERYTHING, ["half!", "flate", "half!", "half!"]),
    ],
)
async def test_client_gets_what_it_accepts_encoded_where_it_can_decode(
    store: MemoryStore,
    arena: Arena,
    request: pytest.FixtureRequest,
    encoder: str | None,
    accepts: Accepts,
    expected: list[str],
) -> None:
    codec = request.getfixturevalue(encoder or "lossless")
    async with (
        encoding(store, codec, None if encoder else "naive") as served,
        client_of(served, accepts) as client,
    ):
        assert await kinds(client, arena) == [*expected, "never_stored"]
        assert served.stats().get("encoded_chunks", 0) == sum(
            kind.startswith(codec.serde) and name in ("raw", "decoded")
            for name, kind in zip(NAMES, expected, strict=False)
        )
    assert store.chunks[make_key("raw")].header.serde == "naive", "the stored record is unchanged"


async def test_lossless_record_replaces_a_lossy_one_for_all_clients(
    door: EncodingStore, store: MemoryStore, arena: Arena
) -> None:
    keys = [make_key("lossy"), make_key("raw")]
    async with client_of(door, ONLY_LOSSLESS) as client, client_of(door, EVERYTHING) as other:
        await client.get(keys[:1], arena)
        assert await client.contains(keys) == [False, True]
        assert await other.contains(keys) == [True, True]
        assert await client.put([make_chunk("lossy", payload=DATA)]) == [True]
        assert await client.contains(keys) == [True, True]
        assert (
            await kinds(client, arena, ["lossy"])
            == await kinds(other, arena, ["lossy"])
            == ["naive"]
        )
    assert not store.chunks[keys[0]].lossy


async def test_record_without_memory_for_its_encoding_is_sent_raw(
    store: MemoryStore, lossless: ZlibCodec, arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with encoding(store, lossless) as served, client_of(served, EVERYTHING) as client:
        monkeypatch.setattr(served_module, "MAX_ENCODING_BYTES", len(DATA) - 1)
        assert await kinds(client, arena, ["raw"]) == ["naive"]
        monkeypatch.setattr(served_module, "MAX_ENCODING_BYTES", len(DATA))
        assert await kinds(client, arena, ["raw"]) == ["flate"]
    monkeypatch.setattr(served_module, "MAX_SENDING_BYTES", 10)
    async with encoding(store, lossless) as served, client_of(served, EVERYTHING) as client:
        assert await kinds(client, arena, ["raw"]) == ["naive"]
        assert served.encoding_bytes == 0


@pytest.mark.parametrize("has_begun", [False, True])
async def test_cancelled_pull_releases_everything(
    store: MemoryStore, lossless: ZlibCodec, has_begun: bool
) -> None:
    async with encoding(store, lossless) as served:
        view = served.for_client(EVERYTHING)
        lossless.gate.clear()
        before = lossless.num_begun
        pull = asyncio.ensure_future(
            view.get([make_key("raw"), make_key("lossless"), make_key("decoded")])
        )
        await asyncio.sleep(0)
        if has_begun:
            await until(lambda: lossless.num_begun > before)
        assert pull.cancel()
        await asyncio.wait([pull])
        lossless.gate.set()
        await until(
            lambda: (
                all(chunk.memory.get_ref_count() == 1 for chunk in store.chunks.values())
                and not served.stats()["sending_bytes"]
            )
        )
        assert served.encoding_bytes == 0


async def test_miss_reason_of_a_later_version_is_unavailable(
    store: MemoryStore, arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    later = Miss(SimpleNamespace(value="of a later version"))  # type: ignore[arg-type]

    async def get(keys: Sequence[ChunkKey]) -> list[Result]:
        return [later] * len(keys)

    monkeypatch.setattr(store, "get", get)
    async with client_of(store, EVERYTHING) as client:
        assert await kinds(client, arena, ["raw"]) == ["unavailable"]


async def test_prefix_read_ends_at_a_chunk_that_the_client_does_not_accept(
    door: EncodingStore, arena: Arena
) -> None:
    async with client_of(door, ONLY_LOSSLESS) as client:
        results = await client.get([make_key(name) for name in NAMES[1:]], arena, prefix_only=True)
        assert [_kind(result) for result in results][:2] == ["flate", REFUSED]
        content(results[0])
