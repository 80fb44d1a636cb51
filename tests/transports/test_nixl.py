"""Reads through real movers, whose peers are stopped and killed in the middle."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import secrets
import signal
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from lmcache_core.errors import UnavailableError
from lmcache_core.memory.base import MemoryObj
from lmcache_core.mover import Piece

from tests.transports.movers import Node, running_node
from tests.transports.storm import Fault, Storm

MIB = 1 << 20
ARENA_BYTES = 128 * MIB
PIECE_BYTES = 4 * MIB
NUM_PIECES = 8
NUM_EDITS = 40
LONG_S = 120.0
"""Only a hang lasts so long."""
READS = int(os.environ.get("READS", "60"))
"""In the storm."""


@pytest.fixture(scope="module", params=["tcp", "tcp,cma"])
def nodes(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Node, Node]]:
    """One that reads, one that is read from."""
    directory = tmp_path_factory.mktemp("movers")
    with (
        tempfile.TemporaryDirectory(dir="/dev/shm") as shared,
        running_node(directory / "a", Path(shared) / "a", ARENA_BYTES, request.param) as reader,
        running_node(directory / "b", Path(shared) / "b", ARENA_BYTES, request.param) as peer,
    ):
        yield reader, peer


@pytest.fixture
async def opened(nodes: tuple[Node, Node]) -> AsyncIterator[tuple[Node, Node]]:
    """Both, connected to their movers."""
    async with AsyncExitStack() as stack:
        for node in nodes:
            node.make_client()
            node.client.open()
            stack.push_async_callback(node.client.close)
        for node in nodes:
            await node.attached()
        nodes[1].attend()
        yield nodes


def filled(node: Node) -> list[MemoryObj]:
    """Return memory of a node with random bytes."""
    made = [node.allocate(PIECE_BYTES) for _ in range(NUM_PIECES)]
    for memory in made:
        memory.byte_array[:] = secrets.token_bytes(PIECE_BYTES)
    return made


def release(*memories: MemoryObj) -> None:
    for memory in memories:
        memory.ref_count_down()


async def test_bytes_arrive(opened: tuple[Node, Node]) -> None:
    reader, peer = opened
    theirs = filled(peer)
    pieces = [reader.piece_from(peer, memory) for memory in theirs]
    await reader.client.read(await peer.attached(), pieces, LONG_S)
    for piece, memory in zip(pieces, theirs, strict=True):
        assert piece.memory.byte_array == memory.byte_array
    release(*theirs, *(piece.memory for piece in pieces))
    assert reader.memory.used_bytes == 0


async def test_memory_of_a_read_from_a_stopped_peer_comes_back(opened: tuple[Node, Node]) -> None:
    reader, peer = opened
    theirs = filled(peer)
    pieces = [reader.piece_from(peer, memory) for memory in theirs]
    num_lives = reader.client.num_lives
    peer.mover.send(signal.SIGSTOP)
    try:
        began = time.monotonic()
        with pytest.raises(UnavailableError, match="in time"):
            await reader.client.read(await peer.attached(), pieces, 0.2)
        assert time.monotonic() - began < LONG_S
        release(*(piece.memory for piece in pieces))
        assert reader.client.given_up_bytes == reader.memory.used_bytes == NUM_PIECES * PIECE_BYTES
        async with asyncio.timeout(LONG_S):
            while reader.client.given_up_bytes:
                await asyncio.sleep(0.02)
    finally:
        peer.mover.send(signal.SIGCONT)
    assert reader.memory.used_bytes == 0
    assert reader.client.num_lives == num_lives, "the peer's agent was destroyed, not the mover"
    release(*theirs)


async def test_a_blob_that_makes_no_sense_is_an_error(opened: tuple[Node, Node]) -> None:
    reader, _ = opened
    memory = reader.allocate(4096)
    with pytest.raises(UnavailableError):
        await reader.client.read(b"no blob", [Piece(4096, memory)], LONG_S)
    release(memory)


@pytest.mark.timeout(60 + 10 * READS)
async def test_no_fault_writes_to_memory_that_is_used_again(opened: tuple[Node, Node]) -> None:
    outcome = await Storm(*opened, seed=1).rage(READS, hurt_share=0.2)
    print(outcome)
    assert outcome.num_wrong == outcome.num_late == 0
    assert outcome.overwritten_bytes == outcome.lost_bytes == 0


@pytest.mark.parametrize("nodes", ["tcp"], indirect=True)
async def test_without_ownership_memory_is_overwritten(opened: tuple[Node, Node]) -> None:
    storm = Storm(*opened, seed=1, is_owned=False)
    async with asyncio.timeout(LONG_S):
        while not storm.outcome.overwritten_bytes:
            await storm.read(Fault("peer", signal.SIGSTOP))
    print(await storm.settle())


async def test_an_edited_blob_changes_nothing_but_what_it_reads_into(
    opened: tuple[Node, Node],
) -> None:
    reader, peer = opened
    theirs, *others = filled(peer)
    lent = bytes(theirs.byte_array)
    kept = reader.allocate(PIECE_BYTES)
    kept.byte_array[:] = held = secrets.token_bytes(PIECE_BYTES)
    dice = random.Random(1)
    for _ in range(NUM_EDITS):
        await reader.attached()
        blob = bytearray(await peer.attached())
        for _ in range(dice.choice((1, 1, 8))):
            blob[dice.randrange(len(blob))] = dice.randrange(256)
        piece = reader.piece_from(peer, theirs)
        with contextlib.suppress(UnavailableError):
            await reader.client.read(bytes(blob), [piece], 0.2)
        release(piece.memory)
        assert bytes(kept.byte_array) == held
    async with asyncio.timeout(LONG_S):
        while reader.client.given_up_bytes:
            await asyncio.sleep(0.02)
    assert bytes(theirs.byte_array) == lent
    await reader.attached()
    piece = reader.piece_from(peer, theirs)
    await reader.client.read(await peer.attached(), [piece], LONG_S)
    assert piece.memory.byte_array == theirs.byte_array, "it reads again"
    release(piece.memory, kept, theirs, *others)
    assert reader.memory.used_bytes == 0
