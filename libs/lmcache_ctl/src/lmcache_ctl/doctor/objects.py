"""Check a release's Kubernetes objects: pods run, volumes are bound, autoscalers can work."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

from lmcache_ctl.doctor.configuration import ALLOCATOR, ALLOCATOR_FIX, allocator_problem
from lmcache_ctl.doctor.findings import Finding, Subject
from lmcache_ctl.errors import CtlError
from lmcache_ctl.kube.access import KubeApi
from lmcache_ctl.kube.pods import OF_THE_CHART, SIDECAR_CONTAINERS, containers_of, pods_of, selector
from lmcache_ctl.options import CtlSettings

CHECK: Final = "kubernetes"
MANY_RESTARTS: Final = 3
CLAIMS: Final = "app.kubernetes.io/component=storage"
"""A claim has only those labels that a StatefulSet may not change."""


def check_objects(settings: CtlSettings) -> list[Finding]:
    """Check pods, their owners and claims; an API that refuses is a finding."""
    with KubeApi(settings) as api:
        subject = Subject(CHECK, api.place)
        try:
            pods = pods_of(api, settings.release)
        except CtlError as exc:
            return [subject.error(str(exc), "see docs/ctl.md, Kubernetes")]
        if not pods:
            fix = f"{api.how_to_look_elsewhere}; lmcachectl status -A shows where releases are"
            return [subject.error(f"no pod has the label {OF_THE_CHART}", fix)]
        found = [one for pod in pods for one in _of_pod(pod)]
        return [*found, *_of_owners(api, settings.release), *_of_claims(api, settings.release)]


def _of_pod(pod: Any) -> Iterator[Finding]:
    name = pod.metadata.name
    subject = Subject(CHECK, f"pod {name}")
    ready = next((one for one in pod.status.conditions or () if one.type == "Ready"), None)
    if pod.status.phase == "Succeeded":
        return
    statuses = [*(pod.status.init_container_statuses or ()), *(pod.status.container_statuses or ())]
    if ready is None or ready.status != "True":
        message = ready.message if ready is not None else None
        what = _waits(statuses) or message or f"its phase is {pod.status.phase}"
        yield subject.error(f"not ready: {what}", f"kubectl describe pod {name}")
    else:
        yield subject.ok("ready")
    for status in statuses:
        if status.restart_count > MANY_RESTARTS:
            last = getattr(getattr(status, "last_state", None), "terminated", None)
            why = "" if last is None else f" (the last time: {last.reason}, code {last.exit_code})"
            what = f"container {status.name} has restarted {status.restart_count} times{why}"
            fix = (
                f"kubectl logs {name} -c {status.name} --previous; after OOMKilled"
                " raise its memory limit"
            )
            yield subject.warning(what, fix)
    containers = containers_of(pod)
    if any(one.name in SIDECAR_CONTAINERS for one in containers):
        for container in containers:
            conf = {one.name: one.value for one in container.env or ()}.get(ALLOCATOR)
            if conf is not None and (problem := allocator_problem(conf)):
                yield subject.error(f"container {container.name}: {problem}", ALLOCATOR_FIX)
    for container in containers:
        requests = container.resources.requests if container.resources is not None else None
        if "cpu" not in (requests or {}):
            fix = (
                "give it one in the values: an autoscaler by CPU does nothing while a container of"
                " the pod has none"
            )
            yield subject.warning(f"container {container.name} has no CPU request", fix)


def _waits(statuses: Sequence[Any]) -> str:
    """Return what a container is waiting for, such as its image."""
    for status in statuses:
        waiting = status.state.waiting if status.state is not None else None
        if waiting is not None and waiting.reason not in ("PodInitializing", "ContainerCreating"):
            message = f", {waiting.message}" if waiting.message else ""
            return f"container {status.name} waits: {waiting.reason}{message}"
    return ""


def _of_owners(api: KubeApi, release: str | None) -> Iterator[Finding]:
    apps = api.apps
    for kind, method in (
        ("deployment", apps.list_namespaced_deployment),
        ("statefulset", apps.list_namespaced_stateful_set),
    ):
        try:
            owners = api.list(method, f"{kind}s", selector(OF_THE_CHART, release))
        except CtlError as exc:
            yield Subject(CHECK, f"{kind}s").note(f"not checked: {exc}")
            continue
        for owner in owners:
            wanted, ready = owner.spec.replicas or 0, owner.status.ready_replicas or 0
            subject = Subject(CHECK, f"{kind} {owner.metadata.name}")
            what = f"{ready} of {wanted} replicas are ready"
            if ready < wanted:
                fix = f"kubectl rollout status {kind}/{owner.metadata.name}"
                yield subject.error(what, fix)
            else:
                yield subject.ok(what)


def _of_claims(api: KubeApi, release: str | None) -> Iterator[Finding]:
    method, kind = api.core.list_namespaced_persistent_volume_claim, "persistentvolumeclaim"
    try:
        claims = api.list(method, f"{kind}s", selector(CLAIMS, release))
    except CtlError as exc:
        yield Subject(CHECK, f"{kind}s").note(f"not checked: {exc}")
        return
    for claim in claims:
        subject = Subject(CHECK, f"{kind} {claim.metadata.name}")
        if claim.status.phase == "Bound":
            yield subject.ok("bound")
        else:
            fix = (
                f"kubectl describe pvc {claim.metadata.name}; the cluster needs a storage class"
                " that makes volumes"
            )
            yield subject.error(f"its phase is {claim.status.phase}", fix)
