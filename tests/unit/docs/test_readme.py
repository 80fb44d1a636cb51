"""The README's figures are those of docs/benchmarks.md, and its comparison names its sources."""

from __future__ import annotations

import re
from collections.abc import Iterator

from tests.bench import peers
from tests.unit.docs.pages import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")
BENCHMARKS = (ROOT / "docs/benchmarks.md").read_text(encoding="utf-8")
FIRST_SCREEN = README.partition("\n[vllm]: ")[0]
# What the README calls each column, and what the benchmark calls its row.
MEASURED = {
    "recomputed": "cold",
    "vLLM's own prefix cache": "vLLM's own prefix cache",
    "the pod's sidecar": "memory of the sidecar",
    "the sidecar's disk": "disk of the sidecar",
    "the storage service": "storage service",
    "another pod": "sidecar of another pod",
}
OURS = list(MEASURED)[2:]
MAX_LINES, FIRST_LINES, FIRST_WORDS = 110, 42, 600


def rows(text: str, begin: str) -> Iterator[list[str]]:
    """Yield the cells of the first table after `begin`."""
    body = re.search(r"(?:^\|.*\|\n)+", text.partition(begin)[2], re.MULTILINE)
    assert body is not None, begin
    for line in re.findall(r"^\|(.*)\|$", body[0], re.MULTILINE):
        if not set(line) <= set("|:-"):
            yield [cell.strip() for cell in line.split("|")]


def hits() -> Iterator[tuple[str, tuple[str, str]]]:
    """Yield where KV came from, with the milliseconds and how many times faster it was."""
    names, times, factors = rows(README, "**What a hit saves**")
    for name, time, factor in zip(names[1:], times[1:], factors[1:], strict=True):
        yield name, (time, factor)


def test_the_figures_are_those_of_the_benchmark() -> None:
    measured = {row[0]: row[1:] for row in rows(BENCHMARKS, "\n## vLLM\n")}
    said = dict(hits())
    costs = {row[0]: row[1:] for row in rows(BENCHMARKS, "what storing costs a cold request")}
    storing = "{} ({})".format(*costs["storing adds"][:2])
    assert said == {name: tuple(measured[source][:2]) for name, source in MEASURED.items()} | {
        "storing adds": (storing, "")
    }
    [release] = re.findall(r"vLLM ([\d.]+) on the CPU", BENCHMARKS)
    assert f"vLLM {release}" in README.partition("**What a hit saves**")[2]


def test_the_comparison_says_what_was_measured() -> None:
    table = {row[0]: row[1:] for row in rows(README, "**Against what you may run today**")}
    factors = [int(factor) for name, (_, factor) in hits() if name in OURS]
    assert table["A hit against recomputing"][0].startswith(f"{min(factors)} to {max(factors)} ")
    assert "in-process mode" in table["A hit against recomputing"][2], "not the column's mode"
    said = {
        place: factor
        for factor, place in re.findall(r"(\d\.\d) ([^,\]]+)", table["Load rate, ours = 1"][2])
    }
    head, *measured = rows(BENCHMARKS, "\n### In turn with")
    assert said == peers.load_rates(head, measured)
    assert list(said) == list(peers.README_PLACES)


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
        "make demo",
        "Not in this release",
    ):
        assert answer in FIRST_SCREEN
    for table in ("**What a hit saves**", "**Against what you may run today**"):
        assert list(rows(FIRST_SCREEN, table))
    assert FIRST_SCREEN.count("\n") <= FIRST_LINES
    shown = re.sub(r"\]\[[\w-]+\]|\]\([^)]*\)", "", FIRST_SCREEN)
    assert len(re.findall(r"\w\S*", shown)) <= FIRST_WORDS
    assert README.count("\n") <= MAX_LINES
