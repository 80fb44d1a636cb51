"""The replay that says what routing by events is worth, on traces written by hand."""

from __future__ import annotations

import random

from tests.bench.routing import (
    BY_GPU,
    ORACLE,
    OURS,
    POLICIES,
    Found,
    Replay,
    Setup,
    Tier,
    Trace,
    hits,
    read_trace,
)

TINY = Setup((0.5, 2, 4, 8), 8000, (float("inf"), 300_000, 20_000, 24_000))
"""Chunks of 256 tokens are of 32 MiB: 16 on a GPU, 64 in an arena, 128 on a disk."""


def agents() -> Trace:
    """Forty sessions, each of two chunks and one more in each turn, in random order."""
    chance = random.Random(3)
    turns = [session for session in range(40) for _ in range(12)]
    chance.shuffle(turns)
    lines, last, sizes = [], {}, {}
    for at, session in enumerate(turns):
        size = sizes.get(session, 0)
        lines.append((at - last[session] if size else 0, size, 1 if size else 2))
        last[session], sizes[session] = at, size + lines[-1][2]
    return read_trace(lines, 256)


def replayed(policy: str) -> Found:
    replay = Replay(agents(), 4, TINY, policy)
    replay.play(replay.num_requests)
    assert replay.found.num_requests == replay.num_requests // 2
    return replay.found


def test_who_knows_more_saves_more() -> None:
    found = {policy: replayed(policy) for policy in POLICIES}
    saved = {policy: each.saved_s for policy, each in found.items()}
    assert saved[ORACLE] >= saved[OURS] >= 0.95 * saved[ORACLE]
    assert saved[OURS] > saved[BY_GPU] > saved["round robin"]
    assert found[OURS].mean_first_s < found["by session"].mean_first_s
    assert len({sum(each.tokens) for each in found.values()}) == 1


def test_same_seed_gives_the_same_figures() -> None:
    assert replayed(OURS) == replayed(OURS)


def test_prompts_share_stretches_and_sessions() -> None:
    # a b c | a b c d e | a b x | y
    trace = read_trace([(0, 0, 3), (1, 3, 2), (1, 2, 1), (0, 0, 1)], 256)
    (ab, c), (_, _, de), (_, x), (y,) = trace.paths
    assert trace.paths[1] == (ab, c, de)
    assert trace.paths[2] == (ab, x)
    assert [length for _, length in (ab, c, de, x, y)] == [2, 1, 2, 1, 1]
    assert len({name for name, _ in (ab, c, de, x, y)}) == 5
    assert trace.sessions == [0, 0, 2, 3]


def test_fastest_tier_is_read_up_to_the_first_chunk_that_none_has() -> None:
    path = [(0, 4), (1, 4), (2, 4)]
    gpu, arena, disk = {0: 2, 1: 4}, {0: 3, 1: 1}, {0: 4, 2: 4}
    # vLLM's blocks end with the gap in the first stretch; the second ends after one chunk.
    assert hits(path, (gpu, arena, disk), {}) == (2, 2, 1, 0)
    assert hits(path, (gpu, arena, disk), {1: 4}) == (2, 2, 5, 3)


def test_full_tier_gives_up_ends_of_what_was_used_last_longest_ago() -> None:
    tier = Tier(6)
    assert tier.put([(0, 3), (1, 2)]) == ({0: 3, 1: 2}, 5, 0)
    assert tier.put([(0, 3), (2, 2)]) == ({2: 2, 1: 1}, 2, 1)
    assert tier.put([(3, 4)]) == ({3: 4, 1: 0, 2: 0, 0: 2}, 4, 4)
    assert tier.held == {0: 2, 3: 4}
