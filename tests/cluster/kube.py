"""One namespace of a cluster, through the Kubernetes API."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import kubernetes
from kubernetes.stream import stream
from urllib3.exceptions import HTTPError

from tests.cluster.names import INSTANCE
from tests.cluster.waiting import ClusterError, progress, wait_until

Manifest = dict[str, Any]

CALL_TIMEOUT_S = 30
READ_TRIES = 4
"""How often what only reads is asked in all: a busy API server leaves a call without an answer."""
READ_PAUSE_S = 2.0
PAGE = 500
EXEC_TIMEOUT_S = 150
OWN = "lmcache-cluster-test"
"""Label of the namespaces that this suite makes, and deletes."""
STUCK_S = 60.0
"""For so long a failed pull may be one that succeeds when it is tried again."""
STUCK = {
    "ImagePullBackOff",
    "ErrImageNeverPull",
    "InvalidImageName",
    "CreateContainerConfigError",
    "CreateContainerError",
}
TRANSIENT_GROUPS = ("metrics.k8s.io", "events.k8s.io")
TRANSIENT_KINDS = ("Event", "Namespace")
ABSENT = (404, 405, 503)
"""Statuses of an API whose server is unavailable, or that only announces a kind."""


class ApiError(ClusterError):
    """The API server refused a call.

    Attributes:
        status: HTTP status.
    """

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class NoAnswerError(ClusterError):
    """The API server did not answer a call, or not to its end."""


class Cluster:
    """A namespace.

    Args:
        api: The client of a cluster.
        namespace: Its name.

    Attributes:
        incidents: What went wrong in the containers of all pods that were ever listed, by pod and
            container: restarts, lack of memory, eviction by the kubelet.
    """

    def __init__(self, api: Any, namespace: str) -> None:
        self._api = api
        self.namespace = namespace
        self.incidents: dict[str, str] = {}
        self._stuck_since: float | None = None

    @classmethod
    def from_kubeconfig(cls, path: Path, namespace: str) -> Cluster:
        """Use the current context of a kubeconfig.

        Raises:
            ClusterError: The file names no cluster, or the cluster does not answer.
        """
        try:
            made = cls(kubernetes.config.new_client_from_config(str(path)), namespace)
        except kubernetes.config.ConfigException as exc:
            raise ClusterError(f"{path}: {exc}") from exc
        made.call("GET", "/version")
        return made

    def close(self) -> None:
        """Close the connections."""
        self._api.rest_client.pool_manager.clear()

    def call(
        self,
        method: str,
        path: str,
        body: Manifest | None = None,
        query: Mapping[str, Any] | None = None,
        content_type: str = "application/json",
    ) -> Any:
        """Make one call; return its JSON, or text where the API has text. One that only reads is
        made again if it is not answered.

        Raises:
            ApiError: It was refused.
            NoAnswerError: It was not answered.
        """
        for _ in range(READ_TRIES - 1 if method == "GET" else 0):
            try:
                return self._call(method, path, body, query, content_type)
            except NoAnswerError as exc:
                progress(f"asked again: {exc}")
                time.sleep(READ_PAUSE_S)
        return self._call(method, path, body, query, content_type)

    def _call(
        self,
        method: str,
        path: str,
        body: Manifest | None,
        query: Mapping[str, Any] | None,
        content_type: str,
    ) -> Any:
        try:
            response = self._api.call_api(
                path,
                method,
                query_params=list((query or {}).items()),
                header_params={"Accept": "*/*", "Content-Type": content_type},
                body=body,
                auth_settings=["BearerToken"],
                _preload_content=False,
                _return_http_data_only=True,
                _request_timeout=CALL_TIMEOUT_S,
            )
            text = response.data.decode(errors="replace")
        except kubernetes.client.ApiException as exc:
            text = str(exc.body)[:1000]
            raise ApiError(exc.status, f"{method} {path}: {exc.status}: {text}") from exc
        except HTTPError as exc:
            raise NoAnswerError(f"{method} {path}: no answer: {exc}") from exc
        if "json" in response.headers.get("content-type", ""):
            return json.loads(text)
        return text

    def items(self, path: str, **query: str) -> list[Manifest]:
        """List all objects of a path, page by page."""
        found: list[Manifest] = []
        token = ""
        while True:
            asked: dict[str, Any] = {**query, "limit": PAGE}
            page = self.call("GET", path, query={**asked, "continue": token} if token else asked)
            found += page.get("items") or []
            token = page.get("metadata", {}).get("continue") or ""
            if not token:
                return found

    def path(self, plural: str, name: str = "", api: str = "api/v1") -> str:
        """Return the path of a kind, or of an object, in the namespace."""
        return f"/{api}/namespaces/{self.namespace}/{plural}" + (f"/{name}" if name else "")

    def create(self, plural: str, manifest: Manifest, api: str = "api/v1") -> None:
        """Create an object."""
        self.call("POST", self.path(plural, api=api), manifest)

    def serves(self, api: str) -> bool:
        """Return whether the cluster has an API, `monitoring.coreos.com/v1` for example."""
        try:
            self.call("GET", f"/apis/{api}")
        except ApiError as exc:
            if exc.status != 404:
                raise
            return False
        return True

    def delete(self, path: str, *, at_once: bool = False) -> None:
        """Delete an object, if it exists, and what it owns; `at_once` kills a pod."""
        how: Manifest = {"propagationPolicy": "Background"}
        try:
            self.call("DELETE", path, how | ({"gracePeriodSeconds": 0} if at_once else {}))
        except ApiError as exc:
            if exc.status != 404:
                raise

    # --- pods ---------------------------------------------------------------------------------

    def pods(self, selector: str = "") -> list[Manifest]:
        """List pods that have not ended."""
        found = self.items(self.path("pods"), **({"labelSelector": selector} if selector else {}))
        for pod in found:
            self.incidents |= incidents(pod)
        return [pod for pod in found if pod["status"].get("phase") not in ("Succeeded", "Failed")]

    def not_ready(self) -> str:
        """Return which workloads differ from their specification, "" if none.

        Raises:
            ClusterError: A pod cannot start, for example because its image does not exist.
        """
        pods = self.pods()
        self._check_stuck(pods)
        missing = [
            text
            for plural in ("deployments", "statefulsets")
            for one in self.items(self.path(plural, api="apis/apps/v1"))
            if (text := shortfall(plural, one))
        ]
        missing += [
            f"{name_of(pod)} is ending" for pod in pods if pod["metadata"].get("deletionTimestamp")
        ]
        return ", ".join(missing)

    def wait_ready(self, timeout_s: float) -> None:
        """Wait until every workload has all its pods ready, and no pod is ending."""
        wait_until(self.not_ready, "all pods ready", timeout_s)

    def ready_pods(self, selector: str, count: int, timeout_s: float) -> list[str]:
        """Wait for that many ready pods, no more and no fewer; return their names."""

        def missing() -> str:
            pods = self.pods(selector)
            self._check_stuck(pods)
            ready = sum(is_ready(pod) for pod in pods)
            return "" if ready == len(pods) == count else f"{ready} of {len(pods)} pods are ready"

        wait_until(missing, f"{count} pods of {selector}", timeout_s)
        return sorted(name_of(pod) for pod in self.pods(selector))

    def _check_stuck(self, pods: Sequence[Manifest]) -> None:
        """Raise `ClusterError` if pods have been unable to start for STUCK_S."""
        now, found = time.monotonic(), stuck(pods)
        self._stuck_since = (self._stuck_since or now) if found else None
        if self._stuck_since is not None and now - self._stuck_since >= STUCK_S:
            raise ClusterError(f"pods cannot start: {found}")

    def scale(self, plural: str, name: str, replicas: int) -> None:
        """Set the number of replicas of a `deployments` or `statefulsets` object."""
        self.call(
            "PATCH",
            self.path(plural, f"{name}/scale", "apis/apps/v1"),
            {"spec": {"replicas": replicas}},
            content_type="application/merge-patch+json",
        )

    def reviewed(self, pod: Manifest) -> Manifest:
        """Return a pod as admission would make it, without making it; its name may be taken."""
        metadata = {**pod["metadata"], "generateName": f"{name_of(pod)}-"}
        del metadata["name"]
        body = {**pod, "metadata": metadata}
        made: Manifest = self.call("POST", self.path("pods"), body, query={"dryRun": "All"})
        return made

    def other_nodes(self, node: str) -> list[str]:
        """Return the nodes to which pods of this one could go."""
        nodes = self.items("/api/v1/nodes")
        return [name_of(one) for one in nodes if name_of(one) != node and takes_pods(one)]

    @contextmanager
    def cordoned(self, node: str) -> Iterator[None]:
        """Keep pods from being scheduled to a node during the block, as `kubectl drain` does."""
        self._cordon(node, is_on=True)
        try:
            yield
        finally:
            self._cordon(node, is_on=False)

    def not_moved(self, node: str, selector: str, count: int) -> str:
        """Return which of that many pods are not ready on another node, "" if none.

        A pod whose volume ties it to the node cannot be, and is not waited for.
        """
        pods = self.pods(selector)
        missing = [f"{len(pods)} of {count} pods"] if len(pods) < count else []
        for pod in pods:
            where, why = pod["spec"].get("nodeName"), why_unscheduled(pod)
            is_tied = not where and "volume" in why.lower() and "node affinity" in why
            if where == node or not (is_ready(pod) or is_tied):
                missing.append(f"{name_of(pod)} on {where or 'no node'} {why}".strip())
        return ", ".join(missing)

    def _cordon(self, node: str, *, is_on: bool) -> None:
        self.call(
            "PATCH",
            f"/api/v1/nodes/{node}",
            {"spec": {"unschedulable": is_on or None}},
            content_type="application/merge-patch+json",
        )

    def evict(self, names: Sequence[str], timeout_s: float) -> None:
        """Evict pods as `kubectl drain` does: retry evictions that a budget forbids."""
        uids = {name_of(pod): pod["metadata"]["uid"] for pod in self.pods()}
        pending = {name: uids[name] for name in names}
        evicted = set[str]()

        def missing() -> str:
            current = {name_of(pod): pod["metadata"]["uid"] for pod in self.pods()}
            for name, uid in list(pending.items()):
                if current.get(name) != uid:
                    del pending[name]
                elif name not in evicted and self._evict(name):
                    evicted.add(name)
            waiting = [f"{name} ({'ends' if name in evicted else 'budget'})" for name in pending]
            return ", ".join(waiting)

        wait_until(missing, f"{len(names)} pods evicted", timeout_s)

    def _evict(self, name: str) -> bool:
        body = {
            "apiVersion": "policy/v1",
            "kind": "Eviction",
            "metadata": {"name": name, "namespace": self.namespace},
        }
        try:
            self.call("POST", self.path("pods", f"{name}/eviction"), body)
        except ApiError as exc:
            if exc.status not in (404, 429):
                raise
            return exc.status == 404
        return True

    def execute(self, pod: str, container: str, command: Sequence[str]) -> str:
        """Run a command in a container; return what it printed.

        Raises:
            ClusterError: It failed, or did not end in time.
        """
        socket = stream(
            kubernetes.client.CoreV1Api(self._api).connect_get_namespaced_pod_exec,
            pod,
            self.namespace,
            container=container,
            command=list(command),
            stdout=True,
            stderr=True,
            stdin=False,
            tty=False,
            _preload_content=False,
        )
        socket.run_forever(timeout=EXEC_TIMEOUT_S)
        is_open, output, errors = socket.is_open(), socket.read_stdout(), socket.read_stderr()
        status = None if is_open else socket.returncode
        socket.sock.shutdown()  # `close` does not close a socket that the server has closed
        if status != 0:
            how = f"did not end in {EXEC_TIMEOUT_S} s" if is_open else f"ended with {status}"
            raise ClusterError(f"{command[0]} in {pod} {how}: {output[-500:]}{errors[-1500:]}")
        return str(output)

    def logs(self, pod: str, container: str, lines: int = 5000, *, previous: bool = False) -> str:
        """Return the last lines of a container's log; "" where there is none."""
        query = {"container": container, "tailLines": lines}
        if previous:
            query["previous"] = "true"
        try:
            return str(self.call("GET", self.path("pods", f"{pod}/log"), query=query))
        except ApiError as exc:
            if exc.status not in (400, 404):
                raise
            return ""

    # --- namespace ----------------------------------------------------------------------------

    def create_namespace(self) -> None:
        """Create the namespace with the `restricted` standard enforced, and wait for its default
        objects.
        """
        labels = {
            OWN: "true",
            "pod-security.kubernetes.io/enforce": "restricted",
            "pod-security.kubernetes.io/warn": "restricted",
        }
        self.call(
            "POST", "/api/v1/namespaces", {"metadata": {"name": self.namespace, "labels": labels}}
        )

        def missing() -> str:
            names = {name_of(one) for one in self.items(self.path("serviceaccounts"))}
            names |= {name_of(one) for one in self.items(self.path("configmaps"))}
            return ", ".join(sorted({"default", "kube-root-ca.crt"} - names))

        wait_until(missing, f"namespace {self.namespace}", 60)

    def delete_namespace(self, timeout_s: float) -> None:
        """Delete the namespace of this run or an earlier one, if it exists.

        Raises:
            ClusterError: It exists, and no run of this suite made it.
        """
        path = f"/api/v1/namespaces/{self.namespace}"
        try:
            labels = self.call("GET", path)["metadata"].get("labels", {})
        except ApiError as exc:
            if exc.status != 404:
                raise
            return
        if OWN not in labels:
            raise ClusterError(
                f"the namespace {self.namespace} is not one of this suite (no label {OWN}):"
                " set NAMESPACE to another name"
            )
        self.delete(path)

        def missing() -> str:
            try:
                return f"phase {self.call('GET', path)['status'].get('phase')}"
            except ApiError as exc:
                if exc.status != 404:
                    raise
                return ""

        wait_until(missing, f"namespace {self.namespace} deleted", timeout_s)

    # --- leftovers ----------------------------------------------------------------------------

    def objects(self) -> set[str]:
        """List every object of the namespace, and every one outside that mentions it: of the
        cluster, or with the release's label in another namespace.

        Returns:
            `Kind/name`, or `Kind/namespace/name` in a namespace.
        """
        found = set[str]()
        for prefix, resource in self._listed():
            plural, kind, inside = resource["name"], resource["kind"], list[Manifest]()
            labelled = {"labelSelector": INSTANCE} if resource["namespaced"] else {}
            try:
                if resource["namespaced"]:
                    inside = self.items(f"{prefix}/namespaces/{self.namespace}/{plural}")
                everywhere = self.items(f"{prefix}/{plural}", **labelled)
            except ApiError as exc:
                if exc.status not in ABSENT:
                    raise
                progress(f"cannot look for leftovers of kind {kind}: {exc.status}")
                continue
            for one in [*inside, *(one for one in everywhere if mentions(one, self.namespace))]:
                namespace = one["metadata"].get("namespace", "")
                found.add("/".join(filter(None, (kind, namespace, name_of(one)))))
        return found

    def _listed(self) -> Iterable[tuple[str, Manifest]]:
        """Kinds that can be listed, and the path of their API; each kind once."""
        groups = self.call("GET", "/apis")["groups"]
        apis = [
            f"/apis/{group['preferredVersion']['groupVersion']}"
            for group in groups
            if group["name"] not in TRANSIENT_GROUPS
        ]
        for prefix in ("/api/v1", *apis):
            try:
                resources = self.call("GET", prefix)["resources"]
            except ApiError as exc:
                if exc.status not in ABSENT:
                    raise
                progress(f"cannot look for leftovers in {prefix}: {exc.status}")
                continue
            for resource in resources:
                is_listed = "/" not in resource["name"] and "list" in resource["verbs"]
                if is_listed and resource["kind"] not in TRANSIENT_KINDS:
                    yield prefix, resource

    # --- reports ------------------------------------------------------------------------------

    def describe(self) -> str:
        """Return pods, warnings and logs, for the report of a failure."""
        lines = []
        pods = self.items(self.path("pods"))
        for pod in sorted(pods, key=is_ready):
            lines.append(describe_pod(pod))
            for status in container_statuses(pod):
                container, is_first = status["name"], status.get("restartCount", 0) > 0
                num_lines = 20 if is_ready(pod) else 80
                if is_first:
                    lines.append(f"  log of {container} before its restart:")
                    lines.append(self.logs(name_of(pod), container, num_lines, previous=True))
                lines.append(f"  log of {container}:")
                lines.append(self.logs(name_of(pod), container, num_lines))
        lines.append("events that are warnings:")
        for event in self.items(self.path("events"), fieldSelector="type=Warning")[-40:]:
            about = event["involvedObject"]
            text = f"{event.get('reason')}: {event.get('message')}"
            lines.append(f"  {about.get('kind')}/{about.get('name')} x{event.get('count')} {text}")
        return "\n".join(lines)


def name_of(manifest: Manifest) -> str:
    """Return an object's name."""
    return str(manifest["metadata"]["name"])


def is_ready(pod: Manifest) -> bool:
    """Return whether a pod is ready and not terminating."""
    conditions = pod["status"].get("conditions") or []
    ready = any(one["type"] == "Ready" and one["status"] == "True" for one in conditions)
    return ready and not pod["metadata"].get("deletionTimestamp")


def container_statuses(pod: Manifest) -> list[Manifest]:
    """Return the statuses of all containers, init containers first."""
    status = pod["status"]
    found: list[Manifest] = status.get("initContainerStatuses") or []
    return [*found, *(status.get("containerStatuses") or [])]


def incidents(pod: Manifest) -> dict[str, str]:
    """Return what has gone wrong with a pod, and with which of its containers."""
    found, name = dict[str, str](), name_of(pod)
    if pod["status"].get("reason") == "Evicted":
        found[name] = f"evicted by the kubelet: {pod['status'].get('message')}"
    for status in container_statuses(pod):
        states = (status.get("lastState") or {}, status.get("state") or {})
        ends = [state["terminated"] for state in states if state.get("terminated")]
        num_restarts = status.get("restartCount", 0)
        if num_restarts or any(one.get("reason") == "OOMKilled" for one in ends):
            why = "; ".join(f"{one.get('reason')}, exit code {one.get('exitCode')}" for one in ends)
            found[f"{name}/{status['name']}"] = f"{num_restarts} restarts ({why})"
    return found


def takes_pods(node: Manifest) -> bool:
    """Return whether pods without tolerations are scheduled to a node."""
    spec, conditions = node["spec"], node["status"].get("conditions") or []
    is_tainted = any(one["effect"] != "PreferNoSchedule" for one in spec.get("taints") or [])
    is_unready = any(one["type"] == "Ready" and one["status"] != "True" for one in conditions)
    return not (spec.get("unschedulable") or is_tainted or is_unready)


def why_unscheduled(pod: Manifest) -> str:
    """Return why the scheduler has found no node for a pod, "" if it has not said."""
    for one in pod["status"].get("conditions") or []:
        if one["type"] == "PodScheduled" and one["status"] == "False":
            return str(one.get("message", ""))
    return ""


def stuck(pods: Iterable[Manifest]) -> str:
    """Return which pods wait for something that will not happen, "" if none."""
    return ", ".join(
        f"{name_of(pod)}/{status['name']}: {waiting['reason']}: {waiting.get('message', '')}"
        for pod in pods
        for status in container_statuses(pod)
        if (waiting := status.get("state", {}).get("waiting"))
        if waiting.get("reason") in STUCK
    )


def shortfall(plural: str, workload: Manifest) -> str:
    """Return how a workload differs from its specification, "" if it does not.

    Args:
        plural: Of its kind: an API server's lists name the kind in none of their items.
        workload: An object of `deployments` or `statefulsets`.
    """
    status, wanted = workload["status"], workload["spec"].get("replicas", 1)
    counts = {name: status.get(name, 0) for name in ("replicas", "readyReplicas")}
    if plural == "deployments":
        counts["updatedReplicas"] = status.get("updatedReplicas", 0)
    is_seen = status.get("observedGeneration", 0) >= workload["metadata"]["generation"]
    is_new = status.get("currentRevision") == status.get("updateRevision")
    if is_seen and is_new and set(counts.values()) == {wanted}:
        return ""
    return f"{name_of(workload)} {counts['readyReplicas']} of {wanted} ready"


def mentions(value: Any, namespace: str) -> bool:
    """Return whether any text in an object is the namespace, or a name derived from it."""
    if isinstance(value, dict):
        return any(mentions(one, namespace) for key, one in value.items() if key != "managedFields")
    if isinstance(value, list):
        return any(mentions(one, namespace) for one in value)
    return isinstance(value, str) and (value == namespace or value.startswith(f"{namespace}-"))


def describe_pod(pod: Manifest) -> str:
    """Return a pod's state in a line or a few."""
    status = pod["status"]
    state = "ready" if is_ready(pod) else f"NOT READY, {status.get('phase')}"
    lines = [f"pod {name_of(pod)}: {state} {status.get('message', '')}"]
    for one in container_statuses(pod):
        what = json.dumps(one.get("state", {}))
        last = json.dumps(one["lastState"]) if one.get("lastState") else ""
        lines.append(f"  {one['name']}: {one.get('restartCount', 0)} restarts, {what} {last}")
    return "\n".join(lines)
