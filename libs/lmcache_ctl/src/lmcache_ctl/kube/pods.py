"""Which pods of a namespace are services, and at which port."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from lmcache_ctl.cluster.services import DEFAULT_PORTS, Kind, Service
from lmcache_ctl.errors import CtlError
from lmcache_ctl.kube.access import Cluster
from lmcache_ctl.kube.forward import PodPort
from lmcache_ctl.settings import CtlSettings

OF_THE_CHART: Final = "app.kubernetes.io/part-of=lmcache"
INJECTED: Final = "lmcache.io/inject=true"
COMPONENT: Final = "app.kubernetes.io/component"
RELEASE: Final = "app.kubernetes.io/instance"
SIDECAR_CONTAINERS: Final = frozenset({"sidecar", "lmcache-sidecar"})
PORT_NAME: Final = "http"
MAX_FORWARDED: Final = 256
FORWARDED_NAME: Final = "localhost"
"""What certificates of the chart name beside a pod's service: a forwarded connection ends there."""


class PodService(NamedTuple):
    """A service in a pod."""

    kind: Kind
    pod: str
    port: int
    problem: str


def pods_of(cluster: Cluster, release: str | None) -> list[Any]:
    """The pods of the chart, and those that the webhook has given a sidecar.

    Raises:
        CtlError: The API cannot be reached, or refuses.
    """
    core = cluster.core
    of_release = "" if release is None else f",{RELEASE}={release}"
    found = cluster.list(core.list_namespaced_pod, "pods", OF_THE_CHART + of_release)
    if release is None:
        names = {pod.metadata.name for pod in found}
        found += [pod for pod in cluster.list(core.list_namespaced_pod, "pods", INJECTED) if pod.metadata.name not in names]
    return found


def services_in(pods: Sequence[Any]) -> list[PodService]:
    """The services that run in these pods; those whose work is over are left out."""
    found = []
    for pod in pods:
        kind = _kind(pod)
        if kind is not None and pod.status.phase not in ("Succeeded", "Failed"):
            waits = "" if pod.status.phase == "Running" else f"its pod is {pod.status.phase}: kubectl describe pod {pod.metadata.name}"
            found.append(PodService(kind, pod.metadata.name, _port(pod, kind), waits))
    return found


@contextlib.contextmanager
def forwarded_services(settings: CtlSettings, kinds: Sequence[Kind]) -> Iterator[list[Service]]:
    """The services of a namespace, each behind a socket in a directory of its own, for as long as the block lasts.

    Raises:
        CtlError: The API cannot be reached, or refuses, or there are too many.
    """
    with contextlib.ExitStack() as ways:
        cluster = ways.enter_context(Cluster(settings))
        yield _forwarded(cluster, settings, kinds, ways)


def _forwarded(cluster: Cluster, settings: CtlSettings, kinds: Sequence[Kind], ways: contextlib.ExitStack) -> list[Service]:
    found = [one for one in services_in(pods_of(cluster, settings.release)) if one.kind in kinds]
    if len(found) > MAX_FORWARDED:
        raise CtlError(f"{len(found)} pods are more than the {MAX_FORWARDED} that are asked at once: name a --release")
    scheme = "http" if settings.tls is None else "https"
    tls_name = settings.tls_name or FORWARDED_NAME
    directory = Path(ways.enter_context(tempfile.TemporaryDirectory(prefix="lmcachectl-")))  # only its owner may enter it
    services = []
    for number, one in enumerate(found):
        url = f"{scheme}://{one.pod}.{cluster.namespace}:{one.port}"
        path = directory / f"{number}.sock"
        if not one.problem:
            ways.enter_context(PodPort(cluster, one.pod, one.port, path))
        services.append(Service(one.kind, one.pod, url, tls_name, problem=one.problem, socket_path=str(path)))
    return services


def _kind(pod: Any) -> Kind | None:
    component = (pod.metadata.labels or {}).get(COMPONENT)
    if component in (Kind.LOOKUP, Kind.BROKER, Kind.STORAGE):
        return Kind(component)
    return Kind.SIDECAR if any(one.name in SIDECAR_CONTAINERS for one in _containers(pod)) else None


def _port(pod: Any, kind: Kind) -> int:
    """A sidecar's is on loopback and so not declared."""
    if kind is not Kind.SIDECAR:
        for container in _containers(pod):
            for port in container.ports or ():
                if port.name == PORT_NAME:
                    return int(port.container_port)
    return DEFAULT_PORTS[kind]


def _containers(pod: Any) -> list[Any]:
    return [*(pod.spec.init_containers or ()), *(pod.spec.containers or ())]
