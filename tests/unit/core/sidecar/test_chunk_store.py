"""The chunk store of a client: loads have their own connection, so that a store in a step of the
engine does not wait for them; a question that takes several requests waits no longer than one
that takes one; and nonsense about tickets is as no sidecar.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from lmcache_core.keys import CacheEngineKey
from lmcache_core.record import Staged, payload_digest, raw_header
from lmcache_core.record.chunk_store import NotLent
from lmcache_core.record.codec import encode_head
from lmcache_core.sidecar import SidecarChunkStore
from lmcache_core.sidecar import store as store_module
from lmcache_core.wire import messages as m

from tests.fixtures.chains import chain_of
from tests.fixtures.frames import HELLO
from tests.fixtures.held_clock import HeldClock
from tests.fixtures.scripted_sidecar import (
    ARENA_BYTES,
    PATIENCE_S,
    Answer,
    ScriptedSidecar,
    scripted_sidecar,
    store_at,
)
from tests.fixtures.waiting import wait_until
from tests.suites.chunks import make_chunk, make_key

KEY = CacheEngineKey("vllm", "m", 1, 0, "00" * 32)
CHUNK_BYTES = 64


def loaded(handle: int) -> m.Extents:
    head = encode_head(
        raw_header(KEY, (CHUNK_BYTES,), "uint8", payload_digest(bytes(CHUNK_BYTES))), CHUNK_BYTES
    )
    return m.Extents((m.Extent(handle, 0, CHUNK_BYTES, "Hot", head),))


def usual(request: m.Message) -> Answer:
    """The answers of a sidecar with room and one chunk."""
    match request:
        case m.LoadExtents():
            return loaded(7)
        case m.ReserveExtents():
            return m.Extents((m.Extent(3, ARENA_BYTES - CHUNK_BYTES, CHUNK_BYTES),))
        case m.DoneWith():
            return m.Ok()
        case m.Lookup():
            return m.ContainsOk([False])
        case m.Ping():
            return m.Pong()
    return None


def can_load(store: SidecarChunkStore) -> bool:
    chunks = store.get([KEY])
    return bool(chunks) and store.release(chunks)


def can_reserve(store: SidecarChunkStore) -> bool:
    (memory,) = store.reserve([KEY], [(CHUNK_BYTES,)], "uint8")
    if isinstance(memory, NotLent):
        return False
    store.abort([memory])
    return True


def test_store_does_not_wait_for_a_long_load(tmp_path: Path) -> None:
    is_lifted, said = threading.Event(), []

    def script(request: m.Message) -> Answer:
        if isinstance(request, m.LoadExtents):
            is_lifted.wait(PATIENCE_S)
        if isinstance(request, m.DoneWith):
            said.append((threading.get_ident(), request))
        return usual(request)

    with (
        scripted_sidecar(tmp_path, script) as sidecar,
        store_at(sidecar.path, loads_beside=True) as store,
    ):
        assert sidecar.num_connections == 2
        with ThreadPoolExecutor(1) as pool:
            load = pool.submit(can_load, store)
            wait_until(lambda: any(isinstance(each, m.LoadExtents) for each in sidecar.requests))
            assert store.lookup([KEY], ["memory"]) == 0
            assert can_reserve(store), "dropped during a load"
            is_lifted.set()
            assert load.result(PATIENCE_S)
        (aborted_by, aborted), (released_by, released) = said
        assert (aborted, released) == (m.DoneWith((3,)), m.DoneWith((7,)))
        assert aborted_by != released_by, "a connection gets back what it has lent"


def test_loss_of_a_sidecar_is_noticed_for_loads_too(tmp_path: Path) -> None:
    """A store finds it out. The next load, maybe much later, finds the sidecar that followed."""
    with (
        scripted_sidecar(tmp_path, usual) as first,
        store_at(first.path, loads_beside=True) as store,
    ):
        assert can_load(store)
        first.close()
        first.path.unlink()
        assert not can_reserve(store)
        (tmp_path / "second").mkdir()
        with scripted_sidecar(tmp_path / "second", usual) as second:
            first.path.symlink_to(second.path)
            wait_until(lambda: second.num_connections == 2)
            wait_until(lambda: can_load(store) and can_reserve(store))


def test_connection_that_is_given_up_takes_no_other_with_it(tmp_path: Path) -> None:
    loaded_by: list[int] = []

    def script(request: m.Message) -> Answer:
        if isinstance(request, m.ReserveExtents):
            return m.Extents((m.Extent(3, ARENA_BYTES, CHUNK_BYTES),))
        if isinstance(request, m.LoadExtents):
            loaded_by.append(threading.get_ident())
        return usual(request)

    with (
        scripted_sidecar(tmp_path, script) as sidecar,
        store_at(sidecar.path, loads_beside=True) as store,
    ):
        assert can_load(store)
        assert not can_reserve(store), "memory outside of the arena"
        wait_until(lambda: sidecar.num_ended == 1)
        assert can_load(store)
        assert loaded_by[0] == loaded_by[1], "by the same connection"


ANSWER_S = 25.0
PAYLOAD = bytes(1000)


def num_got(store: SidecarChunkStore, keys: list[CacheEngineKey]) -> int:
    chunks = store.get(keys)
    for chunk in chunks:
        store.release([chunk])
    return len(chunks)


@pytest.mark.parametrize(
    ("ask", "kind"),
    [
        (lambda store, keys: store.lookup(keys, None), m.Lookup),
        (lambda store, keys: sum(store.contains(keys)), m.Lookup),
        (num_got, m.LoadExtents),
    ],
    ids=["lookup", "contains", "get"],
)
def test_requests_of_one_call_share_its_time(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    ask: Callable[[SidecarChunkStore, list[CacheEngineKey]], int],
    kind: type[m.Message],
) -> None:
    clock = HeldClock()
    num_loaded = 0

    def script(request: m.Message) -> Answer:
        nonlocal num_loaded
        if isinstance(request, m.Hello):
            return None
        if isinstance(request, kind):
            clock.now_s += ANSWER_S
        if isinstance(request, m.Lookup):
            return m.ContainsOk([True])
        if isinstance(request, m.LoadExtents):
            head = make_chunk(num_loaded, payload=PAYLOAD).head
            num_loaded += 1
            extent = m.Extent(num_loaded, 1024 * num_loaded, len(PAYLOAD), "Hot", head)
            return m.Extents((extent,))
        return m.Ok()

    with scripted_sidecar(tmp_path, script) as sidecar, store_at(sidecar.path) as store:
        monkeypatch.setattr(m, "MAX_NAMES", 1)
        monkeypatch.setattr(store_module, "time", SimpleNamespace(monotonic=clock))
        keys = [make_key(i).key for i in range(6)]
        assert ask(store, keys) == 3, "the fourth request would be late"
    asked = [request.deadline_ms for request in sidecar.requests if isinstance(request, kind)]  # type: ignore[attr-defined]
    assert asked == [60_000, 35_000, 10_000]


CHAINS = [chain_of(range(3)), chain_of(range(2), world_size=2)]


@contextlib.contextmanager
def answered(
    directory: Path, answer: Answer | Callable[[Any], Answer], **options: Any
) -> Iterator[tuple[SidecarChunkStore, ScriptedSidecar]]:
    """A client of a sidecar that answers everything but HELLO so."""

    def script(request: m.Message) -> Answer:
        if isinstance(request, m.Hello):
            return None
        return answer(request) if callable(answer) else answer

    with (
        scripted_sidecar(directory, script) as sidecar,
        store_at(sidecar.path, **options) as store,
    ):
        yield store, sidecar


@pytest.mark.parametrize(
    "answer",
    [
        m.Promise(True, (b"\1\1\0",)),
        m.Promise(True, (b"\1\1\0", b"\2\2", b"")),
        m.Promise(True, (b"\1\1", b"\2\2")),
        m.Promise(True, (b"\1\1\0\0", b"\2\2")),
        m.Promise(True, (b"\2\2", b"\1\1\0")),
        m.Ok(),
        m.ErrorMessage("protocol", "no"),
        b"\xff\xff\xff\xff",
        m.build_frame(2, m.Promise(True, ()))[:-1] + b"\xc1",
    ],
)
def test_impossible_answer_ends_the_connection(tmp_path: Path, answer: Answer) -> None:
    with answered(tmp_path, answer) as (store, sidecar):
        assert store.stage("t", CHAINS) is None
        wait_until(lambda: sidecar.num_ended == 1)


def test_long_question_is_cut_to_one_message(tmp_path: Path) -> None:
    wide, narrow = chain_of(range(40_000), world_size=3), chain_of(range(10))

    def all_there(request: m.Stage) -> m.Promise:
        return m.Promise(True, tuple(b"\1" * (len(hashes) // 32) for _, hashes in request.chains))

    with answered(tmp_path, all_there) as (store, _):
        staged = store.stage("t", [wide, narrow])
        assert staged is not None
        num_asked = m.MAX_STAGE_KEYS // 4
        assert staged.tiers == (b"\1" * num_asked + bytes(40_000 - num_asked), b"\1" * 10)
        with pytest.raises(ValueError, match="17 chains"):
            store.stage("t", [narrow] * 17)
        with pytest.raises(ValueError, match="a chain of 1025 ranks"):
            store.stage("t", [chain_of([1], world_size=m.MAX_RANKS + 1)])


def test_sidecar_that_takes_no_description_is_not_used(tmp_path: Path) -> None:
    described = m.Describe("vllm", "m", 1, 16, bytes(32), ("",))
    with answered(tmp_path, m.ErrorMessage("protocol", "no"), describe=lambda salt: described) as (
        store,
        sidecar,
    ):
        assert store.stage("t", CHAINS) is None
        wait_until(lambda: sidecar.num_ended >= 1)
        assert sidecar.requests[:2] == [HELLO, described]


def test_good_answer_is_believed(tmp_path: Path) -> None:
    """Also one with a tier of a later version."""
    tiers = (b"\1\x63\0", b"\2\2")
    with answered(tmp_path, m.Promise(True, tiers)) as (store, sidecar):
        assert store.stage("t", CHAINS, is_prefix=False, recompute_s=0.5) == Staged(True, tiers)
        runs = tuple(enumerate(chain.hashes for chain in CHAINS))
        assert sidecar.requests[-1] == m.Stage("t", runs, False, int(PATIENCE_S * 1000), 500_000)


def test_silence_after_unstage_is_not_waited_for(tmp_path: Path) -> None:
    with answered(tmp_path, b"") as (store, sidecar):
        store.unstage(["t"] * (m.MAX_NAMES + 1))
        store.unstage(["t"])
        wait_until(lambda: len(sidecar.requests) == 4)
        assert sidecar.num_ended == 0, "an answer was awaited for its whole deadline"
