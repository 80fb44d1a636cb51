"""What a pod requests in its annotations, and what it gets according to the webhook's settings, if
its namespace has a tenant.
"""

from __future__ import annotations

import difflib
import math
import posixpath
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, cast, get_args

from lmcache_core.security import validate_tenant

from lmcache_webhook.injection.pod import DeclinedError, Metadata, Pod, VolumeMount

if TYPE_CHECKING:  # plans are also made where servicekit is not installed
    from lmcache_webhook.settings import TenantEntry, WebhookSettings

ANY_NAMESPACE: Final = "*"
PREFIX: Final = "lmcache.io/"
INJECT: Final = f"{PREFIX}inject"
STATUS: Final = f"{PREFIX}inject-status"
INJECTED: Final = f"{PREFIX}injected"
"""A label: network policies find injected pods by it."""
SIDECARS: Final = f"{PREFIX}sidecars"
"""A label with the name of the Service by which the broker finds a pod's sidecar; the chart's
own pods have it too.
"""
CONTAINER: Final = f"{PREFIX}container"
ARENA_GB: Final = f"{PREFIX}arena-gb"
DISK_GB: Final = f"{PREFIX}disk-gb"
TENANT: Final = f"{PREFIX}tenant"
RUN_AS_USER: Final = f"{PREFIX}run-as-user"
CONNECTOR: Final = f"{PREFIX}connector"
HOST_MEMORY_GB: Final = f"{PREFIX}host-memory-gb"
REPLACE: Final = f"{PREFIX}replace-connector"
KNOWN: Final = (
    *(INJECT, STATUS, CONTAINER, ARENA_GB, DISK_GB, TENANT, RUN_AS_USER),
    *(CONNECTOR, HOST_MEMORY_GB, REPLACE),
)

Connector = Literal["lmcache", "offloading-tier"]
"""The project's connector, or vLLM's own offloading with the sidecar behind it."""

MIN_ARENA_GB: Final = 0.0625
SHM_PATH: Final = "/dev/shm"  # noqa: S108
MAX_USER: Final = 2**31 - 1
MAX_SHOWN_CHARS: Final = 60
MAX_INSTANCE_ID_CHARS: Final = 128
MAX_GENERATED_CHARS: Final = 10


class OtherNamespaceError(DeclinedError):
    """The pod is in a namespace that the webhook is not for."""


@dataclass(frozen=True, slots=True)
class PodRequest:
    """What one pod requests; None: the default in the webhook's settings.

    Attributes:
        container: Name of the container that runs vLLM; None: the one that appears to.
        arena_gb: Shared memory, GiB.
        disk_gb: Disk of the node, GiB; 0 for none.
        run_as_user: User of vLLM's image, if the pod does not name one.
        host_memory_gb: vLLM's host memory with `offloading-tier`, GiB.
        replace_connector: Whether LMCache's connector may be replaced.
    """

    container: str | None = None
    arena_gb: float | None = None
    disk_gb: float | None = None
    tenant: str | None = None
    run_as_user: int | None = None
    connector: Connector | None = None
    host_memory_gb: float | None = None
    replace_connector: bool = False


def is_asked_for(metadata: Metadata) -> bool:
    """Return whether a pod has the label or annotation that requests injection. An annotation wins
    over a label.
    """
    annotation = (metadata.annotations or {}).get(INJECT)
    return (annotation if annotation is not None else (metadata.labels or {}).get(INJECT)) == "true"


def read_request(annotations: Mapping[str, str]) -> PodRequest:
    """Read a pod's annotations.

    Raises:
        DeclinedError: One of them is misspelt or impossible: guessing would give the pod something
            that was not asked for.
    """
    for name in annotations:
        if name.startswith(PREFIX) and name not in KNOWN:
            near = difflib.get_close_matches(name, KNOWN, n=1)
            raise DeclinedError(
                f"the annotation {_shown(name)} is not known: "
                + (f"did you mean {near[0]}?" if near else "remove it")
            )
    user = _number(annotations, RUN_AS_USER, 1, MAX_USER)
    if user is not None and not user.is_integer():
        raise _impossible(RUN_AS_USER, annotations[RUN_AS_USER], "a whole number")
    tenant = annotations.get(TENANT)
    if tenant is not None:
        try:
            validate_tenant(tenant)
        except ValueError as exc:
            raise DeclinedError(f"{TENANT}={_shown(tenant)!r}: {exc}") from None
    replace = annotations.get(REPLACE, "false")
    if replace not in ("true", "false"):
        raise _impossible(REPLACE, replace, "true or false")
    connector = annotations.get(CONNECTOR)
    if connector not in (None, *get_args(Connector)):
        raise _impossible(CONNECTOR, connector or "", " or ".join(get_args(Connector)))
    return PodRequest(
        container=annotations.get(CONTAINER),
        arena_gb=_number(annotations, ARENA_GB, MIN_ARENA_GB, 65_536),
        disk_gb=_number(annotations, DISK_GB, 0, 1 << 20),
        tenant=tenant,
        run_as_user=None if user is None else int(user),
        connector=cast("Connector | None", connector),
        host_memory_gb=_number(annotations, HOST_MEMORY_GB, MIN_ARENA_GB, 65_536),
        replace_connector=replace == "true",
    )


def _number(annotations: Mapping[str, str], name: str, least: float, most: float) -> float | None:
    text = annotations.get(name)
    if text is None:
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not least <= value <= most:
        raise _impossible(name, text, f"a number from {least:g} to {most:g}")
    return value


def _impossible(name: str, text: str, wanted: str) -> DeclinedError:
    return DeclinedError(f"{name}={_shown(text)!r}: write {wanted}")


def _shown(text: str) -> str:
    return text if len(text) <= MAX_SHOWN_CHARS else f"{text[:MAX_SHOWN_CHARS]}…"


@dataclass(frozen=True, slots=True)
class InjectionOptions:
    """What the webhook adds to pods.

    Attributes:
        sidecar_template: The checked template, merged into the sidecar's container.
    """

    settings: WebhookSettings
    sidecar_template: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class PodPlan:
    """What one pod gets.

    Attributes:
        arena_gb: Shared memory, GiB.
        disk_gb: Disk, GiB; 0 for none.
        host_memory_gb: vLLM's own host memory with `offloading-tier`, GiB; 0 with `lmcache`.
        needs_shm: Whether that memory needs a volume at `SHM_PATH`: without one a container has
            64 MiB there.
        run_as_user: User of the sidecar; None: the cluster's choice.
        run_as_group: The same for the group.
        num_gpus: GPUs of the container that runs vLLM.
        is_guaranteed: Whether the limits of the pod's containers equal their requests; then ours
            do, too.
        instance_id: Text of the sidecar's instance id.
        service: Service by which the broker finds the pod; None if it does not.
    """

    options: InjectionOptions
    tenant: TenantEntry
    arena_gb: float
    disk_gb: float
    host_memory_gb: float
    needs_shm: bool
    run_as_user: int | None
    run_as_group: int | None
    num_gpus: int
    is_guaranteed: bool
    instance_id: str
    service: str | None


def plan_pod(
    options: InjectionOptions, pod: Pod, namespace: str, request: PodRequest, engine: int
) -> PodPlan:
    """Decide what a pod gets.

    Args:
        engine: Index of the container that runs vLLM.

    Raises:
        DeclinedError: It requests more than it may, or a tenant of another namespace.
    """
    settings = options.settings
    user, group = _user_of(settings, pod, request, engine)
    host_memory_gb = host_memory(settings, request)
    container = pod.spec.containers[engine]
    mounts = container.volumeMounts or []
    here = [
        tenant
        for tenant in settings.tenants
        if not {namespace, ANY_NAMESPACE}.isdisjoint(tenant.namespaces)
    ]
    if not here:
        own = settings.tenants[0].namespaces[0]  # the release's, as the chart writes them
        # A webhook without further tenants serves its own namespace: another's may serve this one.
        kind = OtherNamespaceError if len(settings.tenants) == 1 else DeclinedError
        raise kind(
            f"the webhook of {own} knows no tenant for the namespace {namespace}: add it to one of"
            " `tenants` in its settings"
        )
    tenant = _tenant_of(here, namespace, request.tenant)
    service = (
        settings.kubernetes_service
        if namespace == settings.kubernetes_namespace and tenant is here[0]
        else None
    )
    return PodPlan(
        options=options,
        tenant=tenant,
        arena_gb=_size(request.arena_gb, settings.arena_gb, settings.max_arena_gb, ARENA_GB),
        disk_gb=_size(request.disk_gb, settings.disk_gb, settings.max_disk_gb, DISK_GB),
        host_memory_gb=host_memory_gb,
        needs_shm=host_memory_gb > 0 and not pod.spec.hostIPC and not any(map(is_shm, mounts)),
        run_as_user=user,
        run_as_group=group,
        num_gpus=0 if container.resources is None else container.resources.num_gpus,
        is_guaranteed=all(
            one.resources is not None and one.resources.is_guaranteed
            for one in pod.spec.all_containers
        ),
        instance_id=_instance_id(pod, namespace, is_followed=service is not None),
        service=service,
    )


def host_memory(settings: WebhookSettings, request: PodRequest) -> float:
    """Return the size of vLLM's own host memory, GiB; 0 if the connector has none."""
    if (request.connector or settings.connector) == "lmcache":
        return 0.0
    wished = request.host_memory_gb
    return settings.host_memory_gb if wished is None else wished


def is_shm(mount: VolumeMount) -> bool:
    """Return whether a volume is mounted where vLLM keeps its host memory."""
    return posixpath.normpath(f"/{mount.mountPath.strip('/')}") == SHM_PATH


def _size(wished: float | None, default: float, most: float, name: str) -> float:
    if wished is not None and wished > most:
        raise DeclinedError(
            f"{wished:g} GiB are above the {most:g} that the webhook gives a pod: set {name} to"
            " less"
        )
    return default if wished is None else wished


def _tenant_of(here: Sequence[TenantEntry], namespace: str, wished: str | None) -> TenantEntry:
    for tenant in here:
        if wished in (None, tenant.name):
            return tenant
    raise DeclinedError(
        f"{TENANT}={wished!r} is not a tenant of the namespace {namespace}: its tenants are"
        f" {', '.join(t.name for t in here)}"
    )


def _user_of(
    settings: WebhookSettings, pod: Pod, request: PodRequest, engine: int
) -> tuple[int | None, int | None]:
    """Sidecar and vLLM share files, so both run as the same user if vLLM's is known. Root may open
    everything anyway.
    """
    container = pod.spec.containers[engine].securityContext
    whole = pod.spec.securityContext
    users = [request.run_as_user, container and container.runAsUser, whole and whole.runAsUser]
    groups = [container and container.runAsGroup, whole and whole.runAsGroup]
    user = next((one for one in users if one is not None), None)
    group = next((one for one in groups if one is not None), None)
    return user or settings.run_as_user, group or None


def _instance_id(pod: Pod, namespace: str, *, is_followed: bool) -> str:
    """Return the pod's name, which its endpoint has, too. The namespace is added where two pods may
    share a name. If the name may be too long, the pod's uid replaces it.
    """
    name = pod.metadata.name or f"{pod.metadata.generateName or ''}{'x' * MAX_GENERATED_CHARS}"
    if is_followed:
        return "$(POD_NAME)" if len(name) <= MAX_INSTANCE_ID_CHARS else "$(POD_UID)"
    return (
        "$(POD_NAMESPACE).$(POD_NAME)"
        if len(namespace) + 1 + len(name) <= MAX_INSTANCE_ID_CHARS
        else "$(POD_UID)"
    )
