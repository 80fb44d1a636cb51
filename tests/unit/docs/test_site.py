"""The site of `make docs` has every page of docs/.

`make docs` itself checks all links and anchors (`--strict`); CI runs it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import yaml

from tests.unit.docs.pages import ROOT

SITE = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
# Of the repository's other pages, those that a user reads.
PARTS = ("*.md", "docs/**/*.md", "services/*/README.md", "helm/lmcache/README.md")
INSIDE = {"services/node/README.md", "services/servicekit/README.md"}


def pages(entry: Any) -> Iterator[str]:
    if isinstance(entry, str):
        yield entry
    else:
        for one in entry.values() if isinstance(entry, dict) else entry:
            yield from pages(one)


def test_every_page_is_in_the_navigation_once() -> None:
    listed = list(pages(SITE["nav"]))
    assert len(listed) == len(set(listed))
    assert [page for page in listed if not (ROOT / page).is_file()] == []
    expected = {path.relative_to(ROOT).as_posix() for part in PARTS for path in ROOT.glob(part)}
    assert expected - INSIDE - set(listed) == set()


def test_broken_links_stop_the_build() -> None:
    checked = SITE["validation"]["links"]
    assert set(checked.values()) == {"warn"}
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert "mkdocs build --strict" in makefile
