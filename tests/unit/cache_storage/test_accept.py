"""Clients that take no loss, over REST and lm://."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
from lmcache_core.record import Chunk
from lmcache_core.wire.capabilities import Accepts
from lmcache_core.wire.client import ClientOptions, LmClient

from tests.fixtures.storage_app import assert_problem, serving
from tests.fixtures.wire import Arena
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


@pytest.mark.parametrize(
    "header", [None, {"LMCache-Accept": ""}, {"LMCache-Accept": "everything, later-word"}]
)
async def test_by_default_everything_is_served(header: dict[str, str] | None) -> None:
    async with serving() as (client, _):
        for chunk in (LOSSY, PLAIN):
            await put(client, chunk)
        lossy = LOSSY.head + bytes(LOSSY.memory.byte_array)
        assert (
            await client.get(f"/v1/chunks/{LOSSY.key.key.to_url()}", headers=header)
        ).content == lossy
        assert await read(client, header) == lossy + PLAIN.head + make_payload("plain")


@pytest.mark.parametrize("word", ["lossless", "LOSSLESS", "later-word, lossless"])
async def test_who_takes_no_loss_gets_none_and_says_so_in_a_header(word: str) -> None:
    header = {"LMCache-Accept": word}
    async with serving() as (client, _):
        for chunk in (LOSSY, PLAIN):
            await put(client, chunk)
        assert await read(client, header) == PLAIN.head + make_payload("plain")
        url = f"/v1/chunks/{LOSSY.key.key.to_url()}"
        assert "encoding" in assert_problem(await client.get(url, headers=header), 404, "not-found")
        assert (await client.head(url, headers=header)).status_code == 404
        assert (await client.head(url)).status_code == 200


async def test_an_endless_header_is_refused() -> None:
    async with serving() as (client, _):
        response = await client.get(
            f"/v1/chunks/{PLAIN.key.key.to_url()}", headers={"LMCache-Accept": "x" * 300}
        )
        assert response.status_code == 422


async def test_what_is_lossy_gives_place_on_disk_too(tmp_path: Path) -> None:
    async with serving(disk_path=tmp_path / "disk", disk_gb=0.01) as (client, parts):
        assert await put(client, LOSSY) == 201
        assert await parts.stack.drain(10)
        assert await read(client, LOSSLESS) == b""
        assert await present(client, LOSSLESS) == [False, False]
        assert await present(client) == [True, False]
        replacement = make_chunk("lossy", payload=make_payload("lossless"))
        assert await put(client, replacement, LOSSLESS) == 201
        assert await parts.stack.drain(10)
        parts.stack.hot.clear_now()
        expected = replacement.head + make_payload("lossless")
        assert await read(client, LOSSLESS) == await read(client) == expected, "from the disk"


async def test_both_doors_know_what_is_in_the_way() -> None:
    async with serving() as (client, parts):
        await put(client, LOSSY)
        picky = LmClient("127.0.0.1", parts.lm_server.port, None)
        easy = LmClient(
            "127.0.0.1", parts.lm_server.port, None, ClientOptions(accepts=Accepts(lossy=True))
        )
        arena = Arena()
        try:
            for lm, served in ((picky, False), (easy, True)):
                [result] = await lm.get([LOSSY.key], arena)
                assert isinstance(result, Chunk) is served
                if isinstance(result, Chunk):
                    result.release()
        finally:
            await picky.close()
            await easy.close()
        arena.check_empty()
        assert await present(client, LOSSLESS) == [False, False]


async def test_it_is_documented() -> None:
    async with serving() as (client, _):
        paths = (await client.get("/openapi.json")).json()["paths"]
        for path, method in (("/v1/chunks/{key}", "get"), ("/v1/chunks:get", "post")):
            [header] = [p for p in paths[path][method]["parameters"] if p["in"] == "header"]
            assert header["name"] == "LMCache-Accept"
            assert "lossless" in header["description"]
            assert not header["required"]
