"""docs/migration.md: what it says is here under another name is here."""

from __future__ import annotations

import dataclasses
import importlib
import re

from lmcache_core.config import LMCacheEngineConfig
from lmcache_core.config.foreign_names import FOREIGN_NAMES

from tests.unit.docs.pages import ROOT

PAGE = (ROOT / "docs" / "migration.md").read_text(encoding="utf-8")
NUM_DOCUMENTED = 15


def rows(title: str) -> list[list[str]]:
    """The first cells of a section's tables, without their headings."""
    section = PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    lines = [
        line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| ")
    ]
    return [line for line in lines if line[0] not in ("LMCache", "option")]


def named(cell: str) -> list[str]:
    return re.findall(r"`(\w[\w.]*)`", cell)


def test_the_documented_options_are_all_there() -> None:
    documented = [field.name for field in dataclasses.fields(LMCacheEngineConfig)][:NUM_DOCUMENTED]
    assert [name for row in rows("Options") for name in named(row[0])] == documented


def test_every_other_name_is_on_the_page_of_the_configuration() -> None:
    text = (
        (ROOT / "docs" / "configuration.md")
        .read_text(encoding="utf-8")
        .partition("## LMCache's names")[2]
    )
    assert [name for name in FOREIGN_NAMES if f"`{name}`" not in text] == []


def test_classes_are_where_the_page_says() -> None:
    found = 0
    for row in rows("Code"):
        for module in named(row[1]):
            for name in named(row[2]):
                assert hasattr(importlib.import_module(module), name), f"{module}.{name}"
                found += 1
    assert found > 30
