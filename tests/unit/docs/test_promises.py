"""The table of docs/simulation.md has each promise of the documents, and what notices it broken.

A sentence promises if it has one of the words below. docs/configuration.md, which is generated, is
only quoted. ADRs count unless superseded, without their status and what they rejected.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.simulation.defects import DEFECTS
from tests.unit.docs.pages import FENCE, PAGES, ROOT, name_of

TABLE = ROOT / "docs/simulation.md"
TITLE = "## What is promised, and what would notice"
HEAD = "| promise | what notices | defect |"
BY_HAND = "by hand: "
WORDS = re.compile(
    r"\b(?:never|always|at most|no (?:longer|later) than|no (?:request|step) |up to `"
    r"|within (?:`|a |two|five|ten|\d)|bounded|bounds:|limits:|nothing(?!:)|unpickles"
    r"|(?:is|are|be) refused|refuses\b|(?:is|are|also|still) (?:a miss|misses)"
    r"|surviv|outliv|guarantee)|≤",
    re.IGNORECASE,
)
MIN_WORDS = 5
SENTENCE_END = re.compile(r"(?<=[.!?])(?:\*\*)?\s+(?=[A-Z`*(\"0-9])")
UNREAD = {"configuration.md", "simulation.md"}
FOLDERS = (ROOT / "docs", ROOT / "docs/adr")
READ = [
    page
    for page in PAGES
    if (page.parent in FOLDERS or page == ROOT / "README.md")
    and page.name not in UNREAD
    and "superseded by" not in page.read_text(encoding="utf-8")
]
# With these words, but advice, names, history, or what others do.
NO_PROMISE = (
    "never import",
    "nothing prevents blending",
    "nothing could be measured",
    "cannot read or refuses with a sidecar",
    "vLLM refuses connectors",
    "what is refused ([rules]",
    "other blending options; they are refused",
    "`within_size` or `always`",
    "certificate or token is refused",
    "Anything unsafe is refused at once",
    "[kinds of KV](#releases) that are refused",
)


def sentences(page: Path) -> Iterator[str]:
    """Those of a page that promise something."""
    for line in FENCE.sub("", page.read_text(encoding="utf-8")).splitlines():
        if re.match(r" *(?:#|(?:\*\*)?Status|Rejected)", line):
            continue
        for cell in line.strip("| ").split(" | ") if line.startswith("|") else [line]:
            for sentence in SENTENCE_END.split(cell):
                if len(sentence.split()) >= MIN_WORDS and WORDS.search(sentence):
                    yield sentence.strip()


def rows() -> list[tuple[str, str, str]]:
    """The cells of the table's rows."""
    section = TABLE.read_text(encoding="utf-8").partition(TITLE)[2].partition("\n## ")[0]
    found = []
    for line in section.splitlines():
        if line.startswith("| ") and line != HEAD:
            promise, notices, defect = line.removeprefix("| ").removesuffix("|").split(" | ")
            found.append((promise, notices, defect.strip()))
    return found


ROWS = rows()


def quotations(promise: str) -> list[tuple[Path, str]]:
    """The pages that a row quotes, and what it quotes of each."""
    found = re.findall(r'"([^"]+)" \(\[[^\]]+\]\(([^)#]+)[^)]*\)\)', promise)
    return [((TABLE.parent / path).resolve(), text) for text, path in found]


@pytest.mark.parametrize("page", READ, ids=name_of)
def test_every_promise_is_in_the_table(page: Path) -> None:
    quoted = [text for row in ROWS for path, text in quotations(row[0]) if path == page]
    known = (*quoted, *NO_PROMISE)
    missing = [one for one in sentences(page) if not any(text in one for text in known)]
    assert not missing, (
        f"{name_of(page)}: quote each in a row of docs/simulation.md, with what would notice it"
        f" broken; if it promises nothing, reword it, or add it to NO_PROMISE: {missing}"
    )


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0][:40])
def test_a_row_names_what_there_is(row: tuple[str, str, str]) -> None:
    promise, notices, defect = row
    assert quotations(promise)
    for page, text in quotations(promise):
        found = page.read_text(encoding="utf-8").count(text)
        # An option that engines and services have is twice in docs/configuration.md.
        assert found == 1 or (found and page.name in UNREAD), f"{found} times in {page}: {text}"
    named = re.findall(r"`(tests/[\w/]+\.py)(?:::([\w:]+))?`", notices)
    assert named, f"what would notice it? {promise}"
    for path, names in named:
        text = (ROOT / path).read_text(encoding="utf-8")
        for name in filter(None, names.split("::")):
            assert re.search(rf"(?:def|class) {name}\b", text), f"{path} has no {name}"
    is_known = defect in {one.name for one in DEFECTS} or defect.startswith(BY_HAND)
    assert is_known or not defect, f"no defect of tests/simulation/defects.py: {defect}"


def test_the_list_of_what_promises_nothing_is_needed() -> None:
    found = [one for page in READ for one in sentences(page)]
    assert [text for text in NO_PROMISE if not any(text in one for one in found)] == []
