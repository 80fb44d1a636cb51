"""The figures of docs/scale.md are those of docs/benchmarks.md, and follow from each other."""

from __future__ import annotations

import re

import pytest

from tests.unit.docs.pages import ROOT

PAGE = (ROOT / "docs" / "scale.md").read_text(encoding="utf-8")
LINES = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8").splitlines()
TIMES = "\N{MULTIPLICATION SIGN}"
FIGURE = re.compile(r"\d[\d,.]*\d|\d")


def rows(heading: str) -> list[list[str]]:
    """The cells of the first table below a heading."""
    section = PAGE.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    lines = re.findall(r"^\| (.*) \|$", section, re.MULTILINE)
    return [line.split(" | ") for line in lines[1:]]


def number(text: str) -> float:
    return float(text.replace(",", ""))


@pytest.mark.parametrize(("what", "figure", "row", "command"), rows("What services take"))
def test_each_cost_is_one_that_was_measured(what: str, figure: str, row: str, command: str) -> None:
    measured = [line for line in LINES if line.removeprefix("| ").startswith(row)]
    measured += [line for line in LINES if f". {row}" in line]
    figures = {each for line in measured for each in FIGURE.findall(line.replace(row, "", 1))}
    assert figure in figures, f"{what}: no row {row!r} of benchmarks.md says {figure}"


@pytest.mark.parametrize(
    ("what", "ten", "hundred", "thousand", "arithmetic"),
    rows("What 10, 100 and 1,000 pods need"),
)
def test_each_need_follows_from_its_arithmetic(
    what: str, ten: str, hundred: str, thousand: str, arithmetic: str
) -> None:
    assert re.fullmatch(rf"pods [\d.{TIMES}/()+ ]+", arithmetic)
    for pods, said in ((10, ten), (100, hundred), (1000, thousand)):
        value = eval(arithmetic.replace(TIMES, "*"), {"pods": pods})
        assert number(said) == pytest.approx(value, rel=0.06, abs=1 if "servers" in what else 0)
