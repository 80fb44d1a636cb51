"""A sidecar that answers nonsense, or never, is an empty cache: nothing is raised, nothing is
believed, and nothing waits twice.
"""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest
from lmcache_core.engine import LMCacheEngine
from lmcache_core.gpu_connectors import VLLMNestedTupleGPUConnector
from lmcache_core.keys import Lane
from lmcache_core.record import encode_head, payload_digest, raw_header
from lmcache_core.sidecar import link
from lmcache_core.telemetry import MISSED_CHUNKS_TOTAL
from lmcache_core.wire import messages as m
from lmcache_core.wire.frames import MAX_META_BYTES, FrameHeader, FrameType, build_header

from tests.fixtures.kv import CHUNK_SIZE, HIDDEN, NUM_LAYERS, empty_kv, random_kv, tokens_of
from tests.fixtures.scripted_sidecar import ARENA_BYTES, Answer, scripted_sidecar
from tests.fixtures.sidecar import engine_at
from tests.fixtures.waiting import threads_end, wait_until

TOKENS = tokens_of(2 * CHUNK_SIZE)
PAYLOAD_BYTES = 2 * NUM_LAYERS * CHUNK_SIZE * HIDDEN * 4
LANE = Lane("vllm", "org/model", 1, 0)


def use(engine: LMCacheEngine) -> int:
    """Every call of an engine; how many tokens it says it has retrieved."""
    engine.store(TOKENS, kvcaches=random_kv(len(TOKENS)))
    engine.prefetch(TOKENS)
    assert 0 <= engine.lookup(TOKENS) <= len(TOKENS)
    num = int(engine.retrieve(TOKENS, kvcaches=empty_kv(len(TOKENS))).sum())
    engine.stats()
    return num


def script(**answers: Answer | Callable[[Any], Answer]) -> Callable[[m.Message], Answer]:
    """Answers by the frame's name; the others are what a sidecar with room and no chunks would
    say.
    """
    usual: dict[str, Answer | Callable[[Any], Answer]] = {
        "HELLO": None,
        "LOOKUP": lambda r: m.ContainsOk([False] * 2),
        "PREFETCH": m.Ok(),
        "RESERVE": lambda r: offered(r),
        "COMMIT": lambda r: m.ContainsOk([True] * len(r.items)),
        "LOAD": m.Extents(("never_stored",)),
        "DONE": m.Ok(),
        "STATS": m.StatsOk({}),
        "PING": m.Pong(),
        "DESCRIBE": m.Ok(),
    }

    def answer(request: m.Message) -> Answer:
        chosen = (usual | answers)[request.frame_type.name]
        return chosen(request) if callable(chosen) else chosen

    return answer


def offered(request: m.ReserveExtents, **changes: Any) -> m.Extents:
    """Memory for everything, but for the changes."""
    extents = [
        m.Extent(i + 1, ARENA_BYTES // 2 + i * 65536, size) for i, size in enumerate(request.sizes)
    ]
    return m.Extents(tuple(msgspec.structs.replace(extent, **changes) for extent in extents))


def loaded(request: m.LoadExtents, **changes: Any) -> m.Extents:
    """What a sidecar that holds zeros under every key would answer, but for the changes."""
    (_, hashes), *_ = request.names
    keys = LANE.keys(hashes)
    extents = []
    for i, key in enumerate(keys):
        header = raw_header(
            key,
            (2, NUM_LAYERS, CHUNK_SIZE, HIDDEN),
            "float32",
            payload_digest(bytes(PAYLOAD_BYTES)),
        )
        extent = m.Extent(
            i + 1, i * PAYLOAD_BYTES, PAYLOAD_BYTES, "Hot", encode_head(header, PAYLOAD_BYTES)
        )
        extents.append(msgspec.structs.replace(extent, **changes))
    return m.Extents(tuple(extents))


def test_missing_socket_is_an_empty_cache_and_logged_with_the_fix(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with engine_at(tmp_path / "absent.sock") as engine:
        assert use(engine) == 0
    assert caplog.text.count("no sidecar") == 1
    assert str(tmp_path / "absent.sock") in caplog.text
    assert "set sidecar_socket to the socket that it names in its log" in caplog.text


@pytest.mark.parametrize(
    "answers",
    [
        {"RESERVE": lambda r: m.Extents((m.Extent(1, 0, 1),) * (len(r.sizes) + 1))},
        {"RESERVE": lambda r: offered(r, offset=ARENA_BYTES - 1)},
        {"RESERVE": lambda r: offered(r, offset=-512)},
        {"RESERVE": lambda r: offered(r, length=1 << 62)},
        {"RESERVE": m.Extents(())},
        {"RESERVE": lambda r: offered(r, length=1)},
        {"COMMIT": m.ContainsOk([])},
        {"COMMIT": m.Pong()},
        {"LOOKUP": m.ContainsOk([True] * 4096)},
        {"LOOKUP": m.ContainsOk([])},
        {"LOOKUP": b"\xff\xff\xff\xff"},
        {"LOOKUP": m.build_frame(1, m.ContainsOk([True]))},
        {"LOOKUP": m.build_frame(7, m.ContainsOk([True]))[:-1] + b"\xc1"},
        {"LOOKUP": build_header(FrameHeader(FrameType.CHUNK, 3, 1, 1 << 32))},
        {"LOAD": lambda r: loaded(r, offset=ARENA_BYTES - 1)},
        {"LOAD": lambda r: loaded(r, offset=-1)},
        {"LOAD": lambda r: loaded(r, length=PAYLOAD_BYTES - 1)},
        {"LOAD": lambda r: loaded(r, head=b"")},
        {"LOAD": lambda r: m.Extents(loaded(r).items[::-1])},
        {"LOAD": m.Extents(("a reason of a later version",))},
        {"LOAD": m.ErrorMessage("closing", "going")},
        {"DONE": m.ErrorMessage("protocol", "no"), "LOAD": loaded},
        {"DONE": b"", "LOAD": loaded},
    ],
)
def test_impossible_answer_is_an_empty_cache(tmp_path: Path, answers: dict[str, Any]) -> None:
    with (
        scripted_sidecar(tmp_path, script(**answers)) as sidecar,
        engine_at(sidecar.path, tier_timeout_s=0.2) as engine,
    ):
        assert use(engine) == 0
        assert {label for _, label in engine.counters.snapshot()} <= {
            "",
            "unavailable",
            "corrupt",
            "never_stored",
            "no_memory",
        }


@pytest.mark.parametrize(
    "changes",
    [
        {"num_bytes": 0},
        {"num_bytes": 1 << 61},
        {"path": "/nowhere"},
        {"path": "/dev/null", "num_bytes": 4096},
        {"generation": 7},
        {"version": 99},
        {"version": 0},
    ],
)
def test_sidecar_with_an_impossible_welcome_is_not_used(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    with scripted_sidecar(tmp_path, script(LOAD=loaded)) as sidecar:
        sidecar.script = script(HELLO=lambda r: sidecar.welcome(**changes), LOAD=loaded)
        with engine_at(sidecar.path, tier_timeout_s=0.2) as engine:
            assert use(engine) == 0


def test_welcome_of_a_later_version_is_understood(tmp_path: Path) -> None:
    """Fields and modes that a newer sidecar adds are no reason to go without a cache; an unknown
    mode verifies everything.
    """
    with scripted_sidecar(tmp_path, script(LOAD=loaded)) as sidecar:

        def later(request: m.Message) -> bytes:
            welcome = msgspec.msgpack.encode(sidecar.welcome(verify_hot="now and then"))
            fields = [*msgspec.msgpack.decode(welcome), {"more": 1}]
            fields[3] = [*fields[3], {"more": 1}]
            longer = msgspec.msgpack.encode(fields)
            header = FrameHeader(FrameType.HELLO_OK, sidecar.last_id, len(longer), 0)
            return build_header(header) + longer

        sidecar.script = script(HELLO=later, LOAD=loaded)
        with engine_at(sidecar.path) as engine:
            assert use(engine) == len(TOKENS)
            sidecar.script = script(
                HELLO=later, LOAD=lambda r: loaded(r, offset=8 * PAYLOAD_BYTES), REJECT=m.Ok()
            )
            with sidecar.arena.open("r+b") as file:
                file.seek(8 * PAYLOAD_BYTES)
                file.write(b"x")
            assert use(engine) == 0
            assert engine.counters.value(MISSED_CHUNKS_TOTAL, "corrupt") == 2


def test_foreign_server_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """However long its answers are."""
    noise = random.Random(1)
    with (
        scripted_sidecar(
            tmp_path, lambda request: noise.randbytes(3) + b"\xffHTTP/1.1 400"
        ) as sidecar,
        engine_at(sidecar.path, tier_timeout_s=0.2),
    ):
        wait_until(lambda: sidecar.num_connections >= 4)
    assert caplog.text.count("is unusable") == 1
    assert "speaks another protocol; set sidecar_socket to a sidecar's socket" in caplog.text


@pytest.fixture
def lost_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a wait in vain there is no second connection."""
    monkeypatch.setattr(link, "WAIT_PER_COST", 1e6)
    monkeypatch.setattr(link, "MAX_WAIT_AFTER_SLOW_S", 1e6)


@pytest.mark.parametrize("mute", ["LOOKUP", "RESERVE", "COMMIT", "LOAD", "DONE"])
def test_silence_costs_one_call_its_deadline_and_the_next_nothing(
    tmp_path: Path, lost_once: None, mute: str
) -> None:
    answers: dict[str, Any] = {"LOAD": loaded} if mute == "DONE" else {}
    with (
        scripted_sidecar(tmp_path, script(**answers, **{mute: b""})) as sidecar,
        engine_at(sidecar.path, tier_timeout_s=0.2) as engine,
    ):
        for _ in range(10):
            assert use(engine) == 0
        asked = [request.frame_type.name for request in sidecar.requests]
        assert asked.count(mute) == 1
        assert asked[-1] == mute


def test_answer_in_drops_has_the_same_deadline(tmp_path: Path) -> None:
    """Each byte comes in time, the answer never does."""
    has_ended = threading.Event()
    with (
        scripted_sidecar(tmp_path, script()) as sidecar,
        engine_at(sidecar.path, tier_timeout_s=0.2) as engine,
    ):

        def drip(request: m.Message) -> Answer:
            header = FrameHeader(FrameType.CONTAINS_OK, sidecar.last_id, MAX_META_BYTES, 0)
            sidecar.send(build_header(header))
            while not has_ended.wait(0.01):
                sidecar.send(b"\x10")
            return None

        sidecar.script = drip
        assert engine.lookup(TOKENS) == 0
        has_ended.set()


def test_threads_behind_a_slow_request_do_not_wait_one_after_the_other(
    tmp_path: Path, lost_once: None
) -> None:
    with (
        scripted_sidecar(tmp_path, script(LOAD=b"")) as sidecar,
        engine_at(sidecar.path, tier_timeout_s=0.8) as engine,
        ThreadPoolExecutor(8) as pool,
    ):
        kvcaches = [empty_kv(len(TOKENS)) for _ in range(8)]
        for found in pool.map(lambda kv: engine.retrieve(TOKENS, kvcaches=kv), kvcaches):
            assert not found.any()
        assert [type(request) for request in sidecar.requests].count(m.LoadExtents) == 1


def test_load_whose_pins_may_be_lost_is_a_miss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sidecar ends the connection while KV is copied: it may be that of another chunk."""
    copy = VLLMNestedTupleGPUConnector.to_gpu
    with (
        scripted_sidecar(tmp_path, script(LOAD=loaded)) as sidecar,
        engine_at(sidecar.path) as engine,
    ):

        def to_gpu(*args: Any, **kwargs: Any) -> None:
            copy(*args, **kwargs)
            sidecar.close()

        monkeypatch.setattr(VLLMNestedTupleGPUConnector, "to_gpu", to_gpu)
        assert not engine.retrieve(TOKENS, kvcaches=empty_kv(len(TOKENS))).any()
        assert engine.counters.value(MISSED_CHUNKS_TOTAL, "unavailable") == 2


def test_forked_child_leaves_the_connection_to_its_parent(tmp_path: Path) -> None:
    with (
        scripted_sidecar(tmp_path, script(LOAD=loaded)) as sidecar,
        engine_at(sidecar.path) as engine,
    ):
        assert use(engine) == len(TOKENS)
        num_before = len(sidecar.requests)
        child = os.fork()
        if child == 0:
            num_found = engine.lookup(TOKENS)
            engine.close()
            os._exit(num_found)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, (
            "the child used the connection of its parent"
        )
        assert len(sidecar.requests) == num_before
        assert sidecar.num_ended == 0
        assert use(engine) == len(TOKENS)


def test_closed_engine_does_not_reconnect(tmp_path: Path) -> None:
    with (
        scripted_sidecar(tmp_path, script(LOAD=loaded)) as sidecar,
        engine_at(sidecar.path) as engine,
    ):
        assert use(engine) == len(TOKENS)
        engine.close()
        engine.close()
        assert use(engine) == 0
        wait_until(lambda: sidecar.num_ended == 1)
        assert sidecar.num_connections == 1
        threads_end("lmcache-sidecar-link")


@pytest.mark.parametrize("answer", [m.ErrorMessage("protocol", "no"), b"", b"\xff\xff\xff\xff"])
def test_missing_answer_to_a_reject_changes_nothing(tmp_path: Path, answer: Answer) -> None:
    """A chunk with wrong bytes is a miss, whatever the sidecar answers."""
    with scripted_sidecar(tmp_path, script()) as sidecar:
        sidecar.script = script(
            HELLO=lambda r: sidecar.welcome(),
            DESCRIBE=m.Ok(),
            LOAD=lambda r: loaded(r, offset=512),
            REJECT=answer,
        )
        with sidecar.arena.open("r+b") as file:
            file.seek(600)
            file.write(b"damage")
        with engine_at(sidecar.path, tier_timeout_s=0.2) as engine:
            assert use(engine) == 0
            assert engine.counters.value(MISSED_CHUNKS_TOTAL, "corrupt") == 2
            assert m.Reject((1,)) in sidecar.requests
