"""Kubernetes objects of a release: do its pods run, have volumes been given, is every container
fit for an autoscaler.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from lmcache_ctl.doctor.findings import Finding, Level
from lmcache_ctl.errors import CtlError
from lmcache_ctl.kube.access import Cluster
from lmcache_ctl.kube.pods import OF_THE_CHART, RELEASE, pods_of
from lmcache_ctl.settings import CtlSettings

CHECK: Final = "kubernetes"
MANY_RESTARTS: Final = 3
CLAIMS: Final = "app.kubernetes.io/component=storage"
"""A claim has only those labels that a StatefulSet may not change."""


def check_objects(settings: CtlSettings) -> list[Finding]:
    """All checks of this module; an API that refuses is a finding."""
    with Cluster(settings) as cluster:
        return _of_namespace(cluster, settings.release)


def _of_namespace(cluster: Cluster, release: str | None) -> list[Finding]:
    where = f"namespace {cluster.namespace}"
    try:
        pods = pods_of(cluster, release)
    except CtlError as exc:
        return [Finding(Level.ERROR, CHECK, where, str(exc), "see docs/ctl.md, Kubernetes")]
    if not pods:
        return [
            Finding(
                Level.ERROR,
                CHECK,
                where,
                f"no pod has the label {OF_THE_CHART}",
                "give the release's namespace by --namespace",
            )
        ]
    found = [one for pod in pods for one in _of_pod(pod)]
    return found + list(_of_owners(cluster, release)) + list(_of_claims(cluster, release))


def _of_pod(pod: Any) -> Iterator[Finding]:
    where = f"pod {pod.metadata.name}"
    ready = next((one for one in pod.status.conditions or () if one.type == "Ready"), None)
    if pod.status.phase == "Succeeded":
        return
    if ready is None or ready.status != "True":
        what = (
            _waits(pod)
            or (ready.message if ready is not None else None)
            or f"its phase is {pod.status.phase}"
        )
        yield Finding(
            Level.ERROR,
            CHECK,
            where,
            f"not ready: {what}",
            f"kubectl describe pod {pod.metadata.name}",
        )
    else:
        yield Finding(Level.OK, CHECK, where, "ready")
    for status in [
        *(pod.status.init_container_statuses or ()),
        *(pod.status.container_statuses or ()),
    ]:
        if status.restart_count > MANY_RESTARTS:
            last = getattr(getattr(status, "last_state", None), "terminated", None)
            why = "" if last is None else f" (the last time: {last.reason}, code {last.exit_code})"
            fix = (
                f"kubectl logs {pod.metadata.name} -c {status.name} --previous; after OOMKilled"
                " raise its memory limit"
            )
            yield Finding(
                Level.WARNING,
                CHECK,
                where,
                f"container {status.name} has restarted {status.restart_count} times{why}",
                fix,
            )
    for container in [*(pod.spec.init_containers or ()), *(pod.spec.containers or ())]:
        requests = container.resources.requests if container.resources is not None else None
        if "cpu" not in (requests or {}):
            fix = (
                "give it one in the values: an autoscaler by CPU does nothing while a container of"
                " the pod has none"
            )
            yield Finding(
                Level.WARNING, CHECK, where, f"container {container.name} has no CPU request", fix
            )


def _waits(pod: Any) -> str:
    """What a container is waiting for, such as its image."""
    for status in [
        *(pod.status.init_container_statuses or ()),
        *(pod.status.container_statuses or ()),
    ]:
        waiting = status.state.waiting if status.state is not None else None
        if waiting is not None and waiting.reason not in ("PodInitializing", "ContainerCreating"):
            return f"container {status.name} waits: {waiting.reason}" + (
                f", {waiting.message}" if waiting.message else ""
            )
    return ""


def _of_owners(cluster: Cluster, release: str | None) -> Iterator[Finding]:
    apps = cluster.apps
    for what, method in (
        ("deployments", apps.list_namespaced_deployment),
        ("statefulsets", apps.list_namespaced_stateful_set),
    ):
        try:
            owners = cluster.list(method, what, _selector(release, OF_THE_CHART))
        except CtlError as exc:
            yield Finding(Level.NOTE, CHECK, what, f"not checked: {exc}")
            continue
        for owner in owners:
            wanted, ready = owner.spec.replicas or 0, owner.status.ready_replicas or 0
            where = f"{what.removesuffix('s')} {owner.metadata.name}"
            if ready < wanted:
                fix = f"kubectl rollout status {what.removesuffix('s')}/{owner.metadata.name}"
                yield Finding(
                    Level.ERROR, CHECK, where, f"{ready} of {wanted} replicas are ready", fix
                )
            else:
                yield Finding(Level.OK, CHECK, where, f"{ready} of {wanted} replicas are ready")


def _of_claims(cluster: Cluster, release: str | None) -> Iterator[Finding]:
    core = cluster.core
    try:
        claims = cluster.list(
            core.list_namespaced_persistent_volume_claim,
            "persistentvolumeclaims",
            _selector(release, CLAIMS),
        )
    except CtlError as exc:
        yield Finding(Level.NOTE, CHECK, "persistentvolumeclaims", f"not checked: {exc}")
        return
    for claim in claims:
        where = f"persistentvolumeclaim {claim.metadata.name}"
        if claim.status.phase == "Bound":
            yield Finding(Level.OK, CHECK, where, "bound")
        else:
            fix = (
                f"kubectl describe pvc {claim.metadata.name}; the cluster needs a storage class"
                " that makes volumes"
            )
            yield Finding(Level.ERROR, CHECK, where, f"its phase is {claim.status.phase}", fix)


def _selector(release: str | None, labels: str) -> str:
    return labels if release is None else f"{labels},{RELEASE}={release}"
