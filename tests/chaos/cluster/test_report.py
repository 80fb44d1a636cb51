"""The report says what came out, good or bad."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from tests.chaos.cluster import report
from tests.chaos.cluster.inspection import Usage
from tests.chaos.cluster.plan import KINDS, make_plan
from tests.chaos.cluster.plot import draw
from tests.chaos.cluster.run import Outcome, Times

HITS = [(-10.0, 0.0), (0.0, 0.9), (60.0, 0.5), (120.0, 1.0)]
SVG = "{http://www.w3.org/2000/svg}"


def outcome_of(*wrong: str) -> Outcome:
    outcome = Outcome(7, Times(10.0, 120.0, 10.0), make_plan(7, 120.0, 1.5), list(wrong), hits=HITS)
    outcome.before, outcome.after = {"lookup-0": Usage(50.0, 20)}, {"lookup-0": Usage(57.0, 21)}
    return outcome


def test_the_plot_has_every_fault_and_every_kind() -> None:
    plan = make_plan(7, 120.0, 1.5)
    root = ElementTree.fromstring(draw(HITS, plan, "a < b"))
    assert len(root.findall(f"{SVG}rect")) == 1 + len(plan)
    texts = [text.text for text in root.findall(f"{SVG}text")]
    assert {"a < b", *KINDS} <= set(texts)
    line = root.find(f"{SVG}polyline")
    assert line is not None
    places = [tuple(map(float, pair.split(","))) for pair in line.attrib["points"].split()]
    assert [y for _, y in places] == [260.0, 65.6, 152.0, 44.0]
    assert places[0][0] == 90.0
    assert places[-1][0] == 880.0


def test_a_line_needs_two_points() -> None:
    with pytest.raises(ValueError, match="1 points"):
        draw(HITS[:1], [], "")


def test_what_went_wrong_is_told_by_sort(tmp_path: Path) -> None:
    (tmp_path / "benchmarks.md").write_text(
        "before\n<!-- chaos: begin -->\nold\n<!-- chaos: end -->\nafter\n"
    )
    wrong = (
        "1.00 engine-0 wrong: the KV",
        "2.00 engine-1 error: store raised OSError: x",
        "3.00 engine-2 late: store",
        "not ready\nmore",
    )
    report.write(tmp_path, outcome_of(*wrong))
    text = (tmp_path / "benchmarks.md").read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    for row in (
        "| wrong KV | 1 |",
        "| errors raised to an engine | 1 |",
        "| calls past their bound | 1 |",
        "| anything else wrong | 1 | not ready |",
    ):
        assert row in text
    assert "| largest growth of a service, MB | 7 | lookup-0 |" in text
    assert (tmp_path / report.PLOT).read_text().startswith("<svg")


def test_nothing_wrong_is_nought() -> None:
    table = report.figures(outcome_of()).as_markdown()
    assert "| wrong KV | 0 |" in table
    assert "| anything else wrong | 0 |  |" in table
