"""A sidecar that answers nonsense, or never, is an empty cache: nothing is raised, nothing is
believed, nobody waits twice.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from lmcache_core.engine import LMCacheEngine
from lmcache_core.keys import Lane
from lmcache_core.record import encode_head, payload_digest, raw_header
from lmcache_core.record.chunk_store import NotLent
from lmcache_core.telemetry import MISSED_CHUNKS_TOTAL
from lmcache_core.wire import messages as m
from lmcache_core.wire.frames import FrameHeader, FrameType, build_header

from tests.fixtures.kv import CHUNK_SIZE, HIDDEN, NUM_LAYERS, empty_kv, random_kv, tokens_of
from tests.fixtures.scripted_sidecar import ARENA_BYTES, Answer, scripted_sidecar
from tests.fixtures.sidecar import engine_at

TOKENS = tokens_of(2 * CHUNK_SIZE)
PAYLOAD_BYTES = 2 * NUM_LAYERS * CHUNK_SIZE * HIDDEN * 4
LANE = Lane("vllm", "org/model", 1, 0)
(KEY,) = LANE.keys(bytes(32))
BOUND_S = 1.5
"""Far above what a call may last with these deadlines (0.2 + 0.5 seconds), far below what two
would.
"""


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


def test_no_socket_is_an_empty_cache_and_told_with_what_to_do(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with engine_at(tmp_path / "absent.sock") as engine:
        assert use(engine) == 0
    (told,) = [
        record.getMessage() for record in caplog.records if "no sidecar" in record.getMessage()
    ]
    assert str(tmp_path / "absent.sock") in told
    assert "set sidecar_socket to the socket that it names in its log" in told


def test_the_script_can_serve(tmp_path: Path) -> None:
    """Control: unchanged, the scripted answers are believed."""
    with (
        scripted_sidecar(tmp_path, script(LOAD=loaded)) as sidecar,
        engine_at(sidecar.path) as engine,
    ):
        assert use(engine) == len(TOKENS)


@pytest.mark.parametrize(
    "answers",
    [
        {"RESERVE": m.Extents(())},
        {"RESERVE": lambda r: m.Extents((m.Extent(1, 0, 1),) * (len(r.sizes) + 1))},
        {"RESERVE": lambda r: offered(r, offset=ARENA_BYTES - 1)},
        {"RESERVE": lambda r: offered(r, offset=-512)},
        {"RESERVE": lambda r: offered(r, offset=1 << 63)},
        {"RESERVE": lambda r: offered(r, length=1)},
        {"RESERVE": lambda r: offered(r, length=1 << 62)},
        {"COMMIT": m.ContainsOk([])},
        {"COMMIT": m.ContainsOk([True] * 50)},
        {"COMMIT": m.Pong()},
        {"LOOKUP": m.ContainsOk([True] * 4096)},
        {"LOOKUP": m.ContainsOk([])},
        {"LOOKUP": b"\xff\xff\xff\xff"},
        {"LOOKUP": m.build_frame(1, m.ContainsOk([True]))},
        {"LOOKUP": m.build_frame(1 << 60, m.ContainsOk([True]))},
        {"LOOKUP": m.build_frame(7, m.ContainsOk([True]))[:-1] + b"\xc1"},
        {"LOOKUP": build_header(FrameHeader(FrameType.CHUNK, 3, 1, 1 << 32))},
        {"LOAD": lambda r: loaded(r, offset=ARENA_BYTES - 1)},
        {"LOAD": lambda r: loaded(r, offset=-1)},
        {"LOAD": lambda r: loaded(r, length=PAYLOAD_BYTES - 1)},
        {"LOAD": lambda r: loaded(r, length=1 << 62)},
        {"LOAD": lambda r: loaded(r, head=b"")},
        {"LOAD": lambda r: loaded(r, head=bytes(512))},
        {"LOAD": lambda r: m.Extents(loaded(r).items[::-1])},
        {"LOAD": m.Extents(("a reason of a later version",))},
        {"LOAD": m.ErrorMessage("closing", "going")},
        {"DONE": m.ErrorMessage("protocol", "no"), "LOAD": loaded},
        {"DONE": b"", "LOAD": loaded},
        {"STATS": m.ErrorMessage("protocol", "no")},
    ],
)
def test_nonsense_is_an_empty_cache(tmp_path: Path, answers: dict[str, Any]) -> None:
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
        {"path": "nul\0"},
        {"path": "/dev/null", "num_bytes": 4096},
        {"path": "/"},
        {"generation": 7},
        {"version": 99},
        {"version": 0},
    ],
)
def test_an_impossible_welcome_is_no_sidecar(tmp_path: Path, changes: dict[str, Any]) -> None:
    with scripted_sidecar(tmp_path, script(LOAD=loaded)) as sidecar:
        sidecar.script = script(HELLO=lambda r: sidecar.welcome(**changes), LOAD=loaded)
        with engine_at(sidecar.path, tier_timeout_s=0.2) as engine:
            assert use(engine) == 0


def test_a_later_welcome_is_understood(tmp_path: Path) -> None:
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
                HELLO=later,
                LOAD=lambda r: loaded(r, offset=8 * PAYLOAD_BYTES),
                REJECT=m.Ok(),
            )
            with sidecar.arena.open("r+b") as file:
                file.seek(8 * PAYLOAD_BYTES)
                file.write(b"x")
            assert use(engine) == 0
            assert engine.counters.value(MISSED_CHUNKS_TOTAL, "corrupt") == 2


def test_a_stranger_on_the_socket_is_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever it says: another length each time is no news."""
    noise = random.Random(1)
    with (
        scripted_sidecar(
            tmp_path, lambda request: noise.randbytes(3) + b"\xffHTTP/1.1 400"
        ) as sidecar,
        engine_at(sidecar.path, tier_timeout_s=0.2),
    ):
        deadline = time.monotonic() + 60.0
        while sidecar.num_connections < 4:
            assert time.monotonic() < deadline
            time.sleep(0.02)
    (told,) = [
        record.getMessage() for record in caplog.records if "is unusable" in record.getMessage()
    ]
    assert "speaks another protocol; set sidecar_socket to a sidecar's socket" in told


@pytest.mark.parametrize("mute", ["HELLO", "LOOKUP", "RESERVE", "COMMIT", "LOAD", "DONE"])
def test_silence_costs_one_call_its_deadline_and_the_next_nothing(
    tmp_path: Path, mute: str
) -> None:
    answers: dict[str, Any] = {"LOAD": loaded} if mute == "DONE" else {}
    with (
        scripted_sidecar(tmp_path, script(**answers, **{mute: b""})) as sidecar,
        engine_at(sidecar.path, tier_timeout_s=0.2) as engine,
    ):
        begin = time.monotonic()
        assert use(engine) == 0
        assert time.monotonic() - begin < BOUND_S
        slept = 0.0
        begin = time.monotonic()
        while time.monotonic() - begin < 2.0:
            assert use(engine) == 0
            time.sleep(0.05)
            slept += 0.05
        stalled = time.monotonic() - begin - slept
        assert stalled < BOUND_S, (
            f"{stalled:.2f} s of 2 were spent on a sidecar that does not answer"
        )


def test_an_answer_by_drops_has_the_same_deadline(tmp_path: Path) -> None:
    """Each byte comes in time, the answer never does."""
    with (
        scripted_sidecar(tmp_path, script()) as sidecar,
        engine_at(sidecar.path, tier_timeout_s=0.2) as engine,
    ):

        def drip(request: m.Message) -> Answer:
            for _ in range(20):
                sidecar._connections[-1].sendall(b"\x10")
                time.sleep(0.1)
            return None

        sidecar.script = drip
        begin = time.monotonic()
        assert engine.lookup(TOKENS) == 0
        assert time.monotonic() - begin < BOUND_S


def test_threads_behind_a_slow_request_do_not_wait_one_after_the_other(tmp_path: Path) -> None:
    with (
        scripted_sidecar(tmp_path, script(LOAD=b"")) as sidecar,
        engine_at(sidecar.path, tier_timeout_s=0.8) as engine,
    ):
        lasted: list[float] = []

        def retrieve() -> None:
            begin = time.monotonic()
            engine.retrieve(TOKENS, kvcaches=empty_kv(len(TOKENS)))
            lasted.append(time.monotonic() - begin)

        threads = [threading.Thread(target=retrieve) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert max(lasted) < 6.0, "0.5 for its turn, 0.8 + 0.5 for an answer; not eight times that"


def test_memory_that_is_being_filled_stays_ours_when_another_thread_gives_up(
    tmp_path: Path,
) -> None:
    """The sidecar takes reservations back at the end of the connection, and gives the memory to
    others: not while we write to it.
    """
    with (
        scripted_sidecar(tmp_path, script(LOAD=b"")) as sidecar,
        engine_at(sidecar.path, tier_timeout_s=0.2) as engine,
    ):
        store = engine._store
        (extent,) = store.reserve([KEY], [(2, NUM_LAYERS, CHUNK_SIZE, HIDDEN)], "float32")
        assert not isinstance(extent, NotLent)
        assert not engine.retrieve(TOKENS, kvcaches=empty_kv(len(TOKENS))).any()
        time.sleep(0.3)
        assert sidecar.num_ended == 0, (
            "the socket was closed under a thread that writes to its reservation"
        )
        extent.byte_array[:] = bytes(extent.get_size())
        store.abort([extent])
        deadline = time.monotonic() + 60.0
        while sidecar.num_ended == 0:
            assert time.monotonic() < deadline, (
                "the socket stayed open although nothing is lent any more"
            )
            time.sleep(0.01)


def test_pins_that_may_have_been_lost_are_a_miss(tmp_path: Path) -> None:
    """The sidecar ends the connection while the KV is copied: what was copied may be another
    chunk's by now.
    """
    with (
        scripted_sidecar(tmp_path, script(LOAD=loaded)) as sidecar,
        engine_at(sidecar.path, tier_timeout_s=0.5) as engine,
    ):
        copy = engine._transfer._gpu_connector.to_gpu

        def to_gpu(*args: Any, **kwargs: Any) -> None:
            copy(*args, **kwargs)
            sidecar.close()

        engine._transfer._gpu_connector.to_gpu = to_gpu  # type: ignore[method-assign]
        assert not engine.retrieve(TOKENS, kvcaches=empty_kv(len(TOKENS))).any()
        assert engine.counters.value(MISSED_CHUNKS_TOTAL, "unavailable") == 2


def test_a_forked_child_leaves_its_parents_connection_alone(tmp_path: Path) -> None:
    with (
        scripted_sidecar(tmp_path, script(LOAD=loaded)) as sidecar,
        engine_at(sidecar.path) as engine,
    ):
        assert use(engine) == len(TOKENS)
        num_before = len(sidecar.requests)
        child = os.fork()
        if child == 0:
            connection = engine._store._link.connection  # type: ignore[attr-defined]
            engine.close()
            os._exit(0 if connection is None else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, (
            "the child used the connection of its parent"
        )
        assert len(sidecar.requests) == num_before
        assert sidecar.num_ended == 0
        assert use(engine) == len(TOKENS)


def test_an_engine_can_be_closed_twice_and_used_afterwards(tmp_path: Path) -> None:
    with (
        scripted_sidecar(tmp_path, script(LOAD=loaded)) as sidecar,
        engine_at(sidecar.path) as engine,
    ):
        assert use(engine) == len(TOKENS)
        engine.close()
        engine.close()
        assert use(engine) == 0
        time.sleep(0.3)
        assert sidecar.num_connections == sidecar.num_ended == 1, (
            "a closed engine does not come back"
        )


@pytest.mark.parametrize(
    "answer", [m.ErrorMessage("protocol", "no"), m.Pong(), b"", b"\xff\xff\xff\xff"]
)
def test_a_reject_without_an_answer_changes_nothing(tmp_path: Path, answer: Answer) -> None:
    """A chunk whose bytes are wrong is a miss whatever the sidecar says to it."""
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
