"""Read the settings: the settings file, then variables `LMCACHE_CTL_…`, then options."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
from lmcache_core.config.options import did_you_mean

from lmcache_ctl.errors import UsageError

PREFIX: Final = "LMCACHE_CTL_"
CONFIG_NAME: Final = "CONFIG"
MAX_CONFIG_FILE_BYTES: Final = 1 << 20
MAX_URLS: Final = 1024
MALFORMED: Final = (ValueError, TypeError, LookupError, AttributeError, RecursionError)
"""What PyYAML, and who reads its values, raises for a kubeconfig of another form."""
MAX_TIMEOUT_S: Final = 600.0
DEFAULT_TIMEOUT_S: Final = 5.0
UNITS: Final = {"": 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)")

Urls = Annotated[
    tuple[Annotated[str, msgspec.Meta(pattern="^https?://")], ...],
    msgspec.Meta(max_length=MAX_URLS),
]
POD_NAMESPACE_FILE: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
DEFAULT_KUBECONFIG: Final = "~/.kube/config"
FROM_ENVIRONMENT: Final = "the environment"
FROM_OPTIONS: Final = "the options"


class CtlSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where services are and how they are asked.

    Attributes:
        lookup_urls: REST addresses of lookup services; a name that resolves to several addresses
            stands for all of them, as below.
        broker_urls: The same for brokers.
        storage_urls: The same for cache_storage.
        sidecar_urls: The same for sidecars.
        token_file: Holds the token to show; None for none.
        token: The token itself, instead of `token_file`; None for none.
        tls: `CA[,CERT[,KEY]]`, PEM files: whom to trust, and what to show; None: whom this machine
            trusts.
        tls_name: The name in certificates, if that is not the host of the URL; None: the host.
        timeout_s: Longest wait for one service, all requests together, seconds.
        kubeconfig: Where the cluster is; None: as kubectl finds it, else the pod's own account.
        context: Of the kubeconfig; None: the current one.
        namespace: Where the release is; None: the namespace of the context or the pod.
        release: Only this Helm release's pods.
        origins: No option: what gave each value, `FROM_OPTIONS`, `FROM_ENVIRONMENT` or the file.
    """

    lookup_urls: Urls = ()
    broker_urls: Urls = ()
    storage_urls: Urls = ()
    sidecar_urls: Urls = ()
    token_file: Path | None = None
    token: Annotated[str, msgspec.Meta(pattern=r"^[!-~]+\Z", max_length=4096)] | None = None
    tls: str | None = None
    tls_name: str | None = None
    timeout_s: Annotated[float, msgspec.Meta(gt=0, le=MAX_TIMEOUT_S)] = DEFAULT_TIMEOUT_S
    kubeconfig: Path | None = None
    context: str | None = None
    namespace: str | None = None
    release: str | None = None
    origins: dict[str, str] = {}

    @property
    def names_urls(self) -> bool:
        """Whether any address is given."""
        return bool(self.lookup_urls or self.broker_urls or self.storage_urls or self.sidecar_urls)

    @property
    def names_cluster(self) -> bool:
        """Whether options say to find services through the Kubernetes API."""
        named = (self.kubeconfig, self.context, self.namespace, self.release)
        return any(value is not None for value in named)

    @property
    def asks_cluster(self) -> bool:
        """Whether they are, named or not: without any address, as kubectl would, wherever it finds
        a kubeconfig or a pod's own account.
        """
        return self.names_cluster or (not self.names_urls and _knows_a_cluster())


OPTIONS: Final = tuple(name for name in CtlSettings.__struct_fields__ if name != "origins")


def _knows_a_cluster() -> bool:
    return has_pod_account() or finds_kubeconfig()


def kubeconfig_paths() -> str:
    """Return the paths at which kubectl looks for a kubeconfig, as `KUBECONFIG` has them."""
    return process_variable("KUBECONFIG") or DEFAULT_KUBECONFIG


def finds_kubeconfig() -> bool:
    """Return whether there is a kubeconfig with a current context where kubectl looks for one."""
    files = [Path(path).expanduser() for path in kubeconfig_paths().split(os.pathsep) if path]
    return any(file.is_file() and _has_context(file) for file in files)


def has_pod_account() -> bool:
    """Return whether this process runs in a pod that may ask the Kubernetes API."""
    return POD_NAMESPACE_FILE.is_file() and bool(process_variable("KUBERNETES_SERVICE_HOST"))


def _has_context(kubeconfig: Path) -> bool:
    """Return whether it names a current context, or is damaged, which its reader reports."""
    import yaml

    try:
        return bool((yaml.safe_load(kubeconfig.read_bytes()) or {}).get("current-context"))
    except (OSError, *MALFORMED, yaml.YAMLError):
        return True


def process_variable(name: str) -> str:
    """Return an environment variable of another program, "" if it is not set."""
    return os.environ.get(name, "")


def parse_size(text: str) -> int:
    """Return the bytes of a size such as `512MiB`.

    Raises:
        UsageError: It is not such a number, or less than one byte.
    """
    found = _SIZE.fullmatch(text.strip())
    size = int(float(found[1]) * UNITS.get(found[2], 0)) if found is not None else 0
    if not size:
        raise UsageError(
            f"{text!r} is not a size: write a number and one of"
            f" {', '.join(unit for unit in UNITS if unit)}, such as 512MiB"
        )
    return size


def load_settings(
    given: Mapping[str, Any] | None = None,
    config_file: Path | None = None,
    environ: Mapping[str, str] | None = None,
) -> CtlSettings:
    """Read the settings: the file, overridden by variables, then by options.

    Args:
        given: Options by name; None, and an empty list, count as not given.
        config_file: YAML; None takes the one that `LMCACHE_CTL_CONFIG` names, if any.
        environ: Instead of the process's environment.

    Raises:
        UsageError: A name is unknown or a value impossible; the text names both and the fix.
    """
    source = os.environ if environ is None else environ
    named = source.get(PREFIX + CONFIG_NAME)
    path = config_file if config_file is not None else Path(named) if named else None
    layers = (
        (str(path), {} if path is None else _read_file(path)),
        (FROM_ENVIRONMENT, _from_environ(source)),
        (FROM_OPTIONS, given or {}),
    )
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for origin, layer in layers:
        own = {name for name in ("token", "token_file") if layer.get(name) is not None}
        if len(own) > 1:
            raise UsageError(f"{origin}: token and token_file are both set: set one of them")
        if own:  # replaces a token or token_file of an earlier layer
            values.pop("token", None)
            values.pop("token_file", None)
        for name, value in layer.items():
            if name not in OPTIONS:
                raise UsageError(f"{origin}: {name} is not an option{did_you_mean(name, OPTIONS)}")
            if name == "token" and isinstance(value, str):
                value = value.strip()  # a token read from a file ends in a newline
            if value is not None and value != []:
                values[name] = value
                _check(origin, name, value)
                origins[name] = origin
    return msgspec.convert(
        values | {"origins": origins}, CtlSettings, strict=False, dec_hook=_as_path
    )


def _check(origin: str, name: str, value: Any) -> None:
    """Check one value, so that the error can name the value and its source."""
    try:
        msgspec.convert({name: value}, CtlSettings, strict=False, dec_hook=_as_path)
    except msgspec.ValidationError as exc:
        if name == "token":  # its value is a secret
            raise UsageError(
                f"token ({origin}): must be visible ASCII characters without blanks"
            ) from None
        told = (
            "an address begins with http:// or https://"
            if name.endswith("_urls")
            else str(exc).partition(" - at")[0]
        )
        raise UsageError(f"{name}={value!r} ({origin}): {told}") from exc


def _as_path(kind: type, value: Any) -> Path:
    """Convert the one type of field that msgspec does not know."""
    if kind is not Path or not isinstance(value, str | Path):
        raise ValueError("it must be the path of a file")
    return Path(value)


def _read_file(path: Path) -> dict[str, Any]:
    import yaml
    from lmcache_core.strict_yaml import DuplicateNameError, load_yaml

    try:
        with path.open("rb") as file:
            data = file.read(MAX_CONFIG_FILE_BYTES + 1)
    except OSError as exc:
        raise UsageError(f"cannot read the settings file {path}: {exc.strerror or exc}") from exc
    if len(data) > MAX_CONFIG_FILE_BYTES:
        raise UsageError(
            f"{path} has more than {MAX_CONFIG_FILE_BYTES} bytes: it is not a settings file"
        )
    try:
        values = load_yaml(data)
    except DuplicateNameError as exc:
        raise UsageError(
            f"{path}: line {exc.line}: the name {exc.name!r} is there twice; keep one of them"
        ) from None
    except (yaml.YAMLError, ValueError, RecursionError) as exc:
        raise UsageError(f"{path} is not YAML: write one `name: value` a line") from exc
    if values is None:
        return {}
    if not isinstance(values, dict) or not all(isinstance(name, str) for name in values):
        raise UsageError(f"{path}: write one `name: value` a line")
    return values


def _from_environ(source: Mapping[str, str]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    known = {PREFIX + name.upper(): name for name in OPTIONS}
    for variable, text in source.items():
        if not variable.startswith(PREFIX) or variable == PREFIX + CONFIG_NAME or not text:
            continue
        if variable not in known:
            raise UsageError(f"{variable} sets nothing{did_you_mean(variable, known)}")
        name = known[variable]
        values[name] = (
            [part.strip() for part in text.split(",") if part.strip()]
            if name.endswith("_urls")
            else text
        )
    return values
