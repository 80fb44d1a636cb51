"""The bench of a node's workers: what it counts, and that it drives a real sidecar."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.bench import workers
from tests.bench.workers_child import REQUESTS

HEADINGS = (
    "sidecar's loop", "lookup p50", "commit p50", "slowest store", "later than one alone",
    "slowest step's wait", "scheduler's question", "added to a step", "goal",
)  # fmt: skip


def test_latency_is_held_against_a_single_worker() -> None:
    one = workers.Taken(
        [[0.0001]] * 4,
        [[[0.001, 0.002, 0.003]]] * 4,
        [0.0003, 0.0005, 0.0004],
        [0.0004, 0.0006, 0.0007],
        True,
        loop_s=0.008,
        sidecar_s=0.012,
    )
    both = workers.Taken(
        [[0.0002, 0.0004]] * 4,
        [[[0.001, 0.002, 0.004], [0.002, 0.004, 0.005]]] * 4,
        [0.0004],
        [0.0012],
        True,
        loop_s=0.02,
        sidecar_s=0.02,
    )
    section = workers.table({(4, 1): one, (4, 8): both})
    alone, together = (dict(zip(section.headings, row, strict=True)) for row in section.rows)
    assert [alone[name] for name in HEADINGS] == [
        "2.00", "1.00", "3.00", "6.00", "", "0.10", "0.40", "0.20", "1",
    ]  # fmt: skip
    assert [together[name] for name in HEADINGS] == [
        "5.00", "1.50", "4.50", "11.00", "5.00", "0.40", "0.40", "0.80", "1",
    ]  # fmt: skip
    assert together["requests a step"] == "24"


@pytest.mark.timeout(120)
def test_workers_store_through_one_sidecar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "WARM_UP_STEPS", 1)
    taken = workers.take(tmp_path, num_workers=2, num_chunks=4, num_steps=3)
    assert [len(step) for step in taken.waits] == [2] * 3
    assert [[len(worker) for worker in step] for step in taken.steps] == [[len(REQUESTS)] * 2] * 3
    assert len(taken.idle_waits) == len(taken.busy_waits) == 3
    assert 0 < taken.loop_s <= taken.sidecar_s
