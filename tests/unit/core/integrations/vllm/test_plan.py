"""What the two sides tell each other."""

from __future__ import annotations

import pickle

from lmcache_core.integrations.vllm.plan import ChunkRun, Load, StepPlan, Store, WorkerReport


def test_a_plan_travels_between_processes() -> None:
    run = ChunkRun(0, 2, (b"a" * 32, b"b" * 32), (3, 4, 5, 6))
    plan = StepPlan((Load("r", 16, 32, (run,), True, 0.5),), (Store("r", (run,)),))
    assert pickle.loads(pickle.dumps(plan)) == plan


def test_reports_of_workers_become_one() -> None:
    both, first = (0, b"both"), (0, b"first")
    whole = WorkerReport({"l"}, {"a"}, {both: 1, first: 1}).aggregate(WorkerReport({"m"}, {"b"}, {both: 1}, is_out=True))
    assert whole == WorkerReport({"l", "m"}, {"a", "b"}, {both: 2, first: 1}, is_out=True)
    assert pickle.loads(pickle.dumps(whole)) == whole
