"""The short form of the run, always the same plan; `make test-chaos` is the long one, with a new
plan each time.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.cluster.plan import make_plan
from tests.chaos.cluster.run import Run, Times

SHORT = Times(warm_up_s=5.0, chaos_s=14.0, after_s=4.0)
PACE_S = 0.6
SEED = 20271


@pytest.mark.timeout(240)
def test_the_cluster_survives(tmp_path: Path) -> None:
    plan = make_plan(SEED, SHORT.chaos_s, PACE_S)
    outcome = Run(tmp_path, plan, SEED, SHORT, print).go()
    assert not outcome.wrong, outcome.wrong
    assert outcome.num_requests > 100, "the workload has worked"
