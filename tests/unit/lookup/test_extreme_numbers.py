"""No number in a message of an instance is believed beyond its bounds, and none leaves a trace."""

from __future__ import annotations

from typing import Any

import pytest
from lmcache_core.lookup.messages import (
    JSON,
    MSGPACK,
    EventsRequest,
    LeaseRequest,
    PackedEventsRequest,
)

from tests.fixtures.extreme_numbers import bodies_with_extremes, number_fields, number_places
from tests.unit.lookup.test_routes import ID, lease, serving, store

LEASE: dict[str, Any] = {"incarnation": 1, "kind": "sidecar", "ttl_ms": 30_000}
EVENTS: dict[str, Any] = {
    "instance": "a",
    "incarnation": 1,
    "first_sequence": 1,
    "events": [{"op": "store", "chunk_id": "0b" * 16, "tier": "hot", "size_bytes": 1}],
}
PACKED_EVENTS = EVENTS | {"events": [["store", bytes.fromhex("0b" * 16), "hot", 1]]}


@pytest.mark.parametrize(
    ("kind", "body"),
    [(LeaseRequest, LEASE), (EventsRequest, EVENTS), (PackedEventsRequest, EVENTS)],
)
def test_each_number_of_a_message_is_tried(kind: Any, body: dict[str, Any]) -> None:
    tried = {part for path in number_places(body) for part in path if isinstance(part, str)}
    assert number_fields(kind) <= tried


@pytest.mark.parametrize(
    ("call", "body", "packed"),
    [
        (("PUT", "/v1/instances/a"), LEASE, LEASE),
        (("POST", "/v1/events"), EVENTS, PACKED_EVENTS),
    ],
)
async def test_extreme_number_is_refused_and_changes_nothing(
    call: tuple[str, str], body: dict[str, Any], packed: dict[str, Any]
) -> None:
    async with serving() as client:
        await lease(client)
        assert (await store(client, ID)).status_code == 200
        as_json = [(place, plain, JSON) for place, plain, _ in bodies_with_extremes(body)]
        as_packed = [(place, data, MSGPACK) for place, _, data in bodies_with_extremes(packed)]
        for place, content, kind in as_json + as_packed:
            reply = await client.request(*call, content=content, headers={"content-type": kind})
            assert reply.status_code in (400, 422), f"{place} {kind}: {reply.text}"
        both = {"chunk_ids": [ID, "0b" * 16]}
        assert (await client.post("/v1/contains", json=both)).json()["present"] == [True, False]
        assert (await lease(client)).json()["resync"] is False
