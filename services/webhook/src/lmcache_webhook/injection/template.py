"""The template that is merged into the sidecar's container."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import yaml
from lmcache_core.errors import ConfigError
from lmcache_core.strict_yaml import DuplicateNameError, load_yaml

from lmcache_webhook.injection.pod import amount_of

MAX_TEMPLATE_BYTES: Final = 64 << 10
MEMBERS: Final = frozenset(
    {
        "env",
        "envFrom",
        "imagePullPolicy",
        "lifecycle",
        "livenessProbe",
        "resources",
        "securityContext",
        "startupProbe",
        "terminationMessagePath",
        "terminationMessagePolicy",
        "volumeMounts",
    }
)
_NAMED_LISTS: Final = {"env": "name", "volumeMounts": "mountPath"}
_LISTS: Final = frozenset({"env", "envFrom", "volumeMounts"})
_TEXTS: Final = frozenset({"imagePullPolicy", "terminationMessagePath", "terminationMessagePolicy"})


def read_template(path: Path | None) -> dict[str, Any]:
    """Read a template; without a file, return an empty one.

    Raises:
        ConfigError: It cannot be read, is not a mapping, or sets a member that it must not set.
    """
    if path is None:
        return {}
    setting = f"sidecar_template_file={str(path)!r}"
    try:
        with path.open("rb") as file:
            data = file.read(MAX_TEMPLATE_BYTES + 1)
    except OSError as exc:
        raise ConfigError(f"{setting}: {exc.strerror or exc}; correct the path") from exc
    if len(data) > MAX_TEMPLATE_BYTES:
        raise ConfigError(
            f"{setting}: longer than {MAX_TEMPLATE_BYTES} bytes; it is not a template"
        )
    try:
        found = load_yaml(data)
    except DuplicateNameError as exc:
        raise ConfigError(
            f"{setting}: line {exc.line}: the name {exc.name!r} is there twice; keep one of them"
        ) from None
    except (yaml.YAMLError, ValueError, RecursionError):
        raise ConfigError(f"{setting}: not YAML; correct it") from None
    return check_template({} if found is None else found, setting)


def check_template(template: Any, setting: str) -> dict[str, Any]:
    """Return a checked template.

    Raises:
        ConfigError: As `read_template`.
    """
    if not isinstance(template, dict):
        raise ConfigError(f"{setting}: write members of a container, one `name: value` a line")
    members: dict[str, Any] = template
    for name, value in members.items():
        if name not in MEMBERS:
            raise ConfigError(
                f"{setting}: {name} is not a template's to say; it may have"
                f" {', '.join(sorted(MEMBERS))}"
            )
        kind: type = list if name in _LISTS else str if name in _TEXTS else dict
        items = value if isinstance(value, list) else []
        if not isinstance(value, kind) or not all(isinstance(item, dict) for item in items):
            raise ConfigError(f"{setting}: {name} must be a {kind.__name__}, as in a container")
    for part in ("requests", "limits"):
        amounts = members.get("resources", {}).get(part, {})
        if not isinstance(amounts, dict) or "memory" in amounts:
            raise ConfigError(
                f"{setting}: resources.{part} names memory, or is not a mapping: memory follows"
                " from the size of the arena"
            )
    return members


def check_cpu(sidecar_cpu: str | None, template: Mapping[str, Any]) -> None:
    """Refuse amounts with which the API server would refuse every pod with a sidecar.

    Args:
        sidecar_cpu: The request if the template sets none; None: one that no limit is below.
        template: A checked one.

    Raises:
        ConfigError: An amount is invalid, or the request is above the limit.
    """
    resources = template.get("resources", {})
    request = resources.get("requests", {}).get("cpu", "0" if sidecar_cpu is None else sidecar_cpu)
    limit = resources.get("limits", {}).get("cpu", request)
    least, most = amount_of(request), amount_of(limit)
    if least is None or most is None:
        raise ConfigError(
            f"resources of the sidecar: cpu {(request if least is None else limit)!r} is"
            " not a quantity: write 500m or 2"
        )
    if least > most:
        raise ConfigError(
            f"resources of the sidecar: it requests {request} of a cpu, and its limit is {limit}:"
            " raise the one or lower the other"
        )


def lay_over(container: Mapping[str, Any], template: Mapping[str, Any]) -> dict[str, Any]:
    """Return a container merged with a template: mappings are merged, and lists appended, where an
    item replaces its namesake.

    A probe is replaced as a whole, since it has one of several kinds.
    """
    result = copy.deepcopy(dict(container))
    for name, value in template.items():
        if name in _NAMED_LISTS:
            key = _NAMED_LISTS[name]
            named = {item.get(key) for item in value}
            result[name] = [
                *(item for item in result.get(name, []) if item.get(key) not in named),
                *copy.deepcopy(value),
            ]
        elif isinstance(value, Mapping) and not name.endswith("Probe"):
            result[name] = _merged(result.get(name, {}), value)
        else:
            result[name] = copy.deepcopy(value)
    return result


def _merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    result = dict(below)
    for name, value in above.items():
        under = result.get(name)
        result[name] = (
            _merged(under, value)
            if isinstance(under, Mapping) and isinstance(value, Mapping)
            else copy.deepcopy(value)
        )
    return result
