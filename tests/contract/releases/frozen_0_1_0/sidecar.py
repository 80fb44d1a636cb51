"""The sidecar's socket as release 0.1.0 speaks it, from docs/protocols.md. Frozen: see README.md.

`sidecar.py client SOCKET [CAPABILITY…]` stores and loads through the arena; `sidecar.py server SOCKET ARENA [CAPABILITY…]` is a sidecar
with nothing but memory, and says when it listens.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import mmap
import os
import socket
import socketserver
import sys
import threading
from pathlib import Path
from typing import Any

from formats import canonical_key, chunk_hash_of, digest_of, head_of, key_of, payload_of, read_head
from lm import CONTAINS_OK, CONTEXT, HASH_BYTES, HELLO, HELLO_OK, LANE, PING, PONG, receive, send

ARENA_BYTES, GENERATION, MAX_NAMES = 4 << 20, 7, 4096
TIMEOUT_S = 10.0
RESERVE, EXTENTS, COMMIT, LOAD, STAGE, PROMISE, DONE, OK, REJECT, DESCRIBE, LOOKUP, STATS, STATS_OK, PREFETCH = range(19, 33)
NUM_FIELDS = {RESERVE: 2, COMMIT: 1, LOAD: 3, STAGE: 5, DONE: 2, REJECT: 1, DESCRIBE: 6, LOOKUP: 3, STATS: 0, PREFETCH: 1, PING: 0, CONTEXT: 2, LANE: 2}
NUM_ANSWERED = {EXTENTS: 1, CONTAINS_OK: 1, PROMISE: 2, OK: 0, STATS_OK: 1, PONG: 0}
ANSWERS = {
    RESERVE: EXTENTS, LOAD: EXTENTS, COMMIT: CONTAINS_OK, LOOKUP: CONTAINS_OK, STAGE: PROMISE, DONE: OK, REJECT: OK, DESCRIBE: OK, PREFETCH: OK,
    STATS: STATS_OK, PING: PONG,
}  # fmt: skip
NEEDS = {REJECT: "reject", STAGE: "stage", DESCRIBE: "describe", CONTEXT: "context"}


class Client:
    def __init__(self, path: str, capabilities: list[str]) -> None:
        self.connection = socket.socket(socket.AF_UNIX)
        self.connection.settimeout(TIMEOUT_S)
        self.connection.connect(path)
        engine = ["release-0.1.0", os.getpid(), 0, "org/model", "", 1]
        send(self.connection, HELLO, 1, [1, 1, capabilities, None, "release-0.1.0", engine])
        answer = receive(self.connection)
        assert answer is not None
        (kind, self.number, (version, agreed, _, max_names, arena, *_), _) = answer
        assert (kind, self.number, version, max_names) == (HELLO_OK, 1, 1, MAX_NAMES)
        arena_path, arena_bytes, generation, verify_hot, salt, *_ = arena
        assert isinstance(verify_hot, str)
        assert isinstance(salt, str)
        self.can = set(agreed)
        assert self.can <= set(capabilities)
        if "locks" in capabilities:
            self.lock = (Path(arena_path).parent / f"{generation:016x}.generation").open("rb")
            fcntl.flock(self.lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        with Path(arena_path).open("r+b") as file:
            self.arena = mmap.mmap(file.fileno(), arena_bytes)

        send(self.connection, LANE, 0, [0, ["vllm", "test/model", 1, 0, ""]])

    def ask(self, kind: int, *fields: Any) -> list[Any]:
        self.number += 1
        if "context" in self.can:
            send(self.connection, CONTEXT, self.number, ["of-release-0.1.0", ""])
        send(self.connection, kind, self.number, list(fields))
        frame = receive(self.connection)
        assert frame is not None, "the sidecar has hung up"
        answered, number, answer, _ = frame
        assert (answered, number) == (ANSWERS[kind], self.number), (kind, answered, answer)
        assert len(answer) == NUM_ANSWERED[answered], f"{answered} has fields that release 0.1.0 does not know: {answer}"
        return answer


def names_of(*names: str) -> list[list[Any]]:
    """The first as hashes in the lane, the others spelled in full."""
    return [[0, bytes.fromhex(chunk_hash_of(names[0]))], *([None, key_of(name)] for name in names[1:])]


def converse(path: str, capabilities: list[str]) -> dict[str, Any]:
    """What an engine wants of a sidecar; what came of it."""
    client = Client(path, capabilities)
    key, payload = key_of("one"), payload_of("one")
    said: dict[str, Any] = {"can": sorted(client.can), "before": client.ask(LOOKUP, names_of("one"), [], 1000)}
    if "describe" in client.can:
        client.ask(DESCRIBE, "vllm", "org/model", 1, 256, bytes(32), [""])
    ((kept, given_up),) = client.ask(RESERVE, [len(payload), 100], names_of("one", "two"))
    number, offset, length, *_ = kept
    assert length == len(payload)
    client.arena[offset : offset + length] = payload
    client.ask(DONE, [given_up[0]], [])
    said["stored"] = client.ask(COMMIT, [[number, head_of(key, payload)]])
    said["lookup"] = client.ask(LOOKUP, names_of("one", "two"), ["Hot"], 1000)
    client.ask(PREFETCH, names_of("one"))
    ((loaded, reason),) = client.ask(LOAD, names_of("one", "two"), 1000, 0)
    number, offset, length, tier, head = loaded
    header, _, payload_bytes = read_head(head)
    data = client.arena[offset : offset + length]
    assert (header[0], payload_bytes, digest_of(data)) == (key, length, header[5])
    said["loaded"] = [data == payload, tier, reason]
    if "reject" in client.can:
        client.ask(REJECT, [number])
    client.ask(DONE, [number], [])
    if "stage" in client.can:
        is_ready, tiers = client.ask(STAGE, "ticket-1", names_of("one"), True, 1000, 0)
        said["staged"] = [is_ready, [tier.hex() for tier in tiers]]
        client.ask(DONE, [], ["ticket-1"])
    client.ask(PING)
    said["stats"] = sorted(set(client.ask(STATS)[0]) & {"Hot"})
    return said


class Sidecar(socketserver.ThreadingUnixStreamServer):
    """Chunks that lie one after the other in an arena, which is never full in a test."""

    daemon_threads = True

    def __init__(self, path: str, directory: Path, capabilities: list[str]) -> None:
        directory.mkdir()
        self.path, self.capabilities = directory / "kv.arena", capabilities
        self.path.write_bytes(bytes(ARENA_BYTES))
        (directory / f"{GENERATION:016x}.generation").touch()
        self.turn = threading.Lock()
        self.num_used = 0
        self.reserved: dict[int, tuple[int, int]] = {}
        self.chunks: dict[bytes, tuple[int, int, bytes]] = {}
        super().__init__(path, Connection)

    def reserve(self, size: int) -> list[Any]:
        number, offset = len(self.reserved) + 1, self.num_used
        self.reserved[number] = (offset, size)
        self.num_used += -(-size // 4096) * 4096
        assert self.num_used <= ARENA_BYTES
        return [number, offset, size, "", b""]

    def commit(self, number: int, head: bytes) -> bool:
        offset, size = self.reserved[number]
        header, _, payload_bytes = read_head(head)
        with self.path.open("rb") as file:
            file.seek(offset)
            payload = file.read(size)
        assert len(payload) == payload_bytes
        assert digest_of(payload) == header[5], "what lies in the arena is not what the head says"
        self.chunks[header[0]] = (offset, size, head)
        return True

    def prefix(self, keys: list[bytes]) -> list[bytes]:
        found = []
        for key in keys:
            if key not in self.chunks:
                break
            found.append(key)
        return found


class Connection(socketserver.BaseRequestHandler):
    """Serves what release 0.1.0 knows, and ends the connection at anything else."""

    server: Sidecar

    def handle(self) -> None:
        with contextlib.suppress(ConnectionError):
            self.serve()

    def serve(self) -> None:
        frame = receive(self.request)
        if frame is None:
            return
        kind, number, hello, _ = frame
        assert (kind, hello[0] <= 1 <= hello[1], len(hello) >= 6) == (HELLO, True, True), hello
        assert len(hello[5]) >= 6, hello
        self.lanes: list[list[Any]] = []
        self.can = [name for name in self.server.capabilities if name in hello[2]]
        arena = [str(self.server.path), ARENA_BYTES, GENERATION, "always", ""]
        send(self.request, HELLO_OK, number, [1, self.can, "frozen-0", MAX_NAMES, arena])
        told = 0
        while frame := receive(self.request):
            kind, correlation_id, fields, _ = frame
            assert NEEDS.get(kind) in (None, *self.can), f"{kind}, of which HELLO_OK has said nothing"
            assert len(fields) == NUM_FIELDS[kind], f"{kind} has fields that release 0.1.0 does not know: {fields}"
            if kind == LANE:
                assert (correlation_id, fields[0], told) == (0, len(self.lanes), 0)
                self.lanes.append(fields[1])
                continue
            assert correlation_id > number
            if kind == CONTEXT:
                told = correlation_id
                continue
            assert told in (0, correlation_id)
            number, told = correlation_id, 0
            with self.server.turn:
                send(self.request, ANSWERS[kind], number, self.answer(kind, fields))

    def keys(self, names: list[list[Any]]) -> list[bytes]:
        keys = []
        for number, data in names:
            if number is None:
                keys.append(data)
            else:
                fmt, model, world_size, rank, group = self.lanes[number]
                keys += [canonical_key(name, fmt, model, world_size, rank, group) for name in hashes_of(data)]
        return keys

    def answer(self, kind: int, fields: list[Any]) -> list[Any]:
        if kind == LOOKUP:
            is_here = not fields[1] or "Hot" in fields[1]
            return [[is_here and key in self.server.chunks for key in self.keys(fields[0])]]
        if kind == RESERVE:
            known = [key in self.server.chunks for key in self.keys(fields[1])] or [False] * len(fields[0])
            return [["known" if is_known else self.server.reserve(size) for size, is_known in zip(fields[0], known, strict=True)]]
        if kind == COMMIT:
            return [[self.server.commit(number, head) for number, head in fields[0]]]
        if kind == LOAD:
            keys = self.keys(fields[0])
            found = self.server.prefix(keys)
            extents: list[Any] = []
            for number, key in enumerate(found, 1000):
                offset, size, head = self.server.chunks[key]
                extents.append([number, offset, size, "Hot", head])
            return [extents + ["never_stored"] * (len(found) < len(keys))]
        if kind == STAGE:
            return [True, [self.staged(*chain) for chain in fields[1]]]
        return [{"Hot": {"num_chunks": len(self.server.chunks)}}] if kind == STATS else []

    def staged(self, number: int, hashes: bytes) -> bytes:
        fmt, model, world_size, _, group = self.lanes[number]
        keys = [[canonical_key(name, fmt, model, world_size, rank, group) for rank in range(world_size)] for name in hashes_of(hashes)]
        return bytes(all(key in self.server.chunks for key in ranks) for ranks in keys)


def hashes_of(data: bytes) -> list[str]:
    return [data[at : at + HASH_BYTES].hex() for at in range(0, len(data), HASH_BYTES)]


def main(role: str, path: str, *arguments: str) -> None:
    if role == "client":
        print(json.dumps(converse(path, list(arguments))))
        return
    with Sidecar(path, Path(arguments[0]), list(arguments[1:])) as server:
        print("listening", flush=True)
        server.serve_forever()


if __name__ == "__main__":
    main(*sys.argv[1:])
