"""Questions and answers in both formats."""

from __future__ import annotations

from typing import Any

import httpx
import msgspec
import pytest
from lmcache_core.lookup import (
    MAX_CHUNKS_PER_LOOKUP,
    ContainsAnswer,
    LookupAnswer,
    RouteAnswer,
    RouteEntry,
)
from lmcache_core.lookup.messages import JSON, MSGPACK, PackedLookupAnswer

from tests.fixtures.sample_service import ADMIN_TOKEN, CLIENT_TOKEN, write_tokens
from tests.unit.lookup.test_routes import lease, serving, store

IDS = [bytes([number]) * 16 for number in range(1, 6)]
PACKED = {"content-type": MSGPACK, "accept": MSGPACK}


async def post(client: httpx.AsyncClient, path: str, body: object) -> httpx.Response:
    return await client.post(path, content=msgspec.msgpack.encode(body), headers=PACKED)


async def fill(client: httpx.AsyncClient) -> None:
    """`a` holds the first four but for the third, `b` the first two and the third."""
    for instance in "ab":
        await lease(client, instance)
    texts = [chunk_id.hex() for chunk_id in IDS]
    await store(client, *texts[:2], texts[3], instance="a")
    await store(client, *texts[:3], instance="b")


async def test_both_formats_of_every_question_say_the_same() -> None:
    asked = {"chunk_ids": b"".join(IDS), "exclude": []}
    plain = {"chunk_ids": [chunk_id.hex() for chunk_id in IDS]}
    async with serving() as client:
        await fill(client)
        first = msgspec.msgpack.decode(
            (await post(client, "/v1/lookup", asked)).content, type=PackedLookupAnswer
        )
        second = msgspec.json.decode(
            (await client.post("/v1/lookup", json=plain)).content, type=LookupAnswer
        )
        assert first.unpack() == second
        assert [[holder.instance for holder in holders] for holders in second.holders] == [
            ["a", "b"],
            ["a", "b"],
            ["b"],
            ["a"],
        ]
        assert [run.num_chunks for run in first.runs] == [2, 1, 1]
        for path, kind, expected in (
            ("/v1/contains", ContainsAnswer, ContainsAnswer([True, True, True, True, False])),
            # `a` has the fourth chunk as well, but not the third.
            ("/v1/route", RouteAnswer, RouteAnswer([RouteEntry("b", 3), RouteEntry("a", 2)])),
        ):
            packed = msgspec.msgpack.decode((await post(client, path, asked)).content, type=kind)
            text = msgspec.json.decode((await client.post(path, json=plain)).content, type=kind)
            assert packed == text == expected
        assert (await client.get(f"/v1/chunks/{IDS[4].hex()}/locations")).json() == {
            "holders": [],
            "degraded": False,
        }


async def test_excluded_instances_count_nowhere() -> None:
    asked = {"chunk_ids": b"".join(IDS), "exclude": ["a"]}
    async with serving() as client:
        await fill(client)
        answer = msgspec.msgpack.decode(
            (await post(client, "/v1/lookup", asked)).content, type=PackedLookupAnswer
        )
        assert (
            answer.num_prefix,
            {one.instance for run in answer.runs for one in run.holders},
        ) == (3, {"b"})
        assert msgspec.msgpack.decode((await post(client, "/v1/contains", asked)).content)[
            "present"
        ] == [True, True, True, False, False]
        assert msgspec.msgpack.decode((await post(client, "/v1/route", asked)).content)[
            "instances"
        ] == [{"instance": "b", "num_prefix": 3}]


@pytest.mark.parametrize(
    ("accept", "kind"),
    [
        (None, JSON),
        (MSGPACK, MSGPACK),
        (f"{MSGPACK};q=0.5, {JSON}", JSON),
        (f"{MSGPACK};q=0, */*", JSON),
        (f"{MSGPACK.upper()} ; q=nonsense", MSGPACK),
    ],
)
async def test_the_answer_has_the_format_that_is_wanted(accept: str | None, kind: str) -> None:
    async with serving() as client:
        del client.headers["accept"]
        headers = {} if accept is None else {"accept": accept}
        for reply in (
            await client.post("/v1/lookup", json={"chunk_ids": []}, headers=headers),
            await client.post("/v1/contains", json={"chunk_ids": []}, headers=headers),
        ):
            assert (reply.status_code, reply.headers["content-type"]) == (200, kind)


@pytest.mark.parametrize(
    ("path", "headers", "status"),
    [
        ("/v1/lookup", {"accept": "text/html", "content-type": JSON}, 406),
        ("/v1/lookup", {"content-type": "text/plain"}, 415),
        ("/v1/lookup", {"content-type": ""}, 415),
        ("/v1/events", {"content-type": JSON}, 415),
        ("/v1/admin/evict", {"content-type": MSGPACK}, 415),
        ("/v1/lookup", {"content-type": f"{JSON}; charset=utf-8"}, 200),
    ],
)
async def test_unknown_formats_are_refused(path: str, headers: dict[str, str], status: int) -> None:
    async with serving() as client:
        reply = await client.post(path, content=b'{"chunk_ids": []}', headers=headers)
    assert reply.status_code == status


EVENT_OF_A_SHORT_ID = {
    "instance": "a",
    "incarnation": 1,
    "first_sequence": 0,
    "events": [["store", b"x", "hot"]],
}


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/v1/lookup", b"\xc1", 400),
        ("/v1/lookup", msgspec.msgpack.encode({"chunk_ids": b"x" * 15}), 422),
        ("/v1/lookup", msgspec.msgpack.encode({"chunk_ids": b"x" * 16 * 8193}), 422),
        ("/v1/lookup", msgspec.msgpack.encode({"chunk_ids": b"", "exclude": ["a\n"]}), 422),
        ("/v1/events", msgspec.msgpack.encode(EVENT_OF_A_SHORT_ID), 422),
        ("/v1/lookup", {"chunk_ids": ["0A" * 16]}, 422),
        ("/v1/lookup", {"chunk_ids": ["0a" * 16] * (MAX_CHUNKS_PER_LOOKUP + 1)}, 422),
        ("/v1/lookup", {"chunk_ids": ["0a" * 16], "exclude": ["a/b"]}, 422),
        ("/v1/admin/evict", {"chunk_ids": ["x"]}, 422),
    ],
)
async def test_malformed_bodies_are_refused(path: str, body: Any, status: int) -> None:
    sent = {"content": body, "headers": PACKED} if isinstance(body, bytes) else {"json": body}
    async with serving() as client:
        reply = await client.post(path, **sent)
    assert (reply.status_code, reply.headers["content-type"]) == (
        status,
        "application/problem+json",
    )


@pytest.mark.parametrize("text", [b'{"incarnation": 1, "kind": "hunter2"}', b"hunter2"])
async def test_a_refusal_names_the_place_and_repeats_nothing(text: bytes) -> None:
    async with serving() as client:
        reply = await client.put("/v1/instances/a", content=text, headers={"content-type": JSON})
    [error] = reply.json()["errors"]
    assert error["at"].startswith("body")
    assert error["message"]
    assert "hunter2" not in reply.text


async def test_a_whole_number_is_an_integer_however_it_is_written() -> None:
    async with serving() as client:
        headers = {"content-type": JSON}
        reply = await client.put(
            "/v1/instances/a",
            content=b'{"incarnation": 3.0, "kind": "sidecar", "ttl_ms": 2e3}',
            headers=headers,
        )
        assert (reply.status_code, reply.json()["ttl_ms"]) == (200, 2000)
        for wrong in (b"3.5", b'"3"', b"true"):
            body = b'{"incarnation": ' + wrong + b', "kind": "sidecar"}'
            assert (
                await client.put("/v1/instances/a", content=body, headers=headers)
            ).status_code == 422


async def test_admins_reach_every_tenant(tmp_path: Any) -> None:
    tokens = write_tokens(tmp_path / "tokens.yaml")
    evicted = {"chunk_ids": [IDS[0].hex()], "tenant": "rival"}
    async with serving(token=ADMIN_TOKEN, auth_tokens_file=tokens) as client:
        await lease(client)
        events = [
            ["store", IDS[0], "hot", 7, "rival"],
            ["store", IDS[0], "hot", 7, "zulu"],
            ["store", IDS[0], "hot"],
        ]
        await post(
            client,
            "/v1/events",
            {"instance": "a", "incarnation": 1, "first_sequence": 0, "events": events},
        )
        assert (await client.get("/v1/admin/tenants")).json() == {
            "tenants": ["acme", "rival", "zulu"],
            "next_after": None,
        }
        assert (await client.get("/v1/admin/tenants?limit=2")).json() == {
            "tenants": ["acme", "rival"],
            "next_after": "rival",
        }
        assert (await client.get("/v1/admin/tenants?limit=2&after=rival")).json() == {
            "tenants": ["zulu"],
            "next_after": None,
        }
        assert (await client.get("/v1/stats?tenant=rival")).json()["num_chunks"] == 1
        assert (await client.post("/v1/admin/evict", json=evicted)).json() == {"num_evicted": 1}
        assert (await client.get("/v1/stats?tenant=rival")).json()["num_chunks"] == 0
        assert (await client.post("/v1/admin/clear?tenant=zulu")).status_code == 204
        assert (await client.get("/v1/admin/tenants")).json()["tenants"] == ["acme"]
    async with serving(token=CLIENT_TOKEN, auth_tokens_file=tokens) as client:
        assert (await client.get("/v1/admin/tenants")).status_code == 403
        assert (await client.get("/v1/stats?tenant=rival")).status_code == 403
        assert (await client.get("/v1/stats?tenant=acme")).status_code == 200
