"""What the two sides tell each other."""

from __future__ import annotations

import pickle

from lmcache_core.integrations.vllm.plan import ChunkRun, Load, StepPlan, Store, WorkerReport


def test_a_plan_travels_between_processes() -> None:
    run = ChunkRun(0, 2, (b"a" * 32, b"b" * 32), (3, 4, 5, 6))
    plan = StepPlan((Load("r", 16, 32, (run,), True, 0.5),), (Store("r", (run,)),))
    assert pickle.loads(pickle.dumps(plan)) == plan


def test_reports_of_workers_become_one() -> None:
    whole = WorkerReport({"l"}, {"a"}, hosts={"x"}).aggregate(
        WorkerReport({"m"}, {"b"}, is_out=True, hosts={"x", "y"})
    )
    assert whole == WorkerReport({"l", "m"}, {"a", "b"}, is_out=True, hosts={"x", "y"})
    assert pickle.loads(pickle.dumps(whole)) == whole
