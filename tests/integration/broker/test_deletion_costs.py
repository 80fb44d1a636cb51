"""Deletion costs of pods, set through a stand-in for the cluster's API that speaks real HTTP."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from lmcache_broker.discovery import costs as module
from lmcache_broker.discovery import discovery as opening

from tests.fixtures.broker import following
from tests.fixtures.kubernetes_api import KubernetesApi, endpoint, endpoint_slice
from tests.fixtures.waiting import until

MIB = 1 << 20


class Cluster:
    """A broker that sets costs, and the pods' heartbeats."""

    def __init__(self, api: KubernetesApi, rest: httpx.AsyncClient, rounds: list[int]) -> None:
        self.api = api
        self._rest = rest
        self._rounds = rounds

    async def beat(self, pod: str, sole_mib: int | None, **more: Any) -> None:
        figures = {} if sole_mib is None else {"sole_bytes": sole_mib * MIB + 7}
        body = {
            "incarnation": 5,
            "distributed_url": f"lm://10.0.0.{ord(pod[0]) - 96}:65433",
            "figures": figures,
        } | more
        assert (await self._rest.put(f"/v1/peers/{pod}", json=body)).status_code == 200

    @property
    def num_rounds(self) -> int:
        return self._rounds[0]

    async def rounds(self) -> None:
        """Wait for a whole round that begins now."""
        enough = self.num_rounds + 2
        await until(lambda: self.num_rounds >= enough)

    async def metric(self, name: str) -> float:
        lines = (await self._rest.get("/metrics")).text.splitlines()
        return next(
            float(line.split(" ")[1])
            for line in lines
            if line.startswith(f"lmcache_broker_{name} ")
        )

    def costs(self) -> dict[str, str | None]:
        return {
            pod: annotations.get(module.ANNOTATION)
            for pod, annotations in self.api.annotations.items()
        }


@pytest.fixture
async def api(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[KubernetesApi]:
    monkeypatch.setattr(opening, "COST_INTERVAL_S", 0.01)
    running = KubernetesApi()
    await running.open()
    running.annotations = {name: {"other/annotation": "kept"} for name in "abc"}
    await running.put(
        endpoint_slice("s1", *(endpoint(name, f"10.0.0.{i}") for i, name in enumerate("abc", 1)))
    )
    yield running
    await running.close()


@asynccontextmanager
async def cluster_of(api: KubernetesApi) -> AsyncIterator[Cluster]:
    rounds = [0]
    update = module.DeletionCosts.update

    async def counted(costs: module.DeletionCosts, seen: Any) -> None:
        await update(costs, seen)
        rounds[0] += 1

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module.DeletionCosts, "update", counted)
        async with following(api, pod_deletion_cost=True) as rest:
            yield Cluster(api, rest, rounds)


async def has_set_one(cluster: Cluster) -> bool:
    return await cluster.metric("deletion_costs_set_total") == 1


async def has_failed_thrice(cluster: Cluster) -> bool:
    return await cluster.metric("deletion_cost_failures_total") >= 3


async def test_the_cost_of_a_pod_is_what_only_it_holds(api: KubernetesApi) -> None:
    async with cluster_of(api) as cluster:
        await cluster.beat("a", 5000)
        await cluster.beat("b", 0)
        await cluster.beat("c", None)
        await until(lambda: cluster.costs()["a"] is not None and cluster.costs()["b"] is not None)
        await cluster.rounds()
        assert cluster.costs() == {"a": "5000", "b": "0", "c": None}, "nothing is known of c"
        assert api.annotations["a"]["other/annotation"] == "kept"
        assert await cluster.metric("deletion_costs_set_total") == 2


async def test_a_cost_is_set_again_only_after_a_large_change(api: KubernetesApi) -> None:
    async with cluster_of(api) as cluster:
        await cluster.beat("a", 5000)
        await until(lambda: cluster.costs()["a"] == "5000")
        for near in (5999, 4001, 5000):
            await cluster.beat("a", near)
            await cluster.rounds()
        assert api.patches == ["a"]
        await cluster.beat("a", 6000)
        await until(lambda: cluster.costs()["a"] == "6000")
        await cluster.beat("b", 10)
        await until(lambda: cluster.costs()["b"] == "10")
        await cluster.beat("b", 73)
        await cluster.rounds()
        assert api.patches == ["a", "a", "b"]


async def test_pods_that_end_or_are_elsewhere_are_left_alone_and_costs_are_bounded(
    api: KubernetesApi,
) -> None:
    async with cluster_of(api) as cluster:
        await cluster.beat("a", 700, draining=True)
        await cluster.beat("b", 1 << 32)
        await until(lambda: cluster.costs()["b"] is not None)
        await cluster.beat("c", 700, distributed_url="lm://192.168.7.7:65433")
        await cluster.rounds()
        assert cluster.costs() == {"a": None, "b": str((1 << 31) - 1), "c": None}


async def test_a_refusal_is_counted_and_retried(
    api: KubernetesApi, caplog: pytest.LogCaptureFixture
) -> None:
    api.patch_status = 403
    async with cluster_of(api) as cluster:
        await cluster.beat("a", 700)
        await until(lambda: has_failed_thrice(cluster))
        assert (
            sum("pod deletion costs cannot be set" in message for message in caplog.messages) == 1
        )
        api.patch_status = 200
        await until(lambda: cluster.costs()["a"] == "700")


async def test_a_deleted_pod_is_no_failure(api: KubernetesApi) -> None:
    del api.annotations["a"]
    async with cluster_of(api) as cluster:
        await cluster.beat("a", 700)
        await cluster.beat("b", 700)
        await until(lambda: has_set_one(cluster))
        assert cluster.costs()["b"] == "700"
        assert await cluster.metric("deletion_cost_failures_total") == 0


async def test_costs_are_set_a_few_at_a_time(
    api: KubernetesApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_PATCHES_PER_ROUND", 1)
    async with cluster_of(api) as cluster:
        for pod in "abc":
            await cluster.beat(pod, 700)
        await until(lambda: sorted(api.patches) == ["a", "b", "c"])
        assert cluster.num_rounds >= 3
