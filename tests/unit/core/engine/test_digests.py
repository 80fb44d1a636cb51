"""Digests computed alongside a copy, at any pace."""

from __future__ import annotations

import random

import pytest
from lmcache_core.engine.digests import STEP_BYTES, FollowingDigest
from lmcache_core.record import payload_digest

SIZE = 5 * STEP_BYTES + 12345
PAYLOAD = random.Random(1).randbytes(SIZE)


@pytest.mark.parametrize("step", [STEP_BYTES // 7, STEP_BYTES, STEP_BYTES + 1, SIZE])
def test_the_digest_covers_only_copied_bytes(step: int) -> None:
    memory = bytearray(SIZE)
    digest = FollowingDigest(memoryview(memory))
    begin = 0
    for end in range(step, SIZE, step):
        memory[begin:end] = PAYLOAD[begin:end]
        digest.copied(end)
        begin = end
    memory[begin:] = PAYLOAD[begin:]
    assert digest.finish() == payload_digest(PAYLOAD)


def test_the_digest_of_nothing() -> None:
    assert FollowingDigest(memoryview(b"")).finish() == payload_digest(b"")
