"""Options of the webhook, and the template of the sidecar."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import yaml
from lmcache_core.errors import ConfigError
from lmcache_servicekit.settings import load_settings
from lmcache_webhook.app import injection_options
from lmcache_webhook.injection.template import MAX_TEMPLATE_BYTES, read_template
from lmcache_webhook.settings import WebhookSettings

from tests.fixtures.pods import plain
from tests.fixtures.reviews import injected

IMAGES = {"LMCACHE_WEBHOOK_SIDECAR_IMAGE": "s:1", "LMCACHE_WEBHOOK_PAYLOAD_IMAGE": "p:1"}


def test_least_settings() -> None:
    settings = load_settings(WebhookSettings, None, IMAGES)
    assert settings.port == 8443
    assert [tenant.name for tenant in settings.tenants] == ["default"]


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("SIDECAR_OPTIONS", "{arena_gb: 4}", "arena_gb is decided by the webhook"),
        (
            "SIDECAR_OPTIONS",
            "{service_token_file: /a}",
            "service_token_file is decided by the webhook",
        ),
        ("SIDECAR_OPTIONS", "{Bad-Name: 4}", "sidecar_options"),
        ("ARENA_GB", "2000", "arena_gb=2000 is above max_arena_gb=1024"),
        ("TENANTS", "[{name: a, namespaces: ['Not A Name']}]", "tenants"),
        ("SIDECAR_CPU", "lots", "sidecar_cpu"),
        ("KUBERNETES_SERVICE", "s", "kubernetes_service and kubernetes_namespace go together"),
        ("KV_EVENTS_REPLAY_PORT", "5558", "kv_events_replay_port=5558 needs a kv_events_port"),
        (
            "PAYLOAD_RESOURCES",
            "{requests: {cpu: lots}}",
            "cpu is not a quantity: write 500m or 64Mi",
        ),
        (
            "PAYLOAD_RESOURCES",
            "{requests: {memory: 1Gi}, limits: {memory: 64Mi}}",
            "the request of memory is above its limit",
        ),
    ],
)
def test_wrong_option_is_named(name: str, value: str, text: str) -> None:
    with pytest.raises(ConfigError, match=text.replace("[", r"\[").replace(".", r"\.")):
        load_settings(WebhookSettings, None, {**IMAGES, f"LMCACHE_WEBHOOK_{name}": value})


def sidecar_with(template: dict[str, Any], tmp_path: Path) -> dict[str, Any]:
    """The sidecar's container of a plain pod."""
    path = tmp_path / "template.yaml"
    path.write_text(yaml.safe_dump(template))
    settings = WebhookSettings(sidecar_image="s:1", payload_image="p:1", sidecar_template_file=path)
    pod = injected(injection_options(settings), plain())
    sidecar: dict[str, Any] = pod["spec"]["initContainers"][-1]
    return sidecar


def test_a_template_lies_over_the_sidecar(tmp_path: Path) -> None:
    template = {
        "resources": {"requests": {"cpu": "2", "ephemeral-storage": "1Gi"}, "limits": {"cpu": "4"}},
        "env": [
            {"name": "LMCACHE_SIDECAR_LOG_LEVEL", "value": "debug"},
            {"name": "LMCACHE_SIDECAR_ARENA_WAIT_S", "value": "60"},
        ],
        "livenessProbe": {"tcpSocket": {"port": 8084}},
        "securityContext": {"runAsUser": 5},
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }
    plain_one, sidecar = sidecar_with({}, tmp_path), sidecar_with(template, tmp_path)
    assert sidecar["resources"]["requests"] == {
        "cpu": "2",
        "ephemeral-storage": "1Gi",
        "memory": "8736Mi",
    }
    assert sidecar["resources"]["limits"] == {"cpu": "4", "memory": "8736Mi"}
    assert sidecar["securityContext"] == {**plain_one["securityContext"], "runAsUser": 5}
    assert sidecar["livenessProbe"] == {"tcpSocket": {"port": 8084}}
    names = [one["name"] for one in sidecar["env"]]
    assert len(names) == len(set(names))
    assert {"name": "LMCACHE_SIDECAR_ARENA_WAIT_S", "value": "60"} in sidecar["env"]
    assert sidecar["startupProbe"] == plain_one["startupProbe"]
    assert sidecar["name"] == plain_one["name"]


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("image: x", "image is not a template's to say"),
        ("- a", "write members of a container"),
        ("env: [a]", "env must be a list"),
        ("resources: 4", "resources must be a dict"),
        ("resources: {limits: {memory: 4Gi}}", "memory follows from the size of the arena"),
        ("#" * (MAX_TEMPLATE_BYTES + 1), "longer than"),
    ],
)
def test_a_wrong_template_is_refused_at_the_start(text: str, error: str, tmp_path: Path) -> None:
    path = tmp_path / "template.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=error):
        read_template(path)
    with pytest.raises(ConfigError, match="correct the path"):
        read_template(tmp_path / "none.yaml")


@pytest.mark.parametrize(
    ("sidecar_cpu", "resources", "error"),
    [
        ("500m", "{limits: {cpu: 200m}}", "requests 500m of a cpu, and its limit is 200m"),
        (None, "{limits: {cpu: 200m}}", None),  # the request follows from the pod, and the limit
        (None, "{requests: {cpu: 2}, limits: {cpu: 1}}", "requests 2 of a cpu, and its limit is 1"),
        (None, "{requests: {cpu: null}}", "cpu None is not a quantity"),
        (None, "{limits: {cpu: lots}}", "cpu 'lots' is not a quantity"),
    ],
)
def test_sidecar_that_no_cluster_accepts_is_refused_at_the_start(
    sidecar_cpu: str | None, resources: str, error: str | None, tmp_path: Path
) -> None:
    path = tmp_path / "template.yaml"
    path.write_text(f"resources: {resources}")
    settings = WebhookSettings(
        sidecar_image="s:1",
        payload_image="p:1",
        sidecar_template_file=path,
        **({} if sidecar_cpu is None else {"sidecar_cpu": sidecar_cpu}),
    )
    with nullcontext() if error is None else pytest.raises(ConfigError, match=error):
        injection_options(settings)
