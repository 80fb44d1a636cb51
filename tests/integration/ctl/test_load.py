"""`python -m tests.bench.load` against a real cache_storage and a real lookup service."""

from __future__ import annotations

import subprocess
import sys

import httpx

from tests.fixtures.ctl import SmallCluster
from tests.fixtures.sample_service import ADMIN_TOKEN
from tests.fixtures.waiting import wait_until

SMALL = ("--seconds", "1", "--size", "65536", "--chunks", "8", "--concurrency", "2")


def put_on(cluster: SmallCluster, url: str) -> str:
    token = f"--token-file={cluster.directory / 'token'}"
    command = [sys.executable, "-m", "tests.bench.load", url, token, *SMALL]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout


def stats_of(url: str) -> dict[str, object]:
    headers = {"authorization": f"Bearer {ADMIN_TOKEN}"}
    answer = httpx.get(f"{url}/v1/stats", headers=headers, trust_env=False)
    found: dict[str, object] = answer.raise_for_status().json()
    return found


def test_a_load_is_measured_and_leaves_nothing(cluster: SmallCluster) -> None:
    storage, lookup = cluster.services["storage-1"], cluster.services["lookup"]
    output = put_on(cluster, f"lm://127.0.0.1:{storage.ports['lm_port']}")
    assert "8 of 8 chunks were kept" in output
    assert "fetch: " in output
    tiers = stats_of(storage.url)["tiers"]
    assert isinstance(tiers, dict)
    assert tiers["memory"]["num_chunks"] == 0
    before = stats_of(lookup.url)["num_chunks"]
    assert "lookup: " in put_on(cluster, lookup.url)
    wait_until(lambda: stats_of(lookup.url)["num_chunks"] == before)
