"""How slots are cut into runs on the host: whole blocks wherever the engine filled whole blocks."""

from __future__ import annotations

import numpy as np
import pytest
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
