"""The containers that are added to a pod."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

from lmcache_webhook.injection.plan import SHM_PATH, PodPlan
from lmcache_webhook.injection.pod import amount_of
from lmcache_webhook.injection.template import lay_over

ROLE: Final = "kv_role"
SIDECAR: Final = "lmcache-sidecar"
PAYLOAD: Final = "lmcache-payload"
SHM: Final = "lmcache-shm"

ARENA_PATH: Final = "/run/lmcache/arena"
SOCKET_DIRECTORY: Final = "/run/lmcache/socket"
SOCKET_PATH: Final = f"{SOCKET_DIRECTORY}/sidecar.sock"
CREDENTIALS_PATH: Final = "/run/secrets/lmcache"
TLS_PATH: Final = "/run/secrets/lmcache-tls"
DISK_PATH: Final = "/var/lib/lmcache"
# An API server mounts the pod's token there in every container that mounts nothing at that path,
# and repeats this after the webhooks. Our containers must not have another account's token.
SERVICE_ACCOUNT_PATH: Final = "/var/run/secrets/kubernetes.io/serviceaccount"
PAYLOAD_PATH: Final = "/opt/lmcache"
PYTHON_PATH: Final = f"{PAYLOAD_PATH}/python"

REST_PORT: Final = 8083
HEALTH_PORT: Final = 8084
LM_PORT: Final = 65433
PORTS: Final = (REST_PORT, HEALTH_PORT, LM_PORT)

MIN_CPU_M: Final = 500
CPU_M_PER_GPU: Final = 750
"""Six cores for the eight GPUs of a node, in one pod or in eight, and a pod still fits on a node
with four cores and one GPU. In thousandths, as in the chart's `lmcache.sidecarResources`.
"""
ARENA_WAIT_S: Final = 600
_EMPTY_ACCOUNT_MOUNT: Final = {
    "name": "lmcache-no-token",
    "mountPath": SERVICE_ACCOUNT_PATH,
    "readOnly": True,
}


def payload_container(plan: PodPlan) -> dict[str, Any]:
    """Return the init container that copies the files for vLLM's process."""
    resources = plan.options.settings.payload_resources
    requests, limits = resources.get("requests", {}), resources.get("limits", {})
    if plan.is_guaranteed:
        requests = limits = requests | limits
    return {
        "name": PAYLOAD,
        "image": plan.options.settings.payload_image,
        "imagePullPolicy": plan.options.settings.image_pull_policy,
        "command": ["/payload/install", PAYLOAD_PATH],
        "resources": {"requests": dict(requests), "limits": dict(limits)},
        "securityContext": _security_context(plan),
        "volumeMounts": [{"name": PAYLOAD, "mountPath": PAYLOAD_PATH}, dict(_EMPTY_ACCOUNT_MOUNT)],
    }


def sidecar_container(plan: PodPlan) -> dict[str, Any]:
    """Return the cache sidecar, a restartable init container, merged with the template of the
    webhook's settings.
    """
    arena_mb = math.ceil(plan.arena_gb * 1024)
    tables_mb = math.ceil(arena_mb / 256)  # of an arena that is mapped twice, in pages of 4 KiB
    memory = f"{arena_mb + plan.options.settings.memory_overhead_mb + tables_mb}Mi"
    container: dict[str, Any] = {
        "name": SIDECAR,
        "restartPolicy": "Always",
        "image": plan.options.settings.sidecar_image,
        "imagePullPolicy": plan.options.settings.image_pull_policy,
        "ports": [
            {"name": "lmcache-lm", "containerPort": LM_PORT},
            {"name": "lmcache-health", "containerPort": HEALTH_PORT},
        ],
        "env": _variables(plan),
        "resources": {
            "requests": {"cpu": _cpu_request(plan), "memory": memory},
            "limits": {"memory": memory},
        },
        "securityContext": _security_context(plan),
        # vLLM starts once the sidecar is alive. Its arena may still be populated then, so that the
        # startup probe is the same for every size. No readiness probe: a sidecar that has lost the
        # storage must not take vLLM out of service. The preStop hook begins the drain at once,
        # while vLLM still finishes its requests. SIGTERM comes after vLLM has ended.
        "lifecycle": {
            "preStop": {
                "exec": {"command": ["python", "-m", "lmcache_sidecar.begin_drain", SOCKET_PATH]}
            }
        },
        "startupProbe": _probe(period_s=2, num_failures=150),
        "livenessProbe": _probe(period_s=10, num_failures=6),
        "volumeMounts": _mounts(plan),
    }
    container = lay_over(container, plan.options.sidecar_template)
    if plan.is_guaranteed:
        requests, limits = container["resources"]["requests"], container["resources"]["limits"]
        requests["cpu"] = limits["cpu"] = limits.get("cpu", requests["cpu"])
    return container


def engine_mounts(plan: PodPlan) -> list[dict[str, Any]]:
    """Return the mounts of vLLM's container."""
    shm = [{"name": SHM, "mountPath": SHM_PATH}] if plan.needs_shm else []
    return [
        *shm,
        {"name": "lmcache-arena", "mountPath": ARENA_PATH},
        {"name": "lmcache-socket", "mountPath": SOCKET_DIRECTORY},
        {"name": PAYLOAD, "mountPath": PAYLOAD_PATH, "readOnly": True},
    ]


def transfer_config(
    extra: Mapping[str, Any] | None = None, members: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return the value of vLLM's `--kv-transfer-config`; plain words only. It makes vLLM recompute
    failed loads, since its default ends the request.

    Args:
        extra: Further options of the connector, with any value; the socket is the pod's.
        members: Further members of the configuration.
    """
    return {
        **(members or {}),
        "kv_connector": "LMCacheConnector",
        "kv_connector_module_path": "lmcache_core.integrations.vllm",
        ROLE: (members or {}).get(ROLE, "kv_both"),
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {**(extra or {}), "sidecar_socket": SOCKET_PATH},
    }


def offloading_config(
    host_memory_gb: float, members: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return the value of `--kv-transfer-config` for vLLM's own offloading, with the sidecar behind
    it.

    Args:
        host_memory_gb: vLLM's host memory, GiB.
        members: Further members of the configuration.
    """
    module = "lmcache_core.integrations.vllm_tier"
    tier = {"type": "LMCacheTier", "module_path": module, "sidecar_socket": SOCKET_PATH}
    return {
        **transfer_config(members=members),
        "kv_connector": "LMCacheOffloadingConnector",
        "kv_connector_module_path": module,
        "kv_connector_extra_config": {
            "spec_name": "TieringOffloadingSpec",
            "cpu_bytes_to_use": int(host_memory_gb * (1 << 30)),
            "secondary_tiers": [tier],
        },
    }


def with_kv_events(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a value of `--kv-transfer-config` by which routers also learn what the sidecar has."""
    extra = dict(config["kv_connector_extra_config"])
    if "secondary_tiers" in extra:
        extra["self_describing_kv_events"] = True  # else vLLM's events have no tokens
        extra["secondary_tiers"] = [
            {**tier, "enable_kv_events": True} for tier in extra["secondary_tiers"]
        ]
    else:
        extra["kv_events"] = True
    return {**config, "kv_connector_extra_config": extra}


def _cpu_request(plan: PodPlan) -> Any:
    """Return the sidecar's CPU request unless the template has one. If it follows from the GPUs it
    is at most the template's limit: a pod with more would be refused.
    """
    if plan.options.settings.sidecar_cpu is not None:
        return plan.options.settings.sidecar_cpu
    cpu_m = max(CPU_M_PER_GPU * plan.num_gpus, MIN_CPU_M)
    limit = plan.options.sidecar_template.get("resources", {}).get("limits", {}).get("cpu")
    most = amount_of(limit)
    if most is not None and most * 1000 < cpu_m:
        return limit
    return f"{cpu_m}m" if cpu_m % 1000 else str(cpu_m // 1000)


def _security_context(plan: PodPlan) -> dict[str, Any]:
    context: dict[str, Any] = {
        "runAsNonRoot": True,
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    if plan.run_as_user is not None:
        context["runAsUser"] = plan.run_as_user
    if plan.run_as_group is not None:
        context["runAsGroup"] = plan.run_as_group
    return context


def _variables(plan: PodPlan) -> list[dict[str, Any]]:
    fields = {
        "POD_NAME": "metadata.name",
        "POD_NAMESPACE": "metadata.namespace",
        "POD_UID": "metadata.uid",
        "POD_IP": "status.podIP",
        "LMCACHE_SIDECAR_NODE": "spec.nodeName",
        "LMCACHE_SIDECAR_ZONE": "metadata.labels['topology.kubernetes.io/zone']",
    }
    found: list[dict[str, Any]] = [
        {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}
        for name, path in fields.items()
    ]
    values = {
        "arena_wait_s": str(ARENA_WAIT_S),
        **{
            name: str(value).lower() if isinstance(value, bool) else str(value)
            for name, value in plan.options.settings.sidecar_options.items()
        },
        **_own_options(plan),
    }
    return [
        *found,
        *(
            {"name": f"LMCACHE_SIDECAR_{name.upper()}", "value": value}
            for name, value in values.items()
        ),
    ]


def _own_options(plan: PodPlan) -> dict[str, str]:
    """Return this sidecar's options. It listens on the pod's own address: other pods reach lm://
    and kubelets reach probes with either address family.
    """
    tenant = plan.tenant
    is_encrypted = tenant.tls_secret is not None
    options = {
        "host": "127.0.0.1",
        "port": str(REST_PORT),
        "health_host": "$(POD_IP)",
        "health_port": str(HEALTH_PORT),
        "lm_host": "$(POD_IP)",
        "lm_port": str(LM_PORT),
        "instance_id": plan.instance_id,
        "tenant": tenant.name,
        "arena_path": ARENA_PATH,
        "arena_gb": _number(plan.arena_gb),
        "socket_path": SOCKET_PATH,
    }
    if plan.disk_gb:
        options |= {"disk_path": f"{DISK_PATH}/chunks", "disk_gb": _number(plan.disk_gb)}
    if tenant.credentials_secret is None:
        options["allow_anonymous"] = "true"
    else:
        options["auth_tokens_file"] = f"{CREDENTIALS_PATH}/tokens.yaml"
        options["service_token_file"] = f"{CREDENTIALS_PATH}/sidecar-token"
        options["allow_plaintext"] = str(not is_encrypted).lower()
    if tenant.keys_secret is not None:
        options |= {
            "ticket_keys_file": f"{CREDENTIALS_PATH}/ticket-keys",
            "salt_file": f"{CREDENTIALS_PATH}/salt",
        }
    if is_encrypted:
        options |= {
            "tls_cert_file": f"{TLS_PATH}/tls.crt",
            "tls_key_file": f"{TLS_PATH}/tls.key",
            "tls_ca_file": f"{TLS_PATH}/ca.crt",
        }
    return options


def _mounts(plan: PodPlan) -> list[dict[str, Any]]:
    mounts: list[dict[str, Any]] = [
        {"name": "lmcache-arena", "mountPath": ARENA_PATH},
        {"name": "lmcache-socket", "mountPath": SOCKET_DIRECTORY},
        {
            "name": "lmcache-tmp",
            "mountPath": "/tmp",  # noqa: S108
        },
        dict(_EMPTY_ACCOUNT_MOUNT),
    ]
    if plan.tenant.credentials_secret or plan.tenant.keys_secret:
        mounts.append(
            {"name": "lmcache-credentials", "mountPath": CREDENTIALS_PATH, "readOnly": True}
        )
    if plan.tenant.tls_secret:
        mounts.append({"name": "lmcache-tls", "mountPath": TLS_PATH, "readOnly": True})
    if plan.disk_gb:
        mounts.append({"name": "lmcache-disk", "mountPath": DISK_PATH})
    return mounts


def _probe(period_s: int, num_failures: int) -> dict[str, Any]:
    return {
        "httpGet": {"path": "/healthz", "port": HEALTH_PORT},
        "periodSeconds": period_s,
        "timeoutSeconds": 5,
        "failureThreshold": num_failures,
    }


def _number(value: float) -> str:
    return f"{value:.4f}".rstrip("0").rstrip(".")


JOURNAL_MB: Final = 64
"""Beside the arena, on the same volume: its journal."""
PAYLOAD_MB: Final = 256
SHM_MB: Final = 2048
"""For the worker processes of vLLM, in addition to its host memory."""
_READABLE: Final = 0o444
"""Only the sidecar mounts them. Without an fsGroup, which is not ours to set, files of a group
would be unreadable to it.
"""


def volumes_of(plan: PodPlan) -> list[dict[str, Any]]:
    """Return all added volumes. Those in memory count towards the memory limit of the sidecar,
    which fills them.
    """
    arena_mb = math.ceil(plan.arena_gb * 1024) + JOURNAL_MB
    volumes: list[dict[str, Any]] = [
        {"name": "lmcache-arena", "emptyDir": {"medium": "Memory", "sizeLimit": f"{arena_mb}Mi"}},
        {"name": "lmcache-socket", "emptyDir": {"medium": "Memory", "sizeLimit": "1Mi"}},
        {"name": "lmcache-payload", "emptyDir": {"sizeLimit": f"{PAYLOAD_MB}Mi"}},
        {"name": "lmcache-tmp", "emptyDir": {"sizeLimit": "64Mi"}},
        {"name": "lmcache-no-token", "emptyDir": {"sizeLimit": "1Mi"}},
    ]
    if plan.needs_shm:
        shm_mb = math.ceil(plan.host_memory_gb * 1024) + SHM_MB
        volumes.append({"name": SHM, "emptyDir": {"medium": "Memory", "sizeLimit": f"{shm_mb}Mi"}})
    if plan.disk_gb:
        # A tenth and one GiB above the tier's size: beyond the limit Kubernetes evicts the whole
        # pod.
        volumes.append(
            {
                "name": "lmcache-disk",
                "emptyDir": {"sizeLimit": f"{math.ceil(round(plan.disk_gb * 1.1, 6)) + 1}Gi"},
            }
        )
    tenant = plan.tenant
    sources = [
        _secret(tenant.credentials_secret, "tokens.yaml", "sidecar-token"),
        _secret(tenant.keys_secret, "ticket-keys", "salt"),
    ]
    credentials = [source for source in sources if source is not None]
    if credentials:
        volumes.append(
            {
                "name": "lmcache-credentials",
                "projected": {"defaultMode": _READABLE, "sources": credentials},
            }
        )
    tls = _secret(tenant.tls_secret, "tls.crt", "tls.key", "ca.crt")
    if tls is not None:
        volumes.append(
            {"name": "lmcache-tls", "projected": {"defaultMode": _READABLE, "sources": [tls]}}
        )
    return volumes


def _secret(name: str | None, *keys: str) -> dict[str, Any] | None:
    return (
        None
        if name is None
        else {"secret": {"name": name, "items": [{"key": key, "path": key} for key in keys]}}
    )
