"""`lmcachectl evict`, `pin`, `explain` and `drain` change real services, and say what they have
changed.
"""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Iterator

import httpx
import pytest

from tests.fixtures.ctl import Ctl, SmallCluster, small_cluster
from tests.fixtures.kv import CHUNK_SIZE, random_kv, tokens_of
from tests.fixtures.sample_service import ADMIN_TOKEN
from tests.fixtures.sidecar import engine_at
from tests.fixtures.waiting import wait_until

NUM_CHUNKS = 3
TIMEOUT_S = 30


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SmallCluster]:
    """Three chunks are in the sidecar and, written by it, in storage-0."""
    with small_cluster(tmp_path_factory.mktemp("cluster")) as running:
        tokens = tokens_of(NUM_CHUNKS * CHUNK_SIZE)
        with engine_at(running.directory / "s.sock") as engine:
            engine.store(tokens, kvcaches=random_kv(len(tokens)))
        wait_until(
            lambda: (
                get(running, "sidecar", "/v1/status")["settled"]
                and len(keys_at(running, "storage-0")) >= NUM_CHUNKS
            )
        )
        yield running


@pytest.fixture
def ctl(cluster: SmallCluster) -> Ctl:
    return cluster.ctl()


def get(cluster: SmallCluster, name: str, path: str) -> dict[str, object]:
    headers = {"authorization": f"Bearer {ADMIN_TOKEN}"}
    answer: dict[str, object] = (
        httpx.get(cluster.services[name].url + path, headers=headers, trust_env=False)
        .raise_for_status()
        .json()
    )
    return answer


def keys_at(cluster: SmallCluster, name: str) -> list[str]:
    chunks = get(cluster, name, "/v1/chunks")["chunks"]
    assert isinstance(chunks, list)
    return [chunk["key"] for chunk in chunks]


def prompt() -> str:
    return " ".join(str(token) for token in tokens_of(NUM_CHUNKS * CHUNK_SIZE).tolist())


def test_a_prompt_is_pinned_listed_and_released(ctl: Ctl) -> None:
    table = ctl.text("pin", "--tokens", "-", "--ttl", "60", stdin=prompt())
    assert f"{NUM_CHUNKS} of these" in table
    [listed] = ctl.json("pin")
    assert (listed["kind"], listed["name"]) == ("sidecar", "sidecar")
    hashes = [one["chunk_hash"] for one in listed["result"]["pins"]]
    assert len(hashes) == NUM_CHUNKS
    assert all(0 < one["expires_in_s"] <= 60 for one in listed["result"]["pins"])
    assert hashes[0][:16] in ctl.text("pin", "--at", "sidecar/sidecar")
    assert "1 let go" in ctl.text("pin", hashes[0], "--ttl", "0")
    [done] = ctl.json("pin", *hashes[1:], "--ttl", "0")
    assert done["result"] == {"num_unpinned": NUM_CHUNKS - 1}


def test_what_is_nowhere_is_not_pinned(ctl: Ctl) -> None:
    told = ctl.text("pin", "ab" * 32, code=1)
    assert "0 of these" in told
    assert "is not pinned: never_stored" in told
    assert "sidecar/absent is not there: there is sidecar/sidecar" in ctl.text(
        "pin", "--at", "sidecar/absent", code=1
    )
    assert "'lookup' names no service: write sidecar or storage" in ctl.text(
        "pin", "--at", "lookup", code=2
    )
    assert "--tokens goes to sidecars" in ctl.text(
        "pin", "--tokens", "-", "--at", "storage", code=2, stdin="1"
    )


def test_keys_are_pinned_at_the_storage_that_has_them(ctl: Ctl, cluster: SmallCluster) -> None:
    keys = keys_at(cluster, "storage-0")
    found = {
        one["name"]: one["result"]["num_pinned"]
        for one in ctl.json("pin", *keys, "--at", "storage")
    }
    assert found == {"storage-0": NUM_CHUNKS, "storage-1": 0}, "one that has them is enough"
    assert (
        ctl.json("pin", *keys, "--at", "storage/storage-0", "--ttl", "0")[0]["result"][
            "num_unpinned"
        ]
        == NUM_CHUNKS
    )


def test_a_prompt_is_explained_and_its_chunks_are_evicted(ctl: Ctl, cluster: SmallCluster) -> None:
    assert "the first 3 are complete" in " ".join(
        ctl.text("explain", "--tokens", "-", "--sidecar", "sidecar", stdin=prompt()).split()
    )
    [freed] = ctl.json("evict", "sidecar", "--size", "1GiB")
    assert freed["result"]["freed_bytes"] > 0
    told = ctl.text("explain", "--tokens", "-", stdin=prompt())
    assert "storage" in told
    assert "memory" not in told
    assert "freed" in ctl.text(
        "evict", f"sidecar/{cluster.services['sidecar'].url.partition('//')[2]}", "--size", "1KiB"
    ), "by its address"


def test_a_client_may_evict_nothing(cluster: SmallCluster) -> None:
    told = cluster.ctl("client-token").text("evict", "storage/storage-0", "--size", "1GiB", code=1)
    assert "this call needs a token with the role admin" in told


def test_everything_goes_only_when_asked_for(ctl: Ctl, cluster: SmallCluster) -> None:
    told = ctl.text("evict", "storage/storage-1", "--everything", code=1, stdin="n\n")
    assert "Forget all chunks at storage/storage-1?" in told
    assert "nothing was done" in told
    assert "give --size or --everything" in ctl.text("evict", "storage", code=2)
    assert "'5 bananas' is not a size" in ctl.text(
        "evict", "storage", "--size", "5 bananas", code=2
    )
    assert "0 chunks forgotten" in ctl.text("evict", "storage/storage-1", "--everything", "--yes")
    assert len(keys_at(cluster, "storage-0")) == NUM_CHUNKS


def test_all_of_a_kind_are_drained_only_when_that_is_meant(ctl: Ctl) -> None:
    told = ctl.text("drain", "storage", code=1, stdin="n\n")
    assert re.search(r"Drain storage/storage-(0|1), storage/storage-(1|0) at once\?", told)
    assert "nothing was done: answer y, or give --yes" in told
    assert "nothing was done" in ctl.text("drain", "sidecar", code=1), "without an answer"
    assert {one["state"] for one in ctl.json("status")["services"]} == {"ok"}


def test_a_drain_that_hangs_is_given_up(cluster: SmallCluster) -> None:
    """From here on: storage-1 stays drained."""
    pid = cluster.services["storage-1"].pid
    timer = threading.Timer(8, os.kill, (pid, signal.SIGCONT))
    os.kill(pid, signal.SIGSTOP)
    timer.start()
    try:
        told = cluster.ctl().text(
            "drain", "storage", "--timeout", "1", "--no-wait", "--yes", code=1
        )
    finally:
        timer.cancel()
        os.kill(pid, signal.SIGCONT)
    assert "no answer within 1 s" in told


def test_a_drain_is_watched_to_its_end(cluster: SmallCluster) -> None:
    """What was drained takes nothing any more."""
    ctl = cluster.ctl()
    done = ctl.run("drain", "peer/sidecar", "--within", "60", "-o", "json", code=0)
    assert '"state": "done"' in done.stdout
    assert "peer sidecar: " in done.stderr
    [found] = [one for one in ctl.json("status")["services"] if one["kind"] == "sidecar"]
    assert found["state"] == "draining"
    assert found["drain"]["state"] == "done"
    table = ctl.text("drain", "sidecar/sidecar", "--within", "60")
    assert "done" in table
    assert "no live peer absent" in ctl.text("drain", "peer/absent", code=1)


def test_a_drained_service_takes_chunks_again(cluster: SmallCluster) -> None:
    """Afterwards they are drained as before."""
    ctl = cluster.ctl()
    assert "takes chunks" in ctl.text("undrain", "sidecar", "storage")

    def is_undrained() -> bool:
        found = ctl.json("status")["services"]
        return not any(one["drain"] or link["draining"] for one in found for link in one["links"])

    wait_until(is_undrained)
    assert {one["state"] for one in ctl.json("status")["services"]} == {"ok"}
    ctl.text("drain", "sidecar", "storage", "--no-wait", "--yes")
    told = cluster.ctl("client-token").text("undrain", "sidecar", code=1)
    assert "this call needs a token with the role admin" in told


def test_drains_and_a_dead_service_are_seen(cluster: SmallCluster) -> None:
    """Last: a service ends."""
    cluster.services["broker"].stop(signal.SIGKILL)
    told = cluster.ctl().text("status", code=1)
    assert "drain: done" in told
    assert "cannot connect" in told
