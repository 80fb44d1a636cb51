"""docs/operations.md and docs/protocols.md say of the sidecar's REST and of its end what the
code does.
"""

from __future__ import annotations

import os
from pathlib import Path

from lmcache_core.storage.pin_board import MAX_PINNED_CHUNKS, PIN_BOUND
from lmcache_core.telemetry import (
    FAILED_CALLS_TOTAL,
    MISSED_CHUNKS_TOTAL,
    RETRIEVED_TOKENS_TOTAL,
    STORED_CHUNKS_TOTAL,
    UNSTORED_CHUNKS_TOTAL,
)
from lmcache_node.admin import DEFAULT_TTL_S
from lmcache_node.drain import DrainState
from lmcache_servicekit.runner import EXIT_BY_SIGNAL
from lmcache_sidecar import metrics
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
from lmcache_sidecar.settings import default_run_directory

DOCS = Path(__file__).resolve().parents[3] / "docs"
METRICS = (DOCS / "metrics.md").read_text(encoding="utf-8")
OPERATIONS = (DOCS / "operations.md").read_text(encoding="utf-8")
VLLM = (DOCS / "vllm.md").read_text(encoding="utf-8")
PROTOCOLS = (DOCS / "protocols.md").read_text(encoding="utf-8")
VLLM_FIGURES = (
    FAILED_CALLS_TOTAL,
    MISSED_CHUNKS_TOTAL,
    RETRIEVED_TOKENS_TOTAL,
    STORED_CHUNKS_TOTAL,
    UNSTORED_CHUNKS_TOTAL,
)


def test_every_counter_is_described() -> None:
    assert [name for name in metrics.DESCRIBED if f"`{name}`" not in METRICS] == []
    assert [
        name
        for name in VLLM_FIGURES
        if f"`{name.removeprefix('lmcache_').removesuffix('_total')}`" not in VLLM
    ] == []


def test_the_socket_is_named_where_a_new_user_looks_for_it() -> None:
    assert default_run_directory().name == f"lmcache-{os.getuid()}"
    assert "/lmcache-<uid>/sidecar.sock" in VLLM
    in_the_chart = "/run/lmcache/socket/sidecar.sock"
    assert in_the_chart in VLLM
    assert in_the_chart in (DOCS.parent / "helm/lmcache/templates/_config.tpl").read_text(
        encoding="utf-8"
    )


def test_the_drain_is_explained() -> None:
    for word in (*DrainState, "accept_handover", "drain_timeout_s", str(EXIT_BY_SIGNAL + 15)):
        assert word in OPERATIONS, word
    names = [
        metrics.DRAINED_CHUNKS_TOTAL,
        metrics.HANDED_OVER_BYTES_TOTAL,
        metrics.RECEIVED_CHUNKS_TOTAL,
        metrics.RECEIVED_BYTES_TOTAL,
    ]
    assert all(f"`{name}`" in METRICS for name in names)
    assert all(name in metrics.DESCRIBED for name in names)
    assert (MAX_TRIES, MAX_TAKERS) == (3, 4), "the pages say it in words"


def test_reasons_and_bounds_are_named() -> None:
    for reason in (QUARANTINED, UNKNOWN, PIN_BOUND):
        assert f"`{reason}`" in OPERATIONS, reason
    for bound in (MAX_PINNED_CHUNKS, DEFAULT_TTL_S):
        assert str(bound) in OPERATIONS, bound
    for bound in (MAX_EXPLAINED_TOKENS, MAX_HASHES, MAX_NAMED_KEYS):
        assert str(bound) in PROTOCOLS, bound
    assert MAX_EXPLANATIONS == 4, "the pages say it in words"
