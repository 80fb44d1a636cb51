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
from tests.cluster.helm import image_values
from tests.helm.conftest import COMPONENT, HELM_FOLDER, REPOSITORY, Rendering, parsed
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
print(json.dumps([traffic.lm_url(arguments.storage_url), *urls, str(arguments.token_file)]))
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
    key, _, value = names.MODEL_PODS.partition("=")
    assert labels_of(rendering, "Deployment", model)[key] == value
    (port,) = rendering.get("Service", model)["spec"]["ports"]
    assert port["port"] == 8000
    vllm = rendering.container("vllm")
    assert vllm["args"][vllm["args"].index("--served-model-name") + 1] == names.MODEL
    assert "--enable-prompt-tokens-details" in vllm["args"], "else no answer has cached_tokens"


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


def test_a_plain_deployment_is_injected(rendering: Rendering, tmp_path: Path) -> None:
    template = manifests.plain_deployment("registry.example.com/a/lmcache-vllm-cpu-tiny:1.2")
    document = {"apiVersion": "v1", "kind": "Pod", **template["spec"]["template"]}
    options = injection_options(settings_of(rendering, tmp_path))
    outcome = review_pod(options, document, "mine")
    assert outcome.verdict == "injected", outcome.reason
    pod = jsonpatch.apply_patch(document, outcome.operations)
    assert pod["metadata"]["annotations"]["lmcache.io/inject-status"].startswith("injected: ")
    assert "lmcache-sidecar" in [one["name"] for one in pod["spec"]["initContainers"]]


def test_the_values_are_of_the_chart() -> None:
    assert (REPOSITORY / names.VALUES).parent == HELM_FOLDER / "lmcache" / "ci"
