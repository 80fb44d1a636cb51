"""The tokens that policies choose, against a plain statement of the rules."""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from lmcache_core.blend.selection import Candidates, create_policy, with_the_rest
from lmcache_core.config import BLEND_POLICIES


def candidates(valid, originals, positions, starts, deviation):
    is_valid = torch.tensor(valid, dtype=torch.bool)
    counted = (torch.tensor(numbers, dtype=torch.int64) for numbers in (originals, positions))
    return Candidates(
        is_valid, is_valid.clone(), *counted, starts, torch.tensor(deviation, dtype=torch.float32)
    )


def wanted(policy, ratio, valid, originals, positions, starts, deviation):
    """The tokens that are to be recomputed."""
    chosen = {token for token, has_kv in enumerate(valid) if not has_kv}
    chosen |= {end - 1 for start, end in pairwise(starts) if start < end}
    for start, end in pairwise(starts):
        own = [token for token in range(start, end) if valid[token]]
        if policy == "deviation":
            rest = sorted(
                (token for token in own if token != end - 1), key=lambda token: -deviation[token]
            )
            chosen.update(rest[: math.floor(len(own) * ratio + 1e-9)])
        elif policy == "first_of_chunk":
            for chunk in chunks_of(own, originals):
                is_prefix = chunk[0] == start and originals[start] == positions[start] == 0
                count = 0 if is_prefix else math.ceil(len(chunk) * ratio - 1e-9)
                chosen.update(token for token in chunk if originals[token] < count)
    return sorted(chosen)


def chunks_of(tokens, originals):
    chunks = []
    for token in tokens:
        if originals[token] == 0 or not chunks:
            chunks.append([])
        chunks[-1].append(token)
    return chunks


@st.composite
def batches(draw):
    """Requests of chunks whose first tokens were found, as a retriever yields them; now and then
    one that lacks its beginning.
    """
    valid, originals, positions, starts = [], [], [], [0]
    for chunks in draw(
        st.lists(
            st.lists(
                st.tuples(st.integers(0, 7), st.integers(0, 7), st.sampled_from([0, 0, 0, 2])),
                max_size=4,
            ),
            max_size=4,
        )
    ):
        for num_found, num_missing, lacking in chunks:
            valid += [True] * num_found + [False] * num_missing
            originals += [*range(lacking, lacking + num_found), *[0] * num_missing]
        first = draw(st.sampled_from([0, 0, 5]))
        positions += range(first, first + len(valid) - starts[-1])
        starts.append(len(valid))
    deviation = draw(
        st.lists(
            st.sampled_from([0.0, 0.5, 1.0, 2.0, 3.0]), min_size=len(valid), max_size=len(valid)
        )
    )
    return (
        valid,
        originals,
        positions,
        starts,
        [number * has_kv for number, has_kv in zip(deviation, valid, strict=True)],
    )


RATIOS = st.one_of(st.sampled_from([0.0, 0.05, 0.15, 0.29, 0.57, 1.0]), st.floats(0, 1))


@settings(deadline=None, max_examples=150)
@given(batches(), st.sampled_from(BLEND_POLICIES), RATIOS)
@example(
    ([True] * 6, [0, 1, 2, 1, 2, 3], [0, 1, 2, 0, 1, 2], [0, 3, 6], [0.0] * 6),
    "first_of_chunk",
    1.0,
)
@example(([True] * 4, [0, 1, 2, 3], [5, 6, 7, 8], [0, 4], [0.0] * 4), "first_of_chunk", 0.5)
# 100 * 0.29 is less than 29 in floating point, and 100 * 0.07 more than 7.
@example(([True] * 100, range(100), range(100), [0, 100], [0.0] * 100), "deviation", 0.29)
@example(
    ([True] * 101, [0, *range(100)], range(101), [0, 101], [0.0] * 101), "first_of_chunk", 0.07
)
def test_policies_choose_by_their_rules(batch, policy, ratio):
    known = candidates(*batch)
    chosen = with_the_rest(create_policy(policy, ratio).choose(known), known)
    assert chosen.nonzero().flatten().tolist() == wanted(policy, ratio, *batch)
