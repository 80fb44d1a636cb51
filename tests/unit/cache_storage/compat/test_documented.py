"""docs/operations.md, metrics.md and protocols.md say of the listener for LMCache clients what the
code does.
"""

from __future__ import annotations

import re
from pathlib import Path

from lmcache_storage.compat.dialect import DIALECTS, CloseReason, CompatCommand
from lmcache_storage.compat.values import ABOUT_EXTENSION
from lmcache_storage.metrics import DESCRIBED
from lmcache_storage.settings import StorageSettings

DOCS = Path(__file__).resolve().parents[4] / "docs"


def test_every_option_metric_and_reason_is_explained() -> None:
    text = (DOCS / "operations.md").read_text(encoding="utf-8").partition("## LMCache clients")[2]
    options = {name for name in StorageSettings.model_fields if name.startswith("lmcache_compat_")}
    assert set(re.findall(r"^\| `(lmcache_compat_\w+)`", text, re.MULTILINE)) == options
    metrics = (DOCS / "metrics.md").read_text(encoding="utf-8")
    assert set(re.findall(r"lmcache_storage_compat_\w+", metrics)) == {
        name for name in DESCRIBED if "compat" in name
    }
    for name in (*CloseReason, *(command.name.lower() for command in CompatCommand)):
        assert f"`{name}`" in metrics, name


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
