"""The chart on a real cluster, from its installation to its end, in this order."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest

from tests.cluster import manifests, reach
from tests.cluster.ask import TIMEOUT_S as ASK_TIMEOUT_S
from tests.cluster.ask import Answer
from tests.cluster.conftest import HELM_TIMEOUT_S, Installation
from tests.cluster.helm import POD_MONITORS
from tests.cluster.kube import Manifest, name_of
from tests.cluster.leftovers import left_over
from tests.cluster.manifests import ALONE, PLAIN, STRANGER
from tests.cluster.names import BASE, INSTANCE, MODEL_PODS, MODEL_SERVICE, component
from tests.cluster.oracle import hit_problems
from tests.cluster.policies import addresses
from tests.cluster.release import NETWORKING, release_problems
from tests.cluster.waiting import (
    ANNOUNCED_S,
    DELETE_TIMEOUT_S,
    ENFORCED_S,
    LIST_ALL_S,
    REVIEW_S,
    START_TIMEOUT_S,
    ClusterError,
    NotInTimeError,
    progress,
    wait_until,
)
from tests.cluster.webhook import (
    NOT_REVIEWED,
    containers_with_api_token,
    inject_status,
    injection_problems,
)

KINDS = ("put", "get", "lookup", "broker", "completion")
STORAGE_CALLS = ("put", "get")
PROMPT_TOKENS = 2000
WEBHOOK = ("deployments", f"{BASE}-webhook", component("webhook"))
UPGRADED = "cluster-test-upgraded"
MONITORING = "monitoring.coreos.com/v1"
REPLICATED = (
    ("deployments", f"{BASE}-lookup", component("lookup")),
    ("deployments", f"{BASE}-broker", component("broker")),
    ("deployments", MODEL_SERVICE, MODEL_PODS),
)
# How long a disturbance that is allowed may last, in seconds.
REROUTED_S = 60
"""Until the other pod of a component gets all calls."""
HANDED_OVER_S = 2 * 120
"""Until two storage pods, one after the other, have handed over (terminationGracePeriodSeconds)."""
REDIS_S = 120
"""Until another Redis is ready, and lookup's index is full again."""
RENEWED_S = 300
"""Until storage's only pod has handed over and another one is ready."""
DRAINED_S = RENEWED_S + 300
"""Until it may return to a node that its volume ties it to: when all others are elsewhere."""


def test_every_pod_is_ready(installation: Installation) -> None:
    installation.cluster.wait_ready(START_TIMEOUT_S)


def test_the_chart_s_own_test_passes(installation: Installation) -> None:
    output = installation.helm.test(HELM_TIMEOUT_S)
    assert output.count("ok     ") >= 5, output
    assert "FAILED" not in output


def test_the_release_is_complete(installation: Installation) -> None:
    require(release_problems(installation.cluster, installation.helm))


def test_a_stranger_reaches_only_what_is_open(installation: Installation) -> None:
    """Each port of each pod, from a pod of the same namespace."""
    cluster = installation.cluster
    policies = cluster.items(cluster.path("networkpolicies", api=NETWORKING))
    is_open = addresses(policies, cluster.pods(INSTANCE))
    script = Path(reach.__file__).read_text(encoding="utf-8")

    def reached() -> list[str]:
        output = cluster.execute(STRANGER, "main", ["python", "-c", script, *is_open])
        return list(json.loads(output))

    pod = manifests.stranger_pod(plain_deployment(installation), installation.image("storage"))
    cluster.create("pods", pod)
    fence = cluster.path("networkpolicies", STRANGER, NETWORKING)
    try:
        cluster.ready_pods(f"app={STRANGER}", 1, START_TIMEOUT_S)
        found, unenforced = reached(), ""
        cluster.create("networkpolicies", manifests.fence(), NETWORKING)
        try:
            wait_until(lambda: ", ".join(reached()), "a fenced pod reaches nothing", ENFORCED_S)
        except NotInTimeError as exc:
            unenforced = str(exc)
    finally:
        cluster.delete(fence)
        cluster.delete(cluster.path("pods", STRANGER))
    wanted = {one for one, may_reach in is_open.items() if may_reach}
    require([f"a pod without labels does not reach {one}" for one in wanted - set(found)])
    if unenforced:
        pytest.skip(f"the cluster's network does not enforce NetworkPolicies: {unenforced}")
    require([f"a pod without labels reaches {one}" for one in found if one not in wanted])


def test_volumes_of_another_size_are_refused(installation: Installation) -> None:
    with pytest.raises(ClusterError, match=r"storage\.persistence is to be .*cannot change"):
        installation.helm.upgrade(
            HELM_TIMEOUT_S, "--dry-run=server", "--set", "storage.persistence.size=3Gi"
        )


def test_a_pod_reuses_what_another_computed(installation: Installation) -> None:
    scale(installation, "deployments", MODEL_SERVICE, MODEL_PODS, 2)
    first, second = installation.cluster.ready_pods(MODEL_PODS, 2, START_TIMEOUT_S)
    require(reuse_problems(installation, (first, "vllm"), (second, "vllm")))


def test_a_plain_deployment_gets_the_cache(installation: Installation) -> None:
    cluster = installation.cluster
    scale(installation, "deployments", MODEL_SERVICE, MODEL_PODS, 1)
    cluster.create("deployments", plain_deployment(installation), "apis/apps/v1")
    try:
        (plain,) = cluster.ready_pods(f"app={PLAIN}", 1, START_TIMEOUT_S)
        pod = cluster.call("GET", cluster.path("pods", plain))
        assert inject_status(pod).startswith("injected: ")
        require(injection_problems(manifests.plain_pod(plain_deployment(installation)), pod))
        added = [one for one in pod["spec"]["initContainers"] if "lmcache" in one["name"]]
        assert containers_with_api_token(pod, added) == []
        (own,) = cluster.ready_pods(MODEL_PODS, 1, START_TIMEOUT_S)
        require(reuse_problems(installation, (own, "vllm"), (plain, "engine")))
    finally:
        cluster.delete(cluster.path("deployments", PLAIN, "apis/apps/v1"))
    cluster.ready_pods(f"app={PLAIN}", 0, DELETE_TIMEOUT_S)


def test_a_pod_without_vllm_is_left_alone(installation: Installation) -> None:
    pod = manifests.plain_pod(plain_deployment(installation))
    (container,) = pod["spec"]["containers"]
    container["command"], container["args"] = ["sleep"], ["60"]
    reviewed = installation.cluster.reviewed(pod)
    assert inject_status(reviewed).startswith("not injected: ")
    assert "initContainers" not in reviewed["spec"]


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
    """A storage server that hands its chunks over keeps no new ones; a chunk on its way from one
    server to another may be missed once.
    """
    with installation.traffic() as traffic:
        for replicas in (most, 1):
            scale(installation, plural, name, selector, replicas)
    may_miss = for_storage(HANDED_OVER_S) if plural == "statefulsets" else {}
    require(traffic.report.problems(KINDS, may_miss=may_miss))


def test_pods_are_injected_while_the_webhook_is_scaled(installation: Installation) -> None:
    """Also one that is really made meanwhile."""
    cluster, (plural, name, selector) = installation.cluster, WEBHOOK
    with installation.traffic() as traffic:
        for replicas in (3, 1):
            progress(f"scaling {name} to {replicas}")
            cluster.scale(plural, name, replicas)
            alone = f"{ALONE}-{replicas}"
            pod = manifests.plain_pod(plain_deployment(installation), alone)
            cluster.create("pods", pod)

            def missing(wanted: int = replicas, asked: Manifest = pod) -> str:
                status = inject_status(cluster.reviewed(asked))
                assert status.startswith("injected: "), status
                num_pods = len(cluster.pods(selector))
                is_settled = num_pods == wanted and not cluster.not_ready()
                return "" if is_settled else f"{num_pods} pods"

            what = f"{replicas} pods of the webhook"
            try:
                wait_until(missing, what, START_TIMEOUT_S, poll_s=REVIEW_S)
                cluster.ready_pods(f"app={alone}", 1, START_TIMEOUT_S)
                require(injection_problems(pod, cluster.call("GET", cluster.path("pods", alone))))
            finally:
                cluster.delete(cluster.path("pods", alone))
            cluster.ready_pods(f"app={alone}", 0, DELETE_TIMEOUT_S)
    require(traffic.report.problems(KINDS))


def test_pods_are_unchanged_without_a_webhook(installation: Installation) -> None:
    pod = manifests.plain_pod(plain_deployment(installation))
    scale(installation, *WEBHOOK, 0)
    try:
        reviewed = installation.cluster.reviewed(pod)
        assert inject_status(reviewed) == NOT_REVIEWED
        require(injection_problems(pod, reviewed))
    finally:
        scale(installation, *WEBHOOK, 1)


@pytest.mark.parametrize(
    ("name", "may_fail"),
    [
        ("storage", dict.fromkeys(STORAGE_CALLS, RENEWED_S)),
        ("lookup", {"lookup": REROUTED_S}),
        ("broker", {"broker": REROUTED_S}),
        ("vllm", {"completion": ASK_TIMEOUT_S + REROUTED_S}),
        ("webhook", {}),
    ],
    ids=["storage", "lookup", "broker", "vllm", "webhook"],
)
def test_a_killed_pod_under_traffic(
    installation: Installation, name: str, may_fail: Mapping[str, float]
) -> None:
    """Calls on their way to it fail. Nothing that was acknowledged is lost."""
    cluster = installation.cluster
    scale_all(installation, 2)
    victim = cluster.pods(component(name))[0]
    with survives(installation), installation.traffic() as traffic:
        cluster.delete(cluster.path("pods", name_of(victim)), at_once=True)
        wait_until(
            lambda: replaced(installation, name, victim), f"another pod of {name}", START_TIMEOUT_S
        )
        cluster.wait_ready(START_TIMEOUT_S)
    require(traffic.report.problems(KINDS, may_fail=may_fail))


def test_upgrade_and_rollback_under_traffic(installation: Installation) -> None:
    """Every pod is renewed. Storage and Redis have one pod each, which restarts."""
    scale_all(installation, 2)
    helm, annotation = installation.helm, f"podDefaults.podAnnotations.{UPGRADED}=yes"
    has_monitors = installation.cluster.serves(MONITORING)
    monitors = POD_MONITORS if has_monitors else ()
    with survives(installation) as require_hit, installation.traffic() as traffic:
        helm.upgrade(HELM_TIMEOUT_S, "--set-string", annotation, *monitors)
        installation.cluster.wait_ready(START_TIMEOUT_S)
        assert not_upgraded(installation) == set()
        assert ("kind: PodMonitor" in helm.manifest()) == has_monitors
        require(release_problems(installation.cluster, helm))
        require_hit()
        helm.rollback(HELM_TIMEOUT_S)
        installation.cluster.wait_ready(START_TIMEOUT_S)
        assert not_upgraded(installation) == pod_names(installation)
    problems = traffic.report.problems(
        KINDS, may_fail=for_storage(RENEWED_S), may_miss={"lookup": REDIS_S}
    )
    require(problems)


def test_node_drain_under_traffic(installation: Installation) -> None:
    """Every pod of the release on storage's node is evicted. The node takes none again before all
    are ready elsewhere, but those that a volume ties to it.
    """
    cluster = installation.cluster
    scale_all(installation, 2)
    (storage,) = cluster.pods(component("storage"))
    node, pods = storage["spec"]["nodeName"], cluster.pods(INSTANCE)
    there = [name_of(pod) for pod in pods if pod["spec"]["nodeName"] == node]
    others = cluster.other_nodes(node)
    progress(f"evicting {len(there)} pods from node {node}")
    with survives(installation), installation.traffic() as traffic:
        with cluster.cordoned(node) if others else nullcontext():
            cluster.evict(there, START_TIMEOUT_S)
            if others:
                wait_until(
                    lambda: cluster.not_moved(node, INSTANCE, len(pods)),
                    f"the pods of {node} elsewhere",
                    START_TIMEOUT_S,
                )
        cluster.wait_ready(START_TIMEOUT_S)
    problems = traffic.report.problems(
        KINDS, may_fail=for_storage(DRAINED_S), may_miss={"lookup": REDIS_S}
    )
    require(problems)
    if not others:
        pytest.skip(f"{node} alone takes pods: its pods were evicted, but nothing was drained")


def test_loss_of_redis_under_traffic(installation: Installation) -> None:
    """Lookups have no result until Redis is back, and its index until holders report again."""
    cluster = installation.cluster
    scale_all(installation, 2)
    (redis,) = cluster.pods(component("redis"))
    with survives(installation), installation.traffic() as traffic:
        cluster.delete(cluster.path("pods", name_of(redis)))
        wait_until(
            lambda: replaced(installation, "redis", redis), "Redis is another pod", START_TIMEOUT_S
        )
        cluster.wait_ready(START_TIMEOUT_S)
    may_miss = {"lookup": REDIS_S, **for_storage(REDIS_S)}
    require(traffic.report.problems(KINDS, may_miss=may_miss))


def test_the_release_is_complete_in_the_end(installation: Installation) -> None:
    """And no container of any pod has restarted or run out of memory."""
    problems = release_problems(installation.cluster, installation.helm)
    incidents = installation.cluster.incidents.items()
    require(problems + [f"{where}: {what}" for where, what in incidents])


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


def ask_in_turn(
    installation: Installation, *containers: tuple[str, str], seed: int | None = None
) -> list[tuple[int, Answer]]:
    """Send one long prompt, by default a new one, to each container in turn, after a short one that
    warms it up; return its seed with each answer.
    """
    seed = random.randrange(1 << 30) if seed is None else seed
    answers = []
    for pod, container in containers:
        installation.ask(pod, container, seed + 1, 64)
        answer = installation.ask(pod, container, seed, PROMPT_TOKENS)
        progress(
            f"{pod}: {answer.took_ms:.0f} ms, {answer.num_cached} of {answer.num_prompt} cached"
        )
        answers.append((seed, answer))
        time.sleep(ANNOUNCED_S)
    return answers


def for_storage(limit_s: float) -> dict[str, float]:
    """Return that limit of a disturbance for all calls of storage."""
    return dict.fromkeys(STORAGE_CALLS, limit_s)


def require(problems: list[str]) -> None:
    """Fail with every problem, which pytest's own report of a list would cut off."""
    assert not problems, "\n".join(problems)


def reuse_problems(
    installation: Installation, first: tuple[str, str], second: tuple[str, str]
) -> list[str]:
    """Return why the second container does not reuse what the first one computes."""
    return hit_problems(*(answer for _, answer in ask_in_turn(installation, first, second)))


@contextmanager
def survives(installation: Installation) -> Iterator[Callable[[], None]]:
    """Have a prompt computed before the block, and require after it that another pod reuses it;
    yield what requires the same within the block.
    """
    first, _ = installation.cluster.ready_pods(MODEL_PODS, 2, START_TIMEOUT_S)
    ((seed, computed),) = ask_in_turn(installation, (first, "vllm"))

    def require_hit() -> None:
        pods = installation.cluster.ready_pods(MODEL_PODS, 2, START_TIMEOUT_S)
        second = next(pod for pod in pods if pod != first)
        ((_, reused),) = ask_in_turn(installation, (second, "vllm"), seed=seed)
        require(hit_problems(computed, reused))

    yield require_hit
    require_hit()


def plain_deployment(installation: Installation) -> Manifest:
    """Return a Deployment of vLLM without the chart."""
    image = installation.image("vllm-cpu-tiny")
    return manifests.plain_deployment(image, pull_secret=installation.pull_secret)


def pod_names(installation: Installation) -> set[str]:
    """Return the names of the release's pods."""
    return {name_of(pod) for pod in installation.cluster.pods(INSTANCE)}


def not_upgraded(installation: Installation) -> set[str]:
    """Return the names of the release's pods without the upgrade's annotation."""
    return {
        name_of(pod)
        for pod in installation.cluster.pods(INSTANCE)
        if UPGRADED not in pod["metadata"].get("annotations", {})
    }


def replaced(installation: Installation, name: str, old: Manifest) -> str:
    """Return a sentence while a component's pod is still the old one, else ""."""
    for pod in installation.cluster.pods(component(name)):
        if pod["metadata"]["uid"] == old["metadata"]["uid"]:
            return f"{name_of(old)} is not replaced"
    return ""
