"""A gateway that answers for the bucket causes misses and deletes nothing."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from lmcache_core.record import Chunk, Miss, MissReason
from lmcache_storage.s3 import create_s3_backend
from lmcache_storage.s3.backend import S3Backend
from lmcache_storage.settings import StorageSettings

from tests.fixtures.gateway import Answered, Change, Gateway, running_gateway
from tests.fixtures.s3_server import S3Server, running_s3
from tests.suites.backend_suite import Arena, payload_of
from tests.suites.chunks import make_chunk, make_key, make_payload, make_record

NAMES = ("a", "b", "c")
KEYS = [make_key(name) for name in NAMES]
TTL_S = 1e8
PAGE = b"<html><body>Log in to the network.</body></html>"


def tag_of(body: bytes) -> dict[str, str]:
    return {"etag": f'"{hashlib.md5(body).hexdigest()}"'}


def bare(body: bytes) -> Change:
    """The gateway's own page, with nothing of the object."""
    return lambda method, path, answered: Answered(200, {}, body, len(body))


def beneath_the_headers(change: Callable[[bytes], bytes]) -> Change:
    """Another body under the object's own headers."""
    return lambda method, path, answered: (
        answered._replace(body=change(answered.body)) if method == "GET" else answered
    )


def tagged(change: Callable[[bytes], bytes]) -> Change:
    """Another body with its own tag, in every answer."""

    def answer(method: str, path: str, answered: Answered) -> Answered:
        body = change(make_record("a"))
        return Answered(200, answered.headers | tag_of(body), body, len(body))

    return answer


def flipped(record: bytes) -> bytes:
    return record[:-1] + bytes([record[-1] ^ 1])


LIES: dict[str, Change] = {
    "page": bare(PAGE),
    "old_page": lambda method, path, answered: Answered(
        200, {"last-modified": "Thu, 01 Jan 1970 00:00:01 GMT"}, PAGE, len(PAGE)
    ),
    "page_with_its_tag": tagged(lambda record: PAGE),
    "cut": beneath_the_headers(lambda record: record[:-100]),
    "other_object": beneath_the_headers(lambda record: make_record("other")),
    "other_object_with_its_tag": tagged(lambda record: make_record("other")),
    "changed_payload": beneath_the_headers(flipped),
}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[S3Server]:
    with running_s3(tmp_path) as server:
        yield server


@pytest.fixture
def gateway(server: S3Server) -> Iterator[Gateway]:
    with running_gateway(int(server.url.rpartition(":")[2])) as gateway:
        yield gateway


@pytest.fixture
async def backend(server: S3Server, gateway: Gateway) -> AsyncIterator[S3Backend]:
    options: dict[str, Any] = {**server.options, "s3_endpoint_url": gateway.url}
    backend = create_s3_backend(StorageSettings(**options, chunk_ttl_s=TTL_S))
    assert backend is not None
    await backend.open()
    yield backend
    await backend.close()


@pytest.mark.parametrize("lie", LIES)
async def test_lies_of_a_gateway_delete_nothing(
    backend: S3Backend, server: S3Server, gateway: Gateway, lie: str
) -> None:
    arena = Arena()
    assert await backend.batched_put([make_chunk(name) for name in NAMES]) == [True] * 3
    names = server.names()
    gateway.change = LIES[lie]
    for turn in (1, 2):
        results = await backend.batched_get(KEYS, arena)
        assert all(isinstance(result, Miss) for result in results)
        if lie in ("page", "cut", "other_object"):
            assert results == [Miss(MissReason.UNAVAILABLE)] * 3, "failures of the tier"
            figures = backend.stats()
            assert (figures["failed_reads"], figures["corrupt_chunks"]) == (3 * turn, 0)
    assert (gateway.count("DELETE"), server.names()) == (0, names)
    gateway.change = None
    results = await backend.batched_get(KEYS, arena)
    assert [payload_of(result) for result in results] == [make_payload(name) for name in NAMES]
    assert await backend.batched_contains(KEYS) == [True] * 3, "what was read is there again"


@pytest.mark.parametrize("has_tag", [True, False], ids=["md5", "other_tag"])
async def test_a_damaged_object_is_deleted_only_if_its_tag_proves_the_damage(
    backend: S3Backend, server: S3Server, gateway: Gateway, has_tag: bool
) -> None:
    chunk = make_chunk("a")
    await backend.batched_put([chunk])
    [name] = server.names()
    server.write(name, flipped(make_record("a")))
    if not has_tag:  # as with keys of a key service
        gateway.change = lambda method, path, answered: answered._replace(
            headers=answered.headers | {"etag": '"0123-2"'}
        )
    [result] = await backend.batched_get([chunk.key], Arena())
    assert result == Miss(MissReason.CORRUPT if has_tag else MissReason.UNAVAILABLE)
    assert server.names() == ([] if has_tag else [name])
    assert await backend.batched_contains([chunk.key]) == [False]
    assert await backend.batched_put([chunk]) == [True]
    [result] = await backend.batched_get([chunk.key], Arena())
    assert isinstance(result, Chunk)
    result.release()
    assert server.read(name) == make_record("a")


async def test_a_page_is_no_list_of_objects(backend: S3Backend, gateway: Gateway) -> None:
    await backend.probe()
    gateway.change = bare(PAGE)
    with pytest.raises(Exception, match="no list of objects"):
        await backend.probe()
