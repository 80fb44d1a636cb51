"""From a pod to a patch."""

from __future__ import annotations

import dataclasses
import json
import math
import posixpath
import shlex
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from lmcache_core.integrations.vllm.releases import LEAST, LEAST_WITH_TIERS
from pydantic import ValidationError

from lmcache_webhook.injection.command_line import (
    SCRIPT_VARIABLE,
    engine_kwargs,
    find_engine,
    find_plain_script,
    names_our_connector,
    plan_arguments,
    plan_script_variable,
    refuse_old_vllm,
    runs_ray,
    runs_sglang,
    words_of,
)
from lmcache_webhook.injection.connector_options import (
    CarriedOver,
    ReplaceableConnector,
    carry_over,
    check_options,
    find_lmcache,
)
from lmcache_webhook.injection.kv_events import OPTION as EVENTS_OPTION
from lmcache_webhook.injection.kv_events import EventsPlan, plan_events
from lmcache_webhook.injection.patch import Operation, Patch, extend_variable
from lmcache_webhook.injection.plan import (
    CONNECTOR,
    INJECTED,
    MIN_ARENA_GB,
    REPLACE,
    SIDECARS,
    STATUS,
    InjectionOptions,
    OtherNamespaceError,
    PodPlan,
    PodRequest,
    host_memory,
    is_asked_for,
    is_shm,
    plan_pod,
    read_request,
)
from lmcache_webhook.injection.pod import (
    Container,
    DeclinedError,
    Pod,
    PodSpec,
    VolumeMount,
    amount_of,
)
from lmcache_webhook.injection.sidecar import (
    PORTS,
    PYTHON_PATH,
    SIDECAR,
    engine_mounts,
    offloading_config,
    payload_container,
    sidecar_container,
    transfer_config,
    volumes_of,
    with_kv_events,
)

Verdict = Literal["injected", "declined", "unchanged", "unreadable"]

MAX_STATUS_CHARS: Final = 1000


@dataclass(frozen=True, slots=True)
class PodReview:
    """The result of a pod's review.

    Attributes:
        verdict: `injected`; `declined` (it asked, and is unchanged but for the annotation that
            says why); `unchanged` (it did not ask, or has it all already); `unreadable` (it is no
            pod that we can read).
        operations: JSON patch.
        reason: For people; empty if there was nothing to do.
        is_warned_of: Whether a declined pod's creator is warned: not of a pod that is probably
            another release's.
    """

    verdict: Verdict
    operations: list[Operation] = field(default_factory=list)
    reason: str = ""
    is_warned_of: bool = True


def review_pod(options: InjectionOptions, document: Mapping[str, Any], namespace: str) -> PodReview:
    """Decide what to do with a pod. Never raise, whatever the document contains.

    Args:
        document: The pod, as the API server sends it; not changed.
    """
    try:
        pod = Pod.model_validate(document)
    except ValidationError as exc:
        return PodReview(
            "unreadable",
            reason=(
                f"this is not a pod that the webhook can read: {exc.error_count()} of its members"
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
        patch = Patch(document)  # drop the partial patch
        reason = f"not injected: {exc}"[:MAX_STATUS_CHARS]
        patch.put(("metadata", "annotations", STATUS), reason)
        is_ours = not isinstance(exc, OtherNamespaceError)
        return PodReview("declined", patch.operations, reason, is_ours)
    patch.put(("metadata", "annotations", STATUS), reason)
    return PodReview("injected", patch.operations, reason)


def _inject(patch: Patch, options: InjectionOptions, pod: Pod, namespace: str) -> str:
    annotations = pod.metadata.annotations or {}
    request = read_request(annotations)
    _check_pod(pod.spec)
    host_memory_gb = host_memory(options.settings, request)
    config = offloading_config(host_memory_gb) if host_memory_gb else transfer_config()
    index, engine = find_engine(pod.spec, request.container, config)
    is_sglang = runs_sglang(engine)
    if is_sglang:
        request, host_memory_gb = _without_offloading(request), 0.0
    if not names_our_connector(engine):  # else it would start without the module that it names
        refuse_old_vllm(engine, LEAST_WITH_TIERS if host_memory_gb else LEAST)
    if request.connector is None and names_our_connector(engine):
        # Only its author knows which one that is, and gives it its memory.
        request = dataclasses.replace(request, connector="lmcache")
    theirs = find_lmcache(engine) if request.replace_connector else None
    carried = None
    at = ("spec", "containers", index)
    if theirs is not None:
        carried = carry_over(engine, theirs)
        request = _with_sizes(request, carried)
        engine = _without(patch, at, engine, theirs, carried)
        config = (
            offloading_config(host_memory_gb, carried.members)
            if host_memory_gb
            else transfer_config(carried.extra, carried.members)
        )
    plan = plan_pod(options, pod, namespace, request, index)
    arguments = plan_arguments(engine, config)
    script = find_plain_script(engine) if arguments else None
    in_script = plan_script_variable(engine, config)
    events = (
        EventsPlan()
        if is_sglang
        else plan_events(options.settings, pod.spec, engine, is_in_script=bool(in_script))
    )
    if events.is_told:
        config = with_kv_events(config)
        arguments = plan_arguments(engine, config)
        in_script = plan_script_variable(engine, config)
    if events.config is not None and arguments:
        arguments += (EVENTS_OPTION, json.dumps(events.config, separators=(",", ":")))
    if events.config is not None and in_script:
        in_script = " ".join([in_script, *words_of(EVENTS_OPTION, events.config)])
    check_options(engine, carried.extra if carried else {})
    _check_names(pod.spec, engine, plan)

    patch.put(("metadata", "labels", INJECTED), "true")
    if plan.service is not None:
        patch.put(("metadata", "labels", SIDECARS), plan.service)
    for volume in volumes_of(plan):
        patch.append(("spec", "volumes"), volume)
    # After the others: a mesh's proxy, which provides the network, starts before ours and ends
    # after it.
    for container in (payload_container(plan), sidecar_container(plan)):
        patch.append(("spec", "initContainers"), container)
    if script is not None:
        patch.replace((*at, *script.place), f"{script.text} {shlex.join(arguments)}")
    else:
        for argument in arguments:
            patch.append((*at, "args"), argument)
    for port in events.ports if arguments or in_script else ():
        patch.append((*at, "ports"), {"name": f"lmcache-{port}", "containerPort": port})
    if in_script:
        extend_variable(patch, at, SCRIPT_VARIABLE, in_script, " ")
    extend_variable(patch, at, "PYTHONPATH", PYTHON_PATH, ":")
    for mount in engine_mounts(plan):
        patch.append((*at, "volumeMounts"), mount)
    if plan.host_memory_gb:
        _add_host_memory(patch, pod.spec, at, engine, plan)
    text = (
        f"injected: the container {engine.name} shares {plan.arena_gb:g} GiB of memory with its"
        f" sidecar, tenant {plan.tenant.name}"
    )
    if theirs is not None and carried is not None:
        text += f"; replaced {theirs.name}"
        left_out = [*carried.left_out, *(carried.extra if host_memory_gb else ())]
        if left_out:
            text += f", not carried over: {', '.join(left_out)}"
    if not arguments:
        text += _why_no_arguments(engine, config, events, bool(in_script))
    return text + (events.said if arguments or in_script else "")


def _without_offloading(request: PodRequest) -> PodRequest:
    """Return what a pod with SGLang requests.

    Raises:
        DeclinedError: It requests what only vLLM has.
    """
    if request.connector == "offloading-tier" or request.replace_connector:
        name = REPLACE if request.replace_connector else CONNECTOR
        raise DeclinedError(f"the pod runs SGLang, and {name} is about vLLM: remove it")
    return dataclasses.replace(request, connector="lmcache")


def _add_host_memory(
    patch: Patch, spec: PodSpec, at: tuple[str | int, ...], engine: Container, plan: PodPlan
) -> None:
    """Add vLLM's host memory to what its container may have: to its memory, and to the volume in
    which vLLM keeps it, if that is the pod's own.
    """
    places = [(*at, "resources", part, "memory") for part in ("requests", "limits")]
    shm = {mount.name for mount in engine.volumeMounts or () if is_shm(mount)}
    places += [
        ("spec", "volumes", index, "emptyDir", "sizeLimit")
        for index, volume in enumerate(spec.volumes or ())
        if volume.name in shm
    ]
    for place in places:
        amount = amount_of(patch.at(place))
        if amount is not None:
            sum_mb = math.ceil(amount / (1 << 20) + math.ceil(plan.host_memory_gb * 1024))
            patch.put(place, f"{sum_mb}Mi")


def _with_sizes(request: PodRequest, carried: CarriedOver) -> PodRequest:
    arena_gb = carried.arena_gb and max(carried.arena_gb, MIN_ARENA_GB)
    return dataclasses.replace(
        request,
        arena_gb=arena_gb if request.arena_gb is None else request.arena_gb,
        disk_gb=carried.disk_gb if request.disk_gb is None else request.disk_gb,
    )


def _without(
    patch: Patch,
    at: tuple[str | int, ...],
    engine: Container,
    theirs: ReplaceableConnector,
    carried: CarriedOver,
) -> Container:
    """Remove LMCache's connector and the variables of its tiers from a container, in the patch and
    in the returned container.
    """
    removed = {*theirs.words, *(("env", index) for index in carried.variables)}
    changed: dict[str, list[Any]] = {}
    for member in sorted({member for member, _ in removed}):
        # One operation for all items: one per item would take quadratic time.
        patch.put((*at, member), _kept(patch.at((*at, member)), member, removed))
        changed[member] = _kept(getattr(engine, member), member, removed)
    return engine.model_copy(update=changed)


def _kept(items: Sequence[Any], member: str, removed: Set[tuple[str, int]]) -> list[Any]:
    return [item for index, item in enumerate(items) if (member, index) not in removed]


def _why_no_arguments(
    engine: Container, config: Mapping[str, Any], events: EventsPlan, has_variable: bool
) -> str:
    if has_variable:
        return f"; its script gets the connector in the variable {SCRIPT_VARIABLE}"
    text = "; its command line is as it was, since "
    if names_our_connector(engine):
        return f"{text}it names the connector already"
    if runs_ray(engine):
        kwargs = engine_kwargs(config, events.config)
        return f"{text}Ray starts vLLM later: put into engine_kwargs {kwargs}"
    return f"{text}what it runs is not the engine's server itself"


def _check_pod(spec: PodSpec) -> None:
    """Refuse a pod that would not start, or would lose something, with a sidecar."""
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
    """Refuse a pod that already uses a name of the added objects for something else."""
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
        for place in (one["mountPath"] for one in engine_mounts(plan)):
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
    """Like `PurePath.is_relative_to`, which since Python 3.12 takes quadratic time in the number of
    parts.
    """
    return path == directory or path.startswith(f"{directory.rstrip('/')}/")
