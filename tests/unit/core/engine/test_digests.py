"""Digests of what is being filled: right for any pace, also when it stalls, and nothing is read
any more when it is abandoned.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator

import pytest
from lmcache_core.concurrency import Workers
from lmcache_core.engine.digests import FILL_POLL_S, FILL_STEP_BYTES, MAX_IDLE_POLLS, FillingDigest
from lmcache_core.record import payload_digest

SIZE = 5 * FILL_STEP_BYTES + 12345
PAYLOAD = random.Random(1).randbytes(SIZE)
STALL_S = 3 * FILL_POLL_S * MAX_IDLE_POLLS


@pytest.fixture(params=[1, 2, None])
def workers(request: pytest.FixtureRequest) -> Iterator[Workers]:
    """One thread, two, and none at all."""
    made = Workers("test-digest", request.param)
    if request.param is not None:
        made.open()
    yield made
    made.close()


def fill(workers: Workers, ends: list[int], pause_s: float) -> bytes:
    """The digest of memory that is filled to these ends; what is not filled yet is something
    else.
    """
    memory = bytearray(SIZE)
    digest = FillingDigest(memoryview(memory), workers)
    begin = 0
    for end in ends:
        memory[begin:end] = PAYLOAD[begin:end]
        digest.filled(end)
        time.sleep(pause_s)
        begin = end
    memory[begin:] = PAYLOAD[begin:]
    return digest.finish().result(10.0)


@pytest.mark.parametrize(
    "step", [FILL_STEP_BYTES // 7, FILL_STEP_BYTES, FILL_STEP_BYTES + 1, 4 * FILL_STEP_BYTES, SIZE]
)
@pytest.mark.parametrize("pause_s", [0.0, FILL_POLL_S, STALL_S])
def test_the_digest_is_right_at_any_pace(workers: Workers, step: int, pause_s: float) -> None:
    assert fill(workers, list(range(step, SIZE, step)), pause_s) == payload_digest(PAYLOAD)


def test_who_tells_nothing_before_the_end_gets_the_digest_too(workers: Workers) -> None:
    assert fill(workers, [], 0.0) == payload_digest(PAYLOAD)
    assert FillingDigest(memoryview(b""), workers).finish().result(10.0) == payload_digest(b"")


def test_several_at_once_share_the_threads(workers: Workers) -> None:
    payloads = [random.Random(seed).randbytes(SIZE) for seed in range(5)]
    digests = [FillingDigest(memoryview(payload), workers) for payload in payloads]
    for end in range(FILL_STEP_BYTES, SIZE, FILL_STEP_BYTES):
        for digest in digests:
            digest.filled(end)
    futures = [digest.finish() for digest in digests]
    assert [future.result(10.0) for future in futures] == [
        payload_digest(payload) for payload in payloads
    ]


def test_what_is_abandoned_is_not_read_any_more(workers: Workers) -> None:
    digest = FillingDigest(memoryview(PAYLOAD), workers)
    digest.filled(2 * FILL_STEP_BYTES)
    begin = time.monotonic()
    digest.abandon()
    assert time.monotonic() - begin < 1.0
    assert digest._follower is not None
    assert digest._follower.done()
