"""docs/operations.md, "Sizes": the figures follow from what the code stores."""

from __future__ import annotations

import math
import re

import pytest
import yaml
from lmcache_core.config import LMCacheEngineConfig
from lmcache_core.gpu_connectors import KVLayout, LayerGroup, PagedGPUConnector

from tests.unit.docs.pages import ROOT

PAGE = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
SECTION = PAGE.partition("\n## Sizes\n")[2].partition("\n## ")[0]
VALUES = yaml.safe_load((ROOT / "helm" / "lmcache" / "values.yaml").read_text(encoding="utf-8"))
CHUNK_SIZE = LMCacheEngineConfig.from_defaults().chunk_size
KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
ELEMENT_BYTES = 2
MODELS = {
    "Llama-3.1-8B": LayerGroup("", 32, 8, 128, "bfloat16", packing="block_first"),
    "Llama-3.1-70B": LayerGroup("", 80, 8, 128, "bfloat16", packing="block_first"),
    "DeepSeek-V3": LayerGroup("", 61, 1, 512 + 64, "bfloat16", packing="split", sides=1),
}


def token_bytes(model: str) -> float:
    """What a connector for that model stores of a token."""
    shape = PagedGPUConnector(KVLayout((MODELS[model],))).get_shape(CHUNK_SIZE)
    return math.prod(shape) * ELEMENT_BYTES / CHUNK_SIZE


@pytest.mark.parametrize("model", MODELS)
def test_a_model_takes_what_the_table_says(model: str) -> None:
    row = re.search(
        rf"^\| {re.escape(model)}: .* \| ([\d.]+) KiB \| ([\d.]+) MiB \| ([\d,]+) \|$",
        SECTION,
        re.MULTILINE,
    )
    assert row is not None
    of_a_token = token_bytes(model)
    assert float(row[1]) == pytest.approx(of_a_token / KIB, rel=1e-3)
    assert float(row[2]) == pytest.approx(of_a_token * CHUNK_SIZE / MIB, rel=5e-3)
    assert int(row[3].replace(",", "")) == int(32 * GIB / of_a_token)


def test_the_example_is_right() -> None:
    of_a_token = token_bytes("Llama-3.1-8B")
    num_tokens = 2_000 + 500 * 4_000
    working_set_gib = num_tokens * of_a_token / GIB
    assert f"{num_tokens:,} tokens, {working_set_gib:.0f} GiB" in SECTION
    storage_gib = 3 * 125 * 0.9
    assert working_set_gib * 4 / 3 < storage_gib
    assert (
        f"are {working_set_gib * 4 / 3:.0f} GiB. Three replicas with"
        f" `storage.persistence.size: 125Gi` have {int(storage_gib)}" in SECTION
    )
    overhead_mi = int(VALUES["sidecar"]["memoryOverhead"].removesuffix("Mi"))
    tables_mi = 32 * 1024 // 256
    assert f"asks for {32 * 1024 + overhead_mi + tables_mi:,} MiB" in SECTION
    pays_from = of_a_token * 8_000
    assert f"{pays_from / 1e9:.2f} GB/s, or {pays_from * 8 / 1e9:.1f} Gbit/s" in SECTION
    link = 25e9 / 8
    loaded = 6_000 * of_a_token
    assert (
        f"({loaded / 1e6:.0f} MB) arrive in {loaded / link:.2f} s; computing them takes"
        f" {6_000 / 8_000:.2f} s" in SECTION
    )
    drain_s = VALUES["sidecar"]["config"]["drain_timeout_s"]
    assert (
        f"take {32 * GIB / link:.0f} s, within the chart's `drain_timeout_s` of {drain_s}"
        in SECTION
    )
