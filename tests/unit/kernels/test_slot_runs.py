"""How slots are cut into runs on the host: whole blocks wherever the engine filled whole blocks."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from lmcache_kernels.paged_copy.slot_runs import Run, find_runs


def slots_of(*blocks, block_size=4):
    return np.array(
        [block * block_size + i for block in blocks for i in range(block_size)], dtype=np.int64
    )


@pytest.mark.parametrize(
    ("slots", "unit", "num_units", "edges"),
    [
        (slots_of(7, 2, 3, 0), 4, 4, ()),
        (slots_of(5), 4, 1, ()),
        (slots_of(7, 2, 5)[1:], 4, 2, (Run(0, 7, 1, 3),)),
        (slots_of(7, 2, 5)[:-1], 4, 2, (Run(8, 5, 0, 3),)),
        (slots_of(7, 2, 5)[3:-3], 4, 1, (Run(0, 7, 3, 1), Run(5, 5, 0, 1))),
        (slots_of(7, 2)[2:-1], 4, 0, (Run(0, 7, 2, 2), Run(2, 2, 0, 3))),
        (slots_of(7)[1:3], 4, 0, (Run(0, 7, 1, 2),)),
        (np.array([9, 3, 14, 6]), 1, 4, ()),
        (np.array([5, 5, 5]), 1, 3, ()),
        (np.array([4, 5, 10, 11, 0, 1]), 2, 3, ()),
    ],
)
def test_units_are_as_large_as_the_inner_runs_allow(slots, unit, num_units, edges):
    runs = find_runs(slots, 4)
    assert (runs.unit, len(runs.blocks), runs.edges) == (unit, num_units, edges)


@given(slots=st.lists(st.integers(0, 59), min_size=1), block_size=st.integers(1, 13))
def test_every_token_is_in_one_run(slots, block_size):
    runs = find_runs(np.array(slots, dtype=np.int64), block_size)
    seen = {}
    for run in runs.edges:
        seen |= {run.token + i: run.block * block_size + run.offset + i for i in range(run.length)}
    blocks, offsets = runs.token_slots()
    seen |= {runs.begin + i: int(slot) for i, slot in enumerate(blocks * block_size + offsets)}
    assert runs.end - runs.begin == len(blocks)
    assert seen == dict(enumerate(slots))
    assert block_size % runs.unit == 0
