"""The broker as release 0.1.0 speaks to it, from docs/protocols.md. Frozen: see README.md.

`broker.py client PORT` registers two instances and asks for a pull; `broker.py server` grants every pull, and first says at which port.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

from rest import JSON, Caller, serve

CHUNK = "11" * 16
TTL_MS = 15000


def announcement(name: str) -> dict[str, Any]:
    url = f"lm://{name}.example:65433"
    return {
        "incarnation": 3,
        "distributed_url": url,
        "kind": "sidecar",
        "zone": "",
        "node": "",
        "load": 0.5,
        "ttl_ms": None,
        "draining": False,
    }


def converse(port: int) -> dict[str, Any]:
    """What an instance wants of the broker; what came of it."""
    caller = Caller(port, JSON)
    leases = [caller.ask("PUT", f"/v1/peers/{name}", announcement(name)) for name in ("old-1", "old-2")]
    said: dict[str, Any] = {"leases": [[lease["ttl_ms"] > 0, lease["draining"], lease.get("copies", [])] for lease in leases]}
    wanted = {"requester": "old-1", "chunks": [{"chunk_id": CHUNK, "holders": ["old-2"]}, {"chunk_id": "22" * 16, "holders": ["nobody"]}]}
    answer = caller.ask("POST", "/v1/transfers", wanted)
    (assigned,) = answer["assignments"]
    assert assigned["expires_ms"] > time.time() * 1000
    assert assigned["ticket"].count(".") == 2
    said["assigned"] = [assigned["instance"], assigned["distributed_url"], assigned["chunk_ids"], answer["unassigned"], answer["busy"]]
    pulls = {"requester": "old-1", "pulls": [assigned["pull"]]}
    (renewed,) = caller.ask("POST", "/v1/transfers:renew", pulls)["renewed"]
    said["renewed"] = [renewed["pull"] == assigned["pull"], renewed["ttl_ms"] > 0, renewed["ticket"].count(".")]
    said["ended"] = caller.ask("POST", "/v1/transfers:done", pulls)["num_ended"]
    said["peers"] = sorted(peer["id"] for peer in caller.ask("GET", "/v1/peers")["peers"])
    caller.ask("POST", "/v1/peers/old-1:drain")
    said["draining"] = caller.ask("PUT", "/v1/peers/old-1", announcement("old-1"))["draining"]
    caller.ask("DELETE", "/v1/peers/old-1")
    said["left"] = sorted(peer["id"] for peer in caller.ask("GET", "/v1/peers")["peers"])
    return said


class Broker:
    def __init__(self) -> None:
        self.peers: dict[str, Any] = {}
        self.asked_to_drain: set[str] = set()

    def announce(self, name: str, body: Any) -> Any:
        known = ("incarnation", "distributed_url", "kind", "zone", "node", "load", "draining")
        status = {field: body[field] for field in known if field in body}
        self.peers[name] = {"id": name, "num_pulls": 0, "expires_in_ms": TTL_MS, "draining": False} | status
        return {"ttl_ms": TTL_MS, "draining": name in self.asked_to_drain, "copies": []}

    def leave(self, name: str) -> None:
        self.peers.pop(name, None)

    def drain(self, name: str) -> None:
        self.asked_to_drain.add(name)

    def list(self) -> Any:
        return {"peers": list(self.peers.values())}

    def grant(self, body: Any) -> Any:
        by_peer: dict[str, list[str]] = {}
        unassigned = []
        for chunk in body["chunks"]:
            known = [holder for holder in chunk["holders"] if holder in self.peers]
            by_peer.setdefault(known[0], []).append(chunk["chunk_id"]) if known else unassigned.append(chunk["chunk_id"])
        assignments = [
            {"instance": name, "distributed_url": self.peers[name]["distributed_url"], "chunk_ids": ids} | ticket(f"pull-{name}")
            for name, ids in by_peer.items()
        ]
        return {"assignments": assignments, "unassigned": unassigned, "busy": []}

    def renew(self, body: Any) -> Any:
        return {"renewed": [ticket(pull) for pull in body["pulls"]]}

    def done(self, body: Any) -> Any:
        return {"num_ended": len(body["pulls"])}


def ticket(pull: str) -> dict[str, Any]:
    return {"pull": pull, "ticket": "v1.e30.e30", "expires_ms": int(time.time() * 1000) + TTL_MS, "ttl_ms": TTL_MS}


def main(role: str, *arguments: str) -> None:
    if role == "client":
        print(json.dumps(converse(int(arguments[0]))))
        return
    broker = Broker()
    routes = (
        ("PUT", "/v1/peers/([^/:]+)", broker.announce),
        ("DELETE", "/v1/peers/([^/:]+)", broker.leave),
        ("POST", "/v1/peers/([^/:]+):drain", broker.drain),
        ("GET", "/v1/peers", broker.list),
        ("POST", "/v1/transfers", broker.grant),
        ("POST", "/v1/transfers:renew", broker.renew),
        ("POST", "/v1/transfers:done", broker.done),
    )
    serve(routes)


if __name__ == "__main__":
    main(*sys.argv[1:])
