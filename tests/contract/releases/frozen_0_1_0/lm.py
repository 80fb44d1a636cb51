"""lm:// as release 0.1.0 speaks it, from docs/protocols.md. Frozen: see README.md.

`lm.py client PORT [CAPABILITY…]` stores and fetches; `lm.py server [CAPABILITY…]` serves a dictionary, and first says at which port.
"""

from __future__ import annotations

import contextlib
import json
import socket
import socketserver
import struct
import sys
from typing import Any

import msgspec
import xxhash
from formats import canonical_key, chunk_hash_of, key_of, payload_of, read_record, record_of

HELLO, HELLO_OK, CONTAINS, CONTAINS_OK, GET, CHUNK, GET_END, PUT, PUT_OK, REMOVE, REMOVE_OK, PING, PONG, ERROR, _, CONTEXT = range(1, 17)
LANE = 18
NUM_FIELDS = {CONTAINS: 1, GET: 3, PUT: 0, REMOVE: 1, PING: 0, CONTEXT: 2, LANE: 2}
NUM_ANSWERED = {CONTAINS_OK: 1, CHUNK: 1, GET_END: 1, PUT_OK: 2, REMOVE_OK: 1, PONG: 0}
MAX_META_BYTES, MAX_BATCH, MAX_LANES, HASH_BYTES = 1 << 20, 128, 256, 32
TIMEOUT_S = 10.0


def send(to: socket.socket, kind: int, number: int, meta: list[Any], blob: bytes = b"") -> None:
    packed = msgspec.msgpack.encode(meta)
    first, last = struct.pack("<4sB3xQI", b"LMF1", kind, number, len(packed)), struct.pack("<Q", len(blob))
    checksum = struct.pack("<I", xxhash.xxh3_64_intdigest(first + last) & 0xFFFFFFFF)
    to.sendall(first + checksum + last + packed + blob)


def receive(source: socket.socket) -> tuple[int, int, list[Any], bytes] | None:
    head = exactly(source, 32)
    if not head:
        return None
    magic, kind, reserved, number, meta_bytes, checksum, blob_bytes = struct.unpack("<4sB3sQIIQ", head)
    assert (magic, reserved) == (b"LMF1", bytes(3)), head
    assert checksum == xxhash.xxh3_64_intdigest(head[:20] + head[24:]) & 0xFFFFFFFF, head
    assert 0 < meta_bytes <= MAX_META_BYTES, head
    assert not blob_bytes or kind in (CHUNK, PUT), head
    meta = msgspec.msgpack.decode(exactly(source, meta_bytes))
    return kind, number, meta, exactly(source, blob_bytes)


def exactly(source: socket.socket, num_bytes: int) -> bytes:
    data = bytearray()
    while len(data) < num_bytes and (piece := source.recv(num_bytes - len(data))):
        data += piece
    assert len(data) in (0, num_bytes), "the connection ended in the middle of a frame"
    return bytes(data)


class Client:
    """Says one thing after the other, and strictly reads what comes."""

    def __init__(self, port: int, capabilities: list[str]) -> None:
        self.connection = socket.create_connection(("127.0.0.1", port), TIMEOUT_S)
        self.number = 1
        self.agreed: list[str] = []
        send(self.connection, HELLO, 1, [1, 1, capabilities, None, "release-0.1.0"])
        kind, number, meta = self.read()[:3]
        assert (kind, number, meta[0]) == (HELLO_OK, 1, 1), meta
        self.agreed, self.server, self.max_batch = meta[1], meta[2], meta[3]
        assert set(self.agreed) <= set(capabilities), meta
        assert isinstance(self.server, str)
        assert 0 < self.max_batch <= MAX_BATCH
        self.has_lane = False

    def names(self, names: list[str]) -> list[list[Any]]:
        """The first spelled in full, the others as hashes in a lane."""
        if not self.has_lane:
            self.has_lane = True
            send(self.connection, LANE, 0, [0, ["vllm", "test/model", 1, 0, ""]])
        hashes = b"".join(bytes.fromhex(chunk_hash_of(name)) for name in names[1:])
        return [[None, key_of(names[0])], [0, hashes]]

    def read(self) -> tuple[int, int, list[Any], bytes]:
        frame = receive(self.connection)
        assert frame is not None, "the server has hung up"
        kind, _, meta, _ = frame
        assert kind in (HELLO_OK, ERROR) or len(meta) == NUM_ANSWERED[kind], f"{kind} has fields that release 0.1.0 does not know: {meta}"
        return frame

    def ask(self, kind: int, meta: list[Any], blob: bytes = b"") -> list[Any]:
        self.number += 1
        if "context" in self.agreed:
            send(self.connection, CONTEXT, self.number, ["of-release-0.1.0", ""])
        send(self.connection, kind, self.number, meta, blob)
        answer = self.read()
        assert answer[:2] == (kind + 1, self.number), answer
        return answer[2]

    def get(self, names: list[str], prefix_only: bool = False) -> tuple[list[int], list[list[Any]]]:
        """Places of the chunks that came, and the misses."""
        named = self.names(names)
        self.number += 1
        send(self.connection, GET, self.number, [named, prefix_only, None])
        came = []
        while True:
            kind, number, meta, blob = self.read()
            assert number == self.number
            if kind == GET_END:
                return came, meta[0]
            assert kind == CHUNK
            assert read_record(blob) == (key_of(names[meta[0]]), payload_of(names[meta[0]]))
            came.append(meta[0])


def converse(port: int, capabilities: list[str]) -> dict[str, Any]:
    """What a client wants of a server; what came of it."""
    client = Client(port, capabilities)
    names = ["one", "two", "three"]
    said: dict[str, Any] = {"ping": client.ask(PING, []), "put": [client.ask(PUT, [], record_of(name))[0] for name in ("one", "two")]}
    damaged = record_of("three")
    said["damaged"] = client.ask(PUT, [], damaged[:-1] + bytes([damaged[-1] ^ 1]))
    said["contains"] = client.ask(CONTAINS, [client.names(names)])
    said["get"] = client.get(["one", "three", "two"])
    said["prefix"] = client.get(["one", "three", "two"], prefix_only=True)
    other = Client(port, capabilities)
    said["other"] = other.get(["two"])
    said["remove"] = client.ask(REMOVE, [client.names(names)])
    said["after"] = other.ask(CONTAINS, [other.names(names)])
    said["agreed"] = client.agreed
    return said


class Store(socketserver.ThreadingTCPServer):
    daemon_threads = True
    capabilities: list[str]
    records: dict[bytes, bytes]


class Connection(socketserver.BaseRequestHandler):
    """Serves what release 0.1.0 knows, and ends the connection at anything else."""

    server: Store
    lanes: list[tuple[str, str, int, int, str]]

    def handle(self) -> None:
        with contextlib.suppress(ConnectionError):
            self.serve()

    def serve(self) -> None:
        self.request.settimeout(TIMEOUT_S)
        frame = receive(self.request)
        if frame is None:
            return
        kind, last, meta, _ = frame
        assert kind == HELLO, kind
        assert meta[0] <= 1 <= meta[1], meta
        agreed = [name for name in meta[2] if name in self.server.capabilities]
        send(self.request, HELLO_OK, last, [1, agreed, "frozen-0", MAX_BATCH])
        context, self.lanes = None, []
        while (frame := receive(self.request)) is not None:
            kind, number, meta, blob = frame
            assert len(meta) == NUM_FIELDS[kind], f"{kind} has fields that release 0.1.0 does not know: {meta}"
            if kind == LANE:
                assert (number, meta[0], context) == (0, len(self.lanes), None)
                assert len(self.lanes) < MAX_LANES
                fmt, model, world_size, rank, group = meta[1]
                self.lanes.append((fmt, model, world_size, rank, group))
                continue
            assert number > last, f"{number} behind {last}"
            if kind == CONTEXT:
                assert "context" in agreed, "CONTEXT, of which HELLO_OK has said nothing"
                context = number
                continue
            assert context in (None, number), f"CONTEXT {context} before {number}"
            context, last = None, number
            self.answer(kind, number, meta, blob)

    def keys(self, named: list[list[Any]]) -> list[bytes]:
        keys: list[bytes] = []
        for lane, data in named:
            if lane is None:
                keys.append(data)
            else:
                assert not len(data) % HASH_BYTES, data
                hashes = [data[at : at + HASH_BYTES].hex() for at in range(0, len(data), HASH_BYTES)]
                keys += [canonical_key(chunk_hash, *self.lanes[lane]) for chunk_hash in hashes]
        assert len(keys) <= MAX_BATCH, len(keys)
        return keys

    def answer(self, kind: int, number: int, meta: list[Any], blob: bytes) -> None:
        records = self.server.records
        if kind == PING:
            send(self.request, PONG, number, [])
        elif kind == PUT:
            try:
                records[read_record(blob)[0]] = blob
                send(self.request, PUT_OK, number, [True, ""])
            except ValueError:
                send(self.request, PUT_OK, number, [False, "corrupt"])
        elif kind == CONTAINS:
            send(self.request, CONTAINS_OK, number, [[key in records for key in self.keys(meta[0])]])
        elif kind == REMOVE:
            send(self.request, REMOVE_OK, number, [sum(records.pop(key, None) is not None for key in self.keys(meta[0]))])
        else:
            named, prefix_only, _ = meta
            misses = []
            for place, key in enumerate(self.keys(named)):
                if key in records:
                    send(self.request, CHUNK, number, [place], records[key])
                else:
                    misses.append([place, "never_stored"])
                    if prefix_only:
                        break
            send(self.request, GET_END, number, [misses])


def main(role: str, *arguments: str) -> None:
    if role == "client":
        print(json.dumps(converse(int(arguments[0]), list(arguments[1:]))))
        return
    with Store(("127.0.0.1", 0), Connection) as server:
        server.capabilities, server.records = list(arguments), {}
        print(server.server_address[1], flush=True)
        server.serve_forever()


if __name__ == "__main__":
    main(*sys.argv[1:])
