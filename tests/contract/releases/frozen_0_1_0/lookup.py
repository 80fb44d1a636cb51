"""The lookup service as release 0.1.0 speaks to it, from docs/protocols.md. Frozen: see README.md.

`lookup.py client PORT [json]` announces and asks, in MessagePack or in JSON; `lookup.py server [json]` remembers in a dictionary, and first
says at which port; with `json` it takes nothing else.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from rest import JSON, MSGPACK, Caller, serve

IDS = [bytes([number]) * 16 for number in (0x11, 0x22, 0x33)]


def hexed(data: bytes | str) -> str:
    return data if isinstance(data, str) else data.hex()


def event(kind: str, op: str, chunk_id: bytes, tier: str, size_bytes: int) -> Any:
    if kind == MSGPACK:
        return [op, chunk_id, tier, size_bytes, None]
    return {"op": op, "chunk_id": chunk_id.hex(), "tier": tier, "size_bytes": size_bytes}


def chunk_ids(kind: str, ids: list[bytes]) -> Any:
    return b"".join(ids) if kind == MSGPACK else [chunk_id.hex() for chunk_id in ids]


def converse(port: int, kind: str) -> dict[str, Any]:
    """What an instance wants of the service; what came of it."""
    caller = Caller(port, kind)
    lease = caller.ask("PUT", "/v1/instances/old-1", {"incarnation": 5, "kind": "sidecar"}, JSON)
    assert lease["ttl_ms"] > 0
    said: dict[str, Any] = {"lease": [lease["next_sequence"], lease["resync"]]}

    def send(first: int, *events: Any) -> list[Any]:
        ack = caller.ask("POST", "/v1/events", {"instance": "old-1", "incarnation": 5, "first_sequence": first, "events": list(events)})
        return [ack["next_sequence"], ack["resync"]]

    stores = [event(kind, "store", chunk_id, "Hot", 4096) for chunk_id in IDS]
    said["events"] = [send(0, *stores), send(0, *stores), send(3, event(kind, "remove", IDS[2], "Hot", 0))]
    found = caller.ask("POST", "/v1/lookup", {"chunk_ids": chunk_ids(kind, IDS), "exclude": ["old-2"]})
    if kind == MSGPACK:
        holders = [[list(holder) for holder in held] for count, held in found["runs"] for _ in range(count)]
    else:
        holders = [[[each[name] for name in ("instance", "kind", "tier", "size_bytes")] for each in held] for held in found["holders"]]
    said["lookup"] = [found["num_prefix"], found["degraded"], holders]
    said["excluded"] = caller.ask("POST", "/v1/lookup", {"chunk_ids": chunk_ids(kind, IDS), "exclude": ["old-1"]})["num_prefix"]
    route = caller.ask("POST", "/v1/route", {"chunk_ids": chunk_ids(kind, IDS)})
    said["route"] = [[each["instance"], each["num_prefix"]] for each in route["instances"]]
    said["contains"] = caller.ask("POST", "/v1/contains", {"chunk_ids": chunk_ids(kind, IDS)})["present"]
    at = caller.ask("GET", f"/v1/chunks/{IDS[0].hex()}/locations", kind=JSON)
    said["locations"] = [[each["instance"], each["tier"]] for each in at["holders"]]
    said["gap"] = send(9, event(kind, "store", IDS[2], "Hot", 1))[1]
    caller.ask("DELETE", "/v1/instances/old-1?incarnation=5", kind=JSON)
    said["ended"] = caller.ask("POST", "/v1/contains", {"chunk_ids": chunk_ids(kind, IDS)})["present"]
    return said


class Index:
    """Who holds what: one tenant, no leases that end."""

    def __init__(self) -> None:
        self.kinds: dict[str, str] = {}
        self.lives: dict[str, list[int]] = {}
        self.held: dict[tuple[str, str, str], int] = {}

    def renew(self, instance: str, body: Any, kind: str) -> Any:
        incarnation = body["incarnation"]
        if self.lives.get(instance, [-1])[0] < incarnation:
            self.end(instance, kind)
            self.lives[instance] = [incarnation, 0]
        self.kinds[instance] = body["kind"]
        return {"ttl_ms": body.get("ttl_ms") or 15000, "next_sequence": self.lives[instance][1], "resync": False}

    def end(self, instance: str, kind: str) -> None:
        self.lives.pop(instance, None)
        self.held = {key: size for key, size in self.held.items() if key[0] != instance}

    def take(self, body: Any, kind: str) -> Any:
        instance, first = body["instance"], body["first_sequence"]
        life = self.lives.get(instance)
        if life is None or life[0] != body["incarnation"] or first > life[1]:
            return {"next_sequence": 0 if life is None else life[1], "resync": True}
        for number, each in enumerate(body["events"], first):
            fields = each if isinstance(each, list) else [each.get(name) for name in ("op", "chunk_id", "tier", "size_bytes")]
            op, chunk_id, tier, size_bytes = fields[:4]
            if number < life[1]:
                continue
            life[1] += 1
            if op == "store":
                self.held[instance, hexed(chunk_id), tier] = size_bytes or 0
            else:
                self.held.pop((instance, hexed(chunk_id), tier), None)
        return {"next_sequence": life[1], "resync": False}

    def holders(self, chunk_id: str, exclude: list[str]) -> list[list[Any]]:
        held = [(key, size) for key, size in self.held.items() if key[1] == chunk_id and key[0] not in exclude]
        return [[instance, self.kinds[instance], tier, size] for (instance, _, tier), size in held]

    def asked(self, body: Any) -> tuple[list[str], list[str]]:
        ids = body["chunk_ids"]
        if isinstance(ids, bytes):
            ids = [ids[at : at + 16].hex() for at in range(0, len(ids), 16)]
        return ids, body.get("exclude", [])

    def lookup(self, body: Any, kind: str) -> Any:
        ids, exclude = self.asked(body)
        found: list[list[list[Any]]] = []
        for chunk_id in ids:
            if not (held := self.holders(chunk_id, exclude)):
                break
            found.append(held)
        answer = {"num_prefix": len(found), "degraded": False}
        if kind == MSGPACK:
            return answer | {"runs": [[1, held] for held in found]}
        names = ("instance", "kind", "tier", "size_bytes")
        return answer | {"holders": [[dict(zip(names, each, strict=True)) for each in held] for held in found]}

    def route(self, body: Any, kind: str) -> Any:
        ids, exclude = self.asked(body)
        counts = {}
        for instance in self.kinds.keys() - set(exclude):
            has = [any(holder[0] == instance for holder in self.holders(chunk_id, [])) for chunk_id in ids]
            counts[instance] = [*has, False].index(False)
        longest = sorted(counts.items(), key=lambda each: -each[1])
        return {"instances": [{"instance": name, "num_prefix": count} for name, count in longest if count], "degraded": False}

    def contains(self, body: Any, kind: str) -> Any:
        ids, exclude = self.asked(body)
        return {"present": [bool(self.holders(chunk_id, exclude)) for chunk_id in ids], "degraded": False}

    def locations(self, chunk_id: str, kind: str) -> Any:
        names = ("instance", "kind", "tier", "size_bytes")
        return {"holders": [dict(zip(names, each, strict=True)) for each in self.holders(chunk_id, [])], "degraded": False}


def main(role: str, *arguments: str) -> None:
    if role == "client":
        print(json.dumps(converse(int(arguments[0]), JSON if "json" in arguments else MSGPACK)))
        return
    index = Index()
    routes = (
        ("PUT", "/v1/instances/([^/?]+)", index.renew),
        ("DELETE", r"/v1/instances/([^/?]+)(?:\?incarnation=\d+)?", index.end),
        ("POST", "/v1/events", index.take),
        ("POST", "/v1/lookup", index.lookup),
        ("POST", "/v1/route", index.route),
        ("POST", "/v1/contains", index.contains),
        ("GET", "/v1/chunks/([0-9a-f]{32})/locations", index.locations),
    )
    kinds = (JSON,) if "json" in arguments else (JSON, MSGPACK)

    def route_of(method: str, path: str, answer: Any) -> Any:
        return method, path, lambda *given, kind=JSON: answer(*given, kind=kind)

    serve(tuple(route_of(*route) for route in routes), kinds)


if __name__ == "__main__":
    main(*sys.argv[1:])
