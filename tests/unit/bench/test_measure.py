"""What the tables of docs/benchmarks.md rest on: rounds, shares, other load, and their place."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.bench import measure, report
from tests.bench.measure import Figure, OtherLoad


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
