"""The short form of the run, always the same plan; `make test-chaos` is the long one, with a new
plan each time.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.cluster.inspection import Usage, grown
from tests.chaos.cluster.plan import KINDS, make_plan
from tests.chaos.cluster.run import Run, Times

SHORT = Times(warm_up_s=5.0, chaos_s=14.0, after_s=4.0)
PACE_S = 0.6
SEED = 20271


def test_a_seed_gives_one_plan() -> None:
    plan = make_plan(7, 600.0, 1.5)
    assert plan == make_plan(7, 600.0, 1.5)
    assert plan != make_plan(8, 600.0, 1.5)
    assert {fault.kind for fault in plan} == set(KINDS)


@pytest.mark.parametrize("seed", range(20))
def test_a_plan_leaves_each_target_time_to_come_back(seed: int) -> None:
    free_from_s: dict[tuple[str, str], float] = {}
    for fault in make_plan(seed, 300.0, 0.3):
        kind = KINDS[fault.kind]
        assert fault.target in kind.targets
        assert free_from_s.get((kind.domain, fault.target), 0.0) <= fault.at_s + 0.02
        assert fault.at_s + fault.lasts_s <= 300.02
        free_from_s[kind.domain, fault.target] = fault.at_s + fault.lasts_s + kind.room_s


def test_growth_is_seen() -> None:
    before = {"a": Usage(60.0, 20), "b": Usage(60.0, 20), "c": Usage(60.0, 20)}
    wrong = grown(before, {"a": Usage(98.0, 43), "b": Usage(100.0, 20), "c": Usage(60.0, 45)})
    assert len(wrong) == 2
    assert wrong[0].startswith("b has grown")
    assert wrong[1].startswith("c has 45 file descriptors")


@pytest.mark.timeout(240)
def test_the_cluster_survives(tmp_path: Path) -> None:
    plan = make_plan(SEED, SHORT.chaos_s, PACE_S)
    outcome = Run(tmp_path, plan, SEED, SHORT, print).go()
    assert not outcome.wrong, outcome.wrong
    assert outcome.num_requests > 100, "the workload has worked"
