"""What a server gives to whom, over real connections."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager

import pytest
import pytest_asyncio
from lmcache_core.record import Chunk, Miss, MissReason, Result
from lmcache_core.storage import served as served_module
from lmcache_core.storage.served import EncodingStore
from lmcache_core.wire.capabilities import ONLY_LOSSLESS, Accepts
from lmcache_core.wire.client import ClientOptions, LmClient
from lmcache_core.wire.served import ServedStore
from lmcache_core.wire.server import LmServer

from tests.fixtures.codecs import ZlibCodec, codecs_of, decoded_from_lossy, encoded_by
from tests.fixtures.encoded_tier import DATA, content
from tests.fixtures.wire import Arena, MemoryStore, anyone
from tests.suites.chunks import make_chunk, make_key

EVERYTHING = Accepts(True, frozenset({"flate", "half"}))
NAMES = ("raw", "lossless", "lossy", "decoded", "absent")


@pytest.fixture
def store(lossless: ZlibCodec, lossy: ZlibCodec) -> Iterator[MemoryStore]:
    """Holds one chunk of each kind, in memory that must come back."""
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
    """How each chunk came: its serde, with `!` if lossy, or why it did not."""
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


async def test_a_door_holds_records_as_they_come(door: EncodingStore, arena: Arena) -> None:
    async with client_of(door, EVERYTHING) as client:
        assert await kinds(client, arena) == ["naive", "flate", "half!", "naive!", "never_stored"]


async def test_who_takes_no_loss_gets_none(door: EncodingStore, arena: Arena) -> None:
    async with client_of(door, ONLY_LOSSLESS) as client:
        assert await kinds(client, arena) == [
            "naive",
            "flate",
            "encoding",
            "encoding",
            "never_stored",
        ]
        results = await client.get([make_key(name) for name in NAMES[1:]], arena, prefix_only=True)
        assert [_kind(result) for result in results][:2] == ["flate", "encoding"]
        content(results[0])


async def test_what_is_lossy_gives_place_to_what_is_not(
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


async def test_a_lossy_chunk_takes_nothings_place(
    door: EncodingStore, store: MemoryStore, arena: Arena
) -> None:
    async with client_of(door, ONLY_LOSSLESS) as client:
        await client.get([make_key("lossy")], arena)
        await client.put([decoded_from_lossy(make_chunk("lossy", payload=DATA)).sealed()])
        assert await client.contains([make_key("lossy")]) == [False]
        assert await client.remove([make_key("lossy")]) == 1
        assert await client.put([make_chunk("lossy", payload=DATA)]) == [True]
        assert await kinds(client, arena, ["lossy"]) == ["naive"]


async def test_raw_chunks_go_out_encoded_to_who_can_read_them(
    store: MemoryStore, lossless: ZlibCodec, arena: Arena
) -> None:
    async with encoding(store, lossless) as served:
        async with client_of(served, Accepts(False, frozenset({"flate"}))) as client:
            [result] = await client.get([make_key("raw")], arena)
            assert isinstance(result, Chunk)
            assert result.header == encoded_by(lossless, make_chunk("raw", payload=DATA)).header
            content(result)
            assert await kinds(client, arena) == [
                "flate",
                "flate",
                "encoding",
                "encoding",
                "never_stored",
            ]
        async with client_of(served, EVERYTHING) as client:
            assert await kinds(client, arena) == [
                "flate",
                "flate",
                "half!",
                "flate!",
                "never_stored",
            ]
        async with client_of(served, Accepts(True, frozenset({"half"}))) as client:
            assert await kinds(client, arena) == [
                "naive",
                "flate",
                "half!",
                "naive!",
                "never_stored",
            ]
        async with client_of(served, ONLY_LOSSLESS) as client:
            assert await kinds(client, arena) == [
                "naive",
                "flate",
                "encoding",
                "encoding",
                "never_stored",
            ]
        assert served.stats()["encoded_chunks"] == 4
        assert store.chunks[make_key("raw")].header.serde == "naive", "what is held stays as it is"


async def test_a_lossy_serde_is_for_those_who_take_loss(
    store: MemoryStore, lossy: ZlibCodec, arena: Arena
) -> None:
    async with encoding(store, lossy) as served:
        async with client_of(served, Accepts(False, frozenset({"half"}))) as client:
            assert await kinds(client, arena) == [
                "naive",
                "flate",
                "encoding",
                "encoding",
                "never_stored",
            ]
        async with client_of(served, EVERYTHING) as client:
            assert await kinds(client, arena) == [
                "half!",
                "flate",
                "half!",
                "half!",
                "never_stored",
            ]


async def test_who_encodes_nothing_serves_raw(
    store: MemoryStore, lossless: ZlibCodec, arena: Arena
) -> None:
    async with (
        encoding(store, lossless, "naive") as served,
        client_of(served, EVERYTHING) as client,
    ):
        assert await kinds(client, arena, ["raw"]) == ["naive"]


async def test_what_cannot_be_held_encoded_goes_out_raw(
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


async def test_a_cancelled_pull_leaves_nothing_behind(
    store: MemoryStore, lossless: ZlibCodec
) -> None:
    async with encoding(store, lossless) as served:
        view = served.for_client(EVERYTHING)
        for has_begun in (False, True):
            lossless.gate.clear()
            before = lossless.num_begun
            pull = asyncio.ensure_future(
                view.get([make_key("raw"), make_key("lossless"), make_key("decoded")])
            )
            await asyncio.sleep(0)
            while has_begun and lossless.num_begun == before:
                await asyncio.sleep(0.001)
            assert pull.cancel()
            await asyncio.wait([pull])
            lossless.gate.set()
        async with asyncio.timeout(60):
            while (
                any(chunk.memory.get_ref_count() != 1 for chunk in store.chunks.values())
                or served.stats()["sending_bytes"]
            ):
                await asyncio.sleep(0.005)
        assert served.encoding_bytes == 0


async def test_a_store_that_does_not_adapt_serves_all_the_same(
    store: MemoryStore, arena: Arena
) -> None:
    async with client_of(store, ONLY_LOSSLESS) as client:
        assert await kinds(client, arena) == ["naive", "flate", "half!", "naive!", "never_stored"]


def test_reasons_that_an_old_client_does_not_know() -> None:
    from lmcache_core.wire.client import _reason

    assert _reason("encoding") is MissReason.ENCODING
    assert _reason("of a later version") is MissReason.UNAVAILABLE
