"""Where pods go, their priority, and what decorates them: the same for every component."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.helm.conftest import MODELS, both_helms

if TYPE_CHECKING:
    from tests.helm.conftest import Chart, Manifest, Rendering

ALL: Manifest = MODELS | {"webhook.enabled": True}
DIGEST = f"sha256:{'0123456789abcdef' * 4}"
COMPONENTS = ("storage", "lookup", "broker", "webhook", "redis", "modelDefaults")
BUDGETED = ("storage", "lookup", "broker", "webhook", "modelDefaults")
TOLERATION = {"key": "dedicated", "operator": "Exists", "effect": "NoSchedule"}
AFFINITY = {"podAntiAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": []}}
SPREAD = {
    "maxSkew": 2,
    "topologyKey": "topology.kubernetes.io/zone",
    "whenUnsatisfiable": "DoNotSchedule",
}
PLACED: Manifest = {
    "nodeSelector": {"pool": "cache"},
    "tolerations": [TOLERATION],
    "affinity": AFFINITY,
    "topologySpreadConstraints": [SPREAD],
    "priorityClassName": "first",
    "dnsPolicy": "None",
    "dnsConfig": {"nameservers": ["10.0.0.10"]},
    "podAnnotations": {"example.com/note": "x"},
    "podLabels": {"example.com/team": "y"},
    "terminationGracePeriodSeconds": 1234,
}
EXTRA: Manifest = {
    "extraEnv": [{"name": "TZ", "value": "UTC"}],
    "extraVolumes": [{"name": "scratch", "emptyDir": {}}],
    "extraVolumeMounts": [{"name": "scratch", "mountPath": "/scratch"}],
    "extraContainers": [{"name": "log-agent", "image": "example.com/agent:1"}],
}


OWN_CONTEXTS: Manifest = {
    "podSecurityContext": {"supplementalGroups": [7]},
    "containerSecurityContext": {"readOnlyRootFilesystem": False},
}
DECORATED: Manifest = ALL | {
    f"{component}.{name}": value
    for component in COMPONENTS
    for name, value in (PLACED | EXTRA | OWN_CONTEXTS).items()
}
DECORATED |= {f"{name}.updateStrategy.type": "Recreate" for name in COMPONENTS}
DECORATED |= {f"{name}.updateStrategy.type": "OnDelete" for name in ("storage", "redis")}
DECORATED |= {f"{name}.podDisruptionBudget.maxUnavailable": 2 for name in BUDGETED}


@pytest.fixture
def decorated(chart: Chart) -> Rendering:
    """Each option of pods, given to each component."""
    return chart.render(DECORATED)


def workload_of(rendering: Rendering, component: str) -> Manifest:
    name = "vllm-tiny" if component == "modelDefaults" else component
    kind = "StatefulSet" if component in ("storage", "redis") else "Deployment"
    return rendering.get(kind, name)


@pytest.mark.parametrize("component", COMPONENTS)
def test_pods_are_placed_as_their_values_say(decorated: Rendering, component: str) -> None:
    template = workload_of(decorated, component)["spec"]["template"]
    spec, labels = template["spec"], template["metadata"]["labels"]
    for field in set(PLACED) - {"podAnnotations", "podLabels", "topologySpreadConstraints"}:
        assert spec[field] == PLACED[field], field
    assert template["metadata"]["annotations"]["example.com/note"] == "x"
    assert labels["example.com/team"] == "y"
    (constraint,) = spec["topologySpreadConstraints"]
    selected = constraint.pop("labelSelector")["matchLabels"]
    assert constraint == SPREAD
    assert selected.items() <= labels.items(), "a constraint that selects no pods spreads nothing"


def test_a_component_may_say_otherwise_than_all(chart: Chart) -> None:
    rendering = chart.render(
        {"commonLabels": {"team": "all"}, "storage.podLabels": {"team": "own"}}
    )
    labels = {
        one["metadata"]["name"]: one["spec"]["template"]["metadata"]["labels"]["team"]
        for one in rendering.workloads()
    }
    assert labels.pop("cache-lmcache-storage") == "own"
    assert set(labels.values()) == {"all"}
    assert rendering.text.count("team: own") == 1


def test_a_selector_of_ones_own_stays(chart: Chart) -> None:
    own = SPREAD | {"labelSelector": {"matchLabels": {"a": "b"}}}
    template = workload_of(
        chart.render(ALL | {"lookup.topologySpreadConstraints": [own]}), "lookup"
    )["spec"]["template"]
    assert template["spec"]["topologySpreadConstraints"] == [own]


@pytest.mark.parametrize("component", COMPONENTS)
def test_containers_get_what_is_extra(decorated: Rendering, component: str) -> None:
    spec = workload_of(decorated, component)["spec"]["template"]["spec"]
    container = spec["containers"][0]
    assert EXTRA["extraEnv"][0] in container["env"]
    assert EXTRA["extraVolumeMounts"][0] in container["volumeMounts"]
    assert EXTRA["extraVolumes"][0] in spec["volumes"]
    assert EXTRA["extraContainers"][0] in spec["containers"][1:]


@pytest.mark.parametrize("component", COMPONENTS)
def test_security_contexts_are_laid_over_the_restricted_ones(
    chart: Chart, decorated: Rendering, component: str
) -> None:
    before, after = (
        workload_of(rendering, component)["spec"]["template"]["spec"]
        for rendering in (chart.render(ALL), decorated)
    )
    pod, container = OWN_CONTEXTS.values()
    assert after["securityContext"] == before["securityContext"] | pod
    for one, other in zip(before["containers"], after["containers"], strict=False):
        assert other["securityContext"] == one["securityContext"] | container


@pytest.mark.parametrize("component", COMPONENTS)
def test_pods_are_replaced_as_their_values_say(decorated: Rendering, component: str) -> None:
    is_stateful = component in ("storage", "redis")
    field, kind = ("updateStrategy", "OnDelete") if is_stateful else ("strategy", "Recreate")
    assert workload_of(decorated, component)["spec"][field] == {"type": kind}


@both_helms
def test_pod_defaults_apply_to_every_pod_without_its_own(chart: Chart, helm: str) -> None:
    """Maps are merged, lists replaced."""
    other = [{"key": "gpu", "operator": "Exists"}]
    values = ALL | {
        "podDefaults.nodeSelector": {"pool": "cache", "disk": "nvme"},
        "podDefaults.tolerations": [TOLERATION],
        "storage.nodeSelector": {"pool": "storage"},
        "lookup.tolerations": [],
        "models.tiny.tolerations": other,
    }
    rendering = chart.render(values, helm=helm)
    specs = {name.removeprefix("cache-lmcache-"): pod for name, pod in rendering.pods()}
    of_hooks = {one["metadata"]["name"]: one["spec"] for one in rendering.of_kind("Pod")}
    specs |= {name.removeprefix("cache-lmcache-"): pod for name, pod in of_hooks.items()}
    assert len(specs) == 8
    for name, spec in specs.items():
        pool = "storage" if name in ("storage", "release-test") else "cache"
        assert spec["nodeSelector"] == {"pool": pool, "disk": "nvme"}, name
    tolerations = {name: spec.get("tolerations") for name, spec in specs.items()}
    assert tolerations.pop("lookup") is None
    assert tolerations.pop("vllm-tiny") == other
    assert all(each == [TOLERATION] for each in tolerations.values())


def test_annotations_are_every_objects_and_every_pods(chart: Chart) -> None:
    everything = ALL | {"webhook.certificate.certManager.enabled": True}
    everything |= {"priorityClass.create": True, "monitoring.dashboards.enabled": True}
    for values in (ALL, everything):
        own = {"storage.podAnnotations": {"a": "own"}, "commonAnnotations": {"a": "all"}}
        rendering = chart.render(values | own)
        for one in rendering.manifests:
            assert one["metadata"]["annotations"]["a"] == "all", one["metadata"]["name"]
        for one in rendering.workloads():
            annotation = one["spec"]["template"]["metadata"]["annotations"]["a"]
            is_storage = one["metadata"]["name"].endswith("-storage")
            assert annotation == ("own" if is_storage else "all")


OWN_VARIABLES = {
    "storage": "LMCACHE_STORAGE_ZONE",
    "lookup": "LMCACHE_LOOKUP_INSTANCE_ID",
    "broker": "LMCACHE_BROKER_REDIS_URL",
    "webhook": "LMCACHE_WEBHOOK_INSTANCE_ID",
    "sidecar": "LMCACHE_SIDECAR_ZONE",
    "modelDefaults": "HF_HOME",
}


def test_a_variable_of_ones_own_takes_the_place_of_the_charts(chart: Chart) -> None:
    """Twice the same name is what an API server refuses that Helm 4 applies on."""
    own = {component: {"name": name, "value": "own"} for component, name in OWN_VARIABLES.items()}
    values = {f"{component}.extraEnv": [variable] for component, variable in own.items()}
    before = dict(chart.render(ALL).containers())
    after = dict(chart.render(ALL | values).containers())
    changed = {where.rpartition("/")[2]: where for where in before if before[where] != after[where]}
    assert set(changed) == {"storage", "lookup", "broker", "webhook", "sidecar", "vllm"}
    for container, where in changed.items():
        variable = own["modelDefaults" if container == "vllm" else container]
        names = [one["name"] for one in before[where]["env"]]
        assert names.count(variable["name"]) == 1, "it is none of the chart's"
        found = [one for one in after[where]["env"] if one["name"] == variable["name"]]
        assert found == [variable]
        assert {one["name"] for one in after[where]["env"]} == set(names)


def test_a_digest_wins_everywhere(chart: Chart) -> None:
    components = (*COMPONENTS, "sidecar", "payload")
    values = {f"{component}.image.digest": DIGEST for component in components}
    images = {
        where: container["image"] for where, container in chart.render(ALL | values).containers()
    }
    assert len(images) == len(components)
    assert all(image.endswith(f"@{DIGEST}") for image in images.values()), images


def test_pull_secrets_are_every_pods(chart: Chart) -> None:
    rendering = chart.render(ALL | {"imagePullSecrets": [{"name": "registry"}]})
    specs = [
        *(pod for _, pod in rendering.pods()),
        *(one["spec"] for one in rendering.of_kind("Pod")),
    ]
    assert len(specs) >= 7
    assert all(spec["imagePullSecrets"] == [{"name": "registry"}] for spec in specs)


def test_a_class_of_priority_is_made_for_all_but_the_models(chart: Chart) -> None:
    rendering = chart.render(
        ALL | {"priorityClass.create": True, "lookup.priorityClassName": "own"}
    )
    (made,) = rendering.of_kind("PriorityClass")
    assert made["metadata"]["name"] == "inference-cache-lmcache"
    assert "namespace" not in made["metadata"]
    assert made["globalDefault"] is False
    found = {
        name.removeprefix("cache-lmcache-"): pod.get("priorityClassName")
        for name, pod in rendering.pods()
    }
    assert found == dict.fromkeys(
        ("storage", "broker", "webhook", "redis"), made["metadata"]["name"]
    ) | {"lookup": "own", "vllm-tiny": None}


@pytest.mark.parametrize("component", BUDGETED)
def test_each_has_a_budget_that_selects_its_pods(decorated: Rendering, component: str) -> None:
    workload = workload_of(decorated, component)
    budget = next(
        one
        for one in decorated.of_kind("PodDisruptionBudget")
        if one["metadata"]["name"] == workload["metadata"]["name"]
    )
    assert budget["spec"]["maxUnavailable"] == 2
    assert budget["spec"]["unhealthyPodEvictionPolicy"] == "AlwaysAllow"
    selected = budget["spec"]["selector"]["matchLabels"].items()
    assert selected <= workload["spec"]["template"]["metadata"]["labels"].items()
    others = [one for one in decorated.workloads() if one is not workload]
    assert not any(
        selected <= one["spec"]["template"]["metadata"]["labels"].items() for one in others
    )


def test_the_ha_values_leave_no_single_point(chart: Chart) -> None:
    rendering = chart.render({"webhook.enabled": True}, chart.path / "values-ha.yaml")
    scaled = {
        one["spec"]["scaleTargetRef"]["name"]: one["spec"]["minReplicas"]
        for one in rendering.of_kind("HorizontalPodAutoscaler")
    }
    for workload in rendering.workloads():
        name = workload["metadata"]["name"]
        assert workload["spec"].get("replicas", scaled.get(name, 1)) >= 2, name
        keys = {
            one["topologyKey"]
            for one in workload["spec"]["template"]["spec"]["topologySpreadConstraints"]
        }
        assert keys == {"kubernetes.io/hostname", "topology.kubernetes.io/zone"}, name
    assert not [one for one in rendering.workloads() if one["metadata"]["name"].endswith("-redis")]
