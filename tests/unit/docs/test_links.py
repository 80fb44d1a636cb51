"""Links of the documents lead somewhere, and runbooks name metrics that exist."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

from tests.unit.docs.pages import FENCE, PAGES, ROOT

EVERY_PAGE = sorted({*PAGES, *(ROOT / "docs").rglob("*.md")})
LINK = re.compile(r"\]\((?!https?:|mailto:)([^)#\s]*)(?:#([^)\s]+))?\)")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
METRIC = re.compile(
    r"\b(?:vllm:)?lmcache_[a-z0-9_]+_(?:total|bytes|seconds|info|chunks|up|shared|requests|peers|flight|error)\b"
)


def anchors(text: str) -> set[str]:
    """As GitHub names headings: one that is there again has a number at its end."""
    found = Counter[str]()
    for heading in HEADING.findall(FENCE.sub("", text)):
        name = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        found[name] += 1
        if found[name] > 1:
            found[f"{name}-{found[name] - 1}"] += 1
    return set(found)


@pytest.mark.parametrize("page", EVERY_PAGE, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for path, anchor in LINK.findall(FENCE.sub("", text)):
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{path} is not there"
        if anchor:
            assert anchor in anchors(target.read_text(encoding="utf-8")), (
                f"{path}#{anchor} is not there"
            )


def test_runbooks_name_metrics_that_exist() -> None:
    known = set(METRIC.findall((ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")))
    named = set(METRIC.findall((ROOT / "docs" / "runbooks.md").read_text(encoding="utf-8")))
    assert named
    assert named <= known
