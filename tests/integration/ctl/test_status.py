"""`lmcachectl status` of a whole cluster of real services, also when one of them hangs, lies, or wants another token."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import yaml

from tests.fixtures.ctl import Ctl, SmallCluster
from tests.fixtures.kv import CHUNK_SIZE, empty_kv, random_kv, tokens_of
from tests.fixtures.sidecar import engine_at

NUM_CHUNKS = 3
NAMES = ["lookup", "broker", "storage-0", "storage-1", "sidecar"]


def test_everything_is_told_in_every_format(cluster: SmallCluster) -> None:
    tokens = tokens_of(NUM_CHUNKS * CHUNK_SIZE)
    with engine_at(cluster.directory / "s.sock") as engine:
        engine.store(tokens, kvcaches=random_kv(len(tokens)))
        engine.retrieve(tokens, kvcaches=empty_kv(len(tokens)))
        ctl = cluster.ctl()
        found = ctl.json("status")
        table = ctl.text("status")
    by_kind = {one["kind"] + " " + one["name"]: one for one in found["services"]}
    assert [one["state"] for one in found["services"]] == ["ok"] * len(NAMES)
    assert found["totals"] | {"used_bytes": 0, "capacity_bytes": 0} == {
        "num_services": 5,
        "num_well": 5,
        "versions": {"0.1.0": 5},
        "hit_ratio": 1.0,
        "hit_ratio_by_tier": {"Hot": 1.0},
        "used_bytes": 0,
        "capacity_bytes": 0,
    }
    sidecar = by_kind["sidecar sidecar"]
    assert sidecar["traffic"]["num_wanted"] == sidecar["traffic"]["num_found"] >= NUM_CHUNKS
    assert sidecar["facts"] == {"engines": "1", "registered": "yes", "models": "org/model"}
    assert sidecar["tiers"][0]["name"] == "Hot"
    assert sidecar["tiers"][0]["num_chunks"] == NUM_CHUNKS
    assert abs(sidecar["clock_skew_s"]) <= 1.5
    assert found["totals"]["capacity_bytes"]["storage/LocalDiskBackend"] > 0
    [broker] = [one for one in found["services"] if one["kind"] == "broker"]
    assert sorted(link["id"] for link in broker["links"]) == ["sidecar", "storage-0", "storage-1"]
    assert "services   5 of 5 are well" in table
    assert "100.0%" in table
    assert yaml.safe_load(ctl.text("status", "-o", "yaml"))["totals"]["versions"] == {"0.1.0": 5}


def test_a_replica_that_hangs_holds_nobody_up(cluster: SmallCluster) -> None:
    pid = cluster.services["storage-1"].pid
    os.kill(pid, signal.SIGSTOP)
    try:
        started = time.monotonic()
        found = cluster.ctl().json("status", "--timeout", "2", code=1)
        took_s = time.monotonic() - started
    finally:
        os.kill(pid, signal.SIGCONT)
    states = {one["name"]: (one["state"], one["problem"]) for one in found["services"]}
    assert states["storage-0"][0] == "ok"
    hung = [one for one in found["services"] if one["state"] != "ok"]
    assert [one["kind"] for one in hung] == ["storage"]
    assert hung[0]["problem"] == "no answer within 2 s: it hangs, or the network drops what is sent to it"
    assert took_s < 15


def test_a_wrong_token_is_told_and_not_shown(cluster: SmallCluster) -> None:
    told = cluster.ctl("wrong-token").text("status", code=1)
    assert told.count("it refuses the token") == len(NAMES)
    assert "nobody-knows" not in told
    found = cluster.ctl("wrong-token").json("status", code=1)
    assert {one["state"] for one in found["services"]} == {"ok"}, "whether it is well needs no token"


def test_where_services_are_is_said_by_file_and_environment(cluster: SmallCluster, tmp_path: Path) -> None:
    lookup, broker = cluster.services["lookup"].url, cluster.services["broker"].url
    config = {"lookup_urls": [lookup], "broker_urls": ["http://127.0.0.1:9"], "token_file": str(cluster.directory / "token")}
    (tmp_path / "ctl.yaml").write_text(yaml.safe_dump(config))
    environ = {"LMCACHE_CTL_CONFIG": str(tmp_path / "ctl.yaml"), "LMCACHE_CTL_BROKER_URLS": broker}
    assert [one["url"] for one in Ctl([], environ).json("status")["services"]] == [lookup, broker]
    wrong = {"LMCACHE_CTL_LOOKUP_URL": lookup}
    assert "LMCACHE_CTL_LOOKUP_URL sets nothing; did you mean 'LMCACHE_CTL_LOOKUP_URLS'?" in Ctl([], wrong).text("status", code=2)


def test_a_service_of_another_kind_is_not_taken_for_one(cluster: SmallCluster) -> None:
    [found] = Ctl([f"--storage-url={cluster.services['lookup'].url}"]).json("status", code=1)["services"]
    assert (found["state"], found["problem"]) == ("not ours", "it is lmcache-lookup: ask for a storage elsewhere")
