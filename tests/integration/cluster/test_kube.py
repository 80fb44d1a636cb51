"""What `make test-cluster` does through the Kubernetes API, against a stand-in."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster import kube
from tests.cluster.kube import Cluster, Manifest
from tests.cluster.waiting import ClusterError
from tests.fixtures.cluster_api import ClusterApi, serving

ROOT = Path(__file__).resolve().parents[3]
NAMESPACE = "/api/v1/namespaces/ns"


@pytest.fixture
def api() -> Iterator[ClusterApi]:
    with serving(ClusterApi()) as api:
        api.put(NAMESPACE, metadata={"labels": {kube.OWN: "true"}})
        yield api


@pytest.fixture
def cluster(api: ClusterApi, tmp_path: Path) -> Iterator[Cluster]:
    cluster = Cluster.from_kubeconfig(api.kubeconfig(tmp_path / "kubeconfig"), "ns")
    yield cluster
    cluster.close()


def login(folder: Path, **auths: object) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps({"auths": auths, "credsStore": "desktop"}))
    return path


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


def fake_helm(folder: Path, version: str) -> None:
    """A Helm that says its version and cannot install."""
    script = folder / "helm"
    lines = (
        f"[ $1 = version ] && echo {version}",
        "[ $1 = install ] && echo no rights >&2 && exit 1",
    )
    script.write_text("\n".join(["#!/bin/sh", *lines, "exit 0\n"]))
    script.chmod(0o755)


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
