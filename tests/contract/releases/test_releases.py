"""Each side of each protocol works with the other side as it was at a release, byte for byte, in
both directions.

`record.py` records a release when it is tagged. What is recorded now is always
replayed, so that the recorder is known to work. Only HELLO and REST bodies may have grown since a
recording.
"""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from lmcache_core.lookup import LookupClient
from lmcache_core.p2p import BrokerClient
from lmcache_core.wire.frames import (
    HEADER_BYTES,
    FrameHeader,
    FrameType,
    build_header,
    parse_header,
)

from tests.contract.releases import conversations as talks
from tests.contract.releases.record import record
from tests.contract.releases.tape import (
    RECORDED,
    Exchange,
    Player,
    ask_lm,
    lm_server,
    read_message,
    tape_of,
    unix_server,
)
from tests.fixtures.service_process import running_service
from tests.fixtures.shared_arena import create_shared_arena
from tests.fixtures.sidecar import running_socket
from tests.fixtures.wire import MemoryStore, client_of, serving
from tests.suites.chunks import make_chunk

REST = ("lookup", "broker")
FUTURE = "from_the_future"


@pytest.fixture(scope="module")
def recorded_now(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recorded") / "now"
    record(folder)
    return folder


@pytest.fixture(params=[*RECORDED, None], ids=[*(path.name for path in RECORDED), "now"])
def release(request: pytest.FixtureRequest, recorded_now: Path) -> Path:
    return recorded_now if request.param is None else request.param


def meta_of(frame: bytes) -> Any:
    return msgspec.msgpack.decode(
        frame[HEADER_BYTES : HEADER_BYTES + parse_header(frame[:HEADER_BYTES]).meta_bytes]
    )


def with_surplus(frame: bytes, surplus: list[object]) -> bytes:
    """Return a HELLO or HELLO_OK with unknown fields appended."""
    return with_meta(frame, [*meta_of(frame), *surplus])


def with_meta(frame: bytes, fields: list[object]) -> bytes:
    header, meta = parse_header(frame[:HEADER_BYTES]), msgspec.msgpack.encode(fields)
    return build_header(FrameHeader(header.type, header.correlation_id, len(meta), 0)) + meta


def is_same_hello(old: list[Any], new: list[Any]) -> bool:
    """Fields and capabilities may have come; the others are as they were."""
    return (new[:2], new[3 : len(old)]) == (old[:2], old[3:]) and set(old[2]) <= set(new[2])


@pytest.mark.parametrize("surplus", [[], ["new", {"more": 1}]])
async def test_an_old_lm_client_is_served(release: Path, surplus: list[object]) -> None:
    tape = tape_of(release, "lm")
    async with serving(MemoryStore(), name=talks.SERVER) as server, asyncio.timeout(20):
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        for exchange in tape:
            said, answered = (
                bytes.fromhex(exchange["said"]),
                [bytes.fromhex(answer) for answer in exchange["answered"]],
            )
            is_hello = said[4] == FrameType.HELLO
            got = await ask_lm(reader, writer, with_surplus(said, surplus) if is_hello else said)
            if is_hello:
                old, new = meta_of(answered[0]), meta_of(got[0])
                assert new[: len(old)] == old
            else:
                assert got == answered
        writer.close()


@pytest.mark.parametrize("surplus", [[], ["new", {"more": 1}]])
async def test_an_old_lm_server_is_understood(release: Path, surplus: list[object]) -> None:
    left = tape_of(release, "lm")

    def answer(header: FrameHeader, frame: bytes) -> list[bytes]:
        exchange = left.pop(0)
        said, answered = (
            bytes.fromhex(exchange["said"]),
            [bytes.fromhex(each) for each in exchange["answered"]],
        )
        if header.type is FrameType.HELLO:
            assert is_same_hello(meta_of(said), meta_of(frame))
            return [with_surplus(answered[0], surplus)]
        assert frame == said
        return answered

    store = MemoryStore()
    async with (
        lm_server(answer) as port,
        client_of(port, name=talks.CLIENT) as client,
        asyncio.timeout(20),
    ):
        assert await talks.talk_lm(client, store.arena) == talks.LM_OUTCOME
    store.arena.check_empty()
    assert not left


@pytest.mark.parametrize("surplus", [[], ["new", {"more": 1}]])
def test_an_old_socket_client_is_served(
    release: Path, surplus: list[object], tmp_path: Path
) -> None:
    payload = bytes(make_chunk("one").memory.byte_array)
    with (
        running_socket(tmp_path, talks.ARENA_BYTES) as running,
        socket.socket(socket.AF_UNIX) as client,
    ):
        client.settimeout(10.0)
        client.connect(str(running.path))
        for exchange in tape_of(release, "socket"):
            said = bytes.fromhex(exchange["said"])
            kind = said[4]
            client.sendall(with_surplus(said, surplus) if kind == FrameType.HELLO else said)
            for answered in map(bytes.fromhex, exchange["answered"]):
                got = read_message(client)
                old, new = meta_of(answered), meta_of(got)
                if kind == FrameType.HELLO:
                    # Not the server's name; of the arena, not where and how large it is.
                    assert (new[0], new[2], new[3][3:]) == (old[0], old[2], old[3][3:])
                elif kind == FrameType.STATS:
                    assert talks.covers(old, new, exactly=False)
                else:
                    assert got == answered
                if kind == FrameType.RESERVE:
                    at = new[0][0][1]
                    running.arena.store_view[at : at + len(payload)] = payload


@pytest.mark.parametrize("surplus", [[], ["new", {"more": 1}]])
def test_an_old_sidecar_is_understood(release: Path, surplus: list[object], tmp_path: Path) -> None:
    left = tape_of(release, "socket")
    arena = create_shared_arena(tmp_path / "arena", talks.ARENA_BYTES)

    def answer(request: bytes) -> bytes:
        exchange = left.pop(0)
        said = bytes.fromhex(exchange["said"])
        answered = b"".join(map(bytes.fromhex, exchange["answered"]))
        if request[4] != FrameType.HELLO:
            assert request == said
            return answered
        assert is_same_hello(meta_of(said), meta_of(request))
        welcome = meta_of(answered)
        welcome[3][:3] = [str(arena.path), arena.size, arena.generation]
        return with_meta(answered, [*welcome, *surplus])

    try:
        with unix_server(tmp_path / "old.sock", answer):
            outcome = talks.talk_socket(
                tmp_path / "old.sock", lambda connection: connection.arena.store_view
            )
        assert outcome == talks.SOCKET_OUTCOME
    finally:
        arena.lock.release()
    assert not left


@pytest.mark.parametrize("surplus", [False, True])
@pytest.mark.parametrize("service", REST)
def test_old_heartbeats_and_questions_are_answered(
    release: Path, service: str, surplus: bool, tmp_path: Path
) -> None:
    replaced: dict[str, str] = {}
    options = {f"LMCACHE_{service.upper()}_PORT": "0"}
    with (
        running_service(f"lmcache_{service}", tmp_path, options) as running,
        httpx.Client(base_url=running.url, trust_env=False) as rest,
    ):
        for exchange in tape_of(release, service):
            body, headers = bytes.fromhex(exchange["body"]), exchange["headers"]
            for old_pull, new_pull in replaced.items():
                body = body.replace(old_pull.encode(), new_pull.encode())
            if surplus and body:
                body = grown(headers["content-type"], body)
            answer = rest.request(
                exchange["method"], exchange["path"], headers=headers, content=body or None
            )
            assert answer.status_code == exchange["status"], (exchange["path"], answer.text)
            old, new = (
                said_in(exchange),
                talks.body_of(answer.headers.get("content-type", ""), answer.content),
            )
            assert talks.covers(old, new, exactly=False), (exchange["path"], old, new)
            if exchange["path"] == "/v1/transfers":
                replaced |= {
                    was["pull"]: now["pull"]
                    for was, now in zip(old["assignments"], new["assignments"], strict=True)
                }


@pytest.mark.parametrize("surplus", [False, True])
async def test_old_services_are_understood(release: Path, surplus: bool) -> None:
    change = grown if surplus else (lambda kind, data: data)
    player = Player(tape_of(release, "lookup"), change)
    lookup = LookupClient("http://lookup", transport=player)
    await lookup.open()
    assert await talks.talk_lookup(lookup) == talks.LOOKUP_OUTCOME
    await lookup.close()
    check_asked(player)
    player = Player(tape_of(release, "broker"), change)
    broker = BrokerClient("http://broker", None, 5.0, transport=player)
    await broker.open()
    assert await talks.talk_broker(broker) == talks.BROKER_OUTCOME
    await broker.close()
    check_asked(player)


def check_asked(player: Player) -> None:
    assert player.is_over
    for exchange, request, body in player.asked:
        assert (request.method, request.url.raw_path.decode()) == (
            exchange["method"],
            exchange["path"],
        )
        old = talks.body_of(
            exchange["headers"].get("content-type", ""), bytes.fromhex(exchange["body"])
        )
        assert talks.covers(
            old, talks.body_of(request.headers.get("content-type", ""), body), exactly=True
        ), exchange["path"]


def said_in(exchange: Exchange) -> Any:
    return talks.body_of(exchange["answer_type"], bytes.fromhex(exchange["answer"]))


def grown(kind: str, data: bytes) -> bytes:
    """Return a body with a field of a later release."""
    pack = msgspec.msgpack.encode if "msgpack" in kind else msgspec.json.encode
    return pack({**talks.body_of(kind, data), FUTURE: {"more": [1]}})


def test_each_recording_has_all_protocols(release: Path) -> None:
    for protocol, least in (("lm", 7), ("socket", 10), ("lookup", 7), ("broker", 7)):
        assert len(tape_of(release, protocol)) >= least
