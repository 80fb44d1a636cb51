"""What `make test-cluster` and `make kind-up` take for granted about the chart."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import jsonpatch
import pytest
from lmcache_webhook.app import injection_options
from lmcache_webhook.injection.injector import review_pod

from tests.cluster import kind, manifests, names
from tests.cluster.helm import POD_MONITORS, image_values
from tests.cluster.pods import probe_problems, security_problems
from tests.cluster.policies import addresses, uncovered
from tests.helm.conftest import COMPONENT, HELM_FOLDER, REPOSITORY, Rendering, both_helms, parsed
from tests.helm.test_webhook import settings_of

if TYPE_CHECKING:
    from tests.helm.conftest import Chart, Manifest

IMAGES = "registry.example.com/a:1.2"
ARGUMENTS = """
import json, sys
sys.path.insert(0, "tests/cluster")
import traffic
arguments = traffic.parse_arguments()
paths = ("/v1/instances", "/v1/peers")
urls = [traffic.service_url(arguments.guarded_url, path) for path in paths]
print(json.dumps([arguments.storage_url, *urls, str(arguments.token_file)]))
"""


@pytest.fixture
def rendering(chart: Chart) -> Rendering:
    """The release as the suite installs it."""
    values = chart.path / Path(names.VALUES).relative_to("helm/lmcache")
    where = [names.RELEASE, str(chart.path), "--namespace", "mine", "--values", str(values)]
    answer = chart.run("template", *where, *image_values(IMAGES))
    assert answer.returncode == 0, answer.stderr
    return Rendering(answer.stdout, parsed(answer.stdout))


def labels_of(rendering: Rendering, kind: str, name: str) -> Manifest:
    labels: Manifest = rendering.get(kind, name)["spec"]["template"]["metadata"]["labels"]
    return labels


def test_every_image_is_one_that_is_built(rendering: Rendering) -> None:
    registry, tag = IMAGES.rsplit(":", 1)
    images = {container["image"] for _, container in rendering.containers()}
    (own_redis,) = [image for image in images if "redis" in image]
    built = {f"{registry}/lmcache-{image}:{tag}" for image in kind.IMAGES}
    assert images - {own_redis} <= built
    settings = rendering.get("ConfigMap", "webhook")["data"]["config.yaml"]
    assert all(image in settings for image in built if "payload" in image or "sidecar" in image)


def test_what_the_suite_names_is_there(rendering: Rendering) -> None:
    for component in ("storage", "lookup", "broker", "redis"):
        workload = "StatefulSet" if component in ("storage", "redis") else "Deployment"
        labels = labels_of(rendering, workload, component)
        assert names.component(component) == ",".join(
            f"app.kubernetes.io/{key}={labels[f'app.kubernetes.io/{key}']}"
            for key in ("instance", "component")
        )
        if component != "redis":
            assert (
                "\nlog_level: info\n"
                in "\n" + rendering.get("ConfigMap", component)["data"]["config.yaml"]
            )
    model = names.MODEL_SERVICE.removeprefix(f"{names.BASE}-")
    assert labels_of(rendering, "Deployment", model)[COMPONENT] == "vllm"
    assert [name for name, _ in rendering.pods() if "vllm" in name] == [names.MODEL_SERVICE]
    (port,) = rendering.get("Service", model)["spec"]["ports"]
    assert port["port"] == 8000
    vllm = rendering.container("vllm")
    assert vllm["args"][vllm["args"].index("--served-model-name") + 1] == names.MODEL
    assert "--enable-prompt-tokens-details" in vllm["args"], "else no answer has cached_tokens"


def test_the_suite_s_rules_hold(rendering: Rendering) -> None:
    """What it asks of a running release is what the chart gives."""
    pods = [
        {
            "metadata": {**one["spec"]["template"]["metadata"], "name": one["metadata"]["name"]},
            "spec": one["spec"]["template"]["spec"],
            "status": {"podIP": one["metadata"]["name"].removeprefix(f"{names.BASE}-")},
        }
        for one in rendering.workloads()
    ]
    rules_of_pods = (probe_problems, security_problems)
    assert [text for pod in pods for rule in rules_of_pods for text in rule(pod)] == []
    network_policies = rendering.of_kind("NetworkPolicy")
    assert uncovered(network_policies, pods) == []
    reached = addresses(network_policies, pods)
    assert [one for one, is_open in reached.items() if is_open] == [
        "vllm-tiny:8000",
        "webhook:8443",
    ]
    assert len(reached) > 8


@pytest.mark.parametrize("component", ["lookup", "broker"])
def test_redis_on_a_busy_machine_is_waited_for(rendering: Rendering, component: str) -> None:
    assert rendering.config(component)["redis_timeout_ms"] == 1000


def test_every_object_is_found_by_its_label(rendering: Rendering) -> None:
    key, _, value = names.INSTANCE.partition("=")
    labels = [one["metadata"]["labels"].get(key) for one in rendering.manifests]
    assert set(labels) == {value}
    (webhooks,) = rendering.of_kind("MutatingWebhookConfiguration")
    assert webhooks["metadata"]["name"] == f"mine-{names.BASE}-webhook"
    secrets = [one["metadata"]["name"] for one in rendering.of_kind("Secret")]
    assert f"{names.BASE}-webhook-tls" in secrets


def test_the_upgrade_can_add_monitors(chart: Chart) -> None:
    values = chart.path / Path(names.VALUES).relative_to("helm/lmcache")
    where = [names.RELEASE, str(chart.path), "--values", str(values)]
    answer = chart.run("template", *where, *image_values(IMAGES), *POD_MONITORS)
    assert "kind: PodMonitor" in answer.stdout, answer.stderr


def test_what_is_scaled_is_kubectl_s(rendering: Rendering) -> None:
    """Helm 4 refuses an upgrade when it and another own the number of replicas."""
    scaled = [one for one in rendering.workloads() if "replicas" in one["spec"]]
    assert [one["metadata"]["name"] for one in scaled] == [f"{names.BASE}-webhook"]


def test_the_traffic_reaches_what_the_release_test_reaches(rendering: Rendering) -> None:
    pod = manifests.traffic_pod(rendering.text)
    assert "annotations" not in pod["metadata"], "no hook: Helm leaves it alone"
    (container,) = pod["spec"]["containers"]
    command = [sys.executable, "-c", ARGUMENTS, *container["args"]]
    answered = subprocess.run(
        command, cwd=REPOSITORY, capture_output=True, text=True, timeout=60, check=True
    )
    lm, lookup, broker, token = json.loads(answered.stdout)
    assert lm == "lm://cache-lmcache-storage-headless.mine.svc:65432"
    assert (lookup, broker) == (
        "http://cache-lmcache-lookup.mine.svc:8081",
        "http://cache-lmcache-broker.mine.svc:8082",
    )
    mounts = {mount["mountPath"] for mount in container["volumeMounts"]}
    assert {"/tmp", "/opt/traffic", str(Path(token).parent)} <= mounts


def test_the_policies_let_the_traffic_through(rendering: Rendering) -> None:
    labels = manifests.traffic_pod(rendering.text)["metadata"]["labels"]

    def selects(selector: Manifest) -> bool:
        assert not set(selector) - {"matchLabels", "matchExpressions"}
        expressions = selector.get("matchExpressions", [])
        assert not expressions, "not known to this test"
        return selector.get("matchLabels", {}).items() <= labels.items()

    policies = rendering.by_name("NetworkPolicy")
    for name, policy in policies.items():
        assert not selects(policy["podSelector"]), f"{name} holds the traffic back"
    for component in ("storage", "lookup", "broker", "vllm"):
        peers = [
            peer
            for policy in policies.values()
            if policy["podSelector"]["matchLabels"].get(COMPONENT) == component
            for rule in policy.get("ingress", [])
            for peer in rule.get("from", [])
            if not peer.get("namespaceSelector")
        ]
        assert any(selects(peer["podSelector"]) for peer in peers), component


def test_a_plain_deployment_has_shared_memory_as_the_chart_s(rendering: Rendering) -> None:
    """vLLM does not start with the 64 MiB that Kubernetes gives."""

    def shared_memory(spec: Manifest) -> list[tuple[Manifest, Manifest]]:
        volumes = {one["name"]: one for one in spec.get("volumes", [])}
        return [
            (mount, volumes[mount["name"]])
            for one in spec["containers"]
            for mount in one.get("volumeMounts", [])
            if mount["mountPath"] == "/dev/shm"
        ]

    deployment = manifests.plain_deployment("vllm")
    model = rendering.get("Deployment", names.MODEL_SERVICE.removeprefix(f"{names.BASE}-"))
    ours = shared_memory(model["spec"]["template"]["spec"])
    assert ours
    for made in (deployment["spec"]["template"], manifests.plain_pod(deployment)):
        assert shared_memory(made["spec"]) == ours


def test_a_plain_deployment_is_injected(rendering: Rendering, tmp_path: Path) -> None:
    template = manifests.plain_deployment("registry.example.com/a/lmcache-vllm-cpu-tiny:1.2")
    document = {"apiVersion": "v1", "kind": "Pod", **template["spec"]["template"]}
    options = injection_options(settings_of(rendering, tmp_path))
    outcome = review_pod(options, document, "mine")
    assert outcome.verdict == "injected", outcome.reason
    pod = jsonpatch.apply_patch(document, outcome.operations)
    assert pod["metadata"]["annotations"]["lmcache.io/inject-status"].startswith("injected: ")
    assert "lmcache-sidecar" in [one["name"] for one in pod["spec"]["initContainers"]]


@both_helms
@pytest.mark.parametrize(
    ("command", "flags"),
    [
        ("install", "--values --set-string --timeout --kubeconfig --namespace"),
        ("upgrade", "--install --values --set --set-json --timeout --kubeconfig --kube-context"),
        ("upgrade", "--dry-run"),
        ("rollback", "--timeout --kubeconfig"),
        ("test", "--logs --timeout --kubeconfig"),
        ("uninstall", "--ignore-not-found --timeout --kubeconfig"),
        ("get hooks", "--kubeconfig --namespace"),
        ("get manifest", "--kubeconfig --namespace"),
    ],
)
def test_helm_has_the_flags(chart: Chart, helm: str, command: str, flags: str) -> None:
    usage = chart.run(*command.split(), "--help", helm=helm).stdout
    assert [flag for flag in flags.split() if f"{flag} " not in usage.replace("\n", " ")] == []


def test_the_values_are_of_the_chart() -> None:
    assert (REPOSITORY / names.VALUES).parent == HELM_FOLDER / "lmcache" / "ci"
