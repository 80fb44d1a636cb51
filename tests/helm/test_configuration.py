"""Settings files, their checksums, and values that are refused."""

from __future__ import annotations

import base64
import hashlib
import re
from typing import TYPE_CHECKING

import pytest
import yaml

from tests.helm.conftest import MODEL, MODELS

if TYPE_CHECKING:
    from tests.helm.conftest import Chart, Manifest, Rendering

ALONE = {"lookup.enabled": False, "broker.enabled": False, "redis.enabled": False}
CHANGES: dict[str, Manifest] = {
    "storage": {"storage.memorySize": "5Gi"},
    "lookup": {"lookup.config.redis_timeout_ms": 50},
    "broker": {"broker.config.max_pulls_per_peer": 3},
    "redis": {"redis.maxMemory": "300Mi"},
    "vllm-tiny": {"models": {"tiny": MODEL | {"sidecar": {"config": {"log_level": "debug"}}}}},
}


def checksums(rendering: Rendering) -> dict[str, str]:
    return {
        one["metadata"]["name"].removeprefix("cache-lmcache-"): one["spec"]["template"]["metadata"][
            "annotations"
        ]["checksum/config"]
        for one in rendering.workloads()
    }


@pytest.mark.parametrize("component", sorted(CHANGES))
def test_a_changed_setting_restarts_its_pods_only(chart: Chart, component: str) -> None:
    before = checksums(chart.render(MODELS))
    after = checksums(chart.render(MODELS | CHANGES[component]))
    assert {name for name in before if before[name] != after[name]} == {component}


OWN_REDIS: Manifest = {
    "redis.enabled": False,
    "externalRedis": {
        "url": "rediss-sentinel://:password-1@s:26379/index",
        "tls": {"existingSecret": "files-1"},
        "sentinel": {"existingSecret": "sentinel-1", "username": "asker-1"},
    },
}


@pytest.mark.parametrize(
    "changed",
    [
        {"url": "rediss-sentinel://:password-2@s:26379/index"},
        {"url": "", "existingSecret": "url-1"},
        {"url": "", "existingSecret": "url-1", "existingSecretKey": "redis"},
        {"tls": {"existingSecret": "files-2"}},
        {"tls": {"existingSecret": "files-1", "clientCertificate": True}},
        {"sentinel": {"existingSecret": "sentinel-2", "username": "asker-1"}},
        {"sentinel": {"existingSecret": "sentinel-1", "username": "asker-2"}},
    ],
    ids=lambda changed: "-".join(changed),
)
def test_another_redis_restarts_its_callers(chart: Chart, changed: Manifest) -> None:
    def templates(values: Manifest) -> dict[str, Manifest]:
        rendering = chart.render(MODELS | values)
        return {
            one["metadata"]["name"].removeprefix("cache-lmcache-"): one["spec"]["template"]
            for one in rendering.workloads()
        }

    before = templates(OWN_REDIS)
    after = templates(OWN_REDIS | {"externalRedis": OWN_REDIS["externalRedis"] | changed})
    assert {name for name in before if before[name] != after[name]} == {"lookup", "broker"}


def test_the_mark_of_a_redis_is_no_plain_digest_of_it(chart: Chart) -> None:
    """The same for the same URL, or each upgrade would restart pods; and what pods show
    lets no password be guessed by hashing.
    """
    found = checksums(chart.render(OWN_REDIS))
    assert checksums(chart.render(OWN_REDIS, helm="helm3")) == found
    config = chart.render(OWN_REDIS).get("ConfigMap", "lookup")["data"]["config.yaml"]
    url = OWN_REDIS["externalRedis"]["url"]
    guesses = [f"{guess}{end}" for guess in (config, config.rstrip("\n")) for end in ("", url)]
    assert found["lookup"] not in {hashlib.sha256(one.encode()).hexdigest() for one in guesses}


def test_config_values_are_written_as_they_are(chart: Chart) -> None:
    values = chart.render().get("ConfigMap", "broker")
    assert "ticket_ttl_ms: 5000\n" in values["data"]["config.yaml"]
    large = chart.render({"lookup.config.rate_limit_per_tenant": 12345678}).get(
        "ConfigMap", "lookup"
    )
    assert "rate_limit_per_tenant: 12345678\n" in large["data"]["config.yaml"], "not 1.2345678e+07"


def test_addresses_follow_what_is_installed(chart: Chart) -> None:
    everything = chart.render(MODELS).config("vllm-tiny")
    assert everything["remote_url"] == "lm://cache-lmcache-storage-headless.inference.svc:65432"
    assert everything["lookup_url"] == "http://cache-lmcache-lookup.inference.svc:8081"
    assert everything["broker_url"] == "http://cache-lmcache-broker.inference.svc:8082"
    alone = chart.render({"models": {"tiny": MODEL}, "storage.enabled": False} | ALONE).config(
        "vllm-tiny"
    )
    assert not {"remote_url", "lookup_url", "broker_url"} & set(alone)


def test_named_addresses_have_services(chart: Chart) -> None:
    rendering = chart.render(MODELS)
    services = {one["metadata"]["name"]: one["spec"] for one in rendering.of_kind("Service")}
    hosts = re.findall(
        r"(?:lm|http|redis)://(?:[^\s/]*@)?(?:\$\(POD_NAME\)\.)?(cache-[a-z-]+)\.inference\.svc:(\d+)",
        rendering.text,
    )
    assert len(hosts) >= 6
    for host, port in hosts:
        assert int(port) in {one["port"] for one in services[host]["ports"]}, host


def test_pods_name_themselves(chart: Chart) -> None:
    rendering = chart.render(MODELS)

    def environ(container: str) -> dict[str, str | None]:
        env = rendering.container(container)["env"]
        return {one["name"]: one.get("value") for one in env}

    storage, headless = environ("storage"), "cache-lmcache-storage-headless"
    assert storage["LMCACHE_STORAGE_INSTANCE_ID"] == "$(POD_NAME)"
    own, all_of_them = (
        storage[f"LMCACHE_STORAGE_{name}_URL"] for name in ("ADVERTISE", "REPLICAS")
    )
    assert own == f"lm://$(POD_NAME).{headless}.inference.svc:65432"
    assert all_of_them == f"lm://{headless}.inference.svc:65432"
    assert rendering.get("StatefulSet", "storage")["spec"]["serviceName"] == headless
    assert environ("sidecar")["LMCACHE_SIDECAR_DISTRIBUTED_URL"] == "lm://$(POD_IP):65433"


def test_only_sidecars_that_encode_have_the_codecs(chart: Chart) -> None:
    base = {"webhook.enabled": True, "images.registry": "r.example"}
    digest = "sha256:" + "a" * 64

    def images(values: dict[str, object], **model: object) -> tuple[str, str]:
        """That of a model's sidecar, and that of injected ones."""
        rendering = chart.render(base | {"models": {"tiny": MODEL | model}} | values)
        found = (
            rendering.container("sidecar")["image"],
            rendering.config("webhook")["sidecar_image"],
        )
        own, injected = (image.rpartition(":")[0] for image in found)
        return own, injected

    lean, codec = "r.example/lmcache-sidecar", "r.example/lmcache-sidecar-codec"
    encoded = {"sidecar.config.remote_serde": "lossless"}
    on_disk = {"sidecar.config.disk_serde": "lossless", "sidecar.diskSize": "1Gi"}
    one_model = {"config": {"remote_serde": "cachegen:high"}}
    assert images({}) == (lean, lean)
    assert images(encoded) == (codec, codec)
    assert images({"sidecar.config.peer_serde": "cachegen"}) == (codec, codec)
    assert images(on_disk) == (codec, lean), "injected ones have no disk_serde"
    assert images({}, sidecar=one_model) == (codec, lean), "one model alone"
    pinned = images({"sidecar.codecImage.digest": digest} | encoded)[0]
    assert pinned == f"{codec}@sha256", "pinned by itself"
    assert images({"sidecar.image.digest": digest} | encoded)[0] == codec, "not by the other's"


def test_models_merge_over_their_defaults(chart: Chart) -> None:
    entry = MODEL | {"sidecar": {"arenaSize": "3Gi"}, "nodeSelector": {"gpu": "h200"}}
    rendering = chart.render(
        {
            "models": {"tiny": entry},
            "modelDefaults.nodeSelector": {"zone": "a"},
            "sidecar.config.log_level": "warning",
        }
    )
    assert rendering.pod("vllm-tiny")["nodeSelector"] == {"gpu": "h200", "zone": "a"}
    settings = rendering.config("vllm-tiny")
    assert (settings["arena_gb"], settings["log_level"]) == (3, "warning")


def test_images(chart: Chart) -> None:
    digest = "sha256:" + "ab" * 32
    rendering = chart.render(
        {
            "images.registry": "registry.example.com/team/",
            "images.tag": "9.9",
            "lookup.image.digest": digest,
        }
    )
    images = {
        name.rpartition("/")[2]: container["image"] for name, container in rendering.containers()
    }
    assert images["storage"] == "registry.example.com/team/lmcache-storage:9.9"
    assert images["lookup"] == f"registry.example.com/team/lmcache-lookup@{digest}"
    assert images["redis"].startswith("docker.io/library/redis:")


def secrets_in(rendering: Rendering) -> list[str]:
    return [
        base64.b64decode(value).decode()
        for secret in rendering.of_kind("Secret")
        for name, value in secret["data"].items()
        if name != "tokens.yaml"
    ]


@pytest.mark.parametrize("case", ["models", "external-redis", "no-auth"])
def test_secrets_are_only_in_secrets(chart: Chart, case: str) -> None:
    rendering = chart.case(case)
    secrets = secrets_in(rendering)
    assert len(secrets) >= 3
    elsewhere = yaml.safe_dump_all([one for one in rendering.manifests if one["kind"] != "Secret"])
    for secret in secrets:
        assert len(secret) >= 16
        assert secret not in elsewhere
        assert secret.rpartition(":")[2] not in elsewhere


def test_existing_secrets_replace_generated_ones(chart: Chart) -> None:
    file = chart.path / "ci" / "existing-secrets-values.yaml"
    rendering = chart.render(None, file)
    assert rendering.of_kind("Secret") == []
    assert chart.template(None, (file,), "helm4").stdout == rendering.text
    for name in ("cache-tokens", "cache-keys", "cache-redis"):
        assert name in rendering.text


def test_without_auth_services_let_anyone_in_and_mount_no_tokens(chart: Chart) -> None:
    rendering = chart.case("no-auth")
    for component in ("storage", "lookup", "broker", "vllm-tiny"):
        settings = rendering.config(component)
        assert settings["allow_anonymous"] is True
        assert not {"auth_tokens_file", "service_token_file"} & set(settings)
    assert "cache-lmcache-auth" not in rendering.text


def test_objects_of_your_own_are_installed_too(chart: Chart) -> None:
    quota = {
        "apiVersion": "v1",
        "kind": "ResourceQuota",
        "metadata": {"name": "as-it-is"},
        "spec": {"hard": {"pods": "10"}},
    }
    template = "apiVersion: v1\nkind: LimitRange\nmetadata:\n  name: {{ .Release.Name }}-limits\n"
    alert = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": "alert"},
        "data": {"text": "{{ $labels.pod }} is full"},
    }
    rendering = chart.render({"extraManifests": [quota, template, alert]})
    assert rendering.of_kind("ResourceQuota") == [quota]
    assert alert in rendering.of_kind("ConfigMap"), "an alert's own templates are Prometheus'"
    assert [one["metadata"]["name"] for one in rendering.of_kind("LimitRange")] == ["cache-limits"]
