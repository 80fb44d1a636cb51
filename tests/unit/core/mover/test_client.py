"""Whose memory it is: of a read that ends, is given up, or whose mover dies or talks nonsense."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
from lmcache_core.errors import UnavailableError
from lmcache_core.memory.arena import ArenaAllocator
from lmcache_core.memory.base import MemoryObj
from lmcache_core.mover import Attach, Attached, MoverClient, Piece, client
from lmcache_core.mover.messages import (
    MAX_PACKET_BYTES,
    Cancel,
    Quiet,
    Read,
    Report,
    Request,
    Serve,
)

ARENA_BYTES = 1 << 20
SIZE = 4096
HANG_S = 60.0
ATTACH = Attach("/volume/kv.arena", ARENA_BYTES, 7)
ATTACHED = Attached(b"reach me so", 1 << 40)


class FakeMover:
    """The other end of the socket, played by a test.

    Args:
        path: Where it listens.
    """

    def __init__(self, path: Path) -> None:
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(str(path))
        self._listener.listen(1)
        self._listener.setblocking(False)
        self._connection: socket.socket | None = None

    async def live(self) -> Attach:
        """Accept a connection and attach."""
        self._connection, _ = await asyncio.get_running_loop().sock_accept(self._listener)
        attach = await self.heard()
        assert isinstance(attach, Attach)
        self.say(ATTACHED)
        return attach

    async def heard(self) -> Request | None:
        """Return the next request; None once the client wants the mover's end."""
        assert self._connection is not None
        async with asyncio.timeout(HANG_S):
            loop = asyncio.get_running_loop()
            packet = await loop.sock_recv(self._connection, MAX_PACKET_BYTES)
        return msgspec.msgpack.decode(packet, type=Request) if packet else None

    def say(self, report: Report | bytes) -> None:
        """Send a report, or what is none."""
        assert self._connection is not None
        packet = report if isinstance(report, bytes) else msgspec.msgpack.encode(report)
        self._connection.send(packet)

    def die(self) -> None:
        """End the connection, as the supervisor does once the worker is dead."""
        if self._connection is not None:
            self._connection.close()

    def close(self) -> None:
        self.die()
        self._listener.close()


class Setting:
    """A client and its mover, attached; the arena."""

    def __init__(self, mover: FakeMover, mover_client: MoverClient, arena: ArenaAllocator) -> None:
        self.mover, self.client, self.arena = mover, mover_client, arena

    def memory(self, num_bytes: int = SIZE) -> MemoryObj:
        made = self.arena.allocate((num_bytes,), None)
        assert made is not None
        return made

    def begin(self, memory: MemoryObj, timeout_s: float = HANG_S) -> asyncio.Task[None]:
        """Begin a read whose caller lets go of the memory when it ends."""

        async def read() -> None:
            try:
                await self.client.read(b"peer", [Piece(5, memory)], timeout_s)
            finally:
                memory.ref_count_down()

        return asyncio.create_task(read())

    async def asked(self) -> Read:
        request = await self.mover.heard()
        assert isinstance(request, Read)
        return request

    async def freed(self) -> None:
        """Wait until nothing is the mover's."""
        async with asyncio.timeout(HANG_S):
            while self.arena.used_bytes:
                await asyncio.sleep(0)


@pytest.fixture
async def setting(tmp_path: Path) -> AsyncIterator[Setting]:
    mover = FakeMover(tmp_path / "socket")
    arena = ArenaAllocator.anonymous(ARENA_BYTES)
    mover_client = MoverClient(tmp_path / "socket", ATTACH, arena)
    mover_client.open()
    assert await mover.live() == ATTACH
    made = Setting(mover, mover_client, arena)
    async with asyncio.timeout(HANG_S):
        while not mover_client.blob:
            await asyncio.sleep(0)
    yield made
    mover.die()
    await mover_client.close()
    mover.close()


async def test_a_filled_read_returns_its_memory(setting: Setting) -> None:
    memory = setting.memory()
    reading = setting.begin(memory)
    request = await setting.asked()
    assert (request.blob, request.pieces) == (b"peer", ((5, memory.metadata.address, SIZE),))
    setting.mover.say(Quiet(request.id))
    await reading
    assert setting.arena.used_bytes == 0


async def test_a_failed_read_says_why(setting: Setting) -> None:
    reading = setting.begin(setting.memory())
    setting.mover.say(Quiet((await setting.asked()).id, "no such peer"))
    with pytest.raises(UnavailableError, match="no such peer"):
        await reading
    assert setting.arena.used_bytes == 0


@pytest.mark.parametrize("is_cancelled", [False, True], ids=["deadline", "cancelled"])
async def test_memory_of_a_read_that_is_given_up_is_the_movers_until_it_is_quiet(
    setting: Setting, is_cancelled: bool
) -> None:
    reading = setting.begin(setting.memory(), HANG_S if is_cancelled else 0.0)
    request = await setting.asked()
    if is_cancelled:
        reading.cancel()
    with pytest.raises(asyncio.CancelledError if is_cancelled else UnavailableError):
        await reading
    assert await setting.mover.heard() == Cancel(request.id)
    assert setting.arena.used_bytes == setting.client.given_up_bytes == SIZE
    setting.mover.say(Quiet(request.id, "given up"))
    await setting.freed()
    assert setting.client.given_up_bytes == 0


async def test_the_movers_death_ends_reads_and_returns_all_memory(setting: Setting) -> None:
    given_up, waiting = setting.begin(setting.memory(), 0.0), setting.begin(setting.memory())
    with pytest.raises(UnavailableError):
        await given_up
    setting.mover.die()
    with pytest.raises(UnavailableError, match="has ended"):
        await waiting
    await setting.freed()


async def test_a_mover_that_does_not_let_go_is_ended(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "QUIET_S", 0.0)
    reading = setting.begin(setting.memory(), 0.0)
    await setting.asked()
    with pytest.raises(UnavailableError):
        await reading
    while await setting.mover.heard() is not None:
        pass  # its Cancel
    assert setting.arena.used_bytes == SIZE, "it is not dead yet"
    with pytest.raises(UnavailableError, match="no mover"):
        await setting.client.read(b"peer", [Piece(5, setting.memory())], HANG_S)
    setting.mover.die()
    await setting.mover.live()  # the next one


async def test_memory_that_may_be_given_up_is_bounded(setting: Setting) -> None:
    half = ARENA_BYTES // client.GIVEN_UP_SHARE // 2
    for _ in range(2):
        with pytest.raises(UnavailableError, match="in time"):
            await setting.begin(setting.memory(half), 0.0)
    with pytest.raises(UnavailableError, match="too much memory"):
        await setting.begin(setting.memory())
    assert setting.client.given_up_bytes == 2 * half


@pytest.mark.parametrize("report", [b"\xc1", b"\x93", Quiet(99), ATTACHED, Quiet(0)], ids=str)
async def test_a_mover_that_talks_nonsense_is_ended(
    setting: Setting, report: Report | bytes
) -> None:
    reading = setting.begin(setting.memory())
    await setting.asked()
    setting.mover.say(report)
    assert await setting.mover.heard() is None
    assert setting.arena.used_bytes == SIZE, "it is not dead yet"
    setting.mover.die()
    with pytest.raises(UnavailableError):
        await reading
    assert setting.arena.used_bytes == 0


async def test_a_mover_that_does_not_listen_is_asked_no_more(setting: Setting) -> None:
    errors = set()
    async with asyncio.timeout(HANG_S):
        while "takes no requests" not in str(errors):
            try:
                await setting.begin(setting.memory(1), 0.0)
            except UnavailableError as exc:
                errors.add(str(exc))
    assert not setting.client.blob
    setting.mover.die()
    await setting.freed()


async def test_closing_waits_for_the_end(setting: Setting) -> None:
    reading = setting.begin(setting.memory())
    await setting.asked()
    closing = asyncio.create_task(setting.client.close())
    assert await setting.mover.heard() is None
    assert not closing.done()
    assert setting.arena.used_bytes == SIZE
    setting.mover.die()
    await closing
    with pytest.raises(UnavailableError):
        await reading
    assert setting.arena.used_bytes == 0


async def test_a_part_of_the_arena_is_lent_and_attended_to(setting: Setting) -> None:
    room = ARENA_BYTES // client.LENT_SHARE
    memory, more, stranger = setting.memory(room), setting.memory(), ArenaAllocator.anonymous(4096)
    foreign = stranger.allocate((1,), None)
    assert foreign is not None
    assert setting.client.lend(foreign) is None, "it is not in the arena"
    assert setting.client.lend(memory) == ATTACHED.address + memory.metadata.address
    assert await setting.mover.heard() == Serve(True)
    assert setting.client.lend(more) is None, "too much is lent"
    setting.client.take_back(memory)
    assert await setting.mover.heard() == Serve(False)
    assert setting.client.lend(more) == ATTACHED.address + more.metadata.address
    assert await setting.mover.heard() == Serve(True)
    setting.mover.die()
    await setting.mover.live()
    assert await setting.mover.heard() == Serve(True), "the next one attends, too"
    for each in (memory, more, foreign):
        each.ref_count_down()
