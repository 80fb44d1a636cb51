"""Proves that two machines read from each other by NIXL, with a mover on each:

    one:   UCX_NET_DEVICES=mlx5_0:1 UCX_TLS=rc,ud python -m tests.transports.pair serve --port 9000
    other: UCX_NET_DEVICES=mlx5_0:1 UCX_TLS=rc,ud python -m tests.transports.pair read HOST:9000

The second prints GB/s, gives up reads in the middle and uses their memory again, and ends with 1
if one byte is wrong. It needs this repository, NIXL in `.transports` (`make test-transports`), and
the port on a network where everyone is trusted.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import hashlib
import json
import os
import secrets
import statistics
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

from lmcache_core.errors import UnavailableError
from lmcache_core.memory.base import MemoryObj
from lmcache_core.mover import Piece

from tests.transports.movers import Node, running_node

PIECE_BYTES, NUM_PIECES = 4 << 20, 16
ARENA_BYTES = 4 * NUM_PIECES * PIECE_BYTES
NUM_READS, NUM_GIVEN_UP = 50, 200
READ_S = 30.0
STAMP = bytes([0xA5]) * PIECE_BYTES


@contextmanager
def node() -> Iterator[Node]:
    """An arena with a mover, on the devices and transports of the environment."""
    with (
        tempfile.TemporaryDirectory() as directory,
        tempfile.TemporaryDirectory(dir="/dev/shm") as shared,
        running_node(
            Path(directory) / "mover", Path(shared) / "a", ARENA_BYTES, os.environ["UCX_TLS"]
        ) as made,
    ):
        yield made


async def serve(port: int) -> None:
    """Lend random bytes, and tell over HTTP where they lie, until interrupted."""
    with node() as mine:
        mine.client.open()
        blob = await mine.attached()
        mine.attend()
        pieces = []
        for _ in range(NUM_PIECES):
            memory = mine.allocate(PIECE_BYTES)
            data = secrets.token_bytes(PIECE_BYTES)
            memory.byte_array[:] = data
            pieces.append([mine.address_of(memory), hashlib.sha256(data).hexdigest()])
        told = json.dumps({"blob": base64.b64encode(blob).decode(), "pieces": pieces}).encode()

        class Teller(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(200)
                self.end_headers()
                self.wfile.write(told)

        with HTTPServer(("", port), Teller) as server:
            print(f"serving on port {server.server_port}", flush=True)
            await asyncio.to_thread(server.serve_forever)


async def read(place: str) -> bool:
    """Read from the other machine; return whether every byte was right."""
    with urllib.request.urlopen(f"http://{place}", timeout=READ_S) as response:
        told: dict[str, Any] = json.loads(response.read())
    blob, theirs = base64.b64decode(told["blob"]), told["pieces"]
    with node() as mine:
        mine.client.open()
        await mine.attached()
        rates, num_wrong = [], 0
        for number in range(NUM_READS):
            pieces = [Piece(address, mine.allocate(PIECE_BYTES)) for address, _ in theirs]
            began = time.perf_counter()
            await mine.client.read(blob, pieces, READ_S)
            rates.append(NUM_PIECES * PIECE_BYTES / (time.perf_counter() - began) / 1e9)
            for piece, (_, digest) in zip(pieces, theirs, strict=True):
                num_wrong += hashlib.sha256(piece.memory.byte_array).hexdigest() != digest
                piece.memory.ref_count_down()
            show(f"read {number + 1} of {NUM_READS}")
        print(f"\n{statistics.median(rates):.1f} GB/s, {num_wrong} chunks with a wrong byte")
        overwritten = await give_up(mine, blob, [address for address, _ in theirs])
        print(f"\n{overwritten} bytes of memory that was used again were overwritten")
        await mine.client.close()
    return not num_wrong and not overwritten


async def give_up(mine: Node, blob: bytes, addresses: list[int]) -> int:
    """Give up reads in the middle, and count what they write to memory that is used again."""
    overwritten = 0
    for number in range(NUM_GIVEN_UP):
        await mine.attached()
        pieces = [Piece(address, mine.allocate(PIECE_BYTES)) for address in addresses]
        with suppress(UnavailableError):
            await mine.client.read(blob, pieces, 0.001 * (number % 10))
        for piece in pieces:
            piece.memory.ref_count_down()
        taken: list[MemoryObj] = []
        while (memory := mine.memory.allocate((PIECE_BYTES,), None)) is not None:
            memory.byte_array[:] = STAMP
            taken.append(memory)
        await asyncio.sleep(0.02)
        for memory in taken:
            overwritten += PIECE_BYTES - bytes(memory.byte_array).count(STAMP[:1])
            memory.ref_count_down()
        show(f"gave up {number + 1} of {NUM_GIVEN_UP}")
        while mine.client.given_up_bytes:
            await asyncio.sleep(0.01)
    return overwritten


def show(text: str) -> None:
    """Show progress in one line."""
    print(f"\r{text}", end="", flush=True)


def main() -> int:
    """Serve, or read."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    todo = parser.add_subparsers(dest="todo", required=True)
    todo.add_parser("serve").add_argument("--port", type=int, default=9000)
    todo.add_parser("read").add_argument("place", metavar="HOST:PORT")
    arguments = parser.parse_args()
    if "UCX_TLS" not in os.environ:
        parser.error("set UCX_TLS, for instance to rc,ud, and UCX_NET_DEVICES to the device")
    if arguments.todo == "serve":
        asyncio.run(serve(arguments.port))
    return 0 if asyncio.run(read(arguments.place)) else 1


if __name__ == "__main__":
    sys.exit(main())
