"""Runs of the simulated cluster: a seed repeats, and a fresh one violates nothing."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path

import pytest

from tests.simulation import defects
from tests.simulation.defects import DEFECTS, Copy, Defect, Search
from tests.simulation.many import ROOT, Result, fresh_seeds, replay, run_seed, shrink
from tests.simulation.pace import SLOW_FROM_S

SECONDS = 20.0
pytestmark = pytest.mark.timeout(600)


def run(seed: int, seconds: float) -> Result:
    """Run a seed; fail with the command that repeats it."""
    result = run_seed(seed, seconds)
    assert not result["violations"], "\n".join([replay(result), *result["violations"]])
    return result


def test_a_seed_of_this_state_of_the_product() -> None:
    assert run(fresh_seeds(1)[0], SECONDS)["events"] > 1000


@pytest.mark.long
def test_a_seed_repeats_byte_for_byte_and_meets_hits() -> None:
    first, again = (run(4, SECONDS) for _ in range(2))
    assert (first["digest"], first["events"]) == (again["digest"], again["events"])
    totals = first["totals"]
    assert totals["hit"] > 0
    assert totals["loaded"] > 0, "by vLLM"
    assert totals["retrieve"] > 0, "by the library"


@pytest.mark.long
def test_a_long_run_is_mostly_quiet() -> None:
    result = run(1, SLOW_FROM_S)
    assert result["faults"]
    assert result["totals"]["requests"] > 10
    assert result["events"] < 60 * result["virtual_s"]


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda defect: defect.name)
def test_a_defect_can_be_put_in(defect: Defect) -> None:
    assert (ROOT / defect.path).read_text(encoding="utf-8").count(defect.before) == 1
    assert defect.before != defect.after


@pytest.mark.long
def test_a_defect_is_found() -> None:
    (late,) = (defect for defect in DEFECTS if defect.name.startswith("an answer that has come"))
    copy = Copy(late)
    try:
        violations = run_seed(3, 1.0, path=copy.path)["violations"]
    finally:
        copy.remove()
    assert any("an offer came after" in text for text in violations)


def test_defects_are_searched_for_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    runs, finders = [], [(1, 2), (0, 3)]

    def run(seed: int, seconds: float, path: str, **_: object) -> dict[str, object]:
        (guard,) = Path(path.split(os.pathsep)[0]).glob("*/storage/guard.py")
        text = guard.read_text(encoding="utf-8")
        (number,) = (i for i, one in enumerate(DEFECTS[:2]) if one.before not in text)
        runs.append((number, seed))
        return {"seed": seed, "violations": ["broken"] if runs[-1] in finders else []}

    monkeypatch.setattr(defects, "run_seed", run)
    search = Search(DEFECTS[:2], 60.0)
    search.run()
    assert runs == [(0, 1), (1, 1), (0, 2), (1, 2), (0, 3)]
    assert [search.found[one.name]["seed"] for one in DEFECTS[:2]] == [3, 2]
    late = Search(DEFECTS[:1], 0.0)
    late.run()
    assert not late.found


def test_a_run_without_an_end_is_a_violation() -> None:
    result = run_seed(1, SECONDS, max_processor_s=1)
    assert result["violations"] == ["the run has not ended in 1 s of processor time"]


def test_shrinking_leaves_what_is_needed_for_the_failure() -> None:
    asked = []

    def fails(keep: Collection[int]) -> bool:
        asked.append(keep)
        return {3, 17} <= set(keep)

    assert shrink(range(40), fails) == [3, 17]
    assert len(asked) < 60
    assert shrink(range(5), lambda keep: True) == []
