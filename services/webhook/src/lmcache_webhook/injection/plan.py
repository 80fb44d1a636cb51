"""What the webhook adds, as its settings say, and whose pods it adds it to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lmcache_webhook.injection.annotations import ARENA_GB, DISK_GB, TENANT, PodRequest
from lmcache_webhook.injection.pod import DeclinedError, Pod

if TYPE_CHECKING:  # plans are made where servicekit is not installed, too
    from lmcache_webhook.settings import TenantEntry, WebhookSettings

ANY_NAMESPACE = "*"


@dataclass(frozen=True, slots=True)
class InjectionOptions:
    """What the webhook adds to pods.

    Attributes:
        settings: The webhook's settings.
        sidecar_template: What is laid over the sidecar's container, checked.
    """

    settings: WebhookSettings
    sidecar_template: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class PodPlan:
    """What one pod gets.

    Attributes:
        options: Of the webhook.
        tenant: Whose pod it is.
        arena_gb: Shared memory, GiB.
        disk_gb: Disk, GiB; 0 for none.
        run_as_user: Whom the sidecar runs as; None: as the cluster decides.
        run_as_group: The same for the group.
        is_guaranteed: Whether the pod's containers have limits that equal their requests; ours then
            have too.
        instance_id: Text of the sidecar's instance id.
        service: By which the broker finds the pod; None where it does not.
    """

    options: InjectionOptions
    tenant: TenantEntry
    arena_gb: float
    disk_gb: float
    run_as_user: int | None
    run_as_group: int | None
    is_guaranteed: bool
    instance_id: str
    service: str | None


MAX_INSTANCE_ID_CHARS = 128
MAX_GENERATED_CHARS = 10


def plan_pod(
    options: InjectionOptions, pod: Pod, namespace: str, request: PodRequest, engine: int
) -> PodPlan:
    """Decide what a pod gets.

    Args:
        options: Of the webhook.
        pod: The pod.
        namespace: Where it is to be.
        request: What it asks for.
        engine: Which of its containers runs vLLM.

    Raises:
        DeclinedError: It asks for more than it may, or for a tenant that is not its namespace's.
    """
    settings = options.settings
    user, group = _user_of(settings, pod, request, engine)
    here = [
        tenant
        for tenant in settings.tenants
        if not {namespace, ANY_NAMESPACE}.isdisjoint(tenant.namespaces)
    ]
    if not here:
        raise DeclinedError(
            f"the webhook knows no tenant for the namespace {namespace}: add it to one of `tenants`"
            " in its settings"
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
        run_as_user=user,
        run_as_group=group,
        is_guaranteed=all(
            one.resources is not None and one.resources.is_guaranteed
            for one in pod.spec.all_containers
        ),
        instance_id=_instance_id(pod, namespace, is_followed=service is not None),
        service=service,
    )


def _size(wished: float | None, default: float, most: float, name: str) -> float:
    if wished is not None and wished > most:
        raise DeclinedError(
            f"{name}={wished:g} is above the {most:g} that the webhook gives a pod: ask for less"
        )
    return default if wished is None else wished


def _tenant_of(here: Sequence[TenantEntry], namespace: str, wished: str | None) -> TenantEntry:
    for tenant in here:
        if wished in (None, tenant.name):
            return tenant
    raise DeclinedError(
        f"{TENANT}={wished!r} is no tenant of the namespace {namespace}: its tenants are"
        f" {', '.join(t.name for t in here)}"
    )


def _user_of(
    settings: WebhookSettings, pod: Pod, request: PodRequest, engine: int
) -> tuple[int | None, int | None]:
    """Sidecar and vLLM share files, so they are one user where it is known whom vLLM runs as.
    Root may open everything anyway.
    """
    container = pod.spec.containers[engine].securityContext
    whole = pod.spec.securityContext
    users = [request.run_as_user, container and container.runAsUser, whole and whole.runAsUser]
    groups = [container and container.runAsGroup, whole and whole.runAsGroup]
    user = next((one for one in users if one is not None), None)
    group = next((one for one in groups if one is not None), None)
    return user or settings.run_as_user, group or None


def _instance_id(pod: Pod, namespace: str, *, is_followed: bool) -> str:
    """Endpoints have the names of pods, of one namespace; else two may have one. What would be
    too long is the pod's uid instead.
    """
    name = pod.metadata.name or f"{pod.metadata.generateName or ''}{'x' * MAX_GENERATED_CHARS}"
    if is_followed:
        return "$(POD_NAME)" if len(name) <= MAX_INSTANCE_ID_CHARS else "$(POD_UID)"
    return (
        "$(POD_NAMESPACE).$(POD_NAME)"
        if len(namespace) + 1 + len(name) <= MAX_INSTANCE_ID_CHARS
        else "$(POD_UID)"
    )
