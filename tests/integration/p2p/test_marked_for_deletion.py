"""A pod is marked for deletion and its preStop hook does not run: the broker's watch of the
cluster begins its drain. Real processes.
"""

from __future__ import annotations

import hashlib
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from lmcache_core.concurrency import LoopThread
from lmcache_demo.settings import quiet_environment

from tests.fixtures.kubernetes_api import KubernetesApi, endpoint, endpoint_slice
from tests.fixtures.kv import CHUNK_SIZE, assert_equal_prefix, empty_kv, random_kv, tokens_of
from tests.fixtures.neighbourhood import Neighbourhood, Sidecar, eventually, get_json
from tests.fixtures.processes import Processes
from tests.fixtures.sidecar import engine_at

NUM_CHUNKS = 4
NUM_TOKENS = NUM_CHUNKS * CHUNK_SIZE
TOKEN = "sidecars-0123456789abcdef"
CALL_S = 10.0


class Cluster:
    """Two pods, `a` and `b`, as the stand-in for the API tells of them."""

    def __init__(self, loop: LoopThread) -> None:
        self._loop = loop
        self.api = KubernetesApi()
        loop.run(self.api.open(), CALL_S)
        self.tell()

    def tell(self, *marked: str, gone: str = "") -> None:
        pods = [
            endpoint(name, "127.0.0.1", ready=name not in marked, terminating=name in marked)
            for name in "ab"
            if name != gone
        ]
        self._loop.run(self.api.put(endpoint_slice("s1", *pods)), CALL_S)

    def close(self) -> None:
        self._loop.run(self.api.close(), CALL_S)


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    loop = LoopThread("kubernetes-api")
    loop.open()
    made = Cluster(loop)
    yield made
    made.close()
    loop.close()


class Site:
    """A broker that follows the cluster, and the sidecars of both pods."""

    def __init__(self, processes: Processes, directory: Path, cluster: Cluster) -> None:
        where = {
            "discovery": "kubernetes",
            "kubernetes_service": "sidecars",
            "kubernetes_namespace": "ns",
        }
        self.house = Neighbourhood(
            processes,
            directory,
            default_lease_ttl_ms=1500,
            kubernetes_api_url=cluster.api.url,
            discovery_tenant="default",
            **where,
        )
        tokens, token = directory / "tokens.yaml", directory / "token"
        digest = hashlib.sha256(TOKEN.encode()).hexdigest()
        tokens.write_text(
            "tokens:\n  - {name: sidecar, tenant: default, role: admin, token_sha256:"
            f" {digest}}}\n"
        )
        token.write_text(TOKEN)
        self.a, self.b = (
            self.house.guarded_sidecar(name, auth_tokens_file=tokens, service_token_file=token)
            for name in "ab"
        )
        eventually(
            lambda: (
                all(peer["incarnation"] for peer in self.peers().values())
                and sorted(self.peers()) == ["a", "b"]
            )
        )

    def peers(self) -> dict[str, dict[str, Any]]:
        return {peer["id"]: peer for peer in get_json(f"{self.house.broker_url}/v1/peers")["peers"]}

    def is_drained(self, name: str) -> bool:
        drain = self.peers()[name]["drain"]
        return bool(drain and drain["state"] == "done")


@pytest.fixture
def site(tmp_path: Path, cluster: Cluster) -> Iterator[Site]:
    with Processes(tmp_path, quiet_environment()) as processes:
        yield Site(processes, tmp_path, cluster)


def store_at(sidecar: Sidecar) -> None:
    with engine_at(sidecar.socket) as engine:
        engine.store(tokens_of(NUM_TOKENS), kvcaches=random_kv(NUM_TOKENS, 1))


def test_its_chunks_are_handed_over_while_it_still_serves(site: Site, cluster: Cluster) -> None:
    store_at(site.a)
    cluster.tell("a")
    eventually(lambda: site.is_drained("a"), 20.0)
    drain = site.peers()["a"]["drain"]
    assert drain == {
        "state": "done",
        "total": NUM_CHUNKS,
        "handed_over": NUM_CHUNKS,
        "already_elsewhere": 0,
        "failed": 0,
        "left": 0,
    }
    assert site.peers()["b"]["draining"] is False
    target = empty_kv(NUM_TOKENS)
    with engine_at(site.a.socket) as engine:
        assert engine.lookup(tokens_of(NUM_TOKENS), ["Hot"]) == NUM_TOKENS, (
            "its own engine still has it"
        )
    site.a.process.process.send_signal(signal.SIGKILL)
    cluster.tell(gone="a")
    eventually(lambda: sorted(site.peers()) == ["b"])
    with engine_at(site.b.socket) as engine:
        assert engine.lookup(tokens_of(NUM_TOKENS), ["Hot"]) == NUM_TOKENS
        assert engine.retrieve(tokens_of(NUM_TOKENS), kvcaches=target).all()
    assert_equal_prefix(target, random_kv(NUM_TOKENS, 1), NUM_TOKENS)


def test_where_the_hook_came_first_nothing_is_done_twice(site: Site, cluster: Cluster) -> None:
    store_at(site.a)
    site.a.process.process.send_signal(signal.SIGUSR1)
    eventually(lambda: site.is_drained("a"), 20.0)
    first = site.peers()["a"]["drain"]
    cluster.tell("a")
    requests = len(cluster.api.watches)
    eventually(lambda: site.peers()["a"]["draining"])
    site.a.process.process.send_signal(signal.SIGTERM)
    assert site.a.process.process.wait(15.0) == 0
    eventually(lambda: sorted(site.peers()) == ["b"])
    assert site.b.process.is_alive
    assert first["handed_over"] == NUM_CHUNKS
    received = [
        line
        for line in site.b.text("/metrics").splitlines()
        if line.startswith("lmcache_sidecar_received_chunks_total")
    ]
    assert [float(line.rsplit(" ", 1)[1]) for line in received] == [NUM_CHUNKS]
    assert len(cluster.api.watches) == requests, "one watch has told it all"
