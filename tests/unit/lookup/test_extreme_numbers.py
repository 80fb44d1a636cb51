"""Numbers beyond their bounds are refused in every message of an instance, and change nothing."""

from __future__ import annotations

from typing import Any

import pytest
from lmcache_core.lookup.messages import JSON, MSGPACK, EventsRequest, LeaseRequest, StoreEvent

from tests.fixtures.extreme_numbers import bodies_with_extremes, number_fields, number_places
from tests.unit.lookup.test_routes import ID, lease, serving, store

LEASE: dict[str, Any] = {"incarnation": 1, "kind": "sidecar", "ttl_ms": 30_000}
EVENTS: dict[str, Any] = {
    "instance": "a",
    "incarnation": 1,
    "first_sequence": 1,
    "events": [["store", bytes.fromhex("0b" * 16), "hot", 1]],
}


NAMED_EVENTS = EVENTS | {
    "events": [
        dict(zip(StoreEvent.__struct_fields__, event, strict=False)) for event in EVENTS["events"]
    ]
}


@pytest.mark.parametrize(("kind", "body"), [(LeaseRequest, LEASE), (EventsRequest, NAMED_EVENTS)])
def test_each_number_of_a_message_is_tried(kind: Any, body: dict[str, Any]) -> None:
    tried = {part for path in number_places(body) for part in path if isinstance(part, str)}
    assert number_fields(kind) <= tried


@pytest.mark.parametrize(
    ("call", "body", "kind"),
    [(("PUT", "/v1/instances/a"), LEASE, JSON), (("POST", "/v1/events"), EVENTS, MSGPACK)],
)
async def test_extreme_number_is_refused_and_changes_nothing(
    call: tuple[str, str], body: dict[str, Any], kind: str
) -> None:
    async with serving() as client:
        await lease(client)
        assert (await store(client, ID)).status_code == 200
        for place, plain, packed in bodies_with_extremes(body):
            content = plain if kind == JSON else packed
            reply = await client.request(*call, content=content, headers={"content-type": kind})
            assert reply.status_code in (400, 422), f"{place} {kind}: {reply.text}"
        both = {"chunk_ids": [ID, "0b" * 16]}
        assert (await client.post("/v1/contains", json=both)).json()["present"] == [True, False]
        assert (await lease(client)).json()["resync"] is False
