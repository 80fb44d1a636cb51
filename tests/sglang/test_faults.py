"""The sidecar dies, hangs and returns at every point: each request is answered, and rightly."""

from __future__ import annotations

import signal
import statistics
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import asdict
from pathlib import Path

import pytest

from tests.sglang.sabotaged import PHASES, PLAN
from tests.sglang.worlds import TRAINED, Pair, Record, opened_pair, whole_pages
from tests.vllm.engines import Ask, from_plain

LINKER = "tests.sglang.sabotaged:SabotagedLinker"
SLACK_S = 0.5
LENGTH, SHORT = 1500, 600
TOKENS_PER_S = 2000.0
NUM_REQUESTS, NUM_ABORTED = 200, 60


@pytest.fixture(scope="module")
def pair(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    directory = tmp_path_factory.mktemp("pair")
    patch = pytest.MonkeyPatch()
    patch.setenv(PLAN, str(directory / "plan"))
    one = opened_pair(directory, models, TRAINED, LINKER, TOKENS_PER_S)
    yield one
    one.owner.__exit__(None, None, None)
    patch.undo()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
@pytest.mark.parametrize("phase", PHASES)
def test_a_sidecar_that_fails_in_a_phase(pair: Pair, phase: str, number: signal.Signals) -> None:
    pair.await_hits()
    ask, more = pair.ask(LENGTH), pair.ask(40)
    (expected,) = pair.filled([ask])
    begin = time.monotonic()
    pair.first.generate([pair.ask(LENGTH)])
    computing_s = time.monotonic() - begin
    plan = pair.owner.directory / "plan"
    plan.write_text(f"{phase} {int(number)} {pair.sidecar.pid}")
    (found,) = pair.second.generate([ask])
    assert found.tokens == expected.tokens
    assert found.finish_reason == "length"
    if phase != "offload":
        assert found.num_cached >= whole_pages(LENGTH), "what was promised was loaded"
    (next_one,) = pair.second.generate([Ask(ask.tokens + more.tokens, 4)])
    assert not plan.exists(), "it did not come to that phase"
    pair.sidecar.thaw()
    if not pair.sidecar.is_alive or number == signal.SIGKILL:
        pair.sidecar.kill()
        pair.sidecar.start()
    (computed,) = pair.first.generate([Ask(ask.tokens + more.tokens, 4)])
    assert next_one.tokens == computed.tokens
    assert found.took_s <= 2 * computing_s + SLACK_S


def test_requests_with_aborts_while_the_sidecar_dies_and_returns(
    pair: Pair, record_property: Record
) -> None:
    pair.await_hits()
    asks = [pair.ask(100 + 7 * number, 6) for number in range(NUM_REQUESTS)]
    expected = pair.first.generate(asks, timeout_s=300.0)
    burst = {"asks": [asdict(ask) for ask in asks], "num_aborted": NUM_ABORTED}
    with ThreadPoolExecutor(1) as pool:
        answering = pool.submit(pair.second.call, 400.0, do="burst", **burst)
        # A process that a thread has started dies with the thread: so it is not done there.
        while not wait([answering], 0.7).done:
            pair.sidecar.freeze()
            wait([answering], 0.7)
            pair.sidecar.kill()
            wait([answering], 0.5)
            pair.sidecar.start()
        answers = answering.result()
    whole = [(from_plain(one), right) for one, right in zip(answers, expected, strict=True) if one]
    assert len(whole) == NUM_REQUESTS - NUM_ABORTED
    assert {one.finish_reason for one, _ in whole} == {"length"}
    assert [one.tokens for one, _ in whole] == [right.tokens for _, right in whole]
    record_property(f"right answers of {NUM_REQUESTS}, {NUM_ABORTED} of them given up", len(whole))
    pair.await_hits()


def test_no_request_waits_longer_than_computing_takes(pair: Pair, record_property: Record) -> None:
    """As the engine believes, while the sidecar is stopped and goes on, over and over."""
    pair.await_hits()
    asks = [pair.ask(SHORT, 2) for _ in range(40)]
    pair.filled(asks)
    took = []
    for number, ask in enumerate(asks):
        if number % 4 == 1:
            pair.sidecar.freeze()
        if number % 4 == 3:
            pair.sidecar.thaw()
        took += [one.took_s for one in pair.second.generate([ask])]
    pair.sidecar.thaw()
    worst_s, price_s = statistics.quantiles(took, n=100)[98], SHORT / TOKENS_PER_S
    figure = f"{worst_s:.3f} / {price_s:.3f} s"
    record_property(f"slowest hundredth / price, that and {SLACK_S} s or less", figure)
    assert worst_s <= price_s + SLACK_S
