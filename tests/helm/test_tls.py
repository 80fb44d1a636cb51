"""TLS on all ports: each service finds its files, names its peers by encrypted URLs, and
certificates name what is called.
"""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import TYPE_CHECKING

import pytest
import yaml
from lmcache_node.settings import NodeSettings

from tests.helm.conftest import MODELS, MUTUAL, TLS
from tests.helm.test_settings import SERVICES, files_in, settings_of

if TYPE_CHECKING:
    from pathlib import Path

    from tests.helm.conftest import Chart, Manifest

ISSUED: Manifest = MODELS | {
    "tls.enabled": True,
    "tls.certManager.enabled": True,
    "tls.certManager.issuerRef.name": "house",
}
REDIS: Manifest = MODELS | {
    "redis.enabled": False,
    "externalRedis": {
        "url": "rediss-sentinel://:password@one:26379,two:26379/index",
        "tls": {"existingSecret": "redis-files", "clientCertificate": True},
        "sentinel": {"username": "asker", "existingSecret": "sentinel-password"},
    },
}
KINDS = {
    "plain": MODELS,
    "tls": MODELS | TLS,
    "mutual": MODELS | MUTUAL,
    "issued": ISSUED,
    "redis": REDIS,
}
CA = "/run/secrets/tls/ca.crt"


@pytest.mark.parametrize("service", sorted(SERVICES))
@pytest.mark.parametrize("kind", sorted(KINDS))
def test_services_find_each_file_of_their_settings_and_no_other(
    chart: Chart, kind: str, service: str, tmp_path: Path
) -> None:
    rendering = chart.render(KINDS[kind])
    settings, container = settings_of(rendering, service, tmp_path)
    told = {str(value) for name, value in settings if name.endswith("_file") and value is not None}
    seen = files_in(rendering, container)
    assert told == seen


@pytest.mark.parametrize("service", sorted(SERVICES))
def test_what_is_served_is_encrypted(chart: Chart, service: str, tmp_path: Path) -> None:
    for kind in ("tls", "issued", "mutual"):
        settings, _ = settings_of(chart.render(KINDS[kind]), service, tmp_path)
        assert str(settings.tls_cert_file) == "/run/secrets/tls/tls.crt"
        assert settings.allow_plaintext is False
        assert (settings.tls_client_ca_file is not None) == (kind == "mutual")


@pytest.mark.parametrize("service", ["storage", "sidecar"])
def test_callers_encrypt_and_check_names(chart: Chart, service: str, tmp_path: Path) -> None:
    settings, _ = settings_of(chart.render(KINDS["mutual"]), service, tmp_path)
    assert isinstance(settings, NodeSettings)
    assert str(settings.tls_ca_file) == CA
    assert str(settings.tls_client_cert_file) == "/run/secrets/tls/tls.crt"
    assert settings.tls_peer_name == "cache-lmcache.inference.svc"
    urls = {name: value for name, value in settings if name.endswith("_url") and value is not None}
    assert len(urls) >= 4
    assert all(url.startswith(("https://", "lm+tls://")) for url in urls.values()), urls
    without, _ = settings_of(chart.render(KINDS["tls"]), service, tmp_path)
    assert isinstance(without, NodeSettings)
    assert without.tls_client_cert_file is None


@pytest.mark.parametrize(
    ("kind", "port", "scheme"),
    [("plain", "http", None), ("tls", "http", "HTTPS"), ("mutual", "health", None)],
)
def test_kubelets_reach_the_probes(
    chart: Chart, kind: str, port: str, scheme: str | None, tmp_path: Path
) -> None:
    rendering = chart.render(KINDS[kind])
    for service in ("storage", "lookup", "broker"):
        settings, container = settings_of(rendering, service, tmp_path)
        ports = {one["name"]: one["containerPort"] for one in container["ports"]}
        assert ("health" in ports) == (kind == "mutual")
        assert settings.health_port == ports.get("health")
        for name in ("startupProbe", "livenessProbe", "readinessProbe"):
            probed = container[name]["httpGet"]
            assert (probed["port"], probed.get("scheme")) == (port, scheme)
            assert probed["port"] in ports


@pytest.mark.parametrize("kind", ["plain", "tls"])
def test_the_broker_sees_sidecars_by_the_url_that_they_announce(
    chart: Chart, kind: str, tmp_path: Path
) -> None:
    broker = settings_of(chart.render(KINDS[kind]), "broker", tmp_path)[0].model_dump()
    sidecar = settings_of(chart.render(KINDS[kind]), "sidecar", tmp_path)[0].model_dump()
    assert (
        broker["kubernetes_tls"]
        == sidecar["distributed_url"].startswith("lm+tls://")
        == (kind == "tls")
    )


def test_the_bundled_redis_is_encrypted(chart: Chart) -> None:
    rendering = chart.render(KINDS["mutual"])
    config = rendering.get("ConfigMap", "redis")["data"]["redis.conf"].splitlines()
    assert {"port 0", "tls-port 6379", "tls-auth-clients yes"} <= set(config)
    assert (
        "tls-auth-clients no"
        in chart.render(KINDS["tls"]).get("ConfigMap", "redis")["data"]["redis.conf"].splitlines()
    )
    assert "rediss://:$(REDIS_PASSWORD)@" in rendering.text
    assert "redis://:$(REDIS_PASSWORD)@" not in rendering.text
    container = rendering.container("redis")
    named = {
        line.partition(" ")[2] for line in config if line.startswith("tls-") and "-file" in line
    }
    assert named <= files_in(rendering, container)
    ping = container["livenessProbe"]["exec"]["command"][2]
    assert f"--cacert {CA}" in ping
    plain = chart.render(MODELS).container("redis")
    assert "--tls" not in plain["livenessProbe"]["exec"]["command"][2]


def test_a_component_may_have_a_certificate_of_its_own(chart: Chart) -> None:
    values = KINDS["tls"] | {
        "tls.existingSecrets.sidecar": "of-sidecars",
        "tls.existingCaSecret": "house",
    }
    rendering = chart.render(values)
    volumes = {
        name.removeprefix("cache-lmcache-"): next(
            one for one in pod["volumes"] if one["name"] == "tls"
        )
        for name, pod in rendering.pods()
    }
    secrets = {
        name: [source["secret"]["name"] for source in volume["projected"]["sources"]]
        for name, volume in volumes.items()
    }
    assert secrets.pop("vllm-tiny") == ["of-sidecars", "house"]
    assert all(names == ["certificates", "house"] for names in secrets.values())
    sources = volumes["storage"]["projected"]["sources"]
    keys = [[item["key"] for item in source["secret"]["items"]] for source in sources]
    assert keys == [["tls.crt", "tls.key"], ["ca.crt"]]


def test_issued_certificates_name_what_is_called(chart: Chart, tmp_path: Path) -> None:
    rendering = chart.render(ISSUED)
    certificates = rendering.by_name("Certificate")
    assert set(certificates) == {"storage", "lookup", "broker", "redis", "vllm"}
    for service in ("sidecar", "storage"):
        settings, _ = settings_of(rendering, service, tmp_path)
        assert isinstance(settings, NodeSettings)
        assert settings.tls_peer_name in certificates["vllm"]["dnsNames"]
        assert settings.tls_peer_name in certificates["storage"]["dnsNames"]
        for name in ("lookup", "broker"):
            host = str(getattr(settings, f"{name}_url")).split("/")[2].partition(":")[0]
            assert host in certificates[name]["dnsNames"]
    assert "cache-lmcache-redis.inference.svc" in certificates["redis"]["dnsNames"]
    mounted = {
        source["secret"]["name"]
        for _, pod in rendering.pods()
        for volume in pod["volumes"]
        if volume["name"] == "tls"
        for source in volume["projected"]["sources"]
    }
    assert mounted == {spec["secretName"] for spec in certificates.values()}


def test_certificates_are_for_servers_and_clients(chart: Chart) -> None:
    known = {"secretName", "duration", "renewBefore", "issuerRef", "privateKey", "usages"}
    for one in chart.render(ISSUED).of_kind("Certificate"):
        assert one["apiVersion"] == "cert-manager.io/v1"
        spec = one["spec"]
        assert set(spec) == known | {"dnsNames"}
        assert spec["issuerRef"] == {"name": "house", "kind": "Issuer", "group": "cert-manager.io"}
        assert {"server auth", "client auth"} <= set(spec["usages"])
        assert spec["privateKey"]["rotationPolicy"] == "Always"


def test_secret_files_do_not_rely_on_their_owner(chart: Chart) -> None:
    """Whether fsGroup reaches a volume depends on the cluster: any user of the container can read
    the files.
    """
    for _, pod in chart.render(KINDS["mutual"]).pods():
        for volume in pod["volumes"]:
            source = volume.get("secret") or volume.get("projected")
            assert source is None or source["defaultMode"] == 0o444, volume["name"]


def test_keys_stay_where_they_are_used(chart: Chart) -> None:
    """vLLM's container sees no certificate of the sidecar's, and settings files hold paths, no
    secrets.
    """
    rendering = chart.render(KINDS["mutual"])
    assert files_in(rendering, rendering.container("vllm")) == set()
    for one in rendering.of_kind("ConfigMap"):
        for value in yaml.safe_load(one["data"].get("config.yaml", "{}")).items():
            assert value[0] != "tls_key_file" or PurePosixPath(value[1]).is_relative_to(
                "/run/secrets"
            )


@pytest.mark.parametrize("service", sorted(SERVICES))
@pytest.mark.parametrize("kind", ["tls", "mutual"])
def test_without_tokens_services_encrypt_all_the_same(
    chart: Chart, kind: str, service: str, tmp_path: Path
) -> None:
    settings, _ = settings_of(
        chart.render(KINDS[kind] | {"auth.enabled": False}), service, tmp_path
    )
    assert settings.tls_cert_file is not None
    assert settings.allow_anonymous


def test_names_that_look_like_numbers_stay_names(chart: Chart, tmp_path: Path) -> None:
    values = KINDS["tls"] | {
        "tls.existingSecret": "1",
        "tls.peerName": "1.5",
        "auth.existingSecret": "2",
        "redis.existingSecret": "4",
        "keys.existingSecret": "3",
        "auth.tenant": "7",
    }
    rendering = chart.render(values)
    sidecar = settings_of(rendering, "sidecar", tmp_path)[0].model_dump()
    assert (sidecar["tls_peer_name"], sidecar["tenant"]) == ("1.5", "7")
    assert settings_of(rendering, "broker", tmp_path)[0].model_dump()["discovery_tenant"] == "7"
    for _, pod in rendering.pods():
        for volume in pod["volumes"]:
            for source in volume.get("projected", {}).get("sources", []):
                assert isinstance(source["secret"]["name"], str), volume["name"]
            assert isinstance(volume.get("secret", {}).get("secretName", ""), str), volume["name"]
    for name, container in rendering.containers():
        for variable in container.get("env", []):
            assert isinstance(
                variable.get("valueFrom", {}).get("secretKeyRef", {"name": ""})["name"], str
            ), name
