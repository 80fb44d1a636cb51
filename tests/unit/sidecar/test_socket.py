"""The sidecar's socket and its clients."""

from __future__ import annotations

import functools
import socket
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from lmcache_core.errors import ConfigError, VersionError
from lmcache_core.keys import CacheEngineKey
from lmcache_core.record import encode_head, payload_digest, raw_header
from lmcache_core.sidecar import SidecarConnection
from lmcache_core.wire import messages as m
from lmcache_core.wire.frames import FrameHeader, FrameType, build_header
from lmcache_sidecar import metrics
from lmcache_sidecar.socket.server import SocketServer

from tests.fixtures.embedded import PATIENCE_S, until
from tests.fixtures.frames import HELLO
from tests.fixtures.kv import CHUNK_SIZE, empty_kv, make_metadata, random_kv, tokens_of
from tests.fixtures.late_socket import late_socket
from tests.fixtures.sidecar import RunningSocket, connected, engine_at, running_socket
from tests.suites.chunks import held_keys


@pytest.fixture
def sidecar(tmp_path: Path) -> Iterator[RunningSocket]:
    with running_socket(tmp_path) as running:
        yield running


@pytest.fixture
def client(sidecar: RunningSocket) -> Iterator[SidecarConnection]:
    with connected(sidecar.path) as connection:
        yield connection


def key_of(number: int, group: str = "") -> CacheEngineKey:
    return CacheEngineKey("vllm", "org/model", 1, 0, f"{number:064x}", group)


def head_of(number: int, payload: bytes, group: str = "") -> bytes:
    key = key_of(number, group)
    return encode_head(
        raw_header(key, (len(payload),), "uint8", payload_digest(payload)), len(payload)
    )


def offered(client: SidecarConnection, *sizes: int) -> tuple[m.Extent | str, ...]:
    return client.call(m.ReserveExtents(sizes), m.Extents).items


def lent(client: SidecarConnection, *sizes: int) -> list[m.Extent]:
    return [item for item in offered(client, *sizes) if isinstance(item, m.Extent)]


def put(client: SidecarConnection, number: int, payload: bytes, group: str = "") -> bool:
    extents = lent(client, len(payload))
    if not extents:
        return False
    (extent,) = extents
    client.arena.store_view[extent.offset : extent.offset + len(payload)] = payload
    return client.call(
        m.Commit(((extent.id, head_of(number, payload, group)),)), m.ContainsOk
    ).present[0]


def loaded(
    client: SidecarConnection, *numbers: int, group: str = ""
) -> tuple[list[bytes], list[m.Extent], str | None]:
    """Bytes and extents of the chunks that are there, and why the next one is not."""
    names = client.names([key_of(number, group) for number in numbers])
    items = client.call(m.LoadExtents(names, 60_000, 0), m.Extents).items
    extents = [item for item in items if isinstance(item, m.Extent)]
    data = [bytes(client.arena.load_view[e.offset : e.offset + e.length]) for e in extents]
    return data, extents, next((item for item in items if isinstance(item, str)), None)


def test_loads_misses_and_saved_tokens_are_counted(
    sidecar: RunningSocket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens by rank 0 alone: other ranks load other parts of the same tokens."""
    tokens = tokens_of(5 * CHUNK_SIZE)
    for rank in (0, 1):
        ranked = functools.partial(make_metadata, world_size=2, worker_id=rank)
        monkeypatch.setattr("tests.fixtures.sidecar.make_metadata", ranked)
        with engine_at(sidecar.path, prefill_tokens_per_s=CHUNK_SIZE) as engine:
            engine.store(tokens[: 3 * CHUNK_SIZE], kvcaches=random_kv(3 * CHUNK_SIZE))
            assert engine.retrieve(tokens, kvcaches=empty_kv(len(tokens))).any()
            assert engine.lookup(tokens, ["disk", "Hot"]) == 3 * CHUNK_SIZE
            assert engine.lookup(tokens, ["disk"]) == 0
    counted = sidecar.counters
    assert counted.value(metrics.REQUESTED_CHUNKS_TOTAL) == 2 * 5
    assert counted.value(metrics.LOADED_CHUNKS_TOTAL, "memory") == 2 * 3
    assert counted.value(metrics.MISSED_CHUNKS_TOTAL, "never_stored") == 2 * 2
    assert counted.value(metrics.STORED_CHUNKS_TOTAL) == 2 * 3
    assert counted.value(metrics.SAVED_TOKENS_TOTAL) == 3 * CHUNK_SIZE
    assert counted.value(metrics.SAVED_PREFILL_MICROSECONDS_TOTAL) == 3_000_000


@pytest.mark.parametrize(
    ("chunks", "num_saved"),
    [
        ({"0:window64": [3], "1:full": [1, 2, 3]}, 3),
        ({"0:window64": [3], "1:window128": [2, 3]}, 2),
    ],
)
def test_the_layers_that_load_most_chunks_count(
    sidecar: RunningSocket, client: SidecarConnection, chunks: dict[str, list[int]], num_saved: int
) -> None:
    """An engine loads each group of layers with its own request, and of a window the end only."""
    client.call(m.Describe("vllm", "org/model", 1, CHUNK_SIZE, bytes(32), tuple(chunks)), m.Ok)
    for group, numbers in chunks.items():
        assert all(put(client, number, b"some", group) for number in numbers)
        assert len(loaded(client, *numbers, group=group)[0]) == len(numbers)
    assert sidecar.counters.value(metrics.SAVED_TOKENS_TOTAL) == num_saved * CHUNK_SIZE


def test_load_pins_the_longest_prefix_and_says_why_it_ends(client: SidecarConnection) -> None:
    assert put(client, 1, b"one")
    assert put(client, 2, b"two!")
    assert put(client, 4, b"four")
    found, _, reason = loaded(client, 1, 2, 3, 4)
    assert found == [b"one", b"two!"]
    assert reason == "never_stored"
    names = client.names([key_of(number) for number in (1, 2, 3, 4)])
    assert client.call(m.Lookup(names, (), 60_000), m.ContainsOk) == m.ContainsOk(
        [True, True, False, True]
    )


def test_no_memory_is_lent_for_a_held_chunk(
    sidecar: RunningSocket, client: SidecarConnection
) -> None:
    assert put(client, 2, b"two!")
    used = sidecar.allocator.used_bytes
    names = client.names([key_of(1), key_of(2)])
    request = m.ReserveExtents((512, 512, 512), names)
    new, known, unnamed = client.call(request, m.Extents).items
    assert (type(new), known, type(unnamed)) == (m.Extent, "known", m.Extent)
    assert sidecar.allocator.used_bytes == used + 2 * 512


def test_an_engine_needs_two_round_trips_to_store_and_two_to_load(
    sidecar: RunningSocket, tmp_path: Path
) -> None:
    """What is there already is neither asked for before, nor copied again."""
    tokens, kv = tokens_of(3 * CHUNK_SIZE), random_kv(3 * CHUNK_SIZE)
    with (
        late_socket(tmp_path / "relay.sock", sidecar.path) as relay,
        engine_at(relay.path) as engine,
    ):
        relay.forget()
        engine.store(tokens[:CHUNK_SIZE], kvcaches=kv)
        engine.store(tokens, kvcaches=kv)
        assert relay.names() == ["RESERVE", "COMMIT"] * 2
        relay.forget()
        engine.store(tokens, kvcaches=kv)
        assert relay.names() == ["RESERVE"]
        relay.forget()
        assert engine.retrieve(tokens, kvcaches=empty_kv(len(tokens))).all()
        assert relay.names() == ["LOAD", "DONE"]


@pytest.mark.parametrize("damage", ["short", "size"])
def test_commit_with_a_bad_head_is_refused_and_its_memory_freed(
    sidecar: RunningSocket, client: SidecarConnection, damage: str
) -> None:
    (extent,) = lent(client, 64)
    assert loaded(client, 1)[0] == [], "it is not committed yet"
    head = head_of(1, bytes(65 if damage == "size" else 64))
    sent = head[:-1] if damage == "short" else head
    assert client.call(m.Commit(((extent.id, sent),)), m.ContainsOk).present == [False]
    assert sidecar.allocator.used_bytes == 0
    assert loaded(client, 1)[0] == []


def test_a_reservation_is_committed_once_and_by_its_owner(
    sidecar: RunningSocket, client: SidecarConnection
) -> None:
    (extent,) = lent(client, 3)
    commit = m.Commit(((extent.id, head_of(1, b"abc")),))
    with connected(sidecar.path) as other:
        assert other.call(commit, m.ContainsOk).present == [False]
    assert client.call(commit, m.ContainsOk).present == [True]
    assert client.call(commit, m.ContainsOk).present == [False]


def test_pins_of_all_clients_leave_some_of_the_arena(
    sidecar: RunningSocket, client: SidecarConnection
) -> None:
    numbers = range(9)
    for number in numbers:
        assert put(client, number, bytes([number]) * 100_000)
    others = [SidecarConnection(sidecar.path, HELLO, PATIENCE_S) for _ in range(2)]
    for other in others:
        other.open()
    _, first, _ = loaded(client, 0, 1, 2, 3)
    _, same, _ = loaded(others[0], 0, 1, 2, 3)
    assert (len(first), len(same)) == (4, 4), "a chunk that two have loaded counts once"
    _, more, reason = loaded(others[1], 4, 5, 6, 7, 8)
    assert (len(more), reason) == (3, "no_memory"), "three quarters of a MiB hold seven"
    client.call(m.DoneWith(tuple(extent.id for extent in first)), m.Ok)
    assert loaded(client, 8)[2] == "no_memory", "the other still has them"
    others[0].close()
    until(lambda: len(sidecar.server.sessions) == 2)
    assert len(loaded(client, 8)[1]) == 1
    others[1].close()
    assert put(client, 20, bytes(100_000)), "the rest is for stores"


def test_versions_must_meet(sidecar: RunningSocket) -> None:
    hello = msgspec.structs.replace(HELLO, version_min=5, version_max=6)
    refused = pytest.raises(VersionError, match="supports versions 1 to 2")
    with refused, connected(sidecar.path, hello):
        pass


def test_garbage_ends_its_own_connection_only(
    sidecar: RunningSocket, client: SidecarConnection
) -> None:
    assert put(client, 1, b"kept")
    hello = m.build_frame(1, HELLO)
    too_long = build_header(FrameHeader(FrameType.STAGE, 2, 1, 0))[:16] + b"\xff" * 16
    for junk in (b"\xff" * 40, bytes(32), hello[:-1] + b"\xc1", hello + too_long):
        with socket.socket(socket.AF_UNIX) as raw:
            raw.connect(str(sidecar.path))
            raw.sendall(junk)
            raw.shutdown(socket.SHUT_WR)
            while raw.recv(4096):
                pass
    assert loaded(client, 1)[0] == [b"kept"]


def test_two_sidecars_do_not_share_a_socket(sidecar: RunningSocket, tmp_path: Path) -> None:
    second = SocketServer(sidecar.path, sidecar.server.context)
    with pytest.raises(ConfigError, match="another sidecar listens"):
        sidecar.loop.run(second.open(), PATIENCE_S)


def test_salt_of_the_sidecar_is_in_the_names_of_chunks(tmp_path: Path) -> None:
    tokens = tokens_of(2 * CHUNK_SIZE)
    names = []
    for salt in ("tenant-a", "tenant-b"):
        (tmp_path / salt).mkdir()
        with (
            running_socket(tmp_path / salt, salt=salt) as running,
            engine_at(running.path) as engine,
        ):
            engine.store(tokens, kvcaches=random_kv(len(tokens)))
            assert engine.lookup(tokens) == len(tokens)
            names.append(set(held_keys(running.hot)))
    assert not names[0] & names[1]
