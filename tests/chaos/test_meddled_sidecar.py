"""Every message between a vLLM and its sidecar, changed on its way: bits, values, types, fields,
lengths, numbers of answers.

The replayed engine guards nothing: what leaves one of the connector's hooks fails the test, as does
KV that is not that of its tokens.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from lmcache_core.sidecar import connection, link
from lmcache_core.telemetry import FAILED_CALLS_TOTAL

from tests.fixtures.fake_vllm import imported_connector
from tests.fixtures.meddling_proxy import Side, meddling
from tests.fixtures.sidecar import running_socket
from tests.fixtures.vllm_engine import Engine, Status, running
from tests.fixtures.vllm_engine.worlds import make_model, prompt, with_sidecar

REQUESTS = {"HELLO", "LANE", "DESCRIBE", "STAGE", "DONE", "RESERVE", "COMMIT", "LOAD"}
ANSWERS = {"HELLO_OK", "OK", "PROMISE", "CONTAINS_OK", "EXTENTS"}
SHARE = 0.15
NUM_ROUNDS, MAX_ENGINES = 20, 8
BOUND_S = 10.0
"""No round may last longer: a few waits of a quarter of a second, on a busy machine."""
AWAY_S = 0.05


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The connector, which comes back to a sidecar at once: it is to read nonsense, not to wait."""
    for name in ("FIRST_WAIT_S", "MAX_WAIT_S", "MAX_WAIT_AFTER_SLOW_S"):
        monkeypatch.setattr(link, name, AWAY_S / 5)
    with imported_connector() as imported:
        yield imported


@pytest.mark.parametrize(
    ("side", "seed"), [(Side.ANSWERS, 1), (Side.ANSWERS, 2), (Side.REQUESTS, 3)]
)
def test_changed_messages_cause_neither_wrong_kv_nor_errors(
    module: ModuleType,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    side: Side,
    seed: int,
) -> None:
    # A busy machine must not make the sidecar late, which is then not asked: that is another
    # matter.
    monkeypatch.setattr(connection, "QUICK_S", 0.1)
    wanted = ANSWERS if side is Side.ANSWERS else REQUESTS
    model = make_model(tmp_path)
    with (
        running_socket(tmp_path) as sidecar,
        meddling(tmp_path, sidecar.path, side, seed, SHARE) as (path, meddler),
    ):
        for attempt in range(MAX_ENGINES):
            meddler.share = SHARE
            with running(module, model, with_sidecar(path, tier_timeout_s=0.25)) as engine:
                use_meddled(engine, 100 * (attempt + 1))
                meddler.share = 0.0
                finds_its_sidecar_again(engine)
            if wanted <= set(meddler.counts):
                break
        assert wanted <= set(meddler.counts), (
            f"some messages were never changed: {meddler.counts} of {meddler.seen}"
        )
    assert "background task failed: owner=sidecar socket" not in caplog.text


def use_meddled(engine: Engine, first_new: int) -> None:
    """Some rounds of requests, each with a prompt that is stored already and a new one."""
    for number in range(NUM_ROUNDS):
        begin = time.monotonic()
        tokens = prompt(number % 5, 43 - number % 3), prompt(first_new + number, 20)
        requests = [engine.add(of_one, 2) for of_one in tokens]
        engine.run(patience_s=BOUND_S)
        assert time.monotonic() - begin < BOUND_S
        assert [request.status for request in requests] == [Status.FINISHED_STOPPED] * 2
        engine.forget()
        time.sleep(AWAY_S)
    assert engine.scheduler.counted[FAILED_CALLS_TOTAL] == 0
    assert all(worker.counted(FAILED_CALLS_TOTAL) == 0 for worker in engine.workers)


def finds_its_sidecar_again(engine: Engine) -> None:
    """Nothing that it has read keeps it away."""
    deadline = time.monotonic() + BOUND_S
    while engine.tally(engine.ask(prompt(8, 43))).num_external != 40:
        assert time.monotonic() < deadline, "the engine does not find its sidecar again"
        engine.forget()
        time.sleep(AWAY_S)
    engine.forget()
