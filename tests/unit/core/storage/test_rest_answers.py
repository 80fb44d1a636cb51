"""JSON that no server of ours answers."""

from __future__ import annotations

from collections.abc import AsyncIterator

import httpx
import pytest
from lmcache_core.errors import UnavailableError
from lmcache_core.storage.remote import RemoteOptions
from lmcache_core.storage.remote.http import HttpBackend
from lmcache_core.testing.chunks import make_key


async def streamed(data: bytes) -> AsyncIterator[bytes]:
    yield data


async def contains(answer: bytes) -> list[bool]:
    transport = httpx.MockTransport(lambda _: httpx.Response(200, content=streamed(answer)))
    backend = HttpBackend("http://localhost", RemoteOptions(), transport)
    await backend.open()
    try:
        return await backend.batched_contains([make_key(1)])
    finally:
        await backend.close()


async def test_fields_of_a_later_version_are_passed_over() -> None:
    assert await contains(b'{"later": [[]], "present": [true]}') == [True]


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"\xff",
        b'"\xff"',
        b'{"\xff": [true]}',
        b'{"present": ["\xff"]}',
        b'{"present": []}',
        b"[" * 100_000,
        b'{"later": ' + b"[" * 100_000,
    ],
    ids=range(8),
)
async def test_what_is_no_answer_is_an_error_of_ours(answer: bytes) -> None:
    with pytest.raises(UnavailableError, match=r"contains was not answered|keys were answered"):
        await contains(answer)
