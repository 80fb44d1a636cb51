"""The README's figures are those of docs/benchmarks.md, and its comparison names its sources."""

from __future__ import annotations

import re
from collections.abc import Iterator

from tests.unit.docs.pages import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")
BENCHMARKS = (ROOT / "docs/benchmarks.md").read_text(encoding="utf-8")
# What the README calls each row, and what the benchmark does.
MEASURED = {
    "recomputed": "cold",
    "vLLM's own prefix cache (same pod, not evicted)": "vLLM's own prefix cache",
    "the pod's sidecar (survives a restart of vLLM)": "memory of the sidecar, sync",
    "the sidecar's disk": "disk of the sidecar",
    "the storage service": "storage service",
    "another pod's sidecar": "sidecar of another pod",
}
MAX_LINES = 150


def rows(text: str, section: str) -> Iterator[list[str]]:
    """Yield the cells of a section's tables, without headings."""
    body = text.partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    for line in re.findall(r"^\|(.*)\|$", body, re.MULTILINE):
        if not set(line) <= set("|:-"):
            yield [cell.strip() for cell in line.split("|")]


def test_the_figures_are_those_of_the_benchmark() -> None:
    measured = {row[0]: row[1:] for row in rows(BENCHMARKS, "vLLM")}
    said = {row[0]: row[1:] for row in rows(README, "What a hit saves") if row[0] != "KV from"}
    assert said == {name: measured[source][:2] for name, source in MEASURED.items()}
    assert "Storing adds {} ms ({})".format(*measured["storing adds"][:2]) in README
    [release] = re.findall(r"vLLM ([\d.]+) on the CPU", BENCHMARKS)
    assert f"vLLM {release}" in README.partition("## What a hit saves")[2]


def test_every_cell_of_the_comparison_has_a_source() -> None:
    head, *table = rows(README, "What people run today")
    assert len(head) == 5
    sources = dict(re.findall(r"^\[([\w-]+)\]: (https://\S+)$", README, re.MULTILINE))
    used = set()
    for row in table:
        assert len(row) == 5, row
        for cell in row[2:]:
            links = re.findall(r"\]\[([\w-]+)\]", cell)
            used.update(links)
            assert links or cell in ("not measured", "not checked"), cell
    assert used == set(sources)


def test_it_is_read_in_a_minute() -> None:
    assert README.count("\n") <= MAX_LINES
    assert README.rstrip().split("\n## ")[-1].startswith("In a Python process")
