"""What `make test-cluster` does through the Kubernetes API, against a stand-in."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster import kube, manifests
from tests.cluster.helm import find_helm, image_values
from tests.cluster.kube import Cluster, Manifest
from tests.cluster.leftovers import DOCUMENTED, left_over
from tests.cluster.login import usable_login
from tests.cluster.waiting import ClusterError, wait_until
from tests.fixtures.cluster_api import ClusterApi, serving

ROOT = Path(__file__).resolve().parents[3]
NAMESPACE = "/api/v1/namespaces/ns"
PODS = f"{NAMESPACE}/pods"
APPS = "/apis/apps/v1/namespaces/ns"
READY = {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}
AT_WORK = {"observedGeneration": 1, "replicas": 1, "readyReplicas": 1}


@pytest.fixture
def api() -> Iterator[ClusterApi]:
    with serving(ClusterApi()) as api:
        api.put(NAMESPACE, metadata={"labels": {kube.OWN: "true"}})
        yield api


@pytest.fixture
def cluster(api: ClusterApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    monkeypatch.setattr(kube, "PAGE", 2)  # so that lists have several pages
    for name in ("POLL_S", "REPORT_EVERY_S"):
        monkeypatch.setitem(wait_until.__kwdefaults__, name.lower(), 0.01)
    cluster = Cluster.from_kubeconfig(api.kubeconfig(tmp_path / "kubeconfig"), "ns")
    yield cluster
    cluster.close()


def test_a_wait_is_bounded_and_says_what_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    answers = iter(["two", "one", ""])
    wait_until(lambda: next(answers), "pods", 60, poll_s=0, report_every_s=0)
    assert re.findall(r"pods \(0 of 60 s\): (\w+)", capsys.readouterr().err) == ["two", "one"]
    with pytest.raises(ClusterError, match=r"^pods: still missing after 0 s: one$"):
        wait_until(lambda: "one", "pods", 0)


def test_ready_is_what_all_workloads_are(api: ClusterApi, cluster: Cluster) -> None:
    deployment: Manifest = api.put(
        f"{APPS}/deployments/lookup", spec={"replicas": 1}, status={**AT_WORK, "updatedReplicas": 1}
    )
    revisions = {"currentRevision": "a", "updateRevision": "a"}
    stateful: Manifest = api.put(
        f"{APPS}/statefulsets/storage", spec={"replicas": 1}, status=AT_WORK | revisions
    )
    cluster.wait_ready(0)
    for workload, name, value in (
        (deployment, "readyReplicas", 0),
        (deployment, "updatedReplicas", 0),
        (deployment, "replicas", 2),
        (deployment, "observedGeneration", 0),
        (stateful, "readyReplicas", 0),
        (stateful, "currentRevision", "b"),
    ):
        kept = workload["status"]
        workload["status"] = {**kept, name: value}
        with pytest.raises(ClusterError, match="of 1 ready"):
            cluster.wait_ready(0)
        workload["status"] = kept
    api.put(f"{PODS}/old", metadata={"deletionTimestamp": "2026-01-01T00:00:00Z"}, status=READY)
    assert cluster.not_ready() == "old is ending"


def test_a_pod_without_an_image_is_not_waited_for(
    api: ClusterApi, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting_state = {"reason": "ImagePullBackOff", "message": "no such image x:1"}
    status = {"name": "vllm", "state": {"waiting": waiting_state}}
    api.put(f"{PODS}/model", status={"phase": "Pending", "containerStatuses": [status]})
    assert cluster.not_ready() == "", "a pull may succeed when it is tried again"
    monkeypatch.setattr(kube, "STUCK_S", 0.0)
    with pytest.raises(ClusterError, match="model/vllm: ImagePullBackOff: no such image x:1"):
        cluster.wait_ready(60)
    with pytest.raises(ClusterError, match="cannot start"):
        cluster.ready_pods("", 1, 60)


def test_pods_are_counted_exactly(api: ClusterApi, cluster: Cluster) -> None:
    labels = {"labels": {"app": "a"}}
    for name in ("b", "a", "c"):
        api.put(f"{PODS}/{name}", metadata=labels, status=READY)
    api.put(f"{PODS}/done", metadata=labels, status={"phase": "Succeeded"})
    api.put(f"{PODS}/other", metadata={"labels": {"app": "b"}}, status=READY)
    assert cluster.ready_pods("app=a", 3, 0) == ["a", "b", "c"]
    with pytest.raises(ClusterError, match="3 of 3 pods are ready"):
        cluster.ready_pods("app=a", 2, 0)


def test_evictions_respect_budgets(api: ClusterApi, cluster: Cluster) -> None:
    for name in ("a", "b"):
        api.put(f"{PODS}/{name}", status=READY)
    api.budgets = {"b": 2}
    cluster.evict(["a", "b"], 60)
    assert sorted(api.calls) == [("POST", f"{PODS}/{name}/eviction") for name in "abbb"]
    api.budgets = {"a": 10**9}
    with pytest.raises(ClusterError, match=r"a \(budget\)"):
        cluster.evict(["a"], 0.1)


def test_a_drained_node_takes_no_pods_until_the_drain_has_ended(
    api: ClusterApi, cluster: Cluster
) -> None:
    node = api.put("/api/v1/nodes/a", spec={})

    def drained_in_vain() -> None:
        with cluster.cordoned("a"):
            assert node["spec"]["unschedulable"]
            raise ClusterError("a budget allows no eviction")

    with pytest.raises(ClusterError, match="budget"):
        drained_in_vain()
    assert not node["spec"]["unschedulable"]


def test_pods_go_only_to_nodes_that_take_them(api: ClusterApi, cluster: Cluster) -> None:
    api.put("/api/v1/nodes/a", spec={})
    control_plane = {"key": "node-role.kubernetes.io/control-plane", "effect": "NoSchedule"}
    api.put("/api/v1/nodes/b", spec={"taints": [control_plane]})
    api.put("/api/v1/nodes/c", spec={"unschedulable": True})
    unready = {"conditions": [{"type": "Ready", "status": "Unknown"}]}
    api.put("/api/v1/nodes/d", spec={}, status=unready)
    assert cluster.other_nodes("a") == []
    api.put("/api/v1/nodes/e", spec={"taints": [{"key": "x", "effect": "PreferNoSchedule"}]})
    assert cluster.other_nodes("a") == ["e"]


def test_pods_have_moved_when_all_that_can_are_elsewhere(api: ClusterApi, cluster: Cluster) -> None:
    pod = api.put(f"{PODS}/a", spec={"nodeName": "one"}, status=READY)
    assert cluster.not_moved("one", "", 2) == "1 of 2 pods, a on one"
    pod["spec"] = {"nodeName": "two"}
    assert cluster.not_moved("one", "", 1) == ""
    pod["status"] = {"phase": "Running"}
    assert cluster.not_moved("one", "", 1) == "a on two", "it is not ready yet"

    def unscheduled(message: str) -> Manifest:
        condition = {"type": "PodScheduled", "status": "False", "message": message}
        return {"phase": "Pending", "conditions": [condition]}

    pod |= {"spec": {}, "status": unscheduled("1 Insufficient memory")}
    assert cluster.not_moved("one", "", 1) == "a on no node 1 Insufficient memory"
    for message in (
        "volume node affinity conflict",
        "didn't match PersistentVolume's node affinity",
    ):
        pod["status"] = unscheduled(message)
        assert cluster.not_moved("one", "", 1) == "", "it waits for its volume's node"


def test_restarts_are_remembered(api: ClusterApi, cluster: Cluster) -> None:
    """Of init containers too, and when the pod is gone."""
    killed = {"terminated": {"reason": "OOMKilled", "exitCode": 137}}
    fine = {"name": "payload", "restartCount": 0, "state": {"terminated": {"reason": "Completed"}}}
    restarted = {"name": "sidecar", "restartCount": 2, "state": {}, "lastState": killed}
    ended = {"name": "vllm", "restartCount": 0, "state": killed}
    statuses = {"initContainerStatuses": [fine, restarted], "containerStatuses": [ended]}
    api.put(f"{PODS}/a", status=READY | statuses)
    api.put(f"{PODS}/b", status={"phase": "Failed", "reason": "Evicted", "message": "no disk"})
    cluster.not_ready()
    cluster.delete(f"{PODS}/a")
    cluster.pods()
    assert cluster.incidents == {
        "a/sidecar": "2 restarts (OOMKilled, exit code 137)",
        "a/vllm": "0 restarts (OOMKilled, exit code 137)",
        "b": "evicted by the kubelet: no disk",
    }


def login(folder: Path, **auths: object) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps({"auths": auths, "credsStore": "desktop"}))
    return path


def test_a_login_is_one_for_the_registry(tmp_path: Path) -> None:
    entry = {"auth": "dTpw"}
    for key, images in (
        ("registry.example.com", "registry.example.com/a:1"),
        ("https://registry.example.com:5000/v2/", "registry.example.com:5000/a:1"),
        ("*.example.com", "registry.example.com/a:1"),
        ("https://index.docker.io/v1/", "example/a:1"),
    ):
        path = login(tmp_path, **{key: entry})
        assert usable_login(path, images) == path.read_text()
    without: list[dict[str, object]] = [
        {},
        {"other.example.com": entry},
        {"registry.example.com": {}},
    ]
    for auths in without:
        with pytest.raises(ClusterError, match=r"holds no login for registry\.example\.com"):
            usable_login(login(tmp_path, **auths), "registry.example.com/a:1")


@pytest.mark.parametrize("text", ["", "[]", '{"auths": ["a"]}'])
def test_a_login_that_is_none_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(ClusterError, match=r"not a \.docker/config\.json"):
        usable_login(path, "registry.example.com/a:1")


def test_a_registry_with_a_login(tmp_path: Path) -> None:
    values = image_values("registry.example.com/a:1", "pull")
    assert values[-2:] == ["--set-string", "imagePullSecrets[0].name=pull"]
    assert "imagePullSecrets" not in " ".join(image_values("registry.example.com/a:1"))
    secret = manifests.pull_secret('{"auths": {}}')
    assert secret["stringData"] == {".dockerconfigjson": '{"auths": {}}'}
    plain = manifests.plain_deployment("a", pull_secret=manifests.PULL_SECRET)
    assert plain["spec"]["template"]["spec"]["imagePullSecrets"] == [secret["metadata"]]


def test_commands_are_run_in_pods(api: ClusterApi, cluster: Cluster) -> None:
    assert cluster.execute("a", "main", ["echo", "x" * 200]) == "echo " + "x" * 200
    api.executed = lambda pod, command: ("no room", 3)
    with pytest.raises(ClusterError, match="touch in a ended with 3: no room"):
        cluster.execute("a", "main", ["touch", "/tmp/stop"])


def test_what_only_reads_is_asked_again(
    api: ClusterApi, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As long as there is hope; what changes something may have done so."""
    monkeypatch.setattr(kube, "READ_PAUSE_S", 0.0)
    api.put(f"{PODS}/a", status=READY)
    api.half_answers = kube.READ_TRIES - 1
    assert [kube.name_of(pod) for pod in cluster.pods()] == ["a"]
    api.half_answers = kube.READ_TRIES
    with pytest.raises(ClusterError, match=f"GET {PODS}: no answer"):
        cluster.pods()
    api.half_answers = 1
    with pytest.raises(ClusterError, match=f"POST {NAMESPACE}/configmaps: no answer"):
        cluster.create("configmaps", {"metadata": {"name": "c"}})
    assert api.calls == [("POST", f"{NAMESPACE}/configmaps")]


def test_workloads_are_scaled(api: ClusterApi, cluster: Cluster) -> None:
    made = api.put(f"{APPS}/statefulsets/storage", spec={"replicas": 1})
    cluster.scale("statefulsets", "storage", 3)
    assert made["spec"] == {"replicas": 3}


def test_what_is_left_behind_is_found(api: ClusterApi, cluster: Cluster) -> None:
    other = {"rules": [{"resourceNames": ["nsx"]}]}
    api.put("/apis/rbac.authorization.k8s.io/v1/clusterroles/other", **other)
    before = set(cluster.objects())
    claim = f"{NAMESPACE}/persistentvolumeclaims/data-cache-lmcache-storage-0"
    for path in (
        claim,
        f"{PODS}/cache-lmcache-release-test",
    ):
        api.put(path)
    reference = {"spec": {"claimRef": {"namespace": "ns"}}}
    api.put("/api/v1/persistentvolumes/pvc-1", **reference)
    assert left_over(before, cluster.objects()) == []
    api.put(f"{NAMESPACE}/configmaps/cache-lmcache-storage")
    api.put("/apis/rbac.authorization.k8s.io/v1/clusterroles/ns-cache-lmcache-webhook")
    left = [
        "ClusterRole/ns-cache-lmcache-webhook",
        "ConfigMap/ns/cache-lmcache-storage",
    ]
    assert left_over(before, cluster.objects()) == left
    cluster.delete_namespace(60)
    gone = left_over(before, cluster.objects(), gone=True)
    assert gone == [left[0], "PersistentVolume/pvc-1"], "then nothing may stay"


def test_a_kind_that_cannot_be_listed_is_no_success(api: ClusterApi, cluster: Cluster) -> None:
    path = "/apis/rbac.authorization.k8s.io/v1"
    api.statuses[path] = 503
    cluster.objects()
    api.statuses = {f"{path}/clusterroles": 403}
    with pytest.raises(ClusterError, match="403"):
        cluster.objects()


def test_the_page_names_what_stays() -> None:
    page = (ROOT / "docs/quickstart.md").read_text(encoding="utf-8")
    (sentence,) = re.findall(r"It leaves the storage's .*? `helm test`\.", page)
    assert not re.findall(r"`(cache-[\w-]+)`", sentence)
    assert {kind.split("/")[0] for kind in DOCUMENTED.pattern.split("|")} == {
        "PersistentVolumeClaim",
        "PersistentVolume",
        "Pod",
    }


def test_only_own_namespaces_are_deleted(api: ClusterApi, cluster: Cluster) -> None:
    api.put(NAMESPACE)
    with pytest.raises(ClusterError, match="not one of this suite"):
        cluster.delete_namespace(60)
    cluster.namespace = "none"
    cluster.delete_namespace(60)
    assert api.calls == []
    cluster.create_namespace()
    labels = api.objects["/api/v1/namespaces/none"]["metadata"]["labels"]
    assert labels["pod-security.kubernetes.io/enforce"] == "restricted"


@pytest.mark.parametrize(
    ("images", "registry", "tag"),
    [("localhost:5000/a/b:0.1.0", "localhost:5000/a/b", "0.1.0"), ("a/b:c", "a/b", "c")],
)
def test_images_become_values(images: str, registry: str, tag: str) -> None:
    assert f"images.registry={registry}" in image_values(images)
    assert f"modelDefaults.image.tag={tag}" in image_values(images)


@pytest.mark.parametrize("images", ["", "a/b", "localhost:5000/a", ":c"])
def test_images_without_a_tag_are_refused(images: str) -> None:
    with pytest.raises(ClusterError, match="must be registry/path:tag"):
        image_values(images)


def fake_helm(folder: Path, version: str) -> None:
    """A Helm that says its version and cannot install."""
    script = folder / "helm"
    lines = (
        f"[ $1 = version ] && echo {version}",
        "[ $1 = install ] && echo no rights >&2 && exit 1",
    )
    script.write_text("\n".join(["#!/bin/sh", *lines, "exit 0\n"]))
    script.chmod(0o755)


def test_an_old_helm_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    fake_helm(tmp_path, "v3.13.2+g2a2fb3b")
    with pytest.raises(ClusterError, match=r"is version 'v3\.13\.2.*Helm 3\.14 or later is needed"):
        find_helm()
    fake_helm(tmp_path, "v4.1.4+g05fa379")
    assert find_helm() == str(tmp_path / "helm")


def suite(*words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run the suite itself."""
    command = [sys.executable, "-m", "pytest", "-c", "tests/cluster/pytest.ini", "tests/cluster"]
    kept = {name: os.environ[name] for name in ("PATH", "PYTHONPATH") if name in os.environ}
    return subprocess.run(
        [*command, *words],
        cwd=ROOT,
        env=kept | environ,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def test_the_suite_says_what_it_needs() -> None:
    answer = suite(IMAGES="a/b:c")
    assert answer.returncode == 4
    assert "KUBECONFIG must be set, for example:\n  make test-cluster KUBECONFIG=" in answer.stderr


def test_a_login_is_checked_before_anything_is_made(api: ClusterApi, tmp_path: Path) -> None:
    fake_helm(tmp_path, "v3.19.0")
    environ = {
        "KUBECONFIG": str(api.kubeconfig(tmp_path / "kubeconfig")),
        "IMAGES": "registry.example.com/a:1",
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
    }
    absent = suite(**environ, PULL_CONFIG=str(tmp_path / "config.json"))
    path = login(tmp_path)
    empty = suite(**environ, PULL_CONFIG=str(path))
    assert (absent.returncode, empty.returncode) == (4, 4)
    assert f"PULL_CONFIG={path}: no such file; log in to the registry first" in absent.stderr
    assert f"PULL_CONFIG={path}: holds no login for registry.example.com" in empty.stderr
    assert api.calls == []


def test_a_failure_shows_events_and_logs_and_cleans_up(api: ClusterApi, tmp_path: Path) -> None:
    """The suite with an installation that fails half-way."""
    fake_helm(tmp_path, "v3.19.0")
    api.put(NAMESPACE.replace("ns", "mine"), metadata={"labels": {kube.OWN: "true"}})
    mine = "/api/v1/namespaces/mine"
    created = api.put

    def create(path: str, **members: object) -> Manifest:
        """With the namespace come a pod that does not start, its event and its log."""
        made = created(path, **members)
        if path == mine:
            state = {"waiting": {"reason": "CreateContainerConfigError"}}
            status = {"name": "main", "state": state}
            created(f"{mine}/pods/bad", status={"containerStatuses": [status]})
            created(
                f"{mine}/events/e",
                involvedObject={"kind": "Pod", "name": "bad"},
                count=3,
                reason="Failed",
                message="no such Secret",
            )
        return made

    api.put = create  # type: ignore[method-assign]
    api.logs["bad", "main"] = "a line of the log"
    answer = suite(
        *("-k", "every_pod_is_ready"),
        KUBECONFIG=str(api.kubeconfig(tmp_path / "kubeconfig")),
        IMAGES="a/b:c",
        NAMESPACE="mine",
        PATH=f"{tmp_path}:{os.environ['PATH']}",
    )
    assert answer.returncode == 1, answer.stdout + answer.stderr
    for text in (
        "exit code 1: no rights",
        'main: 0 restarts, {"waiting": {"reason": "CreateContainerConfigError"}}',
        "pod bad: NOT READY",
        "a line of the log",
        "Pod/bad x3 Failed: no such Secret",
    ):
        assert text in answer.stdout
        assert text in answer.stderr, "when it happens, not only at the end"
    assert api.calls.count(("DELETE", mine)) == 2, "before and after"
    assert not [path for path in api.objects if path.startswith(mine)]
