"""Autoscalers own the number of pods, know what to go by, and let pods go one by one."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from tests.helm.conftest import MODEL, MODELS, both_helms, parsed
from tests.helm.queries import selectors
from tests.helm.test_secrets import OWNER, FakeCluster, kubeconfig, run_against

if TYPE_CHECKING:
    from pathlib import Path

    from tests.helm.conftest import Chart, Manifest

__all__ = ["kubeconfig"]
SCALED = dict.fromkeys(("lookup", "broker", "vllm-tiny"), "Deployment") | {"storage": "StatefulSet"}
CONTAINERS = {"storage": "storage", "lookup": "lookup", "broker": "broker", "vllm-tiny": "vllm"}
HPA: Manifest = {
    **MODELS,
    "storage.autoscaling.enabled": True,
    "lookup.autoscaling.enabled": True,
    "broker.autoscaling.enabled": True,
    "modelDefaults.autoscaling.enabled": True,
    "modelDefaults.autoscaling.cpuPercent": 60,
}
KEDA: Manifest = HPA | {
    "autoscaling.kind": "keda",
    "autoscaling.prometheus": {
        "serverAddress": "http://prometheus.monitoring:9090",
        "authenticationRef": "prometheus",
    },
    "storage.autoscaling.loadPerPod": 268435456,
    "lookup.autoscaling.loadPerPod": 500,
    "broker.autoscaling.loadPerPod": 0.5,
}


@both_helms
@pytest.mark.parametrize(
    ("values", "kind"),
    [(HPA, "HorizontalPodAutoscaler"), (KEDA, "ScaledObject")],
    ids=["hpa", "keda"],
)
def test_each_component_has_one_and_it_alone_sets_replicas(
    chart: Chart, values: Manifest, kind: str, helm: str
) -> None:
    rendering = chart.render(values, helm=helm)
    found = rendering.by_name(kind)
    assert set(found) == set(SCALED)
    assert {one["kind"] for one in rendering.manifests} & {
        "HorizontalPodAutoscaler",
        "ScaledObject",
    } == {kind}
    for name, spec in found.items():
        target = spec["scaleTargetRef"]
        assert target == {
            "apiVersion": "apps/v1",
            "kind": SCALED[name],
            "name": f"cache-lmcache-{name}",
        }
        least = spec.get("minReplicas") or spec["minReplicaCount"]
        assert rendering.get(SCALED[name], name)["spec"]["replicas"] == least


SCALED_BY = {
    "helm": [{"manager": "helm", "operation": "Apply"}],
    "autoscaler": [
        {"manager": "helm", "operation": "Apply"},
        {"manager": "kube-controller-manager", "operation": "Update", "subresource": "status"},
        {"manager": "kube-controller-manager", "operation": "Update", "subresource": "scale"},
    ],
    "unknown": None,
}
"""Managers of a workload's fields, as an API server lists them."""


@both_helms
@pytest.mark.parametrize(
    ("live", "scaled_by", "number"),
    [
        (None, "unknown", 2),
        (1, "helm", 2),
        (2, "helm", 2),
        (10, "helm", 10),
        (10, "unknown", 10),
        (3, "autoscaler", 3),
        (1, "autoscaler", 1),
        (0, "autoscaler", 0),
    ],
)
def test_an_upgrade_to_an_autoscaler_ends_no_pods(
    chart: Chart, kubeconfig: Path, helm: str, live: int | None, scaled_by: str, number: int
) -> None:
    """A field that goes would become 1. Nor is a number that scaling has set overwritten, which
    Helm 4 would be refused for.
    """
    for name, kind in SCALED.items():
        if live is not None:
            (found,) = [one for one in chart.render(MODELS).workloads() if is_of(one, kind, name)]
            metadata = found["metadata"] | {"annotations": OWNER}
            if SCALED_BY[scaled_by] is not None:
                metadata["managedFields"] = SCALED_BY[scaled_by]
            changed = {"metadata": metadata, "spec": found["spec"] | {"replicas": live}}
            FakeCluster.objects[f"{kind.lower()}s/{metadata['name']}"] = found | changed
    values = HPA | {
        f"{name}.autoscaling.minReplicas": 2 for name in ("storage", "lookup", "broker")
    }
    values["modelDefaults.autoscaling.minReplicas"] = 2
    words = [f"{name}={json.dumps(value)}" for name, value in values.items()]
    answer = run_against(
        chart, kubeconfig, helm, *(w for one in words for w in ("--set-json", one))
    )
    assert answer.returncode == 0, answer.stderr
    workloads = [one for one in parsed(answer.stdout) if one["kind"] in set(SCALED.values())]
    numbers = {
        name: one["spec"].get("replicas")
        for name, kind in SCALED.items()
        for one in workloads
        if is_of(one, kind, name)
    }
    assert numbers == dict.fromkeys(SCALED, number)


def is_of(workload: Manifest, kind: str, name: str) -> bool:
    return (workload["kind"], workload["metadata"]["name"]) == (kind, f"cache-lmcache-{name}")


def test_cpu_is_that_of_one_container_with_a_request(chart: Chart) -> None:
    rendering = chart.render(HPA)
    for name, spec in rendering.by_name("HorizontalPodAutoscaler").items():
        (metric,) = spec["metrics"]
        measured = metric["containerResource"]["container"]
        assert measured == CONTAINERS[name]
        (measured,) = (c for c in rendering.pod(name)["containers"] if c["name"] == measured)
        assert measured["resources"]["requests"]["cpu"]
        assert metric["containerResource"]["target"] == {
            "type": "Utilization",
            "averageUtilization": 60 if "vllm" in name else 75,
        }


def test_pods_go_later_than_one_takes_to_end(chart: Chart) -> None:
    for values, kind in ((HPA, "HorizontalPodAutoscaler"), (KEDA, "ScaledObject")):
        rendering = chart.render(values)
        for name, spec in rendering.by_name(kind).items():
            behaviour = (
                spec.get("behavior")
                or spec["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
            )
            end_s = rendering.pod(name)["terminationGracePeriodSeconds"]
            assert behaviour["scaleDown"]["stabilizationWindowSeconds"] >= end_s
            (policy,) = behaviour["scaleDown"]["policies"]
            assert (policy["type"], policy["value"]) == ("Pods", 1)
            assert policy["periodSeconds"] >= (end_s if name == "storage" else 1)


def test_keda_goes_by_what_the_cache_counts(chart: Chart) -> None:
    found = chart.render(KEDA).of_kind("ScaledObject")
    metrics = {}
    for one in found:
        triggers = {trigger["type"]: trigger for trigger in one["spec"]["triggers"]}
        assert set(triggers) == {"cpu", "prometheus"}
        assert triggers["prometheus"]["authenticationRef"] == {"name": "prometheus"}
        asked = triggers["prometheus"]["metadata"]
        (selected,) = selectors(asked["query"])
        assert selected.matchers["lmcache_release"] == "inference/cache"
        assert asked["ignoreNullValues"] == "false", (
            "a Prometheus that is away must not empty the cache"
        )
        metrics[one["metadata"]["name"].removeprefix("cache-lmcache-")] = (
            selected.metric,
            asked["threshold"],
        )
    assert metrics == {
        "storage": ("lmcache_storage_served_bytes_total", "268435456"),
        "lookup": ("lmcache_http_requests_total", "500"),
        "broker": ("lmcache_http_requests_total", "0.5"),
        "vllm-tiny": ("vllm:num_requests_waiting", "5"),
    }


def test_models_scale_by_themselves(chart: Chart) -> None:
    own = {"enabled": True, "cpuPercent": 50, "maxReplicas": 4}
    rendering = chart.render(
        {"models": {"tiny": MODEL | {"autoscaling": own}, "fixed": MODEL | {"replicaCount": 2}}}
    )
    assert set(rendering.by_name("HorizontalPodAutoscaler")) == {"vllm-tiny"}
    assert rendering.get("Deployment", "vllm-fixed")["spec"]["replicas"] == 2


def test_custom_metrics_are_passed_on(chart: Chart) -> None:
    metric = {
        "type": "Pods",
        "pods": {
            "metric": {"name": "load"},
            "target": {"type": "AverageValue", "averageValue": "10"},
        },
    }
    rendering = chart.render(
        {
            "lookup.autoscaling.enabled": True,
            "lookup.autoscaling.cpuPercent": None,
            "lookup.autoscaling.metrics": [metric],
        }
    )
    assert rendering.by_name("HorizontalPodAutoscaler")["lookup"]["metrics"] == [metric]
