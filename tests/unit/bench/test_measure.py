"""What the tables of docs/benchmarks.md rest on: rounds, shares, other load, and their place."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.bench import measure, report, workers
from tests.bench.measure import Figure, OtherLoad


def test_works_take_turns_and_the_first_round_does_not_count() -> None:
    calls: list[tuple[str, int]] = []
    seconds = measure.in_turn(
        lambda turn: calls.append(("one", turn)),
        lambda turn: calls.append(("two", turn)),
        prepare=lambda turn: calls.append(("prepare", turn)),
        rounds=2,
    )
    assert calls == [(name, turn) for turn in range(3) for name in ("prepare", "one", "two")]
    assert [len(of_work) for of_work in seconds] == [2, 2]


def test_a_share_is_of_the_same_round_where_the_limit_took_its_turn() -> None:
    limit = Figure("limit", 10**9, (0.5,))
    assert Figure("", 10**9, (1.0, 2.0, 4.0), limit).share == 0.25
    assert Figure("", 10**9, (1.0, 2.0, 4.0), limit, (1.0, 1.0, 1.0)).share == 0.5
    assert limit.share is None


@pytest.mark.parametrize(("own_s", "cores"), [(3.0, 0.0), (1.0, 1.0)])
def test_other_load_leaves_out_this_process(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, own_s: float, cores: float
) -> None:
    stat = tmp_path / "stat"
    stat.write_text("cpu  0 0 0 0 0 0 0 0\n")
    own, wall = iter([0.0, own_s]), iter([0.0, 2.0])
    monkeypatch.setattr(measure, "PROC_STAT", stat)
    monkeypatch.setattr(measure, "processor_seconds", lambda pid: 0.0)
    monkeypatch.setattr("os.sysconf", lambda _: 100)
    monkeypatch.setattr("time.process_time", lambda: next(own))
    monkeypatch.setattr("time.perf_counter", lambda: next(wall))
    with OtherLoad() as others:
        stat.write_text("cpu  300 0 0 500 900 0 0 0\n")  # idle and waiting are not busy
    monkeypatch.undo()
    assert others.cores == pytest.approx(cores)


def test_only_the_named_section_is_rewritten(tmp_path: Path) -> None:
    document = tmp_path / "figures.md"
    text = "a\n<!-- one: begin -->\n{}\n<!-- one: end -->\nb\n<!-- two: begin -->\nkept\n"
    document.write_text(text.format("old"))
    report.rewrite(document, "one", "machine", ["table"])
    assert document.read_text() == text.format("machine\n\ntable")
    with pytest.raises(ValueError, match="two"):
        report.rewrite(document, "two", "machine", [])


def test_tables_have_no_empty_columns_and_numbers_lie_to_the_right() -> None:
    section = report.Section("T", ("what", "none", "ms", ""), [("a", "", "1", "")])
    assert section.as_markdown() == "### T\n\n| what | ms |\n|---|---:|\n| a | 1 |"


def test_workers_are_compared_with_one_alone() -> None:
    alone = workers.Taken(
        waits=[[0.0001]] * 4,
        steps=[[[0.001, 0.002, 0.003]]] * 4,
        idle_waits=[0.0003, 0.0005, 0.0004],
        busy_waits=[0.0004, 0.0006, 0.0007],
        has_priority=True,
        loop_s=0.008,
        sidecar_s=0.012,
    )
    together = workers.Taken(
        waits=[[0.0002, 0.0004]] * 4,
        steps=[[[0.001, 0.002, 0.004], [0.002, 0.004, 0.005]]] * 4,
        idle_waits=[0.0004],
        busy_waits=[0.0012],
        has_priority=True,
        loop_s=0.02,
        sidecar_s=0.02,
    )
    one, two = workers.table({(4, 1): alone, (4, 8): together}).rows
    figures = ["3", "2.00", "3.00", "1.00", "2.00", "3.00", "3.00", "6.00"]
    assert one[1:] == (*figures, "", "0.10", "0.40", "0.20", "1", "")
    figures = ["24", "5.00", "5.00", "1.50", "3.00", "4.50", "5.00", "11.00"]
    assert two[1:] == (*figures, "5.00", "0.40", "0.40", "0.80", "1", "")
