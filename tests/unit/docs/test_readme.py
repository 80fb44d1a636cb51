"""The figures and pictures of README, docs/compare.md and docs/benchmarks.md are those of the
tables of docs/benchmarks.md, and comparisons name their sources.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator

import pytest
from lmcache_core.names import STORAGE_TIER
from lmcache_demo.report import Answer, Compression, Step, print_report
from rich.console import Console

from tests.bench import pictures, readme
from tests.unit.docs.pages import ROOT

README, COMPARE, BENCHMARKS = (
    (ROOT / name).read_text(encoding="utf-8")
    for name in ("README.md", "docs/compare.md", "docs/benchmarks.md")
)
FIRST_SCREEN = README.partition("\n[vllm]: ")[0]
GENERATED = re.compile(
    rf"{readme.BEGIN}.*{readme.END}|^\| (?:Load|Store) rate, ours = 1 \|.*$",
    re.DOTALL | re.MULTILINE,
)
COMPARISON = "**Against what you may run today**"
MAX_LINES, FIRST_LINES, FIRST_WORDS, MAX_COMPARED = 110, 50, 560, 6


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
    assert readme.compared(COMPARE, BENCHMARKS) == COMPARE


@pytest.mark.parametrize("name", pictures.PICTURES)
def test_the_pictures_are_those_of_the_benchmarks(name: str) -> None:
    picture = (ROOT / "docs" / name).read_text(encoding="utf-8")
    assert picture == pictures.PICTURES[name](BENCHMARKS)
    assert f"]({name})" in BENCHMARKS or f"](docs/{name})" in README


def test_hits_are_those_with_the_default_settings() -> None:
    measured = {row[0]: row[1:3] for row in rows(BENCHMARKS, "\n## vLLM\n")}
    head, *table = rows(README, "**What a hit saves**")
    assert head == ["KV from", "ms", "times faster"]
    said = {name: figures for name, *figures in table}
    assert said["the pod's sidecar"] == measured["memory of the sidecar"]
    connected = measured["vLLM's own prefix cache, with the connector"]
    assert said["the same, with our connector"] == connected
    assert len(said) == len(measured) - 1, "a place of the benchmarks is missing"


def test_what_was_measured_with_earlier_loads_is_said() -> None:
    [remark] = re.findall(r"^Disk, other pod and storage .*$", BENCHMARKS, re.MULTILINE)
    assert remark in README
    assert remark not in rewritten(BENCHMARKS.replace(remark, ""))


def test_every_row_that_has_a_peer_counts() -> None:
    """Also those that are least kind to us."""
    head, *table = rows(BENCHMARKS, "\n### In turn with")
    names = [row[0] for row in table if row[head.index("ours against peer")]]
    assert len(names) >= 25
    for name in names:
        worse = with_row(name, {"ours against peer": "0.01"})
        cells = [cell for row in rows(readme.compared(COMPARE, worse), "## Rates") for cell in row]
        assert [cell for cell in cells if re.search(r"(?:^| to )100\.0$", cell)], name
        calls = [call for call in ("retrieve", "store") if f": {call}" in name]
        if calls and not name.startswith("fixed cost"):
            said = "Load rate" if calls == ["retrieve"] else "Store rate"
            [line] = re.findall(rf"^\| {said}, .*$", rewritten(worse), re.MULTILINE)
            assert re.search(r"(?:\[| to )100\.0\]", line), name


def test_the_worst_hit_of_vllms_own_cache_counts() -> None:
    """In each table that has one."""
    name = "vLLM, hit by its own prefix cache, 1,025 tokens"
    worse = rewritten(with_row(name, {"ours": "90.5", "reference": "10"}))
    assert "with our connector 0.96 to 9.05 times as long (at worst 90.5 ms instead of 10)" in worse
    shorter = BENCHMARKS.replace("| 182.5 | 175.3 |", "| 100 | 912.5 |")
    assert "(at worst 912.5 ms instead of 100)." in rewritten(shorter)
    first = re.sub(r"(with the connector \|) 23\.1 ", r"\1 205 ", BENCHMARKS)
    assert "(at worst 205 ms instead of 20.5)." in rewritten(first)


def test_the_worst_cold_prompt_counts() -> None:
    """In each table that has one."""
    name = "vLLM, cold prompt, stores on, 1,000 tokens"
    worse = rewritten(with_row(name, {"ours": "2,619.5", "reference": "1,309.75"}))
    assert "to 2.00 times as long (at worst 2,619.5 ms instead of 1,309.75) and" in worse
    shorter = BENCHMARKS.replace("| 1359.8 | 1344.3 |", "| 100 | 912.5 |")
    assert "(at worst 912.5 ms instead of 100) and" in rewritten(shorter)
    first = BENCHMARKS.replace("| storing adds | 5.4 |", "| storing adds | 3950.7 |")
    assert "(at worst 7901.4 ms instead of 3950.7) and" in rewritten(first)


def test_estimates_of_a_gpu_stand_apart_until_they_are_measured() -> None:
    [said] = re.findall(r"^.*\bH100\b.*$", FIRST_SCREEN, re.MULTILINE)
    assert said.startswith("**On a GPU, estimated, not measured**")
    measured = re.sub(r"^\| load, Llama-3\.1-8B, p.*\n", "", BENCHMARKS, flags=re.MULTILINE)
    assert "**On a GPU" not in rewritten(measured)


def test_no_other_figure_is_on_the_first_screen() -> None:
    written = GENERATED.sub("", FIRST_SCREEN)
    assert not re.findall(r"\d[\d.,]*(?:%| ms| times| GB/s)", written)
    section = BENCHMARKS.partition("\n## vLLM\n")[2].partition("\n## ")[0]
    [method] = re.findall(r"\*\*What a hit saves\*\*.*", written)
    for figure in re.findall(r"(?<![\w.-])\d[\d,.]*\d", method.partition("](")[0]):
        assert figure in section, figure


@pytest.mark.parametrize(("page", "begin"), [(README, COMPARISON), (COMPARE, "# Compared")])
def test_every_cell_of_a_comparison_has_a_source(page: str, begin: str) -> None:
    head, *table = rows(page, begin)
    assert len(head) == 5
    assert len(table) <= MAX_COMPARED
    sources = dict(re.findall(r"^\[([\w-]+)\]: (https://\S+)$", page, re.MULTILINE))
    used = set()
    for row in table:
        assert len(row) == 5, row
        assert re.search(r"\]\(([\w./-]+\.md|CHANGELOG\.md#)", row[1]), row[1]
        for cell in row[2:]:
            assert re.search(r"\]\[[\w-]+\]|\]\(docs/compare\.md#rates", cell), cell
            used.update(re.findall(r"\]\[([\w-]+)\]", cell))
    assert used == set(sources)


def test_no_row_is_in_both_comparisons() -> None:
    both = [{row[0] for row in rows(*each)} for each in ((README, COMPARISON), (COMPARE, "# C"))]
    assert both[0] & both[1] == {""}


def test_the_demo_ends_as_the_readme_says() -> None:
    """Its lossy engine's answer may differ, and did on the machine of docs/demo.md."""
    plain = Answer([1], "", 3000, 0, {}, 0, 0, 1.0, 32)
    lossy = Answer([2], "", 3000, 2900, {STORAGE_TIER: 2900}, 1, 0, 0.1, 32)
    step = Step("E, cachegen", STORAGE_TIER, lossy, plain, Compression(True, 9, 1, 1, 0.1, 0.1))
    out = io.StringIO()
    assert print_report([step], [], Console(file=out, width=1000))
    assert f'ends with "{out.getvalue().splitlines()[-1]}"' in README


def test_the_first_screen_answers_what_a_visitor_asks() -> None:
    """What it is, for whom, how much against what they run, how to try it, what it does not do."""
    for answer in (
        "vLLM and SGLang on Kubernetes",
        "**Use it if**",
        "**Skip it if**",
        "Not in this release",
        "](docs/first-token.svg)",
        "](docs/architecture.svg)",
    ):
        assert answer in FIRST_SCREEN
    assert re.search(r"^git clone .*\nmake demo +# .*\nmake test +# ", FIRST_SCREEN, re.MULTILINE)
    for table in ("**What a hit saves**", COMPARISON):
        assert list(rows(FIRST_SCREEN, table))
    assert FIRST_SCREEN.count("\n") <= FIRST_LINES
    shown = re.sub(r"!\[.*|\]\[[\w-]+\]|\]\([^)]*\)", "", FIRST_SCREEN)
    assert len(re.findall(r"\w\S*", shown)) <= FIRST_WORDS
    assert README.count("\n") <= MAX_LINES
