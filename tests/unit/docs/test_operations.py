"""docs/operations.md, metrics.md, protocols.md and vllm.md say of encodings, of the sidecar's REST
and of its end what the code does.
"""

from __future__ import annotations

import os
import re

import pytest
from lmcache_core import telemetry
from lmcache_core.config import DISK_SERDES, REMOTE_SERDES
from lmcache_core.record import REPORT_EXTENSION
from lmcache_core.storage.pin_board import MAX_PINNED_CHUNKS, PIN_BOUND
from lmcache_core.wire.capabilities import LOSSY, SERDE_PREFIX
from lmcache_node.admin import DEFAULT_TTL_S
from lmcache_node.collectors import CodecErrorCollector, exported_name
from lmcache_node.drain import DrainState
from lmcache_servicekit.runner import EXIT_BY_SIGNAL
from lmcache_sidecar.admin.explain import (
    MAX_EXPLAINED_TOKENS,
    MAX_EXPLANATIONS,
    QUARANTINED,
    UNKNOWN,
)
from lmcache_sidecar.admin.pins import MAX_HASHES
from lmcache_sidecar.descriptions import MAX_NAMED_KEYS
from lmcache_sidecar.handover.handover import MAX_TRIES
from lmcache_sidecar.handover.takers import MAX_TAKERS
from lmcache_sidecar.metrics import DESCRIBED
from lmcache_sidecar.settings import SidecarSettings, default_run_directory

from tests.unit.docs.pages import ROOT

METRICS, OPERATIONS, PROTOCOLS, VLLM = (
    (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")
    for name in ("metrics", "operations", "protocols", "vllm")
)
CODEC_METRIC = re.compile(r"lmcache_codec_\w+")
VLLM_FIGURES = (
    telemetry.FAILED_CALLS_TOTAL,
    telemetry.MISSED_CHUNKS_TOTAL,
    telemetry.RETRIEVED_TOKENS_TOTAL,
    telemetry.STORED_CHUNKS_TOTAL,
    telemetry.UNSTORED_CHUNKS_TOTAL,
)
SOCKET_OF_THE_CHART = "/run/lmcache/socket/sidecar.sock"
SERDES = {serde.partition(":")[0] for serde in REMOTE_SERDES}
SERDE_SETTINGS = [name for name in SidecarSettings.model_fields if name.endswith("_serde")]
NAMED = [
    (METRICS, [f"`{exported_name(name)}`" for name in DESCRIBED]),
    (
        VLLM,
        [
            *(f"`{name.removeprefix('lmcache_').removesuffix('_total')}`" for name in VLLM_FIGURES),
            "/lmcache-<uid>/sidecar.sock",
            SOCKET_OF_THE_CHART,
        ],
    ),
    (
        OPERATIONS,
        [
            *(f"`{name}`" for name in (*SERDE_SETTINGS, "local_disk_serde", *DISK_SERDES)),
            *(*DrainState, "accept_handover", "drain_timeout_s", str(EXIT_BY_SIGNAL + 15)),
            *(f"`{reason}`" for reason in (QUARANTINED, UNKNOWN, PIN_BOUND)),
            *(str(bound) for bound in (MAX_PINNED_CHUNKS, DEFAULT_TTL_S)),
        ],
    ),
    (
        PROTOCOLS,
        [
            *(f"`{serde}`" for serde in SERDES),
            *(str(bound) for bound in (MAX_EXPLAINED_TOKENS, MAX_HASHES, MAX_NAMED_KEYS)),
            f"| `{LOSSY}` |",
            f"| `{SERDE_PREFIX}<name>` |",
            f"| {REPORT_EXTENSION} encoding report | no |",
        ],
    ),
]
"""What each page must name."""


@pytest.mark.parametrize(
    ("page", "names"), NAMED, ids=["metrics", "vllm", "operations", "protocols"]
)
def test_a_page_names_what_the_code_has(page: str, names: list[str]) -> None:
    assert [name for name in names if name not in page] == []


def test_every_metric_of_codecs_is_listed_and_none_that_is_not() -> None:
    known = {
        exported_name(value)
        for value in vars(telemetry).values()
        if isinstance(value, str) and CODEC_METRIC.fullmatch(value)
    }
    assert set(CODEC_METRIC.findall(METRICS)) == known
    shown = {exported_name(name) for name in DESCRIBED if CODEC_METRIC.fullmatch(name)}
    shown |= {family.name for family in CodecErrorCollector(dict).collect()}
    assert shown == known, "and every one of them is exported"


def test_the_socket_is_where_the_pages_and_the_chart_say() -> None:
    assert default_run_directory().name == f"lmcache-{os.getuid()}"
    config = ROOT / "helm/lmcache/templates/_config.tpl"
    assert SOCKET_OF_THE_CHART in config.read_text(encoding="utf-8")


def test_bounds_that_the_pages_say_in_words() -> None:
    assert (MAX_TRIES, MAX_TAKERS, MAX_EXPLANATIONS) == (3, 4, 4)
