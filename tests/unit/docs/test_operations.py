"""docs/operations.md, metrics.md and protocols.md say of encodings what the code does."""

from __future__ import annotations

import re
from pathlib import Path

from lmcache_core import telemetry
from lmcache_core.config import DISK_SERDES, REMOTE_SERDES
from lmcache_core.record import REPORT_EXTENSION
from lmcache_core.wire.capabilities import LOSSY, SERDE_PREFIX
from lmcache_node.collectors import CodecErrorCollector
from lmcache_sidecar.metrics import DESCRIBED
from lmcache_sidecar.settings import SidecarSettings

DOCS = Path(__file__).resolve().parents[3] / "docs"
CODEC_METRIC = re.compile(r"lmcache_codec_\w+")


def test_every_metric_of_codecs_is_listed_and_none_that_is_not() -> None:
    known = {
        value
        for value in vars(telemetry).values()
        if isinstance(value, str) and CODEC_METRIC.fullmatch(value)
    }
    assert set(CODEC_METRIC.findall((DOCS / "metrics.md").read_text(encoding="utf-8"))) == known
    shown = {name for name in DESCRIBED if CODEC_METRIC.fullmatch(name)}
    shown |= {family.name for family in CodecErrorCollector(dict).collect()}
    assert shown == known, "and every one of them is exported"


def test_every_setting_and_serde_is_explained() -> None:
    text = (DOCS / "operations.md").read_text(encoding="utf-8")
    for name in (
        *(name for name in SidecarSettings.model_fields if name.endswith("_serde")),
        "local_disk_serde",
        *DISK_SERDES,
    ):
        assert f"`{name}`" in text, name
    protocols = (DOCS / "protocols.md").read_text(encoding="utf-8")
    for serde in {serde.partition(":")[0] for serde in REMOTE_SERDES}:
        assert f"`{serde}`" in protocols, serde


def test_the_capabilities_and_the_extension_are_in_the_protocol() -> None:
    text = (DOCS / "protocols.md").read_text(encoding="utf-8")
    assert f"| `{LOSSY}` |" in text
    assert f"| `{SERDE_PREFIX}<name>` |" in text
    assert f"| {REPORT_EXTENSION} encoding report | no |" in text
