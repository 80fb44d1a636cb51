"""TCP relays before the services, that do what networks do: lose, delay, stop, and turn bits."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
from collections.abc import Sequence

from lmcache_core.concurrency import LoopThread

CONNECT_TIMEOUT_S = 1.0
PIECE_BYTES = 64 << 10
CALL_TIMEOUT_S = 10.0


class Link:
    """One address before one or several replicas, of which a connection gets the next that takes
    it. All but `set_target` in its loop.

    Args:
        seed: Of the bits that are turned.

    Attributes:
        delay_s: How long each piece is kept.
        flip_share: Share of pieces in which one bit is turned.
        num_flips: Bits turned so far.
        num_cut: Connections cut so far.
    """

    def __init__(self, seed: int) -> None:
        self._dice = random.Random(seed)
        self._targets: dict[str, int] = {}
        self._turn = 0
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._flows = asyncio.Event()
        self._flows.set()
        self._listening = socket.create_server(("127.0.0.1", 0), backlog=256)
        self.delay_s = self.flip_share = 0.0
        self.num_flips = self.num_cut = 0

    @property
    def port(self) -> int:
        """Where it listens, from the beginning on."""
        port: int = self._listening.getsockname()[1]
        return port

    @property
    def num_connections(self) -> int:
        """That it passes on now."""
        return len(self._tasks)

    def set_target(self, replica: str, port: int | None) -> None:
        """Say where a replica listens now, or that it does not."""
        targets = {name: at for name, at in self._targets.items() if name != replica}
        self._targets = targets if port is None else targets | {replica: port}

    async def open(self) -> None:
        """Take connections."""
        self._server = await asyncio.start_server(self._accept, sock=self._listening)

    async def close(self) -> None:
        """End all connections."""
        if self._server is not None:
            self._server.close()
        await self.cut()

    async def cut(self) -> None:
        """End the connections of this moment without a word."""
        tasks = list(self._tasks)
        self.num_cut += len(tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def freeze(self) -> None:
        """Let nothing pass."""
        self._flows.clear()

    async def thaw(self) -> None:
        """Let all pass again."""
        self._flows.set()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        there: asyncio.StreamWriter | None = None
        try:
            await self._flows.wait()
            there_reader, there = await self._connect()
            ways = [
                asyncio.create_task(self._pass(reader, there)),
                asyncio.create_task(self._pass(there_reader, writer)),
            ]
            try:
                await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for way in ways:
                    way.cancel()
                await asyncio.gather(*ways, return_exceptions=True)
            await asyncio.sleep(0)
        except asyncio.CancelledError:
            writer.transport.abort()
            if there is not None:
                there.transport.abort()
        except OSError:
            writer.transport.abort()
        finally:
            for end in (writer, there):
                if end is not None:
                    end.close()

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        ports = list(self._targets.values())
        self._turn += 1
        for i in range(len(ports)):
            with contextlib.suppress(OSError, TimeoutError):
                async with asyncio.timeout(CONNECT_TIMEOUT_S):
                    return await asyncio.open_connection(
                        "127.0.0.1", ports[(self._turn + i) % len(ports)]
                    )
        raise OSError("no replica takes a connection")

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(PIECE_BYTES):
                if self.delay_s:
                    await asyncio.sleep(self.delay_s)
                await self._flows.wait()
                if self._dice.random() < self.flip_share:
                    data = self._flipped(data)
                writer.write(data)
                await writer.drain()

    def _flipped(self, data: bytes) -> bytes:
        changed = bytearray(data)
        changed[self._dice.randrange(len(changed))] ^= 1 << self._dice.randrange(8)
        self.num_flips += 1
        return bytes(changed)


class Links:
    """All links, on one loop in a thread of its own.

    Args:
        names: Of them.
        seed: Of the bits that are turned.
    """

    def __init__(self, names: Sequence[str], seed: int) -> None:
        self._loop = LoopThread("chaos-links")
        self.all = {name: Link(seed + i) for i, name in enumerate(names)}

    def open(self) -> None:
        """Let all listen."""
        self._loop.open()
        for link in self.all.values():
            self._loop.run(link.open(), CALL_TIMEOUT_S)

    def close(self) -> None:
        """End everything."""
        for link in self.all.values():
            self._loop.run(link.close(), CALL_TIMEOUT_S)
        self._loop.close()

    def cut(self, name: str) -> None:
        """See `Link.cut`."""
        self._loop.run(self.all[name].cut(), CALL_TIMEOUT_S)

    def freeze(self, name: str) -> None:
        """See `Link.freeze`."""
        self._loop.run(self.all[name].freeze(), CALL_TIMEOUT_S)

    def thaw(self, name: str) -> None:
        """See `Link.thaw`."""
        self._loop.run(self.all[name].thaw(), CALL_TIMEOUT_S)
