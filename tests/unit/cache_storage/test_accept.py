"""Clients that accept no lossy chunks, over REST."""

from __future__ import annotations

import httpx
import pytest
from lmcache_core.record import Chunk

from tests.fixtures.storage_app import assert_problem, serving
from tests.suites.chunks import make_chunk, make_payload

LOSSLESS = {"LMCache-Accept": "lossless"}
LOSSY, PLAIN = make_chunk("lossy", lossy=True), make_chunk("plain")


async def put(
    client: httpx.AsyncClient, chunk: Chunk, headers: dict[str, str] | None = None
) -> int:
    body = chunk.head + bytes(chunk.memory.byte_array)
    return (
        await client.put(f"/v1/chunks/{chunk.key.key.to_url()}", content=body, headers=headers)
    ).status_code


async def read(client: httpx.AsyncClient, headers: dict[str, str] | None = None) -> bytes:
    keys = {"keys": [chunk.key.key.to_url() for chunk in (LOSSY, PLAIN)]}
    return (await client.post("/v1/chunks:get", json=keys, headers=headers)).content


async def present(client: httpx.AsyncClient, headers: dict[str, str] | None = None) -> list[bool]:
    keys = {"keys": [chunk.key.key.to_url() for chunk in (LOSSY, PLAIN)]}
    found: list[bool] = (
        await client.post("/v1/chunks:contains", json=keys, headers=headers)
    ).json()["present"]
    return found


@pytest.mark.parametrize("header", [None, {"LMCache-Accept": "everything, later-word"}])
async def test_by_default_everything_is_served(header: dict[str, str] | None) -> None:
    async with serving() as (client, _):
        for chunk in (LOSSY, PLAIN):
            await put(client, chunk)
        lossy = LOSSY.head + bytes(LOSSY.memory.byte_array)
        assert (
            await client.get(f"/v1/chunks/{LOSSY.key.key.to_url()}", headers=header)
        ).content == lossy
        assert await read(client, header) == lossy + PLAIN.head + make_payload("plain")


@pytest.mark.parametrize("word", ["LOSSLESS", "later-word, lossless"])
async def test_lossy_chunk_is_a_miss_for_a_client_that_accepts_lossless_ones(word: str) -> None:
    header = {"LMCache-Accept": word}
    async with serving() as (client, _):
        for chunk in (LOSSY, PLAIN):
            await put(client, chunk)
        assert await read(client, header) == PLAIN.head + make_payload("plain")
        url = f"/v1/chunks/{LOSSY.key.key.to_url()}"
        assert "encoding" in assert_problem(await client.get(url, headers=header), 404, "not-found")
        assert (await client.head(url, headers=header)).status_code == 404
        assert (await client.head(url)).status_code == 200
