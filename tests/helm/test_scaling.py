"""Pods come and go: who owns the number of replicas, what happens before an end, and who may see
which pods there are.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import pytest

from tests.fixtures.http_server import Handler, served
from tests.helm.conftest import MODEL, MODELS, both_helms

if TYPE_CHECKING:
    from tests.helm.conftest import Chart, Manifest, Rendering

SCALED = dict.fromkeys(("lookup", "broker", "vllm-tiny"), "Deployment") | {"storage": "StatefulSet"}


@pytest.fixture
def rendering(chart: Chart) -> Rendering:
    """Everything, with a model."""
    return chart.render(MODELS)


@both_helms
@pytest.mark.parametrize("number", [None, 0, 3])
def test_replicas_are_rendered_only_where_they_are_set(
    chart: Chart, helm: str, number: int | None
) -> None:
    """Helm 4 applies on the server, where a field that two set to different values is a
    conflict: the upgrade fails.
    """
    owners = ("storage", "lookup", "broker", "modelDefaults")
    values = {f"{owner}.replicaCount": number for owner in owners}
    rendering = chart.render(MODELS | values, helm=helm)
    for name, kind in SCALED.items():
        assert rendering.get(kind, name)["spec"].get("replicas") == number, name


@pytest.mark.parametrize(
    ("seconds", "hooks"),
    [(7, {"lifecycle": {"preStop": {"exec": {"command": ["sleep", "7"]}}}}), (0, {})],
)
def test_services_wait_until_no_caller_is_sent_to_them(
    chart: Chart, seconds: int, hooks: Manifest
) -> None:
    names = ("storage", "lookup", "broker")
    rendering = chart.render({f"{name}.preStopSeconds": seconds for name in names})
    for name in names:
        container = rendering.container(name)
        assert {key: container[key] for key in container if key == "lifecycle"} == hooks


def test_the_drain_of_a_sidecar_begins_with_the_end_of_its_pod(
    rendering: Rendering, tmp_path: Path
) -> None:
    """The hook of a native sidecar runs when the pod is to end, its SIGTERM comes when vLLM has
    ended.
    """
    command = rendering.container("sidecar")["lifecycle"]["preStop"]["exec"]["command"]
    config = rendering.config("vllm-tiny")
    assert (command[0], command[-1]) == ("python", config["socket_path"])
    assert any(
        command[-1].startswith(mount["mountPath"])
        for mount in rendering.container("sidecar")["volumeMounts"]
    )
    listens = (
        "import socket, sys, time; s = socket.socket(socket.AF_UNIX); s.bind(sys.argv[1]);"
        " s.listen(); print(flush=True); time.sleep(60)"
    )
    target = subprocess.Popen(
        [sys.executable, "-c", listens, str(tmp_path / "s")], stdout=subprocess.PIPE
    )
    try:
        assert target.stdout is not None
        target.stdout.readline()
        subprocess.run(
            [sys.executable, *command[1:-1], str(tmp_path / "s")], timeout=20, check=True
        )
        assert target.wait(timeout=20) == -10, "SIGUSR1 is what the sidecar takes for it"
    finally:
        target.kill()
        target.communicate()


class FakeVllm(Handler):
    """Has requests until they are over."""

    num_running: ClassVar[list[int]] = []

    def do_GET(self) -> None:
        running = self.num_running.pop(0) if self.num_running else 0
        text = (
            '# HELP x\nvllm:num_requests_running{engine="0"}'
            f' {running}.0\nvllm:num_requests_waiting{{engine="0"}} 0.0\n'
        )
        self.answer(200, text)


@pytest.fixture
def vllm_url() -> Iterator[str]:
    """A server with vLLM's metrics."""
    with served(FakeVllm) as url:
        yield f"{url}/metrics"
    FakeVllm.num_running.clear()


def stop_hook(rendering: Rendering, url: str, *seconds: str) -> list[str]:
    """The hook as it is rendered, for another vLLM and other times."""
    command = rendering.container("vllm")["lifecycle"]["preStop"]["exec"]["command"]
    assert command[:2] == ["python3", "-c"]
    assert command[3:] == ["http://localhost:8000/metrics", "5", "60"]
    return [sys.executable, "-c", command[2], url, *seconds]


def test_vllm_answers_what_it_has_before_it_ends(rendering: Rendering, vllm_url: str) -> None:
    FakeVllm.num_running[:] = [2, 1, 0, 5]
    subprocess.run(stop_hook(rendering, vllm_url, "0", "30"), timeout=40, check=True)
    assert FakeVllm.num_running == [5], "it asks until nothing runs, and no longer"


def test_the_hook_of_vllm_waits_for_new_requests_to_stay_away(
    rendering: Rendering, vllm_url: str
) -> None:
    begin = time.monotonic()
    subprocess.run(stop_hook(rendering, vllm_url, "0.7", "30"), timeout=40, check=True)
    assert time.monotonic() - begin >= 0.7


@pytest.mark.parametrize("url", ["", "http://localhost:1/metrics"])
def test_the_hook_of_vllm_ends(rendering: Rendering, vllm_url: str, url: str) -> None:
    """With requests that never end after the longest time, and at once where vLLM is dead."""
    FakeVllm.num_running[:] = [1] * 1000
    begin = time.monotonic()
    subprocess.run(
        stop_hook(rendering, url or vllm_url, "0", "1" if not url else "30"), timeout=40, check=True
    )
    assert time.monotonic() - begin < 15


def rules(rendering: Rendering) -> dict[str, list[str]]:
    role = rendering.get("Role", "broker")
    return {
        resource: sorted(rule["verbs"]) for rule in role["rules"] for resource in rule["resources"]
    }


def test_the_broker_sees_pods_and_changes_nothing(rendering: Rendering) -> None:
    assert rules(rendering) == {
        "endpointslices": ["get", "list", "watch"],
        "pods": ["get", "list", "watch"],
    }
    binding = rendering.get("RoleBinding", "broker")
    assert binding["roleRef"]["name"] == rendering.get("Role", "broker")["metadata"]["name"]
    account = {"kind": "ServiceAccount", "namespace": "inference"}
    account["name"] = rendering.pod("broker")["serviceAccountName"]
    assert binding["subjects"] == [account]
    assert rendering.of_kind("ClusterRole", "ClusterRoleBinding") == []
    assert len(rendering.of_kind("Role")) == 1


def test_pods_are_patched_only_where_that_is_wanted(chart: Chart) -> None:
    found = rules(chart.render({"broker.podDeletionCost.enabled": True}))
    assert found["pods"] == ["get", "list", "patch", "watch"]


def test_without_discovery_the_broker_has_no_rights(chart: Chart) -> None:
    rendering = chart.render({"broker.discovery.enabled": False})
    assert rendering.of_kind("Role", "RoleBinding") == []
    assert rendering.pod("broker")["automountServiceAccountToken"] is False


def test_the_followed_endpoints_are_those_of_all_sidecars(chart: Chart) -> None:
    rendering = chart.render({"models": {"tiny": MODEL, "other": MODEL}})
    service = rendering.get("Service", "sidecars")["spec"]
    assert service["clusterIP"] == "None"
    for name in ("vllm-tiny", "vllm-other"):
        template = rendering.get("Deployment", name)["spec"]["template"]
        assert service["selector"].items() <= template["metadata"]["labels"].items()
        ports = {
            port["name"]: port["containerPort"]
            for port in template["spec"]["initContainers"][1]["ports"]
        }
        assert [(port["name"], port["port"]) for port in service["ports"]] == [("lm", ports["lm"])]
    assert not service.get("publishNotReadyAddresses"), "a pod that is not ready is no peer yet"
