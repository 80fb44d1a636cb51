"""The whole of `make test-cluster` against a stand-in for a cluster: a healthy one passes, and each
defect fails the test that is there to find it.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path

import pytest

from tests.fixtures.cluster_api import serving
from tests.fixtures.cluster_release import ClusterRelease

ROOT = Path(__file__).resolve().parents[3]
TIMEOUT_S = 280
WITHOUT_VLLM = "test_a_pod_without_vllm_is_left_alone"
WITHOUT_WEBHOOK = "test_pods_are_unchanged_without_a_webhook"
WEBHOOK_SCALED = "test_pods_are_injected_while_the_webhook_is_scaled"
COMPLETE = {"test_the_release_is_complete", "test_the_release_is_complete_in_the_end"}
STRANGER = "test_a_stranger_reaches_only_what_is_open"
RESIZED = "test_volumes_of_another_size_are_refused"
UPGRADED = "test_upgrade_and_rollback_under_traffic"
DRAINED = "test_node_drain_under_traffic"
KILLED = ("storage", "lookup", "broker", "vllm", "webhook")
SCALED = {
    f"test_scaling_under_traffic[{name}]" for name in ("storage", "lookup", "broker", "model")
}
UNDER_TRAFFIC = SCALED | {
    *(f"test_a_killed_pod_under_traffic[{name}]" for name in KILLED),
    UPGRADED,
    DRAINED,
    "test_loss_of_redis_under_traffic",
}
HITS = {"test_a_pod_reuses_what_another_computed", "test_a_plain_deployment_gets_the_cache"}
UNINSTALLATION = "test_uninstallation_leaves_nothing_behind"
OTHERS = {
    WITHOUT_VLLM,
    WITHOUT_WEBHOOK,
    WEBHOOK_SCALED,
    STRANGER,
    RESIZED,
    UNINSTALLATION,
} | COMPLETE
DEFECTS = {
    "no-hit": "the second pod reused 0 tokens, not 1792",
    "lost-chunk": "1 of 50 acknowledged chunks are lost: ['a/1: missed']",
    "failed-lookup": "lookup: 1 of 53 calls failed: ['lookup after 1.0 s: refused']",
    "degraded-lookup": "lookup: 2 of 53 calls degraded",
    "missed-get": "get: 2 of 52 calls missed",
    "refused-put": "put: 2 of 52 calls refused",
    "wrong-text": "completion: 2 calls returned something else",
    "not-injected": 'assert inject_status(pod).startswith("injected: ")',
    "not-reviewed": "not reviewed",
    "left-role": "ClusterRole/mine-cache-lmcache",
    "left-configmap": "ConfigMap/mine/cache-lmcache-storage",
    "left-lease": "Lease/mine/cache-lmcache-broker",
    "left-elsewhere": "RoleBinding/kube-system/cache-lmcache",
    "changed-without-webhook": "not reviewed, but container engine has other args",
    "resizable": "DID NOT RAISE",
    "no-monitors": '("kind: PodMonitor" in helm.manifest()) == has_monitors',
    "open-port": "a pod without labels reaches 10.0.0.2:6379",
    "out-of-memory": "cache-lmcache-vllm-tiny-0/vllm: 1 restarts (OOMKilled, exit code 137)",
    "no-service-account": "ServiceAccount cache-lmcache-redis of the release is not there",
    "no-policy": "no NetworkPolicy is for the Egress of cache-lmcache-lookup-0",
    "no-probe": "cache-lmcache-storage-0/storage has no readinessProbe",
    "privileged": "cache-lmcache-broker-0 is not restricted: broker: capabilities",
    "other-authority": "the caBundle of label is not the ca.crt of cache-lmcache-webhook-tls",
    "secrets-readable": "cache-lmcache-lookup may, but need not, get secrets in mine",
    "pods-unreadable": "cache-lmcache-broker needs to, but may not, list pods in mine",
}
"""What goes wrong, and what the suite must say."""
SHORT = """
import sys, pytest
from tests.cluster import waiting
waiting.ANNOUNCED_S, waiting.LIST_ALL_S, waiting.DELETE_TIMEOUT_S = 0, 0, 2
waiting.ENFORCED_S, waiting.START_TIMEOUT_S = 0.1, 5
waiting.wait_until.__kwdefaults__["poll_s"] = 0.1
sys.exit(pytest.main(["-c", "tests/cluster/pytest.ini", "tests/cluster"]))
"""
OUTCOME = re.compile(
    r"^tests/cluster/test_chart\.py::(\S+).*?(PASSED|FAILED|ERROR|SKIPPED)",
    re.MULTILINE | re.DOTALL,
)


def outcomes(folder: Path, defects: Collection[str]) -> tuple[dict[str, set[str]], str]:
    """Names of tests by how they ended, and what the suite printed."""
    with serving(ClusterRelease("mine", defects)) as api:
        api.write_helm(folder)
        ran = subprocess.run(
            [sys.executable, "-c", SHORT],
            cwd=ROOT,
            env={
                "PATH": f"{folder}:{os.environ['PATH']}",
                "PYTHONPATH": os.environ.get("PYTHONPATH", str(ROOT)),
                "KUBECONFIG": str(api.kubeconfig(folder / "kubeconfig")),
                "IMAGES": "registry.example.com/a:1",
                "NAMESPACE": "mine",
            },
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        left = [path for path in api.objects if "/namespaces/mine" in path]
    assert left == [], "the suite cleans up after itself"
    found: dict[str, set[str]] = {}
    for name, outcome in OUTCOME.findall(ran.stdout):
        found.setdefault(outcome, set()).add(name)
    return found, ran.stdout + ran.stderr


@pytest.mark.timeout(TIMEOUT_S + 10)
def test_a_healthy_cluster_passes(tmp_path: Path) -> None:
    found, output = outcomes(tmp_path, ())
    assert set(found) == {"PASSED"}, output
    assert found["PASSED"] >= HITS | UNDER_TRAFFIC | OTHERS


@pytest.mark.timeout(TIMEOUT_S + 10)
def test_defects_are_found(tmp_path: Path) -> None:
    found, output = outcomes(tmp_path, DEFECTS)
    assert found["FAILED"] == HITS | UNDER_TRAFFIC | OTHERS, output
    assert found["PASSED"] == {"test_every_pod_is_ready", "test_the_chart_s_own_test_passes"}
    for sentence in DEFECTS.values():
        assert sentence in output


@pytest.mark.timeout(TIMEOUT_S + 10)
def test_defects_that_others_hide_are_found(tmp_path: Path) -> None:
    defects = ("api-token", "injected-without-vllm", "not-upgraded", "no-sidecar", "stays-on-node")
    found, output = outcomes(tmp_path, (*defects, "forgets-when-killed"))
    assert found["FAILED"] == {
        "test_a_plain_deployment_gets_the_cache",
        WITHOUT_VLLM,
        WEBHOOK_SCALED,
        "test_a_killed_pod_under_traffic[storage]",
        UPGRADED,
        DRAINED,
    }, output
    assert "assert ['lmcache-sidecar'] == []" in output
    assert "not_upgraded(installation) == set()" in output
    assert "'injected: the container engine', but there is no sidecar" in output
    assert "the second pod reused 0 tokens, not 1792" in output
    assert "the pods of node elsewhere: still missing after 5 s: " in output


@pytest.mark.timeout(TIMEOUT_S + 10)
def test_what_a_cluster_cannot_show_is_said(tmp_path: Path) -> None:
    """One node, whose network ignores policies. What follows an upgrade is still checked."""
    found, output = outcomes(tmp_path, ("one-node", "unenforced", "forgets-at-rollback"))
    assert found["SKIPPED"] == {STRANGER, DRAINED}, output
    assert found["FAILED"] == {UPGRADED}, output
    summary = output.partition("short test summary info")[2]
    assert "node alone takes pods: its pods were evicted, but nothing was drained" in summary
    assert "the cluster's network does not enforce NetworkPolicies" in summary
