"""Hostile bytes at the listener for LMCache clients: malformed headers raise
`CompatRefusedError`, and the service lives.
"""

from __future__ import annotations

import asyncio
import contextlib
import struct

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from lmcache_storage.compat.dialect import DIALECTS, CompatCommand, CompatRefusedError, Request

from tests.fixtures.compat import (
    EXIST,
    GET,
    HEALTH,
    LIST,
    PUT,
    compat_client,
    listening,
    reply_bytes,
    request_bytes,
)
from tests.fixtures.wire import MemoryStore, connected

MAX_VALUE_BYTES = 1 << 20
NUMBERS = st.integers(-(1 << 31), (1 << 31) - 1)

dialects = st.sampled_from(sorted(DIALECTS))
abouts = st.tuples(*[NUMBERS] * 6)
keys = st.binary(max_size=150) | st.text(max_size=30).map(str.encode)
commands = st.sampled_from([PUT, GET, EXIST, LIST, HEALTH]) | NUMBERS
lengths = st.integers(0, 300) | st.integers(MAX_VALUE_BYTES - 1, MAX_VALUE_BYTES + 1) | NUMBERS


@given(dialects, st.data())
def test_arbitrary_bytes_are_refused_or_a_request_within_its_bounds(
    name: str, data: st.DataObject
) -> None:
    dialect = DIALECTS[name]
    header = data.draw(st.binary(min_size=dialect.request.size, max_size=dialect.request.size))
    try:
        request = dialect.parse(header, MAX_VALUE_BYTES)
    except CompatRefusedError:
        return
    _check(request)


@given(dialects, commands, keys, lengths, abouts)
@example("v0.2", PUT, b"k", (1 << 31) - 1, (0,) * 6)
@example("v0.3+", PUT, b" \xc3", 1, (0,) * 6)
@example("v0.2", GET, b"\0\0\0\0key", 0, (0,) * 6)
def test_any_header_reads_as_what_was_written_or_is_refused(
    name: str, command: int, key: bytes, num_bytes: int, about: tuple[int, ...]
) -> None:
    header = request_bytes(name, command, key, num_bytes, about)
    assert struct.unpack_from("<2i", header) == (command, num_bytes)
    if _is_wrong(command, key, num_bytes):
        with pytest.raises(CompatRefusedError):
            DIALECTS[name].parse(header, MAX_VALUE_BYTES)
        return
    request = DIALECTS[name].parse(header, MAX_VALUE_BYTES)
    _check(request)
    assert (request.command, request.about) == (command, about)
    assert request.num_bytes == (num_bytes if command == PUT else 0)
    if command != HEALTH:
        assert request.key.encode() == key.ljust(150).strip(b" ")


def _check(request: Request) -> None:
    assert request.command in set(CompatCommand)
    assert (
        (0 < request.num_bytes <= MAX_VALUE_BYTES)
        if request.command is CompatCommand.PUT
        else request.num_bytes == 0
    )
    assert bool(request.key) != (request.command is CompatCommand.HEALTH)


def _is_wrong(command: int, key: bytes, num_bytes: int) -> bool:
    if command not in (PUT, GET, EXIST, HEALTH):
        return True
    if command == PUT and not 0 < num_bytes <= MAX_VALUE_BYTES:
        return True
    if command == HEALTH:
        return False
    try:
        text = key.decode().strip(" ")
    except UnicodeDecodeError:
        return True
    return not text or not text.isprintable()


steps = st.one_of(
    st.binary(max_size=400),
    st.tuples(commands, keys, st.integers(-2, 300), st.binary(max_size=300)).map(
        lambda step: request_bytes("v0.3+", step[0], step[1], step[2]) + step[3]
    ),
    st.tuples(st.text(min_size=1, max_size=3), st.binary(min_size=1, max_size=300)).map(
        lambda step: request_bytes("v0.3+", PUT, step[0].encode(), len(step[1])) + step[1]
    ),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(steps, max_size=6), st.integers(1, 500))
def test_whatever_a_client_sends_the_others_are_served_and_no_memory_is_lost(
    sent: list[bytes], piece: int
) -> None:
    asyncio.run(_survives(sent, piece))


async def _survives(sent: list[bytes], piece: int) -> None:
    limits = {"max_value_bytes": MAX_VALUE_BYTES, "max_receiving_bytes": MAX_VALUE_BYTES}
    async with (
        listening(store=MemoryStore(2 << 20), **limits) as listener,
        compat_client(listener.port) as other,
        connected(listener.port) as hostile,
    ):
        await other.put("mine", b"value")
        assert await other.exists("mine")
        for data in sent:
            for at in range(0, len(data), piece):
                with contextlib.suppress(ConnectionError):
                    await hostile.send(data[at : at + piece])
        assert await other.ask(HEALTH) == reply_bytes("v0.3+", 200)
        assert await other.exists("mine")
