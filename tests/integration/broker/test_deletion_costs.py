"""Which pods the cluster is to end first, through a stand-in for its API that speaks real HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from lmcache_broker.discovery import costs as module
from lmcache_broker.discovery import discovery as opening
from lmcache_broker.settings import BrokerSettings

from tests.fixtures.broker import following
from tests.fixtures.kubernetes_api import KubernetesApi, endpoint, endpoint_slice
from tests.fixtures.waiting import until

MIB = 1 << 20


class Cluster:
    """A broker that sets costs, and the pods' heartbeats."""

    def __init__(self, api: KubernetesApi, rest: httpx.AsyncClient) -> None:
        self.api = api
        self._rest = rest

    async def beat(self, pod: str, sole_mib: int | None, **more: Any) -> None:
        figures = {} if sole_mib is None else {"sole_bytes": sole_mib * MIB + 7}
        body = {
            "incarnation": 5,
            "distributed_url": f"lm://10.0.0.{ord(pod[0]) - 96}:65433",
            "figures": figures,
        } | more
        assert (await self._rest.put(f"/v1/peers/{pod}", json=body)).status_code == 200

    async def rounds(self) -> None:
        """Let some go by."""
        await asyncio.sleep(0.1)

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
    running.annotations = {name: {"someone.else/says": "so"} for name in "abc"}
    await running.put(
        endpoint_slice("s1", *(endpoint(name, f"10.0.0.{i}") for i, name in enumerate("abc", 1)))
    )
    yield running
    await running.close()


@asynccontextmanager
async def cluster_of(api: KubernetesApi, **options: Any) -> AsyncIterator[Cluster]:
    async with following(api, **({"pod_deletion_cost": True} | options)) as rest:
        yield Cluster(api, rest)


async def has_set_one(cluster: Cluster) -> bool:
    return await cluster.metric("deletion_costs_set_total") == 1


async def has_failed_thrice(cluster: Cluster) -> bool:
    return await cluster.metric("deletion_cost_failures_total") >= 3


async def test_a_pod_costs_what_it_alone_holds(api: KubernetesApi) -> None:
    async with cluster_of(api) as cluster:
        await cluster.beat("a", 5000)
        await cluster.beat("b", 0)
        await cluster.beat("c", None)
        await until(lambda: cluster.costs()["a"] is not None and cluster.costs()["b"] is not None)
        await cluster.rounds()
        assert cluster.costs() == {"a": "5000", "b": "0", "c": None}, "of c nothing is known"
        assert api.annotations["a"]["someone.else/says"] == "so"
        assert await cluster.metric("deletion_costs_set_total") == 2


async def test_it_is_set_again_only_when_it_has_changed_much(api: KubernetesApi) -> None:
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


async def test_a_pod_that_ends_is_left_alone_and_costs_have_a_bound(api: KubernetesApi) -> None:
    async with cluster_of(api) as cluster:
        await cluster.beat("a", 700, draining=True)
        await cluster.beat("b", 1 << 32)
        await until(lambda: cluster.costs()["b"] is not None)
        await cluster.rounds()
        assert cluster.costs() == {"a": None, "b": str((1 << 31) - 1), "c": None}


async def test_who_is_no_pod_of_the_service_is_left_alone(api: KubernetesApi) -> None:
    async with cluster_of(api) as cluster:
        api.annotations["d"] = {}
        await cluster.beat("d", 700)
        await cluster.beat("a", 700, distributed_url="lm://192.168.7.7:65433")
        await cluster.rounds()
        assert api.patches == []


@pytest.mark.parametrize("status", [403, 500])
async def test_a_refusal_is_counted_and_tried_again(
    api: KubernetesApi, status: int, caplog: pytest.LogCaptureFixture
) -> None:
    api.patch_status = status
    async with cluster_of(api) as cluster:
        await cluster.beat("a", 700)
        await until(lambda: has_failed_thrice(cluster))
        assert (
            sum("pod deletion costs cannot be set" in message for message in caplog.messages) == 1
        ), "said once"
        api.patch_status = 200
        await until(lambda: cluster.costs()["a"] == "700")


async def test_a_pod_that_has_gone_is_no_failure(api: KubernetesApi) -> None:
    del api.annotations["a"]
    async with cluster_of(api) as cluster:
        await cluster.beat("a", 700)
        await cluster.beat("b", 700)
        await until(lambda: has_set_one(cluster))
        assert cluster.costs()["b"] == "700"
        assert await cluster.metric("deletion_cost_failures_total") == 0


async def test_a_few_at_a_time(api: KubernetesApi, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_PATCHES_PER_ROUND", 1)
    monkeypatch.setattr(opening, "COST_INTERVAL_S", 0.3)
    async with cluster_of(api) as cluster:
        for pod in "abc":
            await cluster.beat(pod, 700)
        await until(lambda: len(api.patches) == 1)
        await asyncio.sleep(0.05)
        assert len(api.patches) == 1
        await until(lambda: sorted(api.patches) == ["a", "b", "c"])


async def test_its_token_is_shown(api: KubernetesApi, tmp_path: Path) -> None:
    api.token = "service-account"
    token = tmp_path / "token"
    token.write_text("service-account\n")
    async with cluster_of(api, kubernetes_token_file=token) as cluster:
        await cluster.beat("a", 700)
        await until(lambda: cluster.costs()["a"] == "700")


async def test_nothing_is_set_where_it_is_not_asked_for(api: KubernetesApi) -> None:
    async with cluster_of(api, pod_deletion_cost=False) as cluster:
        await cluster.beat("a", 700)
        await cluster.rounds()
        assert api.patches == []


def test_without_a_cluster_it_makes_no_sense() -> None:
    with pytest.raises(ValueError, match="set discovery=kubernetes"):
        BrokerSettings(pod_deletion_cost=True)
