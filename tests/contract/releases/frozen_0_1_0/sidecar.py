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
import struct
import sys
import threading
from pathlib import Path
from typing import Any

import msgspec
from formats import canonical_key, chunk_hash_of, digest_of, head_of, key_of, payload_of, read_head

ARENA_BYTES, GENERATION = 4 << 20, 7
MAX_MESSAGE_BYTES = 8 << 20
TIMEOUT_S = 10.0
NUM_FIELDS = {
    "Lookup": (3,), "Prefetch": (1,), "Reserve": (1,), "Commit": (1,), "Abort": (1,), "Pin": (2, 3), "Release": (1,), "Reject": (1,),
    "Stage": (4, 5), "Unstage": (1,), "Describe": (6,), "Within": (3,), "Stats": (0,),
}  # fmt: skip
NUM_ANSWERED = {
    "LookupOk": 2, "PrefetchOk": 1, "ReserveOk": 1, "CommitOk": 1, "AbortOk": 0, "PinOk": 2, "ReleaseOk": 0, "RejectOk": 0,
    "StageOk": 2, "UnstageOk": 0, "DescribeOk": 0, "StatsOk": 1,
}  # fmt: skip
NEEDS = {"Reject": "reject", "Stage": "stage", "Unstage": "stage", "Describe": "describe", "Within": "context"}


def send(to: socket.socket, *message: Any) -> None:
    body = msgspec.msgpack.encode(message)
    to.sendall(struct.pack("<I", len(body)) + body)


def receive(source: socket.socket) -> list[Any]:
    """The next message; nothing at the end."""
    head = exactly(source, 4)
    if not head:
        return []
    (length,) = struct.unpack("<I", head)
    assert length <= MAX_MESSAGE_BYTES
    message: list[Any] = msgspec.msgpack.decode(exactly(source, length))
    return message


def exactly(source: socket.socket, num_bytes: int) -> bytes:
    data = bytearray()
    while len(data) < num_bytes and (piece := source.recv(num_bytes - len(data))):
        data += piece
    assert len(data) in (0, num_bytes), "the connection ended in the middle of a message"
    return bytes(data)


class Client:
    def __init__(self, path: str, capabilities: list[str]) -> None:
        self.connection = socket.socket(socket.AF_UNIX)
        self.connection.settimeout(TIMEOUT_S)
        self.connection.connect(path)
        send(self.connection, "Hello", 1, 1, "release-0.1.0", os.getpid(), 0, "org/model", "", capabilities, 1)
        kind, version, _, arena_path, arena_bytes, generation, verify_hot, salt, *later = receive(self.connection)
        assert (kind, version) == ("HelloOk", 1)
        assert isinstance(verify_hot, str)
        assert isinstance(salt, str)
        self.can = set(later[0] if later else []) & set(capabilities)
        if "locks" in capabilities:
            self.lock = (Path(arena_path).parent / f"{generation:016x}.generation").open("rb")
            fcntl.flock(self.lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        with Path(arena_path).open("r+b") as file:
            self.arena = mmap.mmap(file.fileno(), arena_bytes)

    def ask(self, kind: str, *fields: Any) -> list[Any]:
        send(self.connection, kind, *fields)
        answered, *answer = receive(self.connection)
        assert answered == f"{kind}Ok", (kind, answered, answer)
        assert len(answer) == NUM_ANSWERED[answered], f"{answered} has fields that release 0.1.0 does not know: {answer}"
        return answer


def converse(path: str, capabilities: list[str]) -> dict[str, Any]:
    """What an engine wants of a sidecar; what came of it."""
    client = Client(path, capabilities)
    key, payload = key_of("one"), payload_of("one")
    said: dict[str, Any] = {"can": sorted(client.can), "before": client.ask("Lookup", [key], [], 1000)}
    if "describe" in client.can:
        client.ask("Describe", "vllm", "org/model", 1, 256, bytes(32), [""])
    (kept, given_up), *_ = client.ask("Reserve", [len(payload), 100])
    client.arena[kept[1] : kept[1] + len(payload)] = payload
    client.ask("Abort", [given_up[0]])
    said["stored"] = client.ask("Commit", [[kept[0], head_of(key, payload)]])
    said["lookup"] = client.ask("Lookup", [key, key_of("two")], ["Hot"], 1000)
    said["prefetch"] = client.ask("Prefetch", [key])
    (chunks, reason) = client.ask("Pin", [key, key_of("two")], 1000)
    ((pin, offset, length, head, tier),) = chunks
    header, _, payload_bytes = read_head(head)
    loaded = client.arena[offset : offset + length]
    assert (header[0], payload_bytes, digest_of(loaded)) == (key, length, header[5])
    said["loaded"] = [loaded == payload, tier, reason]
    if "reject" in client.can:
        client.ask("Reject", [pin])
    client.ask("Release", [pin])
    if "stage" in client.can:
        chain = ["vllm", "test/model", 1, "", bytes.fromhex(chunk_hash_of("one"))]
        is_ready, tiers = client.ask("Stage", "ticket-1", [chain], True, 1000)
        said["staged"] = [is_ready, [tier.hex() for tier in tiers]]
        client.ask("Unstage", ["ticket-1"])
    said["stats"] = sorted(set(client.ask("Stats")[0]) & {"Hot"})
    return said


class Sidecar(socketserver.ThreadingUnixStreamServer):
    """Chunks that lie one behind the other in an arena, which is never full in a test."""

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

    def reserve(self, size: int) -> list[int]:
        number, offset = len(self.reserved) + 1, self.num_used
        self.reserved[number] = (offset, size)
        self.num_used += -(-size // 4096) * 4096
        assert self.num_used <= ARENA_BYTES
        return [number, offset]

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
        hello = receive(self.request)
        if not hello:
            return
        assert hello[0] == "Hello"
        assert hello[1] <= 1 <= hello[2], hello
        assert len(hello) >= 8, hello
        arena = (str(self.server.path), ARENA_BYTES, GENERATION)
        can = self.server.capabilities
        send(self.request, "HelloOk", 1, "frozen-0", *arena, "always", "", *([can] if can else []))
        while message := receive(self.request):
            with self.server.turn:
                send(self.request, *self.answer(*message))

    def answer(self, kind: str, *fields: Any) -> list[Any]:
        assert NEEDS.get(kind) in (None, *self.server.capabilities), f"{kind}, of which HelloOk has said nothing"
        assert len(fields) in NUM_FIELDS[kind], f"{kind} has fields that release 0.1.0 does not know: {fields}"
        if kind == "Within":
            return self.answer(*msgspec.msgpack.decode(fields[2]))
        return [f"{kind}Ok", *getattr(self, kind.lower())(*fields)]

    def lookup(self, keys: list[bytes], search_range: list[str], deadline_ms: int) -> list[Any]:
        found = self.server.prefix(keys) if not search_range or "Hot" in search_range else []
        return [len(found), ["Hot"] * len(found)]

    def prefetch(self, keys: list[bytes]) -> list[Any]:
        return [True]

    def reserve(self, sizes: list[int]) -> list[Any]:
        return [[self.server.reserve(size) for size in sizes]]

    def commit(self, items: list[tuple[int, bytes]]) -> list[Any]:
        return [[self.server.commit(number, head) for number, head in items]]

    def pin(self, keys: list[bytes], deadline_ms: int, recompute_us: int = 0) -> list[Any]:
        found = self.server.prefix(keys)
        pins = [[number, *self.server.chunks[key], "Hot"] for number, key in enumerate(found, 1)]
        return [pins, "" if len(found) == len(keys) else "never_stored"]

    def stage(self, ticket: str, chains: list[Any], is_prefix: bool, deadline_ms: int, recompute_us: int = 0) -> list[Any]:
        tiers = []
        for fmt, model, world_size, group, hashes in chains:
            names = [hashes[at : at + 32].hex() for at in range(0, len(hashes), 32)]
            keys = [[canonical_key(name, fmt, model, world_size, rank, group) for rank in range(world_size)] for name in names]
            tiers.append(bytes(all(key in self.server.chunks for key in ranks) for ranks in keys))
        return [True, tiers]

    def stats(self) -> list[Any]:
        return [{"Hot": {"num_chunks": len(self.server.chunks)}}]

    def nothing(self, *_: Any) -> list[Any]:
        return []

    abort = release = reject = unstage = describe = nothing


def main(role: str, path: str, *arguments: str) -> None:
    if role == "client":
        print(json.dumps(converse(path, list(arguments))))
        return
    with Sidecar(path, Path(arguments[0]), list(arguments[1:])) as server:
        print("listening", flush=True)
        server.serve_forever()


if __name__ == "__main__":
    main(*sys.argv[1:])
