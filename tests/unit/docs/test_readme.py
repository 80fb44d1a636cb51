"""The README's figures are those of docs/benchmarks.md, and its comparison names its sources."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from tests.bench import readme
from tests.unit.docs.pages import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")
BENCHMARKS = (ROOT / "docs/benchmarks.md").read_text(encoding="utf-8")
FIRST_SCREEN = README.partition("\n[vllm]: ")[0]
GENERATED = re.compile(
    rf"{readme.BEGIN}.*{readme.END}|^\| (?:Load|Store) rate, ours = 1 \|.*$",
    re.DOTALL | re.MULTILINE,
)
MAX_LINES, FIRST_LINES, FIRST_WORDS = 110, 42, 600


def rows(text: str, begin: str) -> Iterator[list[str]]:
    """Yield the cells of the first table after `begin`."""
    body = re.search(r"(?:^\|.*\|\n)+", text.partition(begin)[2], re.MULTILINE)
    assert body is not None, begin
    for line in re.findall(r"^\|(.*)\|$", body[0], re.MULTILINE):
        if not set(line) <= set("|:-"):
            yield [cell.strip() for cell in line.split("|")]


def rewritten(benchmarks: str) -> str:
    """The README that follows from a page of benchmarks."""
    return readme.rewritten(README, benchmarks)


def with_row(name: str, cells: dict[str, str]) -> str:
    """The page of benchmarks, with other figures in a row."""
    head, *_ = rows(BENCHMARKS, "\n### In turn with")
    [line] = re.findall(rf"^\| {re.escape(name)} \|.*$", BENCHMARKS, re.MULTILINE)
    found = [cell.strip() for cell in line.strip("|").split("|")]
    for column, cell in cells.items():
        found[head.index(column)] = cell
    return BENCHMARKS.replace(line, f"| {' | '.join(found)} |")


def test_the_figures_are_those_of_the_benchmarks() -> None:
    assert rewritten(BENCHMARKS) == README


def test_hits_are_those_with_the_default_settings() -> None:
    measured = {row[0]: row[1:3] for row in rows(BENCHMARKS, "\n## vLLM\n")}
    names, times, factors = rows(README, "**What a hit saves**")
    said = {name: [times[i], factors[i]] for i, name in enumerate(names)}
    assert said["the pod's sidecar"] == measured["memory of the sidecar"]
    connected = measured["vLLM's own prefix cache, with the connector"]
    assert said["the same, with our connector"] == connected


@pytest.mark.parametrize(("call", "said"), [("retrieve", "Load rate"), ("store", "Store rate")])
def test_every_row_of_a_place_counts(call: str, said: str) -> None:
    """Also those that are least kind to us."""
    _, *table = rows(BENCHMARKS, "\n### In turn with")
    beginnings = [each for place in readme.PLACES.values() for each in place]
    names = [
        row[0]
        for row in table
        if f": {call}" in row[0] and row[0].startswith((*beginnings, "tier behind"))
    ]
    assert len(names) >= 10
    for name in names:
        [line] = re.findall(
            rf"^\| {said}, .*$",
            rewritten(with_row(name, {"ours against peer": "0.01"})),
            re.MULTILINE,
        )
        assert re.search(r"(?:\[| to )100\.0 ", line), name


def test_the_worst_hit_of_vllms_own_cache_counts() -> None:
    """In each table that has one."""
    name = "vLLM, hit by its own prefix cache, 1,025 tokens"
    worse = rewritten(with_row(name, {"ours": "90.5", "reference": "10"}))
    assert "times as long with our connector (at worst 90.5 ms instead of 10)" in worse
    assert " to 9.05 times as long" in worse
    shorter = BENCHMARKS.replace("| 182.5 | 175.3 |", "| 100 | 912.5 |")
    assert "(at worst 912.5 ms instead of 100)" in rewritten(shorter)
    first = re.sub(r"(with the connector \|) 23\.1 ", r"\1 205 ", BENCHMARKS)
    assert "(at worst 205 ms instead of 20.5)" in rewritten(first)


def test_estimates_of_a_gpu_are_given_until_they_are_measured() -> None:
    assert "**On a GPU** nothing is measured" in README
    measured = re.sub(r"^\| load, Llama-3\.1-8B, p.*\n", "", BENCHMARKS, flags=re.MULTILINE)
    assert "**On a GPU**" not in rewritten(measured)


def test_no_other_figure_is_on_the_first_screen() -> None:
    written = GENERATED.sub("", FIRST_SCREEN)
    assert not re.findall(r"\d[\d.,]*(?:%| ms| times| GB/s)", written)
    section = BENCHMARKS.partition("\n## vLLM\n")[2].partition("\n## ")[0]
    [method] = re.findall(r"\*\*What a hit saves\*\*.*", written)
    for figure in re.findall(r"(?<![\w.-])\d[\d,.]*\d", method.partition("](")[0]):
        assert figure in section, figure


def test_every_cell_of_the_comparison_has_a_source() -> None:
    head, *table = rows(README, "**Against what you may run today**")
    assert len(head) == 5
    sources = dict(re.findall(r"^\[([\w-]+)\]: (https://\S+)$", README, re.MULTILINE))
    used = set()
    for row in table:
        assert len(row) == 5, row
        assert re.search(r"\]\((docs/[\w.]+\.md|CHANGELOG\.md#)", row[1]), row[1]
        for cell in row[2:]:
            assert re.search(r"\]\[[\w-]+\]|\]\(docs/benchmarks\.md#", cell), cell
            used.update(re.findall(r"\]\[([\w-]+)\]", cell))
    assert used == set(sources)


def test_the_first_screen_answers_what_a_visitor_asks() -> None:
    """What it is, for whom, how much against what they run, how to try it, what it does not do."""
    for answer in (
        "vLLM on Kubernetes",
        "**Use it if**",
        "**Skip it if**",
        "Not in this release",
    ):
        assert answer in FIRST_SCREEN
    assert re.search(r"^git clone .*\nmake demo +# .*\nmake test +# ", FIRST_SCREEN, re.MULTILINE)
    for table in ("**What a hit saves**", "**Against what you may run today**"):
        assert list(rows(FIRST_SCREEN, table))
    assert FIRST_SCREEN.count("\n") <= FIRST_LINES
    shown = re.sub(r"\]\[[\w-]+\]|\]\([^)]*\)", "", FIRST_SCREEN)
    assert len(re.findall(r"\w\S*", shown)) <= FIRST_WORDS
    assert README.count("\n") <= MAX_LINES
