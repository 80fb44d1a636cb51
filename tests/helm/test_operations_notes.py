"""What the chart says after an installation: what to do next, for exactly what was chosen."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from tests.helm.conftest import MODEL, MODELS
from tests.helm.test_cases import CASES

if TYPE_CHECKING:
    from tests.helm.conftest import Chart, Manifest

ROLES: Manifest = {"models": {"tiny": MODEL | {"prefill": {}, "decode": {}}}}


def notes(chart: Chart, values: Manifest | None = None, case: str = "default") -> str:
    """Helm 3 shows them to those with a cluster alone."""
    answer = chart.template(
        values, (CASES[case],), "helm4", command=("install", "--dry-run=client")
    )
    assert answer.returncode == 0, answer.stderr
    return answer.stdout.split("\nNOTES:\n")[1]


@pytest.mark.parametrize("case", sorted(CASES))
def test_they_name_what_is_there_and_nothing_else(chart: Chart, case: str) -> None:
    text, rendering = notes(chart, case=case), chart.render(None, CASES[case])
    ports = {
        one["metadata"]["name"]: {port["port"] for port in one["spec"]["ports"]}
        for one in rendering.of_kind("Service")
    }
    named = re.findall(r"^(?:Storage .* and|Lookup|Broker|Model) +(\S+):(\d+)", text, re.MULTILINE)
    assert all(int(port) in ports[name] for name, port in named)
    expected = {
        name
        for name in ports
        if not name.endswith(("-headless", "-sidecars", "-redis", "-webhook"))
    }
    assert {name for name, _ in named} == expected
    for kind, name in re.findall(r" (service|statefulset|secret)[ /]([a-z0-9-]+)", text):
        assert any(
            one["kind"].lower() == kind and one["metadata"]["name"] == name
            for one in rendering.manifests
        ), name
    assert "\n\n\n" not in text
    assert all(line == line.rstrip() for line in text.splitlines())


def test_the_first_model_can_be_asked(chart: Chart) -> None:
    text = notes(chart, {"models": {"tiny": MODEL, "other": MODEL}})
    assert "port-forward service/cache-lmcache-vllm-other 8000" in text, "the first by name"
    assert "curl http://localhost:8000/v1/completions" in text
    assert '"model": "example/tiny-llama"' in text
    assert "curl -k https://" in notes(
        chart, {"models": {"tiny": MODEL | {"tls": {"existingSecret": "door"}}}}
    )


WARNED: list[tuple[Manifest, str]] = [
    ({}, "tls.enabled is false: tokens and chunks pass between the pods unencrypted"),
    ({"auth.enabled": False}, "WARNING: auth.enabled is false"),
    ({"networkPolicy.enabled": False}, "networkPolicy.enabled is false"),
    ({"kvEvents.enabled": True}, "with the tokens of prompts in clear"),
    ({"kvEvents.enabled": True}, "No router can read them yet"),
    (
        {"kvEvents.enabled": True, "networkPolicy.enabled": False},
        "Every pod that reaches this port can read prompts",
    ),
    (
        {"kvEvents.enabled": True, "webhook.enabled": True},
        "no policy for injected pods. Close this port of theirs",
    ),
    ({"storage.persistence.enabled": False}, "storage.persistence.enabled is false"),
    ({}, "The bundled Redis is for trials"),
    (
        {"storage.compat.enabled": True, "storage.compat.clientsFrom": [{"podSelector": {}}]},
        "WARNING: storage.compat.enabled",
    ),
]


@pytest.mark.parametrize(("values", "warning"), WARNED)
def test_risks_are_warned_of(chart: Chart, values: Manifest, warning: str) -> None:
    assert warning in notes(chart, values)


@pytest.mark.parametrize(
    ("values", "said", "unsaid"),
    [
        (MODELS, "cache-lmcache-vllm-tiny 8000", "No engine uses the cache yet"),
        (ROLES, "lmcache.io/model=tiny -L llm-d.ai/role", "vllm-tiny:8000"),
        (MODELS, "cache-lmcache-vllm-tiny:8000", "llm-d.ai/role"),
        ({"webhook.enabled": True}, "lmcache.io/inject", "No engine uses the cache yet"),
        ({"auth.existingSecret": "house"}, "a token of house", "get secret"),
        ({"storage.replicaCount": 3}, "get secret", "kubectl -n inference scale"),
        ({"storage.autoscaling.enabled": True}, "get secret", "kubectl -n inference scale"),
        (
            {"tls.enabled": True, "tls.existingSecret": "c"},
            "https://localhost:8082/",
            "http://localhost:8082/",
        ),
        (
            {"lookup.enabled": False, "broker.enabled": False, "redis.enabled": False},
            "No engine uses the cache yet",
            "in a browser",
        ),
    ],
)
def test_advice_follows_from_the_values(
    chart: Chart, values: Manifest, said: str, unsaid: str
) -> None:
    text = notes(chart, values)
    assert said in text
    assert unsaid not in text
