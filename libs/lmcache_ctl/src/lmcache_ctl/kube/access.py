"""Call the Kubernetes API, as a kubeconfig or a pod's own account knows it."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any, Final, NamedTuple, Self

from lmcache_ctl.errors import CtlError, UsageError
from lmcache_ctl.options import CtlSettings, process_variable

DEFAULT_KUBECONFIG: Final = "~/.kube/config"
POD_NAMESPACE_FILE: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
MALFORMED: Final = (ValueError, TypeError, LookupError, AttributeError, RecursionError)
"""What PyYAML, and who reads its values, raises for a kubeconfig of another form."""
DEFAULT_NAMESPACE: Final = "default"
MAX_PAGES: Final = 64
PAGE: Final = 250
PORT_FORWARD: Final = "port-forward"
VERBS: Final = {"secrets": "get", PORT_FORWARD: "create"}
"""The verbs that the account needs; for all else it is `list`."""
KINDS: Final = {PORT_FORWARD: "pods/portforward"}


def asks_cluster(settings: CtlSettings) -> bool:
    """Return whether services are found through the Kubernetes API: where options say so, and,
    without any address, wherever there is a kubeconfig or a pod's own account, as kubectl would.
    """
    return settings.names_cluster or (
        not settings.names_urls and (_has_pod_account() or _finds_kubeconfig())
    )


def _kubeconfig_paths() -> str:
    """Return the paths at which kubectl looks for a kubeconfig, as `KUBECONFIG` has them."""
    return process_variable("KUBECONFIG") or DEFAULT_KUBECONFIG


def _finds_kubeconfig() -> bool:
    """Return whether there is a kubeconfig with a current context where kubectl looks for one."""
    files = [Path(path).expanduser() for path in _kubeconfig_paths().split(os.pathsep) if path]
    return any(file.is_file() and _has_context(file) for file in files)


def _has_pod_account() -> bool:
    """Return whether this process runs in a pod that may ask the Kubernetes API."""
    return POD_NAMESPACE_FILE.is_file() and bool(process_variable("KUBERNETES_SERVICE_HOST"))


def _has_context(kubeconfig: Path) -> bool:
    """Return whether it names a current context, or is damaged, which its reader reports."""
    import yaml

    try:
        return bool((yaml.safe_load(kubeconfig.read_bytes()) or {}).get("current-context"))
    except (OSError, *MALFORMED, yaml.YAMLError):
        return True


class _Access(NamedTuple):
    """How a cluster is reached.

    Attributes:
        configuration: A `kubernetes.client.Configuration`.
        namespace: Of the context, or of this pod.
        context: Name of the context; "" for a pod's own account.
        kubeconfig: What names the kubeconfig; "" for a pod's own account.
    """

    configuration: Any
    namespace: str
    context: str = ""
    kubeconfig: str = ""

    def __str__(self) -> str:
        return f"context {self.context}" if self.context else "this pod's cluster"


class KubeApi:
    """A cluster's API, and one namespace of it; leaving it closes its connections.

    Attributes:
        namespace: "" for all namespaces.
        core: A `kubernetes.client.CoreV1Api`.
        apps: A `kubernetes.client.AppsV1Api`.

    Raises:
        UsageError: The kubeconfig cannot be read, or it does not have that context.
    """

    def __init__(self, settings: CtlSettings) -> None:
        from kubernetes import client

        self.timeout_s = settings.timeout_s
        self._access = _load(settings)
        self.configuration = self._access.configuration
        self.namespace = settings.namespace or self._access.namespace
        self._client = client.ApiClient(self.configuration)
        self.core: Any = client.CoreV1Api(self._client)
        self.apps: Any = client.AppsV1Api(self._client)

    def __enter__(self) -> Self:
        """Connects when first asked."""
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    @property
    def place(self) -> str:
        """Where this looks, for people."""
        return f"{self._scope} of {self._access}"

    @property
    def how_to_look_elsewhere(self) -> str:
        """The options that name another place, for people."""
        cluster = "--context" if self._access.context else "--kubeconfig"
        return f"give another {f'-n (--namespace) or {cluster}' if self.namespace else cluster}"

    def list(self, method: Any, what: str, selector: str) -> list[Any]:
        """Return all objects of the namespace that a selector matches.

        Args:
            method: A `list_namespaced_…` of the client.
            what: Name of the objects, for errors.

        Raises:
            CtlError: The API cannot be reached, or refuses.
        """
        found: list[Any] = []
        token: str | None = None
        for _ in range(MAX_PAGES):
            where = (self.namespace,) if self.namespace else ()
            page = self.call(
                what, method, *where, label_selector=selector, limit=PAGE, _continue=token
            )
            found += page.items
            token = page.metadata._continue if page.metadata is not None else None
            if not token:
                return found
        raise CtlError(
            f"namespace {self.namespace} has more than {MAX_PAGES * PAGE} {what}: name a --release"
        )

    def call(self, what: str, method: Any, *args: Any, **how: Any) -> Any:
        """Make one call of the API.

        Args:
            what: Subject of the call, for errors.

        Raises:
            CtlError: The API cannot be reached, or refuses.
        """
        from kubernetes.client.exceptions import ApiException
        from urllib3.exceptions import HTTPError

        given = {name: value for name, value in how.items() if value is not None}
        try:
            return method(*args, _request_timeout=self.timeout_s, **given)
        except ApiException as exc:
            raise CtlError(self.refusal(what, exc.status, str(exc.reason))) from exc
        except (HTTPError, OSError) as exc:
            reason = (
                str(getattr(exc, "reason", None) or exc).partition(": ")[2] or type(exc).__name__
            )
            access = self._access
            origin = f" in {access.kubeconfig}" if access.kubeconfig else ""
            raise CtlError(
                f"the Kubernetes API of {access}{origin} at {self.configuration.host} cannot be"
                f" reached ({reason}); asked for {what} in {self._scope}: give another --context or"
                " --kubeconfig"
            ) from exc

    @property
    def _scope(self) -> str:
        return f"namespace {self.namespace}" if self.namespace else "all namespaces"

    def refusal(self, what: str, status: int | None, reason: str) -> str:
        """Return the sentence for an error of the API."""
        api, where = f"the Kubernetes API of {self._access}", f"in {self._scope}"
        if status == 401:
            how = "log in again, or give another --context"
            return f"{api} refuses {what} {where} (Unauthorized): {how}"
        if status == 403:
            verb, kind = VERBS.get(what.partition("/")[0], "list"), KINDS.get(what, what)
            scope = f"-n {self.namespace}" if self.namespace else "-A"
            return (
                f"{api} refuses {what} {where} (Forbidden): the account needs the verb {verb} on"
                f" {kind}, see the role in docs/ctl.md; to check: kubectl auth can-i {verb} {kind}"
                f" {scope}"
            )
        return f"{api} answered {reason!r} to {what} {where}"


class _Complaints(logging.Handler):
    """Keeps what the loader only logs: that a credentials command has failed.

    The loader would continue without credentials.
    """

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage().splitlines()[0])


def _unusable() -> tuple[type[Exception], ...]:
    """Return the exceptions that reading a damaged kubeconfig raises."""
    import yaml
    from kubernetes.config import ConfigException

    return (ConfigException, OSError, yaml.YAMLError, *MALFORMED)


def _found(named: str | None) -> tuple[str, str, bool]:
    """Return the paths of the kubeconfig, what names it, and whether the loader finds one."""
    paths = _kubeconfig_paths() if named is None else named
    origin = f"kubeconfig={paths}"
    if named is None:
        origin = paths if paths == DEFAULT_KUBECONFIG else f"KUBECONFIG={paths}"
    # as the loader looks: "" is no path, and the home of an unknown user no error
    found = map(os.path.expanduser, paths.split(os.pathsep))
    return paths, origin, any(os.path.exists(path) for path in found)  # noqa: PTH110


def _load(settings: CtlSettings) -> _Access:
    from kubernetes import client, config

    configuration = client.Configuration()
    configuration.retries = 0  # each call has one deadline and one report
    named = None if settings.kubeconfig is None else str(settings.kubeconfig)
    own_namespace = DEFAULT_NAMESPACE
    if _has_pod_account():
        own_namespace = POD_NAMESPACE_FILE.read_text(encoding="utf-8").strip()
        # as kubectl: a pod's own account is for where no kubeconfig says otherwise
        if named is None and settings.context is None and not _finds_kubeconfig():
            config.load_incluster_config(client_configuration=configuration)
            return _Access(configuration, own_namespace)
    paths, origin, is_there = _found(named)
    complaints = _Complaints()
    logging.getLogger().addHandler(complaints)
    try:
        contexts, active = config.list_kube_config_contexts(paths)
        chosen = (
            active
            if settings.context is None
            else next((one for one in contexts if one["name"] == settings.context), None)
        )
        if chosen is None:
            raise UsageError(
                f"context {settings.context!r} is not in the kubeconfig: it has"
                f" {', '.join(one['name'] for one in contexts)}"
            )
        config.load_kube_config(paths, settings.context, client_configuration=configuration)
    except _unusable() as exc:
        if not is_there:
            why = "no such file"
        elif isinstance(exc, config.ConfigException | OSError) and str(exc):
            why = str(exc).splitlines()[0]
        else:
            why = "it is damaged"
        raise UsageError(
            f"no usable kubeconfig ({why}) in {origin}: give another with --kubeconfig"
        ) from exc
    finally:
        logging.getLogger().removeHandler(complaints)
    if complaints.texts:
        raise UsageError(
            f"no usable kubeconfig (no credentials: {complaints.texts[0]}) in {origin}: log in"
            " again, or mend its users"
        )
    namespace = str(chosen.get("context", {}).get("namespace") or own_namespace)
    return _Access(configuration, namespace, str(chosen["name"]), origin)
