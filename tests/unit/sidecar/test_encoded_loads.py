"""Chunks encoded in the arena, loaded by a client that cannot decode them."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from lmcache_core.errors import SerdeError
from lmcache_core.keys import ChunkKey
from lmcache_core.record import (
    Chunk,
    MissReason,
    RecordHeader,
    TensorSpec,
    encode_head,
    payload_digest,
)
from lmcache_core.serde.codec import ChunkCodec, EncodedPayload
from lmcache_core.storage import codecs as codecs_module
from lmcache_core.storage.codecs import Codecs
from lmcache_core.wire import messages as m

from tests.fixtures.embedded import until
from tests.fixtures.frames import ENGINE, greeted, spelled
from tests.fixtures.sidecar import RunningSocket, running_socket
from tests.suites.chunks import held_keys, make_key

FACTOR = 2
"""Decoded bytes for each encoded one."""
ENCODED_BYTES = 2048
ARENA_BYTES = 1 << 20
GOOD, BAD, HELD, ABSENT = b"good", b"badd", b"held", b"none"
HELLO = m.engine_hello(ENGINE, [])
DEADLINE_MS = 30_000


class DoublingCodec(ChunkCodec):
    """Decodes to the payload twice; refuses a `BAD` one, and waits with a `HELD` one."""

    serde = "doubled"
    lossy = False

    def __init__(self) -> None:
        self.let_go = threading.Event()
        self.num_decoding = 0
        self.lock = threading.Lock()

    def open(self) -> None:
        pass

    def close(self) -> None:
        self.let_go.set()

    def encode(self, tensors: Sequence[TensorSpec], payload: memoryview) -> EncodedPayload | None:
        raise AssertionError("nothing is encoded here")

    def decodes(self, header: RecordHeader) -> bool:
        return header.serde == self.serde

    def decode(self, header: RecordHeader, payload: memoryview, out: memoryview) -> None:
        with self.lock:
            self.num_decoding += 1
        if payload[:4] == HELD:
            self.let_go.wait(60)
        with self.lock:
            self.num_decoding -= 1
        if payload[:4] == BAD:
            raise SerdeError("not what an encoder writes")
        out[:] = bytes(payload) * FACTOR


class Sizes:
    """A `StackListener` that keeps the sizes."""

    def __init__(self) -> None:
        self.sizes: dict[ChunkKey, int] = {}

    def stored(self, key: ChunkKey, tier: str, num_bytes: int) -> None:
        self.sizes[key] = num_bytes


def encoded(sidecar: RunningSocket, name: object, kind: bytes) -> Chunk:
    data = kind + bytes(ENCODED_BYTES - len(kind))
    key = make_key(name)
    spec = TensorSpec("", "uint8", (FACTOR * ENCODED_BYTES,), 0, ENCODED_BYTES)
    header = RecordHeader(
        key.key.canonical(), DoublingCodec.serde, "", False, (spec,), payload_digest(data)
    )
    memory = sidecar.hot.allocate(len(data))
    assert memory is not None
    memory.byte_array[:] = data
    return Chunk(key, header, encode_head(header, len(data)), memory, "test")


def keep(sidecar: RunningSocket, kinds: Sequence[bytes]) -> list[ChunkKey]:
    """Put chunks of these kinds into the arena; return their names."""
    for i, kind in enumerate(kinds):
        if kind is not ABSENT:
            chunk = encoded(sidecar, i, kind)
            assert sidecar.hot.put_many([chunk]) == [True]
            chunk.release()
    return [make_key(i) for i in range(len(kinds))]


def load(sidecar: RunningSocket, keys: Sequence[ChunkKey], deadline_ms: int = DEADLINE_MS) -> list:
    with greeted(sidecar.path, HELLO) as client:
        client.socket.settimeout(60)
        answer = client.say(m.LoadExtents(spelled(*(key.key for key in keys)), deadline_ms, 0))
        assert isinstance(answer, m.Extents)
        return list(answer.items)


def is_unheld(sidecar: RunningSocket) -> bool:
    """Return whether everything in the arena could be evicted."""
    held = sidecar.hot.peek_many(held_keys(sidecar.hot))
    return all(chunk.num_holders == 0 for chunk in held) and (  # type: ignore[union-attr]
        sidecar.hot.stats()["used_bytes"] == sidecar.allocator.used_bytes
    )


@pytest.fixture
def codec() -> DoublingCodec:
    return DoublingCodec()


@pytest.fixture
def announced() -> Sizes:
    return Sizes()


@pytest.fixture
def removed() -> list[ChunkKey]:
    """Chunks that memory has dropped."""
    return []


@pytest.fixture
def sidecar(
    tmp_path: Path,
    codec: DoublingCodec,
    announced: Sizes,
    removed: list[ChunkKey],
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[RunningSocket]:
    monkeypatch.setattr(codecs_module, "MAX_CODEC_THREADS", 2)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1})
    codecs = Codecs({codec.serde: codec})
    with running_socket(
        tmp_path, ARENA_BYTES, codecs=codecs, listener=announced, on_removed=removed.append
    ) as running:
        yield running


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(kinds=st.lists(st.sampled_from([GOOD, BAD, ABSENT]), min_size=1, max_size=8))
def test_load_holds_only_what_it_returns(sidecar: RunningSocket, kinds: list[bytes]) -> None:
    sidecar.hot.clear_now()
    items = load(sidecar, keep(sidecar, kinds))
    num_good = next((i for i, kind in enumerate(kinds) if kind is not GOOD), len(kinds))
    assert [isinstance(item, m.Extent) for item in items[:num_good]] == [True] * num_good
    why = {BAD: MissReason.CORRUPT, ABSENT: MissReason.NEVER_STORED}
    assert items[num_good:] == [why[kind].value for kind in kinds[num_good : num_good + 1]]
    until(lambda: is_unheld(sidecar), "chunks stay referenced after their client has left")


def test_chunks_of_a_prefix_are_decoded_concurrently(
    sidecar: RunningSocket, codec: DoublingCodec
) -> None:
    keys = keep(sidecar, [HELD] * 4)
    items: list[object] = []
    loading = threading.Thread(target=lambda: items.extend(load(sidecar, keys)))
    loading.start()
    until(lambda: codec.num_decoding == 2, "the second chunk waits for the first")
    codec.let_go.set()
    loading.join(60)
    assert [isinstance(item, m.Extent) for item in items] == [True] * 4


def test_late_chunk_is_a_miss_and_nothing_stays_held(
    sidecar: RunningSocket, codec: DoublingCodec
) -> None:
    keys = keep(sidecar, [GOOD, HELD, GOOD, GOOD])
    *in_time, last = load(sidecar, keys, deadline_ms=100)
    assert last == MissReason.DEADLINE.value
    assert len(in_time) <= 1
    codec.let_go.set()
    until(lambda: is_unheld(sidecar), "chunks stay referenced after their client has left")


def test_decoded_chunk_replaces_the_encoded_one_without_a_removal(
    codec: DoublingCodec, announced: Sizes, removed: list[ChunkKey], sidecar: RunningSocket
) -> None:
    keys = keep(sidecar, [GOOD] * 3)
    assert all(isinstance(item, m.Extent) for item in load(sidecar, keys))
    assert removed == [], "lookup would forget chunks that are held"
    assert sidecar.hot.contains_many(keys) == [True] * 3
    sizes = dict(sidecar.hot.held())
    assert min(sizes.values()) > FACTOR * ENCODED_BYTES
    assert announced.sizes == sizes, "lookup knows the size of what is held now"
    codec.serde = "unknown by now"  # nothing is left to be decoded
    assert all(isinstance(item, m.Extent) for item in load(sidecar, keys))


def test_chunk_removed_while_it_is_decoded_stays_removed(
    sidecar: RunningSocket, codec: DoublingCodec
) -> None:
    keys = keep(sidecar, [HELD])
    items: list[object] = []
    loading = threading.Thread(target=lambda: items.extend(load(sidecar, keys)))
    loading.start()
    until(lambda: codec.num_decoding == 1, "nothing is decoded")
    assert sidecar.hot.remove_many(keys) == 1
    codec.let_go.set()
    loading.join(60)
    assert isinstance(items[0], m.Extent), "the client may still use what it asked for in time"
    assert sidecar.hot.contains_many(keys) == [False]
