"""Find which pods of a namespace are services, and ways to their ports."""

from __future__ import annotations

import base64
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final, NamedTuple, Self

from lmcache_ctl.errors import CtlError
from lmcache_ctl.kube.access import KubeApi
from lmcache_ctl.kube.forward import PodPort
from lmcache_ctl.options import CtlSettings
from lmcache_ctl.services import DEFAULT_PORTS, Endpoint, Kind

PART_OF: Final = ("app.kubernetes.io/part-of", "lmcache")
OF_THE_CHART: Final = "=".join(PART_OF)
INJECTED: Final = "lmcache.io/injected=true"
COMPONENT: Final = "app.kubernetes.io/component"
RELEASE: Final = "app.kubernetes.io/instance"
SIDECAR_CONTAINERS: Final = frozenset({"sidecar", "lmcache-sidecar"})
PORT_NAME: Final = "http"
MAX_FORWARDED: Final = 256
TOKENS_KEY: Final = "tokens.yaml"
"""Key of the services' tokens in the Secret that holds the operator's under the next key."""
OPERATOR_KEY: Final = "operator-token"
FORWARDED_NAME: Final = "localhost"
"""A name in all certificates of the chart: a forwarded connection ends there."""


class PodService(NamedTuple):
    """A service in a pod."""

    kind: Kind
    pod: str
    port: int
    problem: str
    token_secret: str
    name_prefix: str


def namespaces_of(settings: CtlSettings, kinds: Sequence[Kind]) -> list[str]:
    """Return the namespaces that have services of these kinds, injected sidecars too.

    Raises:
        CtlError: There is none, or the API cannot be reached, or refuses.
    """
    with KubeApi(settings) as api:
        api.namespace = ""
        found = {
            str(pod.metadata.namespace)
            for pod in pods_of(api, settings.release)
            if any(one.kind in kinds for one in services_in([pod]))
        }
        if not found:
            raise CtlError(nothing_in(api, kinds, settings.release))
    return sorted(found)


def nothing_in(api: KubeApi, kinds: Sequence[Kind], release: str | None) -> str:
    """Return the sentence for a place without services of these kinds."""
    what = "service" if len(kinds) == len(Kind) else " or ".join(kinds)
    whose = "a release" if release is None else f"release {release}"
    return f"no {what} of {whose} was found in {api.place}: {api.how_to_look_elsewhere}"


def pods_of(api: KubeApi, release: str | None) -> list[Any]:
    """Return the pods of the chart, and those that the webhook has given a sidecar.

    Raises:
        CtlError: The API cannot be reached, or refuses.
    """
    core = api.core
    method = core.list_namespaced_pod if api.namespace else core.list_pod_for_all_namespaces
    found = api.list(method, "pods", selector(OF_THE_CHART, release))
    if release is None:
        known = {(pod.metadata.namespace, pod.metadata.name) for pod in found}
        found += [
            pod
            for pod in api.list(method, "pods", INJECTED)
            if (pod.metadata.namespace, pod.metadata.name) not in known
        ]
    return found


def selector(labels: str, release: str | None) -> str:
    """Return the selector of these labels, in one release where it is given."""
    return labels if release is None else f"{labels},{RELEASE}={release}"


def services_in(pods: Sequence[Any]) -> list[PodService]:
    """Return the services of these pods that are not over, and their REST ports."""
    found = []
    for pod in pods:
        kind, name, phase = _kind(pod), pod.metadata.name, pod.status.phase
        if kind is not None and phase not in ("Succeeded", "Failed"):
            describe = f"kubectl describe pod {name} -n {pod.metadata.namespace}"
            waits = f"its pod is {phase}: {describe}" if phase != "Running" else ""
            port = _port(pod, kind)
            found.append(PodService(kind, name, port, waits, _token_secret(pod), _prefix(pod)))
    return found


class PodWays:
    """Forwards the services of a namespace, each to a socket in a private directory, until closed.

    Args:
        settings: With the token to send to these pods; without one, each gets the operator's token
            of the Secret in its own namespace.

    Raises:
        UsageError: The kubeconfig cannot be used.
    """

    def __init__(self, settings: CtlSettings, kinds: Sequence[Kind]) -> None:
        self._settings = settings
        self._kinds = kinds
        self._open = ExitStack()
        self._api = self._open.enter_context(KubeApi(settings))
        self._directory = Path(
            self._open.enter_context(tempfile.TemporaryDirectory(prefix="lmcachectl-"))
        )  # only its owner may enter it
        self._tokens: dict[str, str | None] = {}
        self._token_hints: dict[str, str] = {}

    def __enter__(self) -> Self:
        """Forwards nothing before `find`."""
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def nothing_found(self) -> str:
        """Return where this looks for pods, and how to look elsewhere, for when there are none."""
        return nothing_in(self._api, self._kinds, self._settings.release)

    def find(self) -> list[Endpoint]:
        """Return the services, and begin to forward them.

        Raises:
            CtlError: The API cannot be reached, or refuses, or there are too many.
        """
        pods = services_in(pods_of(self._api, self._settings.release))
        found = [one for one in pods if one.kind in self._kinds]
        if len(found) > MAX_FORWARDED:
            raise CtlError(
                f"{len(found)} pods are more than the {MAX_FORWARDED} that are asked at once: name"
                " a --release"
            )
        return [
            self._opened(one, self._directory / f"{number}.sock")
            for number, one in enumerate(found)
        ]

    def _opened(self, one: PodService, path: Path) -> Endpoint:
        tls_name = self._settings.tls_name or FORWARDED_NAME
        token = self._settings.token or self._operator_token(one.token_secret)
        if not one.problem:
            self._open.enter_context(PodPort(self._api, one.pod, one.port, path))
        scheme = "http" if self._settings.tls is None else "https"
        return Endpoint(
            one.kind,
            one.pod,
            f"{scheme}://{one.pod}.{self._api.namespace}:{one.port}",
            tls_name,
            problem=one.problem,
            socket_path=str(path),
            pod=one.pod,
            namespace=self._api.namespace,
            name_prefix=one.name_prefix,
            token=token,
            token_secret=one.token_secret,
            token_hint=self._settings.token_hint + self._token_hints.get(one.token_secret, ""),
            origin=f"; it is in {self._api.place}: {self._api.how_to_look_elsewhere}",
        )

    def _operator_token(self, secret: str) -> str | None:
        """Return the release's token, if this account may read it."""
        if not secret:
            return None
        if secret not in self._tokens:
            read, text, why = self._api.core.read_namespaced_secret, "", f"has no {OPERATOR_KEY}"
            try:
                found = self._api.call(f"secrets/{secret}", read, secret, self._api.namespace)
                encoded = (found.data or {}).get(OPERATOR_KEY, "")
                text = base64.b64decode(encoded).decode("ascii").strip()
            except CtlError as exc:  # health needs no token
                why = f"was not read: {exc}"
            except ValueError:
                why = f"has an {OPERATOR_KEY} that is not text"
            if not text:
                self._token_hints[secret] = f"; the release's Secret {secret} {why}"
            self._tokens[secret] = text or None
        return self._tokens[secret]


def _kind(pod: Any) -> Kind | None:
    component = (pod.metadata.labels or {}).get(COMPONENT)
    if component in (Kind.LOOKUP, Kind.BROKER, Kind.STORAGE):
        return Kind(component)
    return (
        Kind.SIDECAR if any(one.name in SIDECAR_CONTAINERS for one in containers_of(pod)) else None
    )


def _prefix(pod: Any) -> str:
    """Return what the names of the release's pods begin with: what is in front of the component."""
    labels = pod.metadata.labels or {}
    if labels.get(PART_OF[0]) != PART_OF[1]:
        return ""
    before, found, _ = str(pod.metadata.name).partition(f"-{labels.get(COMPONENT)}-")
    return f"{before}-" if found else ""


def _port(pod: Any, kind: Kind) -> int:
    """Return its port; a sidecar's is on loopback and so not declared."""
    if kind is not Kind.SIDECAR:
        for container in containers_of(pod):
            for port in container.ports or ():
                if port.name == PORT_NAME:
                    return int(port.container_port)
    return DEFAULT_PORTS[kind]


def _token_secret(pod: Any) -> str:
    """Return the Secret that its services read their tokens from, "" where they ask for none."""
    for volume in pod.spec.volumes or ():
        for source in volume.projected.sources or () if volume.projected is not None else ():
            if source.secret is not None and any(
                item.key == TOKENS_KEY for item in source.secret.items or ()
            ):
                return str(source.secret.name)
    return ""


def containers_of(pod: Any) -> list[Any]:
    """Return all containers of a pod, those for its start too."""
    return [*(pod.spec.init_containers or ()), *(pod.spec.containers or ())]
