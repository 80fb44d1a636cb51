"""From a pod to a patch."""

from __future__ import annotations

import posixpath
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from pydantic import ValidationError

from lmcache_webhook.injection.command_line import find_engine, names_our_connector, plan_arguments
from lmcache_webhook.injection.patch import Operation, Patch, add_python_path
from lmcache_webhook.injection.plan import (
    INJECTED,
    SIDECARS,
    STATUS,
    InjectionOptions,
    PodPlan,
    is_asked_for,
    plan_pod,
    read_request,
)
from lmcache_webhook.injection.pod import Container, DeclinedError, Pod, PodSpec, VolumeMount
from lmcache_webhook.injection.sidecar import (
    PORTS,
    PYTHON_PATH,
    SIDECAR,
    engine_mounts,
    payload_container,
    sidecar_container,
    transfer_config,
    volumes_of,
)

Verdict = Literal["injected", "declined", "unchanged", "unreadable"]

MAX_STATUS_CHARS: Final = 1000


@dataclass(frozen=True, slots=True)
class PodReview:
    """What becomes of a pod.

    Attributes:
        verdict: `injected`; `declined` (it asked, and stays as it is but for the annotation that
            says why); `unchanged` (it did not ask, or has it all already); `unreadable` (it is no
            pod that we can read).
        operations: JSON patch.
        reason: For people; empty where nothing was to do.
    """

    verdict: Verdict
    operations: list[Operation] = field(default_factory=list)
    reason: str = ""


def review_pod(options: InjectionOptions, document: Mapping[str, Any], namespace: str) -> PodReview:
    """Decide what becomes of a pod. Raises nothing, whatever the document is.

    Args:
        options: Of the webhook.
        document: The pod, as the API server sends it; not changed.
        namespace: Where it is to be.
    """
    try:
        pod = Pod.model_validate(document)
    except ValidationError as exc:
        return PodReview(
            "unreadable",
            reason=(
                f"this is no pod that the webhook can read: {exc.error_count()} of its members"
                " are not"
            ),
        )
    if not is_asked_for(pod.metadata) or any(
        one.name == SIDECAR for one in pod.spec.all_containers
    ):
        return PodReview("unchanged")
    patch = Patch(document)
    try:
        reason = _inject(patch, options, pod, namespace)[:MAX_STATUS_CHARS]
    except DeclinedError as exc:
        patch = Patch(document)  # nothing of what was begun
        reason = f"not injected: {exc}"[:MAX_STATUS_CHARS]
        patch.put(("metadata", "annotations", STATUS), reason)
        return PodReview("declined", patch.operations, reason)
    patch.put(("metadata", "annotations", STATUS), reason)
    return PodReview("injected", patch.operations, reason)


def _inject(patch: Patch, options: InjectionOptions, pod: Pod, namespace: str) -> str:
    annotations = pod.metadata.annotations or {}
    request = read_request(annotations)
    _check_pod(pod.spec)
    index, engine = find_engine(pod.spec, request.container)
    plan = plan_pod(options, pod, namespace, request, index)
    arguments = plan_arguments(engine, transfer_config())
    _check_names(pod.spec, engine, plan)

    patch.put(("metadata", "labels", INJECTED), "true")
    if plan.service is not None:
        patch.put(("metadata", "labels", SIDECARS), plan.service)
    for volume in volumes_of(plan):
        patch.append(("spec", "volumes"), volume)
    # Behind the others: a mesh's proxy, which is there for the network, starts before ours and ends
    # after it.
    for container in (payload_container(plan), sidecar_container(plan)):
        patch.append(("spec", "initContainers"), container)
    at = ("spec", "containers", index)
    for argument in arguments:
        patch.append((*at, "args"), argument)
    add_python_path(patch, at, engine, PYTHON_PATH)
    for mount in engine_mounts():
        patch.append((*at, "volumeMounts"), mount)
    return _report(engine, plan, has_arguments=bool(arguments))


def _report(engine: Container, plan: PodPlan, *, has_arguments: bool) -> str:
    text = (
        f"injected: the container {engine.name} shares {plan.arena_gb:g} GiB of memory with its"
        f" sidecar, tenant {plan.tenant.name}"
    )
    if names_our_connector(engine):
        text += "; its command line is as it was, since it names the connector already"
    elif not has_arguments:
        text += "; its command line is as it was, since what it runs is not vLLM's server itself"
    return text


def _check_pod(spec: PodSpec) -> None:
    """Refuse a pod that would not come up, or would lose something, with a sidecar.

    Raises:
        DeclinedError: This is one.
    """
    if spec.os is not None and spec.os.name != "linux":
        raise DeclinedError(f"the pod is for {spec.os.name}: the sidecar runs on Linux")
    if spec.hostNetwork:
        raise DeclinedError(
            "the pod uses its node's network, where two pods' sidecars would want the same ports:"
            " leave hostNetwork out"
        )
    if spec.resources and (spec.resources.get("limits") or spec.resources.get("requests")):
        raise DeclinedError(
            "the pod has resources of its own (spec.resources), into which the sidecar's would have"
            " to fit: give them to the containers"
        )


def _check_names(spec: PodSpec, engine: Container, plan: PodPlan) -> None:
    """Refuse a pod that has something by the name of what is added, in another sense.

    Raises:
        DeclinedError: It is.
    """
    volumes = {volume.name for volume in spec.volumes or []}
    containers = {one.name for one in spec.all_containers}
    ports = {port.containerPort for one in spec.all_containers for port in one.ports or []}
    ours = (
        ("volume", [volume["name"] for volume in volumes_of(plan)], volumes),
        ("container", [payload_container(plan)["name"], SIDECAR], containers),
        ("port", PORTS, ports),
    )
    for kind, wanted, there in ours:
        for name in wanted:
            if name in there:
                raise DeclinedError(
                    f"the pod has a {kind} {name} already, which the sidecar needs for itself: give"
                    " it another one"
                )
    for mount in engine.volumeMounts or []:
        for place in (one["mountPath"] for one in engine_mounts()):
            _check_mount(mount, place)


def _check_mount(mount: VolumeMount, place: str) -> None:
    path = posixpath.normpath(f"/{mount.mountPath.strip('/')}")
    if _is_within(path, place):
        raise DeclinedError(
            f"the pod has a mount {mount.mountPath} already, which the sidecar needs for itself:"
            " give it another one"
        )
    if mount.readOnly and _is_within(place, path):
        raise DeclinedError(
            f"the pod has a read-only mount {mount.mountPath}, below which {place} cannot be made:"
            " give it another one"
        )


def _is_within(path: str, directory: str) -> bool:
    """Like PurePath.is_relative_to, which since Python 3.12 takes time quadratic in the parts of
    a path.
    """
    return path == directory or path.startswith(f"{directory.rstrip('/')}/")
