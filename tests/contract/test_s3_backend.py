"""The further store against the contract of tiers, over a real S3-compatible server."""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from lmcache_core.errors import UnavailableError
from lmcache_core.keys import ChunkKey
from lmcache_core.record import Chunk, Miss, MissReason
from lmcache_core.storage.base import StorageBackend
from lmcache_storage.s3 import create_s3_backend
from lmcache_storage.s3.backend import S3Backend
from lmcache_storage.s3.connections import BucketAnswer
from lmcache_storage.settings import StorageSettings

from tests.fixtures.s3_server import LISTED_MS, S3Server, running_s3
from tests.fixtures.tls import Authority
from tests.fixtures.waiting import at_least
from tests.suites.backend_suite import (
    Arena,
    BackendUnderTest,
    ReadingBackendSuite,
    payload_of,
)
from tests.suites.chunks import make_chunk, make_key, make_payload, make_record

LONG_AGO_S = 1e9


def s3_backend(server: S3Server, **options: Any) -> S3Backend:
    backend = create_s3_backend(StorageSettings(**{**server.options, **options}))
    assert backend is not None
    return backend


def name_of(key: ChunkKey, prefix: str = "lmcache/") -> str:
    name = hashlib.sha256(key.key.canonical()).hexdigest()
    return f"{prefix}{key.tenant}/{name[:2]}/{name}.kvr"


class S3UnderTest(BackendUnderTest):
    def __init__(self, server: S3Server, **options: Any) -> None:
        self.server = server
        self.backend = s3_backend(server, **options)

    def raw_set(self, key: ChunkKey, record: bytes) -> None:
        self.server.write(name_of(key), record)

    def raw_get(self, key: ChunkKey) -> bytes | None:
        return self.server.read(name_of(key))


@pytest.fixture
def server(tmp_path: Path) -> Iterator[S3Server]:
    with running_s3(tmp_path) as server:
        yield server


class TestS3(ReadingBackendSuite):
    @pytest.fixture
    def under_test(self, server: S3Server) -> S3UnderTest:
        return S3UnderTest(server)

    async def test_stats_have_their_figures(self, backend: StorageBackend, arena: Arena) -> None:
        chunk = make_chunk("a")
        await backend.batched_put([chunk])
        payload_of((await backend.batched_get([chunk.key], arena))[0])
        figures = backend.stats()
        assert (figures["stored_chunks"], figures["served_chunks"], figures["served_bytes"]) == (
            1,
            1,
            chunk.num_bytes,
        )
        assert figures["used_bytes"] <= figures["capacity_bytes"]

    async def test_what_is_refused_is_counted_removed_and_written_again(
        self, backend: StorageBackend, under_test: S3UnderTest, arena: Arena
    ) -> None:
        damaged, short, long, foreign = (
            make_key(name) for name in ("damaged", "short", "long", "foreign")
        )
        records = {
            key: make_chunk(name).head + make_payload(name)
            for key, name in ((damaged, "damaged"), (short, "short"), (long, "long"))
        }
        under_test.raw_set(damaged, records[damaged][:-1] + bytes([records[damaged][-1] ^ 1]))
        under_test.raw_set(short, records[short][:-1])
        under_test.raw_set(long, records[long] + b"more")
        under_test.raw_set(foreign, make_chunk("other").head + make_payload("other"))
        keys = [damaged, short, long, foreign]
        got = [payload_of(result) for result in await backend.batched_get(keys, arena)]
        assert got == [
            MissReason.CORRUPT,
            MissReason.CORRUPT,
            MissReason.CORRUPT,
            MissReason.IDENTITY,
        ]
        assert backend.stats()["corrupt_chunks"] == 4
        assert await backend.batched_contains(keys) == [False] * 4
        assert await backend.batched_put([make_chunk("damaged")]) == [True]
        assert [payload_of(result) for result in await backend.batched_get([damaged], arena)] == [
            make_payload("damaged")
        ]

    @pytest.mark.parametrize("num_wrong", [1, 2], ids=["right_again", "wrong_in_another_way"])
    @pytest.mark.parametrize("at", [0, 30, 600], ids=["prefix", "header", "payload"])
    async def test_an_object_that_reads_wrong_in_changing_ways_stays(
        self,
        backend: StorageBackend,
        arena: Arena,
        monkeypatch: pytest.MonkeyPatch,
        at: int,
        num_wrong: int,
    ) -> None:
        left, read, num_read = (
            list(range(num_wrong)),
            BucketAnswer.readinto,
            Counter[BucketAnswer](),
        )

        def flipping(answer: BucketAnswer, view: memoryview) -> int:
            """Flip one bit of what is read, as bad memory does."""
            begin, got = num_read[answer], read(answer, view)
            if left and begin <= at < begin + got:
                view[at - begin] ^= 1 << left.pop()
            num_read[answer] += got
            return got

        assert await backend.batched_put([make_chunk("a"), make_chunk("b")]) == [True, True]
        with monkeypatch.context() as patch:
            patch.setattr(BucketAnswer, "readinto", flipping)
            [result] = await backend.batched_get([make_key("a")], arena)
        assert result == Miss(MissReason.UNAVAILABLE)
        figures = backend.stats()
        assert (figures["failed_reads"], figures["corrupt_chunks"]) == (1, 0)
        assert [
            payload_of(result) for result in await backend.batched_get([make_key("a")], arena)
        ] == [make_payload("a")]

    async def test_a_record_of_a_later_version_stays(
        self, backend: StorageBackend, under_test: S3UnderTest, arena: Arena
    ) -> None:
        record = bytearray(make_record("a"))
        record[4] ^= 2
        under_test.raw_set(make_key("a"), bytes(record))
        assert isinstance(
            payload_of((await backend.batched_get([make_key("a")], arena))[0]), MissReason
        )
        assert under_test.raw_get(make_key("a")) == bytes(record)

    async def test_clearing_leaves_what_is_not_ours(
        self, backend: StorageBackend, under_test: S3UnderTest
    ) -> None:
        names = [
            "lmcache/default/notes.txt",
            "lmcache/readme",
            "other/default/x",
            name_of(make_key("a"), "other/"),
        ]
        for name in names:
            under_test.server.write(name, b"foreign")
        await backend.batched_put(
            [
                make_chunk("a", tenant="ab"),
                make_chunk("a", tenant="abc"),
                make_chunk("b", tenant="ab"),
            ]
        )
        assert await backend.clear("ab") == 2
        assert under_test.server.names() == sorted([*names, name_of(make_key("a", tenant="abc"))])
        assert await backend.clear() == 1
        assert under_test.server.names() == sorted(names)


async def put_and_get(backend: S3Backend, arena: Arena, name: str = "a") -> bytes | MissReason:
    await backend.open()
    try:
        assert await backend.batched_put([make_chunk(name)]) == [True]
        [result] = await backend.batched_get([make_key(name)], arena)
        return payload_of(result)
    finally:
        await backend.close()


async def test_a_private_authority_is_trusted_by_its_file_alone(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    with running_s3(tmp_path, authority.sign("server")) as server:
        assert await put_and_get(
            s3_backend(server, s3_ca_file=authority.file), Arena()
        ) == make_payload("a")
        stranger = s3_backend(server)
        await stranger.open()
        with pytest.raises(UnavailableError):
            await stranger.batched_contains([make_key("a")])
        await stranger.close()


async def test_keys_from_files_are_read_again(
    server: S3Server, caplog: pytest.LogCaptureFixture
) -> None:
    arena = Arena()
    server.secret_key_file.write_text("another-secret-key-0123456789")
    backend = s3_backend(server)
    await backend.open()
    with pytest.raises(UnavailableError, match="403") as refused:
        await backend.batched_put([make_chunk("a")])
    for secret in ("another-secret", "secret-key-of-tests", "access-key-of-tests"):
        assert secret not in str(refused.value) + caplog.text
    await backend.close()
    server.secret_key_file.write_text(server.secret_key)
    assert await put_and_get(s3_backend(server), arena) == make_payload("a")


async def test_servers_share_a_prefix_and_others_see_nothing(server: S3Server) -> None:
    one, same, other = (s3_backend(server, s3_prefix=prefix) for prefix in ("a/kv/", "a/kv/", ""))
    for backend in (one, same, other):
        await backend.open()
    await one.batched_put([make_chunk("a")])
    assert server.names() == [name_of(make_key("a"), "a/kv/")]
    assert [await backend.batched_contains([make_key("a")]) for backend in (same, other)] == [
        [True],
        [False],
    ]
    assert await other.clear() == 0
    for backend in (one, same, other):
        await backend.close()


async def test_a_chunk_past_its_time_is_a_miss_and_goes(server: S3Server) -> None:
    arena = Arena()
    backend = s3_backend(server, chunk_ttl_s=3600.0)
    await backend.open()
    young, old, moved = make_chunk("young"), make_chunk("old"), make_chunk("moved")
    moved.stored_at = LONG_AGO_S  # handed over by another server: as old as it is there
    await backend.batched_put([young, old, moved])
    (path,) = (path for path in server.files() if path.name in name_of(old.key))
    os.utime(path, (LONG_AGO_S, LONG_AGO_S))
    await at_least(3 * LISTED_MS / 1000)
    keys = [young.key, old.key, moved.key]
    assert await backend.batched_contains(keys) == [True, False, False]
    results = await backend.batched_get(keys, arena)
    assert isinstance(results[0], Chunk)
    (kept,) = server.files()
    assert results[0].stored_at == pytest.approx(kept.stat().st_mtime, abs=60)
    assert [payload_of(result) for result in results[1:]] == [MissReason.EXPIRED] * 2
    results[0].release()
    assert (backend.stats()["expired_chunks"], server.names()) == (2, [name_of(young.key)])
    await backend.close()
