"""Links of the documents lead somewhere, and runbooks name metrics that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PAGES = [ROOT / "README.md", ROOT / "helm" / "lmcache" / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!https?:|mailto:)([^)#\s]*)(?:#([^)\s]+))?\)")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
METRIC = re.compile(r"\b(?:vllm:)?lmcache_[a-z0-9_]+_(?:total|bytes|seconds|info|chunks|up|shared|requests|peers|flight|error)\b")


def anchors(text: str) -> set[str]:
    """As GitHub names headings."""
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in HEADING.findall(FENCE.sub("", text))}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for path, anchor in LINK.findall(FENCE.sub("", text)):
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{path} is not there"
        if anchor:
            assert anchor in anchors(target.read_text(encoding="utf-8")), f"{path}#{anchor} is not there"


def test_runbooks_name_metrics_that_exist() -> None:
    known = set(METRIC.findall((ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")))
    named = set(METRIC.findall((ROOT / "docs" / "runbooks.md").read_text(encoding="utf-8")))
    assert named
    assert named <= known
