"""docs/protocols.md says of the listener for LMCache clients what the code does."""

from __future__ import annotations

import re
from pathlib import Path

from lmcache_storage.compat.dialect import DIALECTS, CompatCommand
from lmcache_storage.compat.values import ABOUT_EXTENSION

DOCS = Path(__file__).resolve().parents[4] / "docs"


def test_every_dialect_and_command_is_in_the_protocol() -> None:
    text = (DOCS / "protocols.md").read_text(encoding="utf-8")
    assert f"| {ABOUT_EXTENSION} foreign value | no |" in text
    section = text.partition("## LMCache compatibility")[2].partition("\n## ")[0]
    for dialect in DIALECTS.values():
        assert re.search(
            rf"\| `{re.escape(dialect.name)}` \|.*{dialect.request.size}"
            rf" bytes.*{dialect.reply.size} bytes",
            section,
        )
    assert {int(number) for number in re.findall(r"^\| (\d) [A-Z]", section, re.MULTILINE)} == set(
        CompatCommand
    )
