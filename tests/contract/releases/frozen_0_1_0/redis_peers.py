"""A replica of the broker as release 0.1.0 tells others of peers through Redis, from docs/protocols.md. Frozen: see README.md.

`redis_peers.py PORT` reads a call a line, a JSON array, and answers each with a line of JSON. It alone writes while it is asked, so that it
needs no scripts.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import redis

RECORDS, CHANGES, SEQ = (f"lmcache:{{broker}}:{name}" for name in ("records", "changes", "seq"))
LEASE_MS = 60_000


class Replica:
    def __init__(self, port: int) -> None:
        self.redis = redis.Redis(port=port, socket_timeout=10, decode_responses=True)

    def write(self, field: str, incarnation: int, draining: bool, gone: bool, rest: str) -> int:
        ends_ms = int(time.time() * 1000) + LEASE_MS
        self.redis.hset(RECORDS, field, f"{incarnation:020d}{int(draining)}{int(gone)}{ends_ms:015d}{rest}")
        self.redis.zadd(CHANGES, {field: self.redis.incr(SEQ)})
        return ends_ms

    def announce(self, field: str, incarnation: int, url: str) -> int:
        said: list[Any] = [url, "sidecar", "zone-a", "node-a", 0.25, None, None]
        return self.write(field, incarnation, False, False, json.dumps(said))

    def drain(self, field: str) -> int:
        record = self.redis.hget(RECORDS, field)
        return self.write(field, int(record[:20]), True, False, record[37:])

    def leave(self, field: str) -> int:
        record = self.redis.hget(RECORDS, field)
        return self.write(field, int(record[:20]), False, True, record[37:])

    def peers(self) -> dict[str, list[Any]]:
        """Incarnation, address, whether it is draining, and load, of those who live."""
        found = {}
        for field, record in self.redis.hgetall(RECORDS).items():
            url, _, _, _, load, *_ = json.loads(record[37:])
            if record[21] == "0" and int(record[22:37]) > time.time() * 1000:
                found[field] = [int(record[:20]), url, record[20] == "1", load]
        return found


def main(port: str) -> None:
    replica = Replica(int(port))
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        print(json.dumps(getattr(replica, name)(*arguments)), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
