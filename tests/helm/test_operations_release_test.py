"""`helm test`: the pod that it starts, and the same command with the same files against services
that run.
"""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import nullcontext
from http.server import HTTPServer
from typing import TYPE_CHECKING

import kubernetes_validate
import pytest

from tests.fixtures.http_server import Handler, running
from tests.fixtures.tls import Authority
from tests.helm.conftest import COMPONENT, HELM_FOLDER, MODELS, MUTUAL
from tests.helm.processes import Cluster
from tests.helm.test_cases import CASES, render

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.helm.conftest import Chart, Manifest, Rendering

TEST_TIMEOUT_S = 60


def hooks(rendering: Rendering) -> list[Manifest]:
    return [
        one
        for one in rendering.manifests
        if "test" in one["metadata"].get("annotations", {}).get("helm.sh/hook", "").split(",")
    ]


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


@pytest.mark.parametrize("version", ["1.29", "1.33", "1.37"])
@pytest.mark.parametrize("tls", [{}, MUTUAL], ids=["plain", "tls"])
def test_the_objects_fit_kubernetes(chart: Chart, tls: Manifest, version: str) -> None:
    for manifest in parts(chart.render(MODELS | tls)):
        kubernetes_validate.validate(manifest, version, strict=True)


@pytest.mark.parametrize("tls", [{}, MUTUAL], ids=["plain", "tls"])
def test_the_pod_is_restricted_bounded_and_ends(chart: Chart, tls: Manifest) -> None:
    spec = pod_of(chart.render(MODELS | tls))["spec"]
    (container,) = spec["containers"]
    context = container["securityContext"]
    assert spec["restartPolicy"] == "Never"
    assert spec["activeDeadlineSeconds"] == 120
    assert spec["automountServiceAccountToken"] is False
    assert spec["enableServiceLinks"] is False
    assert context["runAsNonRoot"]
    assert context["readOnlyRootFilesystem"]
    assert not context["allowPrivilegeEscalation"]
    assert context["capabilities"] == {"drop": ["ALL"]}
    assert context["seccompProfile"] == {"type": "RuntimeDefault"}
    assert set(container["resources"]["requests"]) == {"cpu", "memory"}
    volumes = {volume["name"] for volume in spec["volumes"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == volumes
    projected = next(
        volume["projected"] for volume in spec["volumes"] if volume["name"] == "credentials"
    )
    items = [item["key"] for source in projected["sources"] for item in source["secret"]["items"]]
    assert items == ["sidecar-token"], "it gets no more than it needs"


def test_it_reaches_what_it_asks_and_nobody_it(chart: Chart) -> None:
    """Which ports these are test_network.py knows."""
    rendering = chart.render(MODELS)
    policies = [one["spec"] for one in parts(rendering) if one["kind"] == "NetworkPolicy"]
    (own,) = (
        spec for spec in policies if spec["podSelector"]["matchLabels"][COMPONENT] == "release-test"
    )
    assert own["policyTypes"] == ["Ingress", "Egress"]
    assert "ingress" not in own
    labels = pod_of(rendering)["metadata"]["labels"]
    assert own["podSelector"]["matchLabels"].items() <= labels.items()
    peers = [rule["from"] for spec in policies for rule in spec.get("ingress", ())]
    assert all(peer == [{"podSelector": own["podSelector"]}] for peer in peers)


def test_its_addresses_are_services(chart: Chart) -> None:
    rendering = chart.render(MODELS)
    services = {
        f"{one['metadata']['name']}.inference.svc": one["spec"]["ports"]
        for one in rendering.of_kind("Service")
    }
    for argument in pod_of(rendering)["spec"]["containers"][0]["args"]:
        if "://" in argument:
            host, _, port = argument.split("://")[1].split("/")[0].partition(":")
            assert int(port) in [one["port"] for one in services[host]], argument


def test_it_can_be_left_out(chart: Chart) -> None:
    assert parts(chart.render({"releaseTest.enabled": False})) == []


@pytest.fixture(scope="module", params=["plain", "mutual TLS"])
def cluster(
    chart: Chart, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[tuple[Cluster, Rendering, Path]]:
    """The services of a rendering, which they go by, and their folder."""
    is_plain = request.param == "plain"
    rendering = chart.render(MODELS | ({} if is_plain else MUTUAL))
    folder = tmp_path_factory.mktemp("run")
    cluster = Cluster(
        rendering, folder, None if is_plain else Authority(tmp_path_factory.mktemp("authority"))
    )
    try:
        cluster.start_all()
        yield cluster, rendering, folder
    finally:
        cluster.stop()


def command_of(rendering: Rendering, cluster: Cluster, folder: Path) -> list[str]:
    """The pod's command, with this machine's addresses and paths: the script is that of the
    ConfigMap, secrets those of the sidecar.
    """
    (script,) = (
        one["data"]["release_test.py"] for one in parts(rendering) if one["kind"] == "ConfigMap"
    )
    path = folder / "release_test.py"
    path.write_text(script, encoding="utf-8")
    container = pod_of(rendering)["spec"]["containers"][0]
    assert container["command"] == ["python", "/etc/lmcache/release_test.py"]
    lm_port = json.loads((folder / "storage" / "ports.json").read_bytes())["lm_port"]
    places = {
        "cache-lmcache-storage-headless.inference.svc:65432": f"127.0.0.1:{lm_port}",
        "cache-lmcache-storage.inference.svc:8080": f"127.0.0.1:{cluster.ports['storage']}",
        "cache-lmcache-lookup.inference.svc:8081": f"127.0.0.1:{cluster.ports['lookup']}",
        "cache-lmcache-broker.inference.svc:8082": f"127.0.0.1:{cluster.ports['broker']}",
        "/run/secrets/": f"{folder}/sidecar/run/secrets/",
    }
    arguments = "\n".join(container["args"])
    for given, here in places.items():
        assert given in arguments
        arguments = arguments.replace(given, here)
    return [sys.executable, str(path), *arguments.splitlines()]


def run(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, capture_output=True, text=True, timeout=TEST_TIMEOUT_S, check=False
    )


def test_a_release_that_works_passes(cluster: tuple[Cluster, Rendering, Path]) -> None:
    services, rendering, folder = cluster
    answer = run(command_of(rendering, services, folder))
    assert answer.returncode == 0, answer.stderr
    done = [line for line in answer.stdout.splitlines() if line.startswith("ok ")]
    assert len(done) == len(answer.stdout.splitlines()) == 5
    held = services.get("storage", "/v1/chunks", "sidecar")
    assert held["chunks"] == [], "nothing stays"


def test_a_token_that_is_wrong_fails(cluster: tuple[Cluster, Rendering, Path]) -> None:
    services, rendering, folder = cluster
    wrong = folder / "wrong-token"
    wrong.write_text("x" * 48, encoding="ascii")
    command = [
        f"--token-file={wrong}" if one.startswith("--token-file=") else one
        for one in command_of(rendering, services, folder)
    ]
    answer = run([*command, "--patience-s=0"])
    assert answer.returncode == 1
    assert answer.stderr.count("FAILED") == 4, "all but the refusal of who shows none"
    assert "x" * 48 not in answer.stderr


def test_a_service_that_lets_everybody_in_fails(cluster: tuple[Cluster, Rendering, Path]) -> None:
    """/healthz stands for a service that asks for no token."""
    services, rendering, folder = cluster
    command = [
        one.replace("/v1/instances", "/healthz").replace("/v1/peers", "/v1/none")
        for one in command_of(rendering, services, folder)
    ]
    answer = run([*command, "--patience-s=0"])
    assert answer.returncode == 1
    assert "/healthz: guarded: it answers 200 without a token, not 401" in answer.stderr
    assert "/v1/none: guarded: it answers" in answer.stderr


class Guarded(Handler):
    """Answers whoever shows a token."""

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


def test_without_tokens_it_asks_without(chart: Chart) -> None:
    arguments = pod_of(chart.render({"auth.enabled": False}))["spec"]["containers"][0]["args"]
    assert not any(one.startswith("--token-file") for one in arguments)
