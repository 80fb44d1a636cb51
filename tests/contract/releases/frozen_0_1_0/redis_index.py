"""A replica of the lookup service as release 0.1.0 keeps its index in one Redis server, from docs/protocols.md. Frozen: see README.md.

`redis_index.py PORT` reads a call a line, a JSON array, and answers each with a line of JSON. It alone writes while it is asked, so that it
needs no scripts.
"""

from __future__ import annotations

import json
import struct
import sys
import time
from typing import Any

import redis

LEASES, VERSION, NUMBERS, TENANTS = (f"lmc2:{{i}}:{name}" for name in ("leases", "version", "numbers", "tenants"))
TAG_LETTERS = (
    "f2bdb0fbfsdrbqajaqbjadfhfkc1fhadbaazfcb1dsfrakbpbkapbzdhb8a1dhbzdifhaqbjcaada0c1b0fbdrbdbcajbddrfidhbkapaabzc0a1fcb1frazaybpazfr"
)
TENANT = "default"


def bucket_of(chunk_id: bytes) -> str:
    number = chunk_id[0] >> 2
    return f"lmc2:{{b:{number:02x}{TAG_LETTERS[2 * number : 2 * number + 2]}}}:{TENANT}"


def holders_in(data: bytes) -> list[tuple[int, int, int, str]]:
    """Number, incarnation, size and tier of each."""
    found, at = [], 0
    while at < len(data):
        number, incarnation, size, length = struct.unpack_from("<IQQB", data, at)
        at += 21 + length
        found.append((number, incarnation, size, data[at - length : at].decode()))
    return found


class Replica:
    def __init__(self, port: int) -> None:
        self.redis = redis.Redis(port=port, socket_timeout=10)

    def leases(self) -> dict[str, list[Any]]:
        """By instance: number, incarnation (20 decimal digits), kind, end, next sequence, resync."""
        return {field.decode().removeprefix(f"{TENANT}/"): json.loads(lease) for field, lease in self.redis.hgetall(LEASES).items()}

    def renew(self, instance: str, incarnation: int, kind: str) -> list[int]:
        lease = self.leases().get(instance)
        if lease is None or int(lease[1]) < incarnation:
            number = lease[0] if lease else max(int(self.redis.get(NUMBERS) or 0) + 1, int(time.time()))
            if not lease:
                self.redis.set(NUMBERS, number)
            lease = [number, f"{incarnation:020d}", kind, 0, 0, 0]
            seconds, micros = self.redis.time()
            self.redis.set(VERSION, f"{seconds}.{micros}")
        lease[3] = int(time.time() * 1000) + 60_000
        self.redis.hset(LEASES, f"{TENANT}/{instance}", json.dumps(lease))
        return [lease[4], lease[5]]

    def apply(self, instance: str, incarnation: int, first: int, events: list[list[Any]]) -> list[int]:
        lease = self.leases().get(instance)
        if lease is None or int(lease[1]) != incarnation or lease[5] or first > lease[4]:
            return [lease[4] if lease else 0, 1]
        for op, text, tier, size in events[lease[4] - first :]:
            chunk_id = bytes.fromhex(text)
            kept = [
                each
                for each in holders_in(self.redis.hget(bucket_of(chunk_id), chunk_id) or b"")
                if each[0] != lease[0] or (each[1] == incarnation and each[3] != tier)
            ]
            if op == "store":
                kept.append((lease[0], incarnation, size, tier))
            data = b"".join(struct.pack("<IQQB", *each[:3], len(each[3])) + each[3].encode() for each in kept)
            if data:
                self.redis.hset(bucket_of(chunk_id), chunk_id, data)
                self.redis.sadd(TENANTS, TENANT)
            else:
                self.redis.hdel(bucket_of(chunk_id), chunk_id)
        lease[4] = max(lease[4], first + len(events))
        self.redis.hset(LEASES, f"{TENANT}/{instance}", json.dumps(lease))
        return [lease[4], 0]

    def end(self, instance: str) -> int:
        seconds, micros = self.redis.time()
        ended = self.redis.hdel(LEASES, f"{TENANT}/{instance}")
        self.redis.set(VERSION, f"{seconds}.{micros}")
        return int(ended)

    def holders(self, text: str) -> list[list[Any]]:
        """Instance, kind, tier and size of those who are alive."""
        chunk_id = bytes.fromhex(text)
        alive = {(lease[0], int(lease[1])): (name, lease[2]) for name, lease in self.leases().items() if lease[3] > time.time() * 1000}
        found = holders_in(self.redis.hget(bucket_of(chunk_id), chunk_id) or b"")
        return sorted([*alive[number, life], tier, size] for number, life, size, tier in found if (number, life) in alive)


def main(port: str) -> None:
    replica = Replica(int(port))
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        print(json.dumps(getattr(replica, name)(*arguments)), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
