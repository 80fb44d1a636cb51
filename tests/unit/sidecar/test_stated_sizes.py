"""An engine states the size of its chunks; larger records in slower tiers cost it nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from lmcache_core.record import MissReason
from lmcache_core.wire import messages as m
from lmcache_core.wire.capabilities import CHUNK_BYTES_PREFIX, chunk_bytes_said_by

from tests.fixtures.chains import chain_of, keys_of_rank, names_of
from tests.fixtures.embedded import until
from tests.fixtures.frames import ENGINE, RawClient, greeted, spelled
from tests.fixtures.kv import CHUNK_SIZE, HIDDEN, NUM_LAYERS
from tests.fixtures.local_chunks import put
from tests.fixtures.sidecar import RunningSocket, engine_at, running_socket
from tests.fixtures.stating_tier import Stating
from tests.suites.chunks import make_key

CHUNK_BYTES = 4 << 10
NUM_CHUNKS = 64
CHAIN = chain_of(range(3))
DEADLINE_MS = 20_000


@pytest.fixture
def tier() -> Stating:
    return Stating(16 * CHUNK_BYTES)


@pytest.fixture
def sidecar(tmp_path: Path, tier: Stating) -> Iterator[RunningSocket]:
    with running_socket(tmp_path, NUM_CHUNKS * CHUNK_BYTES, lower=[tier]) as running:
        put(running.hot, *range(NUM_CHUNKS), payload=bytes(CHUNK_BYTES))
        yield running


def load(client: RawClient) -> None:
    keys = [name.key for name in names_of(keys_of_rank(CHAIN, 0))]
    answer = client.say(m.LoadExtents(spelled(*keys), DEADLINE_MS, 0))
    assert answer == m.Extents((MissReason.NO_MEMORY.value,))


def prefetch(client: RawClient) -> None:
    keys = [name.key for name in names_of(keys_of_rank(CHAIN, 0))]
    assert client.say(m.Prefetch(spelled(*keys))) == m.Ok()


def stage(client: RawClient) -> None:
    lane = m.Lane("vllm", "org/model", 1, 0, "")
    client.socket.sendall(m.build_frame(0, m.DeclareLane(0, lane)))
    request = m.Stage("t", ((0, CHAIN.hashes),), True, DEADLINE_MS, 0)
    assert isinstance(client.say(request), m.Promise)


@pytest.mark.parametrize("size", [None, CHUNK_BYTES])
@pytest.mark.parametrize("ask", [load, prefetch, stage])
def test_larger_record_in_a_slower_tier_evicts_nothing(
    sidecar: RunningSocket, tier: Stating, ask: Callable[[RawClient], None], size: int | None
) -> None:
    said = [] if size is None else [f"{CHUNK_BYTES_PREFIX}{size}"]
    hello = m.engine_hello(ENGINE, said)
    with greeted(sidecar.path, hello) as client:
        ask(client)
        until(lambda: tier.num_asked, "nothing was asked of the tier")
    assert (
        sidecar.hot.contains_many([make_key(i) for i in range(NUM_CHUNKS)]) == [True] * NUM_CHUNKS
    )


def test_an_engine_states_the_size_of_its_chunks(tmp_path: Path) -> None:
    with running_socket(tmp_path) as sidecar, engine_at(sidecar.path):
        (session,) = sidecar.server.sessions
        assert session.staging.most_bytes == 2 * NUM_LAYERS * CHUNK_SIZE * HIDDEN * 4


@pytest.mark.parametrize("text", ["", "-1", "x", "9" * 16, "\u0663"])
def test_malformed_size_is_ignored(text: str) -> None:
    assert chunk_bytes_said_by(["lossy", f"{CHUNK_BYTES_PREFIX}{text}"]) is None
    assert chunk_bytes_said_by([f"{CHUNK_BYTES_PREFIX}7"]) == 7
