"""`lmcachectl bench` against a real cache_storage and a real lookup service, also through
port-forwards; and what it leaves behind.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.fixtures.ctl import Ctl, SmallCluster
from tests.fixtures.kubernetes_pods import pod, pods_api
from tests.fixtures.sample_service import ADMIN_TOKEN, CLIENT_TOKEN, write_tokens
from tests.fixtures.service_process import ServiceProcess, running_service

SMALL = ("--seconds", "2", "--size", "64KiB", "--total", "512KiB", "--concurrency", "2")
"""Two calls store all of it, in the first half of that time."""


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("bench")
    (place / "token").write_text(CLIENT_TOKEN)
    (place / "wrong-token").write_text("wrong-0123456789abcdef")
    return place


@pytest.fixture(scope="module")
def storage(directory: Path) -> Iterator[ServiceProcess]:
    tokens = write_tokens(directory / "tokens.yaml", ["bench"])
    settings = {"PORT": "0", "LM_PORT": "0", "MEMORY_GB": "0.01", "AUTH_TOKENS_FILE": str(tokens)}
    with running_service(
        "lmcache_storage",
        directory,
        {f"LMCACHE_STORAGE_{name}": value for name, value in settings.items()},
    ) as service:
        yield service


@pytest.fixture
def ctl(directory: Path) -> Ctl:
    return Ctl([f"--token-file={directory / 'token'}"])


@pytest.fixture
def in_cluster(cluster: SmallCluster, storage: ServiceProcess, tmp_path: Path) -> Iterator[Ctl]:
    """The same storage, and a lookup service, as pods."""
    with pods_api() as api:
        api.pods = [pod("demo-lookup-0", "lookup", 8081), pod("demo-storage-0", "storage", 8080)]
        api.pods[1]["spec"]["containers"][0]["ports"].append({"name": "lm", "containerPort": 7000})
        api.ports = {
            ("demo-lookup-0", 8081): cluster.services["lookup"].ports["port"],
            ("demo-storage-0", 8080): storage.ports["port"],
        }
        api.ports["demo-storage-0", 7000] = storage.ports["lm_port"]
        options = [
            f"--kubeconfig={api.kubeconfig(tmp_path / 'kubeconfig')}",
            f"--token-file={cluster.directory / 'token'}",
        ]
        yield Ctl(options, {"HOME": str(tmp_path)})


def num_chunks_at(storage: ServiceProcess) -> int:
    headers = {"authorization": f"Bearer {ADMIN_TOKEN}"}
    stats = (
        httpx.get(f"{storage.url}/v1/stats", headers=headers, trust_env=False)
        .raise_for_status()
        .json()
    )
    return int(stats["tiers"]["memory"]["num_chunks"])


def test_what_is_stored_comes_back_and_is_removed(storage: ServiceProcess, ctl: Ctl) -> None:
    for url in (storage.url, f"lm://127.0.0.1:{storage.ports['lm_port']}"):
        found = ctl.json("bench", url, *SMALL)
        connect, way, store, fetch = found["phases"]
        assert (connect["name"], way["name"]) == ("connect", "round trip")
        assert connect["latency_ms"]["p50"] > 0
        assert way["latency_ms"]["p50"] > 0
        assert (store["name"], store["num_chunks"], store["num_bytes"]) == ("store", 8, 512 << 10)
        assert fetch["num_chunks"] >= 8
        assert fetch["num_bytes"] == fetch["num_chunks"] << 16
        for phase in (store, fetch):
            assert phase["failed_calls"] == phase["not_done"] == {}
        latency = fetch["latency_ms"]
        assert 0 < latency["p50"] <= latency["p99"] <= latency["max"]
        per_s = fetch["num_bytes"] / fetch["seconds"]
        assert fetch["bytes_per_s"] == pytest.approx(per_s, rel=0.01)
        assert (found["num_removed"], found["num_left"]) == (8, 0)
        assert num_chunks_at(storage) == 0


def test_more_than_there_is_room_for_is_told(storage: ServiceProcess, ctl: Ctl) -> None:
    table = ctl.text(
        "bench",
        f"--storage-url={storage.url}",
        "--seconds",
        "1",
        "--size",
        "1MiB",
        "--total",
        "32MiB",
    )
    assert "32 chunks of 1.0 MiB" in table
    assert "chunks: " in table, "those that were evicted are misses"
    assert "none is left" in table
    assert num_chunks_at(storage) == 0


def check_lookups(found: dict[str, Any], is_direct: bool) -> None:
    assert [phase["name"] for phase in found["phases"]] == (["connect"] if is_direct else []) + [
        "round trip",
        "lookup",
    ]
    way, lookup = found["phases"][-2:]
    assert lookup["num_chunks"] == 100 * lookup["num_calls"] > 0, (
        "all of them were found, each time"
    )
    assert lookup["calls_per_s"] == pytest.approx(lookup["num_calls"] / lookup["seconds"], rel=0.05)
    assert 0 < way["latency_ms"]["p50"] <= lookup["latency_ms"]["max"]
    assert (found["num_removed"], found["num_left"]) == (100, 0)


def test_lookups_are_measured_and_leave_nothing(cluster: SmallCluster) -> None:
    ctl = cluster.ctl()
    before = ctl.json("lookup", "status")
    done = ctl.run(
        "bench", "lookup", "--seconds", "0.5", "--size", "1MiB", "--total", "100MiB", "-o", "json"
    )
    check_lookups(json.loads(done.stdout), is_direct=True)
    assert "lookup: " in done.stderr, "progress"
    after = ctl.json("lookup", "status")
    assert after["stats"]["num_chunks"] == before["stats"]["num_chunks"]
    assert [one["instance"] for one in after["instances"]] == [
        one["instance"] for one in before["instances"]
    ]


def test_pods_are_measured_through_the_api(in_cluster: Ctl, storage: ServiceProcess) -> None:
    check_lookups(
        in_cluster.json(
            "bench", "lookup", "--seconds", "0.5", "--size", "1MiB", "--total", "100MiB"
        ),
        is_direct=False,
    )
    for target in ("storage", "lm/demo-storage-0", "lm"):
        found = in_cluster.json("bench", target, *SMALL, "--seconds", "0.5")
        assert [phase["name"] for phase in found["phases"]] == ["round trip", "store", "fetch"]
        assert 0 < found["phases"][1]["num_chunks"] == found["num_removed"]
        assert found["num_left"] == num_chunks_at(storage) == 0
    assert "lm/nobody is not there: there is lm/demo-storage-0" in in_cluster.text(
        "bench", "lm/nobody", code=1
    )


def test_what_cannot_be_measured_is_one_sentence(
    storage: ServiceProcess, ctl: Ctl, directory: Path
) -> None:
    assert "http://127.0.0.1:9 cannot be used" in ctl.text("bench", "http://127.0.0.1:9", code=1)
    assert "http://127.0.0.1:9 cannot be used" in ctl.text(
        "bench", "lookup", "--lookup-url=http://127.0.0.1:9", code=1
    )
    assert "begins with one of lm://" in ctl.text("bench", "redis://h:1", code=2)
    assert "name what to measure" in ctl.text("bench", code=2)
    assert "'broker' names no service: write storage or lookup" in ctl.text(
        "bench", "broker", f"--storage-url={storage.url}", code=2
    )
    assert "write the address, lm://host:port" in ctl.text(
        "bench", "lm", f"--storage-url={storage.url}", code=2
    )
    assert "give a smaller --total" in ctl.text(
        "bench", storage.url, "--size", "1KiB", "--total", "1TiB", code=2
    )
    wrong = Ctl([f"--token-file={directory / 'wrong-token'}"])
    told = wrong.text("bench", f"lm://127.0.0.1:{storage.ports['lm_port']}", code=1)
    assert "cannot be used" in told
    assert "wrong-0123" not in told


def test_one_that_is_interrupted_cleans_up(storage: ServiceProcess, directory: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "lmcache_ctl",
        "bench",
        storage.url,
        "--seconds",
        "60",
        "--size",
        "64KiB",
        "--total",
        "2MiB",
    ]
    process = subprocess.Popen(
        [*command, f"--token-file={directory / 'token'}"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    deadline = time.monotonic() + 60.0
    while num_chunks_at(storage) == 0:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(2)
    _, told = process.communicate(timeout=30)
    assert process.returncode == 130
    assert b"Traceback" not in told
    assert num_chunks_at(storage) == 0
