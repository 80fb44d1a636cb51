"""Questions in both formats get the same answers, and what cannot be read is refused without being
repeated.
"""

from __future__ import annotations

from typing import Any

import httpx
import msgspec
import pytest
from lmcache_core.lookup import ContainsAnswer, LookupAnswer, RouteAnswer
from lmcache_core.lookup.messages import (
    JSON,
    MSGPACK,
    PackedLookupAnswer,
)

from tests.fixtures.lookup_index import AwayIndex
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
            ("/v1/route", RouteAnswer, None),
        ):
            packed = msgspec.msgpack.decode((await post(client, path, asked)).content, type=kind)
            text = msgspec.json.decode((await client.post(path, json=plain)).content, type=kind)
            assert packed == text
            assert expected is None or packed == expected
        assert (await client.get(f"/v1/chunks/{IDS[4].hex()}/locations")).json() == {
            "holders": [],
            "degraded": False,
        }


async def test_whoever_is_excluded_counts_nowhere() -> None:
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


@pytest.mark.parametrize(("path", "kind"), [("/v1/events", JSON), ("/v1/admin/evict", MSGPACK)])
async def test_other_bodies_have_one_format(path: str, kind: str) -> None:
    async with serving() as client:
        reply = await client.post(path, content=b"{}", headers={"content-type": kind})
    other = MSGPACK if kind == JSON else JSON
    assert (reply.status_code, reply.json()["detail"]) == (
        415,
        f"the body must be {other}: name its type in Content-Type",
    )


async def test_events_as_messagepack() -> None:
    body = {
        "instance": "a",
        "incarnation": 1,
        "first_sequence": 0,
        "events": [["store", IDS[0], "hot", 7], ["remove", IDS[1], "disk"]],
    }
    async with serving() as client:
        await lease(client)
        assert msgspec.msgpack.decode((await post(client, "/v1/events", body)).content) == {
            "next_sequence": 2,
            "resync": False,
        }
        found = (await client.get(f"/v1/chunks/{IDS[0].hex()}/locations")).json()
        assert found["holders"] == [
            {"instance": "a", "kind": "sidecar", "tier": "hot", "size_bytes": 7}
        ]


@pytest.mark.parametrize(
    ("accept", "kind"),
    [
        (None, JSON),
        ("*/*", JSON),
        ("application/*", JSON),
        ("text/html, */*;q=0.1", JSON),
        (MSGPACK, MSGPACK),
        (f"{MSGPACK}, {JSON};q=0.5", MSGPACK),
        (f"{MSGPACK};q=0.5, {JSON}", JSON),
        (f"{MSGPACK};q=0, */*", JSON),
        (f"{JSON};q=0, */*", MSGPACK),
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


async def test_formats_that_are_not_known_are_refused() -> None:
    async with serving() as client:
        reply = await client.post(
            "/v1/lookup", json={"chunk_ids": []}, headers={"accept": "text/html"}
        )
        assert (reply.status_code, reply.headers["content-type"]) == (
            406,
            "application/problem+json",
        )
        for kind in ("text/plain", "", "application/x-www-form-urlencoded"):
            reply = await client.post(
                "/v1/lookup", content=b'{"chunk_ids": []}', headers={"content-type": kind}
            )
            assert (reply.status_code, reply.headers["content-type"]) == (
                415,
                "application/problem+json",
            )
        reply = await client.post(
            "/v1/lookup",
            content=b'{"chunk_ids": []}',
            headers={"content-type": f"{JSON}; charset=utf-8"},
        )
        assert reply.status_code == 200


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/lookup", b""),
        ("/v1/lookup", b"\xc1"),
        ("/v1/lookup", b"\x91" * 100_000),
        ("/v1/lookup", msgspec.msgpack.encode({"chunk_ids": b"x" * 15})),
        ("/v1/lookup", msgspec.msgpack.encode({"chunk_ids": b"x" * 16 * 8193})),
        ("/v1/lookup", msgspec.msgpack.encode({"chunk_ids": ["0a" * 16]})),
        ("/v1/lookup", msgspec.msgpack.encode({"chunk_ids": b"", "exclude": ["a\n"]})),
        (
            "/v1/events",
            msgspec.msgpack.encode(
                {
                    "instance": "a",
                    "incarnation": 1,
                    "first_sequence": 0,
                    "events": [["store", b"x", "hot"]],
                }
            ),
        ),
        (
            "/v1/events",
            msgspec.msgpack.encode(
                {"instance": "a\n", "incarnation": 1, "first_sequence": 0, "events": []}
            ),
        ),
    ],
)
async def test_malformed_bodies_are_refused(path: str, body: bytes) -> None:
    async with serving() as client:
        reply = await client.post(path, content=body, headers=PACKED)
    status = 400 if body in (b"", b"\xc1") else 422  # the former are no msgpack at all
    assert (reply.status_code, reply.headers["content-type"]) == (
        status,
        "application/problem+json",
    )


@pytest.mark.parametrize(
    "text",
    [
        b'{"incarnation": 1, "kind": "hunter2"}',
        b'{"incarnation": "hunter2", "kind": "sidecar"}',
        b"hunter2",
    ],
)
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
        for wrong in (b"3.5", b'"3"', b"1e300", b"-1.0", b"true"):
            body = b'{"incarnation": ' + wrong + b', "kind": "sidecar"}'
            assert (
                await client.put("/v1/instances/a", content=body, headers=headers)
            ).status_code == 422


async def test_admins_look_after_other_tenants(tmp_path: Any) -> None:
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


async def test_without_the_index_nothing_is_known_in_either_format() -> None:
    async with serving(AwayIndex()) as client:
        assert (await client.post("/v1/contains", json={"chunk_ids": ["0a" * 16]})).json() == {
            "present": [False],
            "degraded": True,
        }
        assert (await client.get(f"/v1/chunks/{IDS[0].hex()}/locations")).json() == {
            "holders": [],
            "degraded": True,
        }
        reply = await post(client, "/v1/lookup", {"chunk_ids": IDS[0]})
        assert msgspec.msgpack.decode(reply.content) == {
            "num_prefix": 0,
            "runs": [],
            "degraded": True,
        }
        assert (await client.get("/v1/admin/tenants")).status_code == 503
