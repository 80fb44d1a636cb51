"""What every pod promises: the `restricted` standard, no secrets where they do not belong,
memory that covers the cache.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.helm.conftest import containers_of
from tests.helm.test_cases import CASES

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.helm.conftest import Chart, Manifest, Rendering

RESTRICTED_VOLUMES = {"configMap", "emptyDir", "persistentVolumeClaim", "projected", "secret"}
SIDECAR_PATHS = ("/run/lmcache/arena", "/run/lmcache/socket")
UNITS = {"Mi": 2**20, "Gi": 2**30}


@pytest.fixture(params=sorted(CASES))
def rendering(chart: Chart, request: pytest.FixtureRequest) -> Rendering:
    """Each case of the matrix."""
    return chart.render(None, CASES[request.param])


@pytest.fixture
def models(chart: Chart) -> Rendering:
    """Two models with sidecars."""
    return chart.case("models")


def all_pods(rendering: Rendering) -> Iterator[tuple[str, Manifest]]:
    """Those of hooks, too."""
    yield from rendering.pods()
    yield from ((one["metadata"]["name"], one["spec"]) for one in rendering.of_kind("Pod"))


def bytes_of(quantity: str) -> int:
    number, unit = quantity[:-2], quantity[-2:]
    return int(number) * UNITS[unit]


def named(items: list[Manifest], name: str) -> Manifest:
    return next(item for item in items if item["name"] == name)


def test_pods_are_restricted(rendering: Rendering) -> None:
    for name, pod in all_pods(rendering):
        assert pod["securityContext"]["runAsNonRoot"] is True, name
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}, name
        assert not {"hostNetwork", "hostPID", "hostIPC", "hostUsers"} & set(pod), name
        for volume in pod.get("volumes", []):
            assert set(volume) - {"name"} <= RESTRICTED_VOLUMES, f"{name}: {volume}"


def test_containers_are_restricted(rendering: Rendering) -> None:
    pods = all_pods(rendering)
    for name, container in ((name, one) for name, pod in pods for one in containers_of(pod)):
        context = container["securityContext"]
        assert context["runAsNonRoot"] is True, name
        assert context["allowPrivilegeEscalation"] is False, name
        assert context["readOnlyRootFilesystem"] is True, name
        assert context["capabilities"] == {"drop": ["ALL"]}, name
        assert context["seccompProfile"] == {"type": "RuntimeDefault"}, name
        assert not {"privileged", "procMount", "seLinuxOptions"} & set(context), name
        assert not any("hostPort" in port for port in container.get("ports", [])), name


def test_the_cluster_may_choose_the_user(chart: Chart) -> None:
    rendering = chart.render({"security.runAsUser": None})
    assert all(
        "runAsUser" not in container["securityContext"] for _, container in rendering.containers()
    )
    assert all(
        not {"runAsUser", "runAsGroup", "fsGroup"} & set(pod["securityContext"])
        for _, pod in rendering.pods()
    )


def test_pods_see_no_services_and_no_api_token(rendering: Rendering) -> None:
    for name, pod in all_pods(rendering):
        assert pod["enableServiceLinks"] is False, name
        assert pod["automountServiceAccountToken"] is (
            name.endswith("-broker") and rendering.of_kind("Role") != []
        ), name
    accounts = rendering.of_kind("ServiceAccount")
    assert all(account["automountServiceAccountToken"] is False for account in accounts)
    created = {account["metadata"]["name"] for account in accounts}
    assert {pod["serviceAccountName"] for _, pod in rendering.pods()} - created <= {"shared"}


def test_containers_have_probes_and_memory_requests(rendering: Rendering) -> None:
    for name, container in rendering.containers():
        assert "cpu" in container["resources"]["requests"], (
            f"{name}: without it autoscalers can tell nothing of the pod"
        )
        if name.endswith("/payload"):
            continue
        assert "startupProbe" in container, name
        assert "livenessProbe" in container, name
        assert ("readinessProbe" in container) == (not name.endswith("/sidecar")), name
        if not name.endswith("/vllm"):
            assert "memory" in container["resources"]["limits"], name


def test_mounts_name_volumes_of_the_pod(rendering: Rendering) -> None:
    for workload in rendering.workloads():
        pod = workload["spec"]["template"]["spec"]
        volumes = {volume["name"] for volume in pod["volumes"]}
        volumes |= {
            claim["metadata"]["name"] for claim in workload["spec"].get("volumeClaimTemplates", [])
        }
        for container in containers_of(pod):
            paths = [mount["mountPath"] for mount in container["volumeMounts"]]
            assert len(paths) == len(set(paths)), container["name"]
            mounted = {mount["name"] for mount in container["volumeMounts"]}
            assert mounted <= volumes, container["name"]


def test_the_sidecar_is_a_native_sidecar(models: Rendering) -> None:
    for name, pod in models.pods():
        if "-vllm-" not in name:
            continue
        assert [container["name"] for container in pod["initContainers"]] == ["payload", "sidecar"]
        assert [container.get("restartPolicy") for container in pod["initContainers"]] == [
            None,
            "Always",
        ]
        assert [container["name"] for container in pod["containers"]] == ["vllm"]


@pytest.mark.parametrize(("model", "arena_gb"), [("llama", 16.5), ("qwen", 2)])
def test_one_value_sizes_the_arena(models: Rendering, model: str, arena_gb: float) -> None:
    pod = models.pod(f"vllm-{model}")
    sidecar = named(pod["initContainers"], "sidecar")
    volume = named(pod["volumes"], "arena")["emptyDir"]
    arena = int(arena_gb * 2**30)
    assert volume["medium"] == "Memory"
    assert bytes_of(volume["sizeLimit"]) > arena
    limit = bytes_of(sidecar["resources"]["limits"]["memory"])
    page_tables = arena // 256
    assert limit == arena + (512 << 20) + page_tables
    assert sidecar["resources"]["requests"]["memory"] == sidecar["resources"]["limits"]["memory"]
    config = models.config(f"vllm-{model}")
    assert config["arena_gb"] == arena_gb


def test_sidecar_and_vllm_share_arena_and_socket_and_nothing_secret(models: Rendering) -> None:
    pod = models.pod("vllm-llama")
    sidecar, vllm = named(pod["initContainers"], "sidecar"), pod["containers"][0]
    mounts = [
        {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
        for container in (sidecar, vllm)
    ]
    for path in SIDECAR_PATHS:
        assert mounts[0][path] == mounts[1][path]
    assert "credentials" in mounts[0].values()
    assert "credentials" not in mounts[1].values()
    assert set(mounts[0].values()) & set(mounts[1].values()) == {"arena", "socket"}


def test_the_sidecar_disk_is_bounded_and_off_at_zero(models: Rendering) -> None:
    pod = models.pod("vllm-llama")
    assert bytes_of(named(pod["volumes"], "sidecar-disk")["emptyDir"]["sizeLimit"]) > 100 * 2**30
    config = models.config("vllm-qwen")
    assert not {"disk_path", "disk_gb"} & set(config)
    assert not any(
        volume["name"] == "sidecar-disk" for volume in models.pod("vllm-qwen")["volumes"]
    )


def test_an_upgrade_changes_no_immutable_field(rendering: Rendering) -> None:
    """Selectors and claim templates cannot change, so no version is among their labels."""
    for workload in rendering.workloads():
        spec = workload["spec"]
        labels = [
            spec["selector"]["matchLabels"],
            *(claim["metadata"]["labels"] for claim in spec.get("volumeClaimTemplates", [])),
        ]
        for found in labels:
            assert not {"helm.sh/chart", "app.kubernetes.io/version"} & set(found)
            assert found.items() <= spec["template"]["metadata"]["labels"].items()


def test_a_late_answer_is_no_dead_process(rendering: Rendering) -> None:
    """/healthz is answered by the loop that does the work, and Redis by one thread: a full node
    makes both late.
    """
    for name, container in rendering.containers():
        probe = container.get("livenessProbe")
        if probe is not None:
            assert probe["periodSeconds"] * probe["failureThreshold"] >= 60, name
            assert probe["timeoutSeconds"] >= 5, name
        if name.endswith("redis/redis"):
            assert "exec" in probe
            assert container["readinessProbe"]["tcpSocket"] == {"port": "redis"}, (
                "a second command every few seconds costs too much"
            )


def test_pod_disruption_budgets_never_block_a_lone_replica(rendering: Rendering) -> None:
    for budget in rendering.of_kind("PodDisruptionBudget"):
        assert budget["spec"]["maxUnavailable"] in (1, "50%")
        assert "minAvailable" not in budget["spec"]
