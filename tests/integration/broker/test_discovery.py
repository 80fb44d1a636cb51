"""Peers discovered through a stand-in for the cluster's API that speaks real HTTP."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from lmcache_broker.app import create_app
from lmcache_broker.discovery import cluster, discovery
from lmcache_broker.discovery import watch as module
from lmcache_broker.settings import BrokerSettings
from lmcache_core.errors import ConfigError

from tests.fixtures.broker import following
from tests.fixtures.kubernetes_api import KubernetesApi, endpoint, endpoint_slice
from tests.fixtures.sample_service import asgi_client
from tests.fixtures.tls import Authority, server_tls
from tests.fixtures.waiting import until

CHUNK = "0" * 32


class World:
    """A broker that follows the stand-in."""

    def __init__(self, api: KubernetesApi, rest: httpx.AsyncClient) -> None:
        self.api = api
        self.rest = rest

    async def peers(self) -> dict[str, dict[str, Any]]:
        return {peer["id"]: peer for peer in (await self.rest.get("/v1/peers")).json()["peers"]}

    async def until(
        self, condition: Callable[[dict[str, dict[str, Any]]], bool]
    ) -> dict[str, dict[str, Any]]:
        async def is_met() -> bool:
            return condition(await self.peers())

        await until(is_met)
        return await self.peers()

    async def until_ids(self, *ids: str) -> dict[str, dict[str, Any]]:
        return await self.until(lambda peers: sorted(peers) == sorted(ids))

    async def until_watching(self, num_watches: int = 1) -> None:
        await until(lambda: len(self.api.watches) >= num_watches)

    async def register(
        self, name: str, address: str, incarnation: int = 5, **more: Any
    ) -> dict[str, Any]:
        body = {"incarnation": incarnation, "distributed_url": f"lm://{address}:65433"} | more
        answer: dict[str, Any] = (await self.rest.put(f"/v1/peers/{name}", json=body)).json()
        return answer


@asynccontextmanager
async def world_of(api: KubernetesApi, **options: Any) -> AsyncIterator[World]:
    async with following(api, **options) as rest:
        yield World(api, rest)


@pytest.fixture
async def api(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[KubernetesApi]:
    monkeypatch.setattr(module, "RETRY_S", 0.02)
    monkeypatch.setattr(module, "MAX_RETRY_S", 0.1)
    running = KubernetesApi()
    await running.open()
    yield running
    await running.close()


@pytest.fixture
async def world(api: KubernetesApi) -> AsyncIterator[World]:
    await api.put(
        endpoint_slice(
            "s1", endpoint("a", "10.0.0.1"), endpoint("b", "10.0.0.2", zone="z2", node="n2")
        )
    )
    async with world_of(api) as running:
        await running.until_ids("a", "b")
        await running.until_watching()
        yield running


async def test_endpoints_are_peers_before_they_register(world: World) -> None:
    peers = await world.peers()
    assert (peers["b"]["distributed_url"], peers["b"]["zone"], peers["b"]["node"]) == (
        "lm://10.0.0.2:65433",
        "z2",
        "n2",
    )
    asked = {"requester": "me", "chunks": [{"chunk_id": CHUNK, "holders": ["a"]}]}
    assert [
        pull["instance"]
        for pull in (await world.rest.post("/v1/transfers", json=asked)).json()["assignments"]
    ] == ["a"]
    assert (await world.register("a", "10.0.0.1", load=0.5))["draining"] is False
    peers = await world.until(lambda found: found["a"]["incarnation"] == 5)
    assert sorted(peers) == ["a", "b"], "a registered peer is listed once"


async def test_added_and_removed_endpoints_are_followed(world: World) -> None:
    await world.api.put(endpoint_slice("s2", endpoint("c", "10.0.0.3")))
    await world.until_ids("a", "b", "c")
    await world.api.put(endpoint_slice("s1", endpoint("a", "10.0.0.1")))
    await world.until_ids("a", "c")
    await world.api.delete("s2")
    await world.until_ids("a")
    assert len(world.api.watches) == 1, "by one watch"


async def test_a_pod_that_is_marked_for_deletion_drains_and_one_that_has_gone_loses_its_lease(
    world: World,
) -> None:
    await world.register("a", "10.0.0.1")
    await world.api.put(
        endpoint_slice(
            "s1",
            endpoint("a", "10.0.0.1", ready=False, terminating=True),
            endpoint("b", "10.0.0.2"),
        )
    )
    await world.until(lambda peers: peers["a"]["draining"])
    assert (await world.register("a", "10.0.0.1"))["draining"] is True
    await world.api.put(endpoint_slice("s1", endpoint("b", "10.0.0.2")))
    await world.until_ids("b")


async def test_an_unready_endpoint_is_no_peer_and_keeps_its_own_lease(world: World) -> None:
    await world.register("a", "10.0.0.1")
    not_ready = [endpoint("a", "10.0.0.1", ready=False), endpoint("c", "10.0.0.3", ready=False)]
    await world.api.put(endpoint_slice("s1", *not_ready))
    peers = await world.until_ids("a")
    assert not peers["a"]["draining"]


async def test_a_cut_watch_resumes_at_the_last_version(world: World) -> None:
    await world.api.put(endpoint_slice("s2", endpoint("c", "10.0.0.3")))
    await world.until_ids("a", "b", "c")
    version = await world.api.bookmark()

    async def is_heard() -> bool:
        checks = (await world.rest.get("/readyz")).json()["checks"]
        return bool(checks["kubernetes"]["detail"] == f"version {version}")

    await until(is_heard)
    await world.api.cut(half_a_line=b'{"type": "DELETED", "obj')
    await world.until_watching(2)
    assert world.api.watches[1]["resourceVersion"] == str(version), "a bookmark moves it on"
    assert world.api.watches[1]["allowWatchBookmarks"] in ("true", "True")
    await world.api.delete("s2")
    await world.until_ids("a", "b")
    assert len([query for query in world.api.requests if "watch" not in query]) == 1, (
        "without another list"
    )


@pytest.mark.parametrize("gone_as_status", [False, True])
async def test_an_expired_version_is_followed_by_a_list(world: World, gone_as_status: bool) -> None:
    world.api.gone_as_status = gone_as_status
    world.api.change_unseen(
        [
            endpoint_slice("s1", endpoint("a", "10.0.0.1")),
            endpoint_slice("s3", endpoint("d", "10.0.0.4")),
        ]
    )
    world.api.forget()
    await world.api.cut()
    await world.until_ids("a", "d")
    await world.api.put(endpoint_slice("s4", endpoint("e", "10.0.0.5")))
    await world.until_ids("a", "d", "e")
    assert "lmcache_broker_endpoint_lists_total 2.0" in (await world.rest.get("/metrics")).text


async def test_an_unavailable_api_changes_nothing_and_degrades_readiness(world: World) -> None:
    world.api.fails = True
    await world.api.cut()

    async def is_degraded() -> bool:
        readiness = (await world.rest.get("/readyz")).json()
        return (readiness["status"], readiness["checks"]["kubernetes"]["ok"]) == ("degraded", False)

    await until(is_degraded)
    assert sorted(await world.peers()) == ["a", "b"]
    world.api.fails = False
    await world.api.put(endpoint_slice("s2", endpoint("c", "10.0.0.3")))
    await world.until_ids("a", "b", "c")
    assert (await world.rest.get("/readyz")).json()["status"] == "ok"


async def test_malformed_events_do_not_end_the_watch(world: World) -> None:
    await world.api.say({"type": "ADDED"})
    await world.until_watching(2)
    await world.api.say({"type": "ERROR", "object": {"code": 500}})
    await world.until_watching(3)
    odd = endpoint_slice(
        "s2",
        endpoint("c", "not-an-address"),
        endpoint("-bad name-", "10.0.0.9"),
        {"addresses": []},
        {},
        port=None,
    )
    odd["endpoints"].append(endpoint("e", "fd00::5") | {"conditions": {}})
    await world.api.put(odd)
    peers = await world.until_ids("a", "b", "e")
    assert peers["e"]["distributed_url"] == "lm://[fd00::5]:65433"


async def test_a_silent_watch_is_restarted(
    api: KubernetesApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module.EndpointWatch.__init__, "__defaults__", (0.1,))
    async with world_of(api) as running:
        await running.until_watching(3)


async def test_a_pod_shows_the_token_of_its_service_account(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Address, namespace, token and authority are where Kubernetes puts them."""
    for part in (cluster, discovery):
        monkeypatch.setattr(part, "SERVICE_ACCOUNT", tmp_path)
    authority = Authority(tmp_path, "ca")
    authority.publish(tmp_path / "ca.crt")
    (tmp_path / "namespace").write_text("ns\n")
    (tmp_path / "token").write_text("of-the-pod\n")
    api = KubernetesApi()
    api.token = "of-the-pod"
    await api.open(server_tls(authority.sign("api")))
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(api.port))
    await api.put(endpoint_slice("s1", endpoint("a", "10.0.0.1")))
    async with world_of(api, kubernetes_namespace=None, kubernetes_api_url=None) as running:
        await running.until_ids("a")
        await running.until_watching()
    await api.close()


async def test_without_a_cluster_the_start_names_the_options() -> None:
    for options, fix in (
        ({}, "kubernetes_namespace is not set"),
        ({"kubernetes_namespace": "ns"}, "kubernetes_api_url"),
    ):
        app = create_app(
            BrokerSettings(discovery="kubernetes", kubernetes_service="sidecars", **options)
        )  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match=fix):
            async with app.router.lifespan_context(app):
                pass


async def test_a_peer_that_registers_while_terminating_drains(world: World) -> None:
    await world.api.put(
        endpoint_slice(
            "s1",
            endpoint("b", "10.0.0.2"),
            endpoint("c", "10.0.0.3", ready=False, terminating=True),
        )
    )
    await world.until_ids("b")
    await world.register("c", "10.0.0.3")
    await world.until(lambda peers: peers["c"]["draining"])
    assert (await world.register("c", "10.0.0.3"))["draining"] is True
    assert (await world.register("b", "10.0.0.2"))["draining"] is False


async def test_pods_that_encrypt_have_lm_tls_urls(api: KubernetesApi) -> None:
    await api.put(endpoint_slice("s1", endpoint("a", "10.0.0.1"), endpoint("b", "10.0.0.2")))
    async with world_of(api, kubernetes_tls=True) as world:
        peers = await world.until_ids("a", "b")
        assert peers["b"]["distributed_url"] == "lm+tls://10.0.0.2:65433"
        await world.register("a", "10.0.0.1", distributed_url="lm+tls://10.0.0.1:65433")
        await api.put(endpoint_slice("s1"))
        await world.until_ids()


async def test_the_token_is_read_again_for_each_watch(api: KubernetesApi, tmp_path: Path) -> None:
    api.token = "first-token"
    token_file = tmp_path / "token"
    token_file.write_text("first-token\n")
    await api.put(endpoint_slice("s1", endpoint("a", "10.0.0.1")))
    async with world_of(api, kubernetes_token_file=token_file) as running:
        await running.until_ids("a")
        await running.until_watching()
        api.token = "second-token"
        token_file.write_text("second-token\n")
        await api.cut()
        await api.put(endpoint_slice("s2", endpoint("b", "10.0.0.2")))
        await running.until_ids("a", "b")


async def test_an_api_of_another_authority_is_not_asked(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    authority, stranger = Authority(tmp_path, "house"), Authority(tmp_path, "stranger")
    encrypted = KubernetesApi()
    await encrypted.open(server_tls(stranger.sign("api")))
    url = f"https://127.0.0.1:{encrypted.port}"
    async with world_of(encrypted, kubernetes_api_url=url, kubernetes_ca_file=authority.file):
        await until(lambda: "certificate verify failed" in caplog.text)
    assert not encrypted.requests
    await encrypted.close()


async def test_peers_from_a_list() -> None:
    settings = BrokerSettings(
        discovery="static",
        static_peers=[{"id": "a", "distributed_url": "lm://a.example:1", "zone": "z1"}],
    )  # type: ignore[list-item]
    async with asgi_client(create_app(settings)) as rest:

        async def is_listed() -> bool:
            peers = (await rest.get("/v1/peers")).json()["peers"]
            return [(peer["id"], peer["zone"]) for peer in peers] == [("a", "z1")]

        await until(is_listed)


async def test_a_peer_of_the_same_name_elsewhere_keeps_its_lease(world: World) -> None:
    await world.register("b", "192.168.7.7")
    await world.api.put(endpoint_slice("s1", endpoint("a", "10.0.0.1")))
    peers = await world.until(lambda found: "b" in found and found["b"]["incarnation"] == 5)
    assert peers["b"]["distributed_url"] == "lm://192.168.7.7:65433"
