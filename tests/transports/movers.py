"""Sidecars' arenas with real movers, in processes that can be stopped and killed."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lmcache_core.memory.arena import ArenaAllocator
from lmcache_core.memory.base import MemoryObj
from lmcache_core.mover import Attach, MoverClient, Piece

from tests.fixtures.shared_arena import create_shared_arena

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ROOT / ".transports"
START_S = 60.0


class Mover:
    """A mover's supervisor, and its worker.

    Args:
        socket: Where it listens.
        transports: UCX's, for `UCX_TLS`.
    """

    def __init__(self, socket: Path, transports: str) -> None:
        paths = [PACKAGES, ROOT / "libs/lmcache_core/src", ROOT / "services/mover/src"]
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(map(str, paths)),
            "UCX_TLS": transports,
            "UCX_LOG_LEVEL": "fatal",
        }
        self.process = subprocess.Popen(
            [sys.executable, "-m", "lmcache_mover", "--socket", str(socket)], env=environment
        )

    @property
    def worker(self) -> int:
        """Process id of the worker."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        return int(children.read_text().split()[0])

    def send(self, number: int) -> None:
        """Send a signal to the worker."""
        os.kill(self.worker, number)

    def stop(self) -> None:
        """Kill both."""
        self.process.send_signal(signal.SIGCONT)
        self.process.kill()
        self.process.wait()


class Node:
    """An arena and the client of its mover.

    Args:
        directory: For the mover's socket.
        arena: In shared memory.
    """

    def __init__(self, directory: Path, arena: Path, num_bytes: int, transports: str) -> None:
        self.arena = create_shared_arena(arena, num_bytes)
        self.memory = ArenaAllocator(self.arena.store_view)
        self._socket = directory / "mover.sock"
        self.mover = Mover(self._socket, transports)
        self.make_client()

    def make_client(self) -> None:
        """Make a client that is not connected yet."""
        attach = Attach(str(self.arena.path), self.arena.size, self.arena.generation)
        self.client = MoverClient(self._socket, attach, self.memory)

    def allocate(self, num_bytes: int) -> MemoryObj:
        """Return memory in the arena."""
        memory = self.memory.allocate((num_bytes,), None)
        assert memory is not None, "the arena is full"
        return memory

    def piece_from(self, other: Node, theirs: MemoryObj) -> Piece:
        """Return a piece that copies a peer's memory to new memory here."""
        return Piece(other.address_of(theirs), self.allocate(theirs.get_size()))

    def attend(self) -> None:
        """Let the mover attend to peers from now on."""
        assert self.client.lend(self.allocate(1)) is not None

    def address_of(self, memory: MemoryObj) -> int:
        """Return where peers read memory; there is no loan."""
        address = self.client.lend(memory)
        assert address is not None, "there is no mover"
        self.client.take_back(memory)
        return address

    async def attached(self) -> bytes:
        """Wait for the mover; return its blob."""
        async with asyncio.timeout(START_S):
            while not self.client.blob:
                await asyncio.sleep(0.02)
        return self.client.blob


@contextmanager
def running_node(directory: Path, arena: Path, num_bytes: int, transports: str) -> Iterator[Node]:
    """Run a node; its client is opened and closed by the caller."""
    directory.mkdir()
    node = Node(directory, arena, num_bytes, transports)
    try:
        yield node
    finally:
        node.mover.stop()
        node.arena.lock.release()
