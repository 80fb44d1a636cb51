"""The chart on a real cluster, from its installation to its end, in this order."""

from __future__ import annotations

import random
import time

import pytest

from tests.cluster import manifests
from tests.cluster.ask import Answer
from tests.cluster.conftest import HELM_TIMEOUT_S, Installation
from tests.cluster.kube import Manifest, name_of
from tests.cluster.leftovers import left_over
from tests.cluster.manifests import PLAIN
from tests.cluster.names import BASE, MODEL_PODS, MODEL_SERVICE, RELEASE, component
from tests.cluster.oracle import hit_problems
from tests.cluster.waiting import (
    ANNOUNCED_S,
    DELETE_TIMEOUT_S,
    LIST_ALL_S,
    START_TIMEOUT_S,
    progress,
    wait_until,
)

KINDS = ("put", "get", "lookup", "broker", "completion")
STORAGE_CALLS = ("put", "get")
PROMPT_TOKENS = 2000
REPLICATED = (
    ("deployments", f"{BASE}-lookup", component("lookup")),
    ("deployments", f"{BASE}-broker", component("broker")),
    ("deployments", MODEL_SERVICE, MODEL_PODS),
)


def test_every_pod_is_ready(installation: Installation) -> None:
    installation.cluster.wait_ready(START_TIMEOUT_S)


def test_the_chart_s_own_test_passes(installation: Installation) -> None:
    output = installation.helm.test(HELM_TIMEOUT_S)
    assert output.count("ok     ") >= 5, output
    assert "FAILED" not in output


def test_a_pod_reuses_what_another_computed(installation: Installation) -> None:
    scale(installation, "deployments", MODEL_SERVICE, MODEL_PODS, 2)
    first, second = installation.cluster.ready_pods(MODEL_PODS, 2, START_TIMEOUT_S)
    answers = ask_in_turn(installation, (first, "vllm"), (second, "vllm"))
    assert hit_problems(*answers) == []


def test_a_plain_deployment_gets_the_cache(installation: Installation) -> None:
    cluster = installation.cluster
    scale(installation, "deployments", MODEL_SERVICE, MODEL_PODS, 1)
    registry, _, tag = installation.images.rpartition(":")
    image = f"{registry}/lmcache-vllm-cpu-tiny:{tag}"
    cluster.create("deployments", manifests.plain_deployment(image), "apis/apps/v1")
    try:
        (plain,) = cluster.ready_pods(f"app={PLAIN}", 1, START_TIMEOUT_S)
        pod = cluster.call("GET", cluster.path("pods", plain))
        annotations = pod["metadata"].get("annotations", {})
        status = annotations.get("lmcache.io/inject-status", "not reviewed")
        assert status.startswith("injected: "), status
        sidecar = [one["name"] for one in pod["spec"]["initContainers"]]
        assert "lmcache-sidecar" in sidecar
        (own,) = cluster.ready_pods(MODEL_PODS, 1, START_TIMEOUT_S)
        assert hit_problems(*ask_in_turn(installation, (own, "vllm"), (plain, "engine"))) == []
    finally:
        cluster.delete(cluster.path("deployments", PLAIN, "apis/apps/v1"))
    cluster.ready_pods(f"app={PLAIN}", 0, DELETE_TIMEOUT_S)


@pytest.mark.parametrize(
    ("plural", "name", "selector", "most"),
    [
        ("statefulsets", f"{BASE}-storage", component("storage"), 3),
        *((*one, 3 if one[1] != MODEL_SERVICE else 2) for one in REPLICATED),
    ],
    ids=["storage", "lookup", "broker", "model"],
)
def test_scaling_under_traffic(
    installation: Installation, plural: str, name: str, selector: str, most: int
) -> None:
    with installation.traffic() as traffic:
        for replicas in (most, 1):
            scale(installation, plural, name, selector, replicas)
    assert traffic.report.problems(KINDS) == []


def test_upgrade_and_rollback_under_traffic(installation: Installation) -> None:
    """Values change in every component but the models; storage has one pod, which restarts."""
    scale_all(installation, 2)
    changed = [
        word
        for name in ("storage", "lookup", "broker")
        for word in ("--set", f"{name}.config.log_level=debug")
    ]
    with installation.traffic() as traffic:
        installation.helm.upgrade(HELM_TIMEOUT_S, *changed)
        installation.cluster.wait_ready(START_TIMEOUT_S)
        assert log_levels(installation) == {"debug"}
        installation.helm.rollback(HELM_TIMEOUT_S)
        installation.cluster.wait_ready(START_TIMEOUT_S)
        assert log_levels(installation) == {"info"}
    assert traffic.report.problems(KINDS, may_fail=STORAGE_CALLS) == []


def test_node_drain_under_traffic(installation: Installation) -> None:
    """Every pod of the release on storage's node is evicted: its budgets hold on one node too."""
    cluster = installation.cluster
    scale_all(installation, 2)
    (storage,) = cluster.pods(component("storage"))
    node = storage["spec"]["nodeName"]
    there = [
        name_of(pod)
        for pod in cluster.pods(f"app.kubernetes.io/instance={RELEASE}")
        if pod["spec"]["nodeName"] == node
    ]
    progress(f"evicting {len(there)} pods from node {node}")
    with installation.traffic() as traffic:
        cluster.evict(there, START_TIMEOUT_S)
        cluster.wait_ready(START_TIMEOUT_S)
    assert traffic.report.problems(KINDS, may_fail=STORAGE_CALLS) == []


def test_loss_of_redis_under_traffic(installation: Installation) -> None:
    cluster = installation.cluster
    (redis,) = cluster.pods(component("redis"))
    with installation.traffic() as traffic:
        cluster.delete(cluster.path("pods", name_of(redis)))
        wait_until(lambda: replaced(installation, redis), "Redis is another pod", START_TIMEOUT_S)
        cluster.wait_ready(START_TIMEOUT_S)
    assert traffic.report.problems(KINDS) == []


def test_uninstallation_leaves_nothing_behind(installation: Installation) -> None:
    cluster, before = installation.cluster, installation.before
    cluster.delete(cluster.path("configmaps", manifests.TRAFFIC))
    installation.helm.uninstall(HELM_TIMEOUT_S)
    wait_until(
        lambda: ", ".join(left_over(before, cluster.objects())),
        "nothing left of the release",
        DELETE_TIMEOUT_S,
        poll_s=LIST_ALL_S,
    )
    cluster.delete_namespace(DELETE_TIMEOUT_S)
    wait_until(
        lambda: ", ".join(left_over(before, cluster.objects(), gone=True)),
        "nothing left in the cluster",
        DELETE_TIMEOUT_S,
        poll_s=LIST_ALL_S,
    )


def scale(installation: Installation, plural: str, name: str, selector: str, replicas: int) -> None:
    """Scale a workload, and wait until it has that many ready pods."""
    progress(f"scaling {name} to {replicas}")
    installation.cluster.scale(plural, name, replicas)
    installation.cluster.ready_pods(selector, replicas, START_TIMEOUT_S)


def scale_all(installation: Installation, replicas: int) -> None:
    """Scale every component that several pods may serve."""
    for plural, name, selector in REPLICATED:
        scale(installation, plural, name, selector, replicas)


def ask_in_turn(installation: Installation, *containers: tuple[str, str]) -> list[Answer]:
    """Send one new long prompt to each container in turn, after a short one that warms it up."""
    seed = random.randrange(1 << 30)
    answers = []
    for pod, container in containers:
        installation.ask(pod, container, seed + 1, 64)
        answer = installation.ask(pod, container, seed, PROMPT_TOKENS)
        progress(
            f"{pod}: {answer.took_ms:.0f} ms, {answer.num_cached} of {answer.num_prompt} cached"
        )
        answers.append(answer)
        time.sleep(ANNOUNCED_S)
    return answers


def log_levels(installation: Installation) -> set[str]:
    """Return the log levels in the settings of storage, lookup and broker."""
    cluster = installation.cluster
    found = set()
    for name in ("storage", "lookup", "broker"):
        settings = cluster.call("GET", cluster.path("configmaps", f"{BASE}-{name}"))
        lines = settings["data"]["config.yaml"].splitlines()
        found |= {line.partition(":")[2].strip() for line in lines if line.startswith("log_level:")}
    return found


def replaced(installation: Installation, old: Manifest) -> str:
    """Return a sentence while the StatefulSet's pod is still the old one, else ""."""
    for pod in installation.cluster.pods(component("redis")):
        if pod["metadata"]["uid"] != old["metadata"]["uid"]:
            return ""
    return f"{name_of(old)} is not replaced"
