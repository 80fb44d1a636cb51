"""Autoscalers own the number of pods, know what to go by, and let pods go one by one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import kubernetes_validate
import pytest

from tests.helm import extensions
from tests.helm.queries import selectors

if TYPE_CHECKING:
    from tests.helm.conftest import Chart, Manifest, Rendering

MODEL: Manifest = {"name": "tiny", "model": "example/tiny-llama"}
SCALED = {
    "storage": "StatefulSet",
    "lookup": "Deployment",
    "broker": "Deployment",
    "vllm-tiny": "Deployment",
}
CONTAINERS = {"storage": "storage", "lookup": "lookup", "broker": "broker", "vllm-tiny": "vllm"}
HPA: Manifest = {
    "models": [MODEL],
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


def autoscalers(rendering: Rendering, kind: str) -> dict[str, Manifest]:
    return {
        one["metadata"]["name"].removeprefix("cache-lmcache-"): one["spec"]
        for one in rendering.of_kind(kind)
    }


def test_off_unless_wanted(chart: Chart) -> None:
    assert (
        chart.render({"models": [MODEL]}).of_kind("HorizontalPodAutoscaler", "ScaledObject") == []
    )


@pytest.mark.parametrize("helm", ["helm3", "helm4"])
@pytest.mark.parametrize(
    ("values", "kind"),
    [(HPA, "HorizontalPodAutoscaler"), (KEDA, "ScaledObject")],
    ids=["hpa", "keda"],
)
def test_each_component_has_one_and_it_alone_sets_replicas(
    chart: Chart, values: Manifest, kind: str, helm: str
) -> None:
    rendering = chart.render(values, helm=helm)
    found = autoscalers(rendering, kind)
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
        assert "replicas" not in rendering.get(SCALED[name], name)["spec"]


@pytest.mark.parametrize("version", ["1.29", "1.33", "1.37"])
def test_the_autoscalers_fit_kubernetes(chart: Chart, version: str) -> None:
    for manifest in chart.render(HPA).of_kind("HorizontalPodAutoscaler"):
        kubernetes_validate.validate(manifest, version, strict=True)


def test_cpu_is_that_of_one_container_with_a_request(chart: Chart) -> None:
    rendering = chart.render(HPA)
    for name, spec in autoscalers(rendering, "HorizontalPodAutoscaler").items():
        (metric,) = spec["metrics"]
        pod = rendering.get(SCALED[name], name)["spec"]["template"]["spec"]
        measured = next(
            one
            for one in pod["containers"]
            if one["name"] == metric["containerResource"]["container"]
        )
        assert measured["name"] == CONTAINERS[name]
        assert measured["resources"]["requests"]["cpu"]
        assert metric["containerResource"]["target"] == {
            "type": "Utilization",
            "averageUtilization": 60 if "vllm" in name else 75,
        }


def test_pods_go_later_than_one_takes_to_end(chart: Chart) -> None:
    for values, kind in ((HPA, "HorizontalPodAutoscaler"), (KEDA, "ScaledObject")):
        rendering = chart.render(values)
        for name, spec in autoscalers(rendering, kind).items():
            behaviour = (
                spec.get("behavior")
                or spec["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
            )
            pod = rendering.get(SCALED[name], name)["spec"]["template"]["spec"]
            assert (
                behaviour["scaleDown"]["stabilizationWindowSeconds"]
                >= pod["terminationGracePeriodSeconds"]
            )
            (policy,) = behaviour["scaleDown"]["policies"]
            assert (policy["type"], policy["value"]) == ("Pods", 1)
            assert policy["periodSeconds"] >= (
                pod["terminationGracePeriodSeconds"] if name == "storage" else 1
            )


def test_keda_goes_by_what_the_cache_counts(chart: Chart) -> None:
    found = chart.render(KEDA).of_kind("ScaledObject")
    metrics = {}
    for one in found:
        extensions.validate(one)
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
        {"models": [MODEL | {"autoscaling": own}, MODEL | {"name": "fixed", "replicaCount": 2}]}
    )
    assert set(autoscalers(rendering, "HorizontalPodAutoscaler")) == {"vllm-tiny"}
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
    assert autoscalers(rendering, "HorizontalPodAutoscaler")["lookup"]["metrics"] == [metric]


ON: Manifest = {"storage.autoscaling.enabled": True}
REFUSED: dict[str, tuple[Manifest, str]] = {
    "two owners": (
        ON | {"storage.replicaCount": 3},
        "storage.autoscaling is enabled, but storage.replicaCount is 3",
    ),
    "more than the most": (
        ON | {"storage.autoscaling.minReplicas": 11},
        "minReplicas is above maxReplicas",
    ),
    "nothing to go by": (
        ON | {"storage.autoscaling.cpuPercent": None},
        "storage.autoscaling has nothing to go by",
    ),
    "no Prometheus": (
        ON | {"autoscaling.kind": "keda", "storage.autoscaling.loadPerPod": 1},
        "autoscaling.prometheus.serverAddress is empty",
    ),
    "pods that go too soon": (
        ON | {"storage.autoscaling.stabilizationSeconds": 60},
        "the next pod would go while the last one",
    ),
}


@pytest.mark.parametrize("what", sorted(REFUSED))
def test_refused(chart: Chart, what: str) -> None:
    values, sentence = REFUSED[what]
    assert sentence in chart.refuse(values)


def test_every_contradiction_is_tested(chart: Chart) -> None:
    """Those above, and the one of test_operations_monitoring.py."""
    template = (chart.path / "templates" / "_requirements_operations.tpl").read_text(
        encoding="utf-8"
    )
    assert template.count("{{- fail ") == len(REFUSED) + 1


def test_the_pages_say_whose_number_counts(chart: Chart) -> None:
    """Lookup and broker have a number by default, and the autoscaler wins; the others must have
    none.
    """
    rendering = chart.render(
        {f"{name}.autoscaling.enabled": True for name in ("storage", "lookup", "broker")}
    )
    for kind, name in (
        ("StatefulSet", "storage"),
        ("Deployment", "lookup"),
        ("Deployment", "broker"),
    ):
        assert "replicas" not in rendering.get(kind, name)["spec"]
    for page in ("README.md", "values.yaml"):
        text = " ".join((chart.path / page).read_text(encoding="utf-8").replace("#", "").split())
        assert "stays null" not in text
        assert (
            "For storage and models leave `replicaCount` null; that of lookup and broker is"
            " ignored." in text
        )


def test_a_model_is_refused_too(chart: Chart) -> None:
    model = MODEL | {"replicaCount": 1, "autoscaling": {"enabled": True, "cpuPercent": 50}}
    assert (
        "models (tiny).autoscaling is enabled, but models (tiny).replicaCount is 1"
        in chart.refuse({"models": [model]})
    )
