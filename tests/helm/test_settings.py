"""The settings files and variables of the chart are what the services' own settings models take."""

from __future__ import annotations

import base64
import importlib
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import jsonschema
import pytest
from lmcache_core.storage.eviction import POLICIES, TenantQuotas, TierLimits
from lmcache_node.settings import NodeSettings
from lmcache_servicekit.settings import ServiceSettings, load_settings
from pydantic import TypeAdapter

from tests.helm.conftest import MODEL, MODELS, Rendering, both_helms, containers_of, parsed
from tests.helm.test_cases import CASES

if TYPE_CHECKING:
    from tests.helm.conftest import Chart, Manifest

SERVICES = {
    "storage": ("lmcache_storage.settings", "StorageSettings"),
    "lookup": ("lmcache_lookup.settings", "LookupSettings"),
    "broker": ("lmcache_broker.settings", "BrokerSettings"),
    "sidecar": ("lmcache_sidecar.settings", "SidecarSettings"),
}
GIVEN = {"redis-password": "1234password", "url": "redis://from-a-secret:6379/0"}
FIELDS = {"metadata.name": "cache-pod-0", "status.podIP": "10.1.2.3", "spec.nodeName": "node-1"}


def environment(rendering: Rendering, container: Manifest) -> dict[str, str]:
    """The container's variables as the kubelet would set them; Secrets that the chart does not
    make hold a password or the URL of a Redis.
    """
    secrets = {one["metadata"]["name"]: one["data"] for one in rendering.of_kind("Secret")}
    values: dict[str, str] = {}
    for one in container["env"]:
        source = one.get("valueFrom", {})
        if "fieldRef" in source:
            text = FIELDS.get(source["fieldRef"]["fieldPath"], "")
        elif "secretKeyRef" in source:
            reference = source["secretKeyRef"]
            held = secrets.get(reference["name"], {}).get(reference["key"])
            text = GIVEN[reference["key"]] if held is None else base64.b64decode(held).decode()
        else:
            text = re.sub(r"\$\((\w+)\)", lambda match: values[match[1]], one["value"])
        values[one["name"]] = text
    return values


def pod_with(rendering: Rendering, container: Manifest) -> Manifest:
    return next(pod for _, pod in rendering.pods() if container in containers_of(pod))


def files_in(rendering: Rendering, container: Manifest) -> set[str]:
    """Paths of the files of Secrets that a container sees."""
    volumes = {one["name"]: one for one in pod_with(rendering, container)["volumes"]}
    found = set()
    for mount in container["volumeMounts"]:
        volume = volumes.get(mount["name"], {})
        projected = volume.get("projected", {}).get("sources", [])
        sources = [volume.get("secret", {}), *(source["secret"] for source in projected)]
        items = [item for source in sources for item in source.get("items", [])]
        found |= {f"{mount['mountPath']}/{item['path']}" for item in items}
    return found


def settings_of(
    rendering: Rendering, service: str, folder: Path
) -> tuple[ServiceSettings, Manifest]:
    """What the service would start with, and the container."""
    module, name = SERVICES[service]
    model: type[ServiceSettings] = getattr(importlib.import_module(module), name)
    container = rendering.container(service)
    pod = pod_with(rendering, container)
    (config,) = (one["configMap"]["name"] for one in pod["volumes"] if one["name"] == "config")
    maps = {one["metadata"]["name"]: one["data"] for one in rendering.of_kind("ConfigMap")}
    text = maps[config]["config.yaml"]
    path = folder / "config.yaml"
    path.write_text(text, encoding="utf-8")
    return load_settings(model, path, environment(rendering, container)), container


@pytest.mark.parametrize("case", sorted(CASES))
def test_services_take_their_settings(chart: Chart, case: str, tmp_path: Path) -> None:
    rendering = chart.render(None, CASES[case])
    services = {where.rpartition("/")[2] for where, _ in rendering.containers()} & set(SERVICES)
    assert "storage" in services
    for service in services:
        settings, container = settings_of(rendering, service, tmp_path)
        values = dict(settings)
        opened = {
            value
            for name, value in values.items()
            if f"_{name}".endswith("_port")
            and value is not None
            and not name.startswith("kubernetes_")
        }
        loopback = {settings.port} if service == "sidecar" else set()
        assert {port["containerPort"] for port in container["ports"]} == opened - loopback
        assert container["args"] == ["--config", "/etc/lmcache/config.yaml"]
        assert settings.instance_id == "cache-pod-0"
        mounts = tuple(mount["mountPath"] for mount in container["volumeMounts"])
        for name in ("disk_path", "arena_path", "socket_path"):
            path = str(values.get(name) or mounts[0])
            assert path.startswith(mounts), f"{name}={path} is on no volume"
        told = {str(path) for name, path in settings if name.endswith("_file") and path is not None}
        assert told <= files_in(rendering, container)
        if case in ("models", "existing-secrets", "no-auth"):
            assert settings.allow_anonymous == (case == "no-auth")
            assert told == files_in(rendering, container), "each file is there, and no other"


@pytest.mark.parametrize("service", sorted(SERVICES))
def test_services_take_ipv6_addresses(chart: Chart, service: str, tmp_path: Path) -> None:
    rendering = chart.render(MODELS | {"network.ipFamily": "IPv6"})
    settings, _ = settings_of(rendering, service, tmp_path)
    assert settings.host == ("127.0.0.1" if service == "sidecar" else "::")
    if isinstance(settings, NodeSettings):
        assert settings.lm_host == "::"
        announced = "lm://[10.1.2.3]:65433" if service == "sidecar" else None
        assert getattr(settings, "distributed_url", None) == announced


@pytest.mark.parametrize("service", ["storage", "sidecar"])
def test_callers_know_the_tenant_of_their_token(chart: Chart, service: str, tmp_path: Path) -> None:
    rendering = chart.render(MODELS | {"auth.tenant": "team-a"})
    settings, _ = settings_of(rendering, service, tmp_path)
    assert getattr(settings, "tenant", None) == "team-a"


def test_limits_reach_the_storage_and_the_sidecar(chart: Chart, tmp_path: Path) -> None:
    rendering = chart.render(
        {
            "models.tiny": MODEL
            | {"sidecar": {"config": {"eviction_policy": "lru", "chunk_ttl_s": 60}}},
            "storage.config.chunk_ttl_s": 2592000,
            "storage.tenantQuota.memory": "512Mi",
            "storage.tenantQuotas": {"team-a": {"memory": "1Gi", "disk": "10Gi"}},
        }
    )
    storage, _ = settings_of(rendering, "storage", tmp_path)
    assert storage.memory_limits == TierLimits(2592000, TenantQuotas(1 << 29, {"team-a": 1 << 30}))
    assert storage.disk_limits == TierLimits(2592000, TenantQuotas(None, {"team-a": 10 << 30}))
    sidecar, _ = settings_of(rendering, "sidecar", tmp_path)
    assert (sidecar.eviction_policy, sidecar.memory_limits) == ("lru", TierLimits(60))


@both_helms
def test_an_overlay_removes_the_limit_of_a_tenant(chart: Chart, tmp_path: Path, helm: str) -> None:
    base = tmp_path / "base.yaml"
    base.write_text("storage: {tenantQuotas: {a: {memory: 1Gi}, b: {memory: 2Gi}}}")
    for files in ((base,), ()):  # where there is none, nothing is removed
        rendering = chart.render({"storage.tenantQuotas.a": None}, *files, helm=helm)
        quotas = rendering.config("storage").get("tenant_quotas", {})
        assert quotas == ({"b": {"memory_gb": 2}} if files else {})


@pytest.mark.parametrize("size_gi", [1, 2, 50, 1048576])
def test_the_disk_tier_fits_the_smallest_volume_too(
    chart: Chart, tmp_path: Path, size_gi: int
) -> None:
    storage, _ = settings_of(
        chart.render({"storage.persistence.size": f"{size_gi}Gi"}), "storage", tmp_path
    )
    disk_gb = storage.model_dump()["disk_gb"]
    assert 0.85 * size_gi <= disk_gb <= 0.9 * size_gi


def test_how_a_cluster_is_run_reaches_its_services(chart: Chart, tmp_path: Path) -> None:
    values = {
        "lookup.config": {"redis_timeout_ms": 50, "rate_limit_per_tenant": 500},
        "broker.config.rate_limit_per_tenant": 0.5,
        "storage.config": {"hand_over_on_stop": False, "rebalance": False, "drain_timeout_s": 12.5},
        "sidecar.config.drain_timeout_s": 7,
        "models": {"tiny": MODEL},
    }
    settings = {
        service: settings_of(chart.render(values), service, tmp_path)[0].model_dump()
        for service in SERVICES
    }
    lookup = settings["lookup"]
    assert (lookup["redis_timeout_ms"], lookup["rate_limit_per_tenant"]) == (50, 500)
    assert settings["broker"]["rate_limit_per_tenant"] == 0.5
    storage = settings["storage"]
    assert (storage["hand_over_on_stop"], storage["rebalance"]) == (False, False)
    assert storage["drain_timeout_s"] == 12.5
    assert settings["sidecar"]["drain_timeout_s"] == 7
    assert storage["replicas_url"] == settings["sidecar"]["remote_url"], "one tier, by one name"


@both_helms
def test_a_rate_may_be_set_on_the_command_line(chart: Chart, helm: str, tmp_path: Path) -> None:
    """`--set` makes a string of a decimal."""
    rates = {"storage": "0.5", "lookup": "12.5", "broker": "999999999.5", "sidecar": "500"}
    options = [f"--set={name}.config.rate_limit_per_tenant={rate}" for name, rate in rates.items()]
    answer = chart.template(MODELS, (), helm, ("template", *options))
    assert answer.returncode == 0, answer.stderr
    rendering = Rendering(answer.stdout, parsed(answer.stdout))
    for service, rate in rates.items():
        settings, _ = settings_of(rendering, service, tmp_path)
        assert settings.model_dump()["rate_limit_per_tenant"] == float(rate)
        component = "vllm-tiny" if service == "sidecar" else service
        assert rendering.config(component)["rate_limit_per_tenant"] == float(rate), "a number"


@both_helms
@pytest.mark.parametrize("rate", ["0.0", "1.", "-0.5", "1000000000.5", "0.5/s"])
def test_what_is_no_rate_is_refused_on_the_command_line(chart: Chart, helm: str, rate: str) -> None:
    option = f"--set=lookup.config.rate_limit_per_tenant={rate}"
    answer = chart.template({}, (), helm, ("template", option))
    assert answer.returncode != 0
    assert "rate_limit_per_tenant" in answer.stderr.replace("/", ".")


@pytest.mark.parametrize("url", ["", "redis-cluster://:password@one:6379,two:6379"])
def test_brokers_agree_through_the_redis_of_lookup(chart: Chart, url: str, tmp_path: Path) -> None:
    rendering = chart.render({"redis.enabled": False, "externalRedis.url": url} if url else {})
    one, other = (
        settings_of(rendering, service, tmp_path)[0].model_dump()["redis_url"]
        for service in ("lookup", "broker")
    )
    assert one == other is not None
    assert one.get_secret_value().startswith("redis-cluster://" if url else "redis://")


def test_the_broker_follows_the_sidecars(chart: Chart, tmp_path: Path) -> None:
    rendering = chart.render({"auth.tenant": "team-a"})
    settings = settings_of(rendering, "broker", tmp_path)[0].model_dump()
    assert settings["discovery"] == "kubernetes"
    service = rendering.get(
        "Service", settings["kubernetes_service"].removeprefix("cache-lmcache-")
    )
    assert service["metadata"]["namespace"] == settings["kubernetes_namespace"]
    assert settings["kubernetes_port_name"] in {port["name"] for port in service["spec"]["ports"]}
    assert settings["discovery_tenant"] == "team-a"
    assert settings["pod_deletion_cost"] is False
    costs, alone = (
        settings_of(chart.render({f"broker.{name}.enabled": value}), "broker", tmp_path)[
            0
        ].model_dump()
        for name, value in (("podDeletionCost", True), ("discovery", False))
    )
    assert costs["pod_deletion_cost"] is True
    assert alone["discovery"] == "registration"


@pytest.mark.parametrize("has_auth", [True, False])
def test_lmcache_clients_have_a_port_and_a_tenant_of_their_own(
    chart: Chart, tmp_path: Path, has_auth: bool
) -> None:
    compat = {
        "enabled": True,
        "clientsFrom": [{"podSelector": {}}],
        "dialect": "v0.2",
        "maxConnections": 7,
    }
    rendering = chart.render({"storage.compat": compat, "auth.enabled": has_auth})
    settings, container = settings_of(rendering, "storage", tmp_path)
    dumped = settings.model_dump()
    given = {
        name.removeprefix("lmcache_compat_"): value
        for name, value in dumped.items()
        if name.startswith("lmcache_compat_")
    }
    assert given == {
        "port": 65434,
        "host": "0.0.0.0",
        "dialect": "v0.2",
        "tenant": "lmcache",
        "max_connections": 7,
    }
    assert (settings.auth_tokens_file is not None) == has_auth, (
        "what that port lets in says nothing of the others"
    )
    assert {"name": "compat", "containerPort": 65434} in container["ports"]
    services = rendering.by_name("Service").items()
    named = [name for name, spec in services if "compat" in {one["name"] for one in spec["ports"]}]
    assert named == ["storage-headless"]
    off, _ = settings_of(chart.render(), "storage", tmp_path)
    assert off.model_dump()["lmcache_compat_port"] is None


def test_encodings_reach_the_sidecar(chart: Chart, tmp_path: Path) -> None:
    encoded = {"disk_serde": "lossless", "remote_serde": "cachegen", "peer_serde": "cachegen:high"}
    sidecar, _ = settings_of(
        chart.render({"models.tiny": MODEL | {"sidecar": {"config": encoded, "diskSize": "1Gi"}}}),
        "sidecar",
        tmp_path,
    )
    assert encoded.items() <= sidecar.model_dump().items()


def test_the_schema_names_every_eviction_policy(chart: Chart) -> None:
    schema = (chart.path / "values.schema.json").read_text(encoding="utf-8")
    named = re.findall(r'"eviction_policy": \{[^{}]*"enum": (\[.*?\])', schema)
    assert [json.loads(names) for names in named] == [list(POLICIES)] * 2


@pytest.mark.parametrize("service", sorted(SERVICES))
def test_what_the_schema_lets_through_the_service_takes(chart: Chart, service: str) -> None:
    """Numbers of all sizes. Otherwise pods would crash where Helm could have refused."""
    schema = json.loads((chart.path / "values.schema.json").read_text(encoding="utf-8"))
    node = schema["properties"][service]
    node = schema["definitions"][node["$ref"].rpartition("/")[2]] if "$ref" in node else node
    module, name = SERVICES[service]
    fields = getattr(importlib.import_module(module), name).model_fields
    tried = 0
    for option, kind in node["properties"]["config"]["properties"].items():
        validator = jsonschema.Draft7Validator(kind | {"definitions": schema["definitions"]})
        adapter = TypeAdapter(Annotated[fields[option].annotation, fields[option]])
        for number in (0, 0.5, *(base * 10**power for base in (1, 3) for power in range(13))):
            if validator.is_valid(number):
                adapter.validate_python(number)
                tried += 1
    assert tried > 15
