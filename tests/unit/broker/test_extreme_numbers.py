"""Numbers beyond their bounds are refused in every message of a peer, and change nothing."""

from __future__ import annotations

from typing import Any

import pytest
from lmcache_core.p2p.messages import AnnounceRequest, PullsRequest, TransferRequest

from tests.fixtures.extreme_numbers import bodies_with_extremes, number_fields, number_places
from tests.unit.broker.test_rest import CHUNK, serve

ANNOUNCE: dict[str, Any] = {
    "incarnation": 1,
    "distributed_url": "lm://10.0.0.1:65433",
    "load": 0.5,
    "ttl_ms": 15_000,
    "drain": {
        "state": "serving",
        **dict.fromkeys(("total", "handed_over", "already_elsewhere", "failed", "left"), 1),
    },
    "figures": {
        "requested_chunks": 1,
        "loaded_chunks": {"memory": 1},
        "loaded_bytes": {"memory": 1},
        "missed_chunks": {"evicted": 1},
        "stored_chunks": 1,
        "stored_bytes": 1,
        "pulled_bytes": {"b": 1},
        "tiers": [{"name": "memory", "num_chunks": 1, "used_bytes": 1, "capacity_bytes": 1}],
        "sole_bytes": 1,
        "models": {"m": {"saved_tokens": 1, "saved_ms": 1, "chunk_tokens": 64.0}},
    },
}
TRANSFER: dict[str, Any] = {
    "requester": "me",
    "chunks": [{"chunk_id": CHUNK, "holders": ["a"]}],
    "wait_ms": 0,
}


@pytest.mark.parametrize(
    ("kind", "body"), [(AnnounceRequest, ANNOUNCE), (TransferRequest, TRANSFER), (PullsRequest, {})]
)
def test_each_number_of_a_message_is_tried(kind: Any, body: dict[str, Any]) -> None:
    tried = {part for path in number_places(body) for part in path if isinstance(part, str)}
    assert number_fields(kind) <= tried


async def test_extreme_number_in_a_heartbeat_is_refused_and_changes_nothing() -> None:
    async with serve() as rest:
        headers = {"content-type": "application/json"}
        assert (await rest.put("/v1/peers/a", json=ANNOUNCE)).status_code == 200
        before = (await rest.get("/v1/peers/a")).json()
        for place, plain, _ in bodies_with_extremes(ANNOUNCE):
            reply = await rest.put("/v1/peers/a", content=plain, headers=headers)
            assert reply.status_code in (400, 422), place
            reply = await rest.put("/v1/peers/new", content=plain, headers=headers)
            assert reply.status_code in (400, 422), place
        after = (await rest.get("/v1/peers/a")).json()
        assert after | {"expires_in_ms": 0} == before | {"expires_in_ms": 0}
        assert (await rest.get("/v1/peers/new")).status_code == 404


async def test_extreme_number_in_a_transfer_is_refused() -> None:
    async with serve() as rest:
        for place, plain, _ in bodies_with_extremes(TRANSFER):
            reply = await rest.post(
                "/v1/transfers", content=plain, headers={"content-type": "application/json"}
            )
            assert reply.status_code in (400, 422), place
