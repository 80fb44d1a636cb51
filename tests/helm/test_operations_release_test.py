"""`helm test`: the pod that it starts, and how its script waits. test_running.py runs the whole
command on services.
"""

from __future__ import annotations

import subprocess
import sys
from contextlib import nullcontext
from http.server import HTTPServer
from typing import TYPE_CHECKING

import pytest
import yaml

from tests.cluster import manifests
from tests.fixtures.http_server import Handler, running
from tests.helm.conftest import HELM_FOLDER, MODELS, MUTUAL
from tests.helm.test_cases import CASES, render

if TYPE_CHECKING:
    from pathlib import Path

    from tests.helm.conftest import Chart, Manifest, Rendering

TEST_TIMEOUT_S = 60


def hooks(rendering: Rendering) -> list[Manifest]:
    return [
        one
        for one in rendering.manifests
        if "test" in one["metadata"].get("annotations", {}).get("helm.sh/hook", "").split(",")
    ]


def container_of(pod: Manifest) -> Manifest:
    """The container of a hook's pod, which ends."""
    (container,) = pod["spec"]["containers"]
    assert pod["spec"]["restartPolicy"] == "Never"
    assert set(container["resources"]["requests"]) == {"cpu", "memory"}
    return dict(container)


def pod_of(rendering: Rendering) -> Manifest:
    (pod,) = hooks(rendering)
    return pod


def parts(rendering: Rendering) -> list[Manifest]:
    """The pod, and what is there for it."""
    return [one for one in rendering.manifests if "release-test" in one["metadata"]["name"]]


def test_the_one_hook_is_a_pod_whose_log_can_be_read(chart: Chart) -> None:
    """Helm asks every test hook for a pod's logs, and an uninstallation removes no hook: the
    rest belongs to the release.
    """
    rendering = chart.render(MODELS)
    pod = pod_of(rendering)
    assert pod["kind"] == "Pod"
    assert pod["metadata"]["annotations"] == {
        "helm.sh/hook": "test",
        "helm.sh/hook-delete-policy": "before-hook-creation",
    }
    rest = [one for one in parts(rendering) if one is not pod]
    assert sorted(one["kind"] for one in rest) == ["ConfigMap", *["NetworkPolicy"] * 4]
    assert not any("annotations" in one["metadata"] for one in rest)


@pytest.mark.parametrize("case", sorted(CASES))
def test_no_hook_but_the_test_pod_outlives_the_release(chart: Chart, case: str) -> None:
    """Helm removes no hook at an uninstallation. The test's pod stays for its log; the quick
    start says how to remove it.
    """
    for one in render(chart, case).manifests:
        annotations = one["metadata"].get("annotations", {})
        if annotations.get("helm.sh/hook", "test") != "test":
            policy = annotations["helm.sh/hook-delete-policy"].split(",")
            assert "hook-succeeded" in policy, one["metadata"]["name"]


@pytest.mark.parametrize("tls", [{}, MUTUAL], ids=["plain", "tls"])
def test_the_pod_is_bounded_and_ends(chart: Chart, tls: Manifest) -> None:
    pod = pod_of(chart.render(MODELS | tls))
    container, spec = container_of(pod), pod["spec"]
    assert spec["activeDeadlineSeconds"] == 120
    volumes = {volume["name"] for volume in spec["volumes"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == volumes
    projected = next(
        volume["projected"] for volume in spec["volumes"] if volume["name"] == "credentials"
    )
    items = [item["key"] for source in projected["sources"] for item in source["secret"]["items"]]
    assert items == ["sidecar-token"], "it gets no more than it needs"


class Guarded(Handler):
    """Answers callers that show a token."""

    def do_GET(self) -> None:
        self.answer(200 if "Authorization" in self.headers else 401)


@pytest.mark.parametrize("patience_s", [0, 20])
def test_what_is_not_there_yet_is_waited_for(tmp_path: Path, patience_s: int) -> None:
    token = tmp_path / "token"
    token.write_text("x" * 48, encoding="ascii")
    with HTTPServer(("127.0.0.1", 0), Guarded, bind_and_activate=False) as server:
        server.server_bind()  # and does not listen: connections are refused
        command = [
            sys.executable,
            str(HELM_FOLDER / "lmcache/files/release_test.py"),
            f"--token-file={token}",
            f"--patience-s={patience_s}",
        ]
        command.append(f"--guarded-url=http://127.0.0.1:{server.server_address[1]}/v1/peers")
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as process:
            if patience_s:
                with pytest.raises(subprocess.TimeoutExpired):
                    process.wait(3)
                server.server_activate()
            with running(server) if patience_s else nullcontext():
                output, errors = process.communicate(timeout=TEST_TIMEOUT_S)
    assert process.returncode == (0 if patience_s else 1), errors
    assert (output if patience_s else errors).startswith("ok " if patience_s else "FAILED")


def test_traffic_of_the_cluster_suite_comes_from_that_pod(chart: Chart) -> None:
    """And not from the one that waits for the webhook."""
    rendering = chart.case("kind")
    traffic = manifests.traffic_pod(yaml.safe_dump_all(rendering.of_kind("Pod")))
    assert traffic["spec"]["containers"][0]["image"].endswith("/lmcache-storage:kind")


def test_without_tokens_it_asks_without(chart: Chart) -> None:
    arguments = pod_of(chart.render({"auth.enabled": False}))["spec"]["containers"][0]["args"]
    assert not any(one.startswith("--token-file") for one in arguments)
