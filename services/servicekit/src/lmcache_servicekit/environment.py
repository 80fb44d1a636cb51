"""Reads settings from environment variables, and refuses the misspelt ones that
pydantic-settings would ignore.
"""

from __future__ import annotations

import difflib
import re
import types
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Final, Union, get_args, get_origin

import yaml
from lmcache_core.errors import ConfigError
from lmcache_core.strict_yaml import DuplicateNameError, load_yaml
from pydantic import BaseModel, SecretBytes, SecretStr

FieldPath = tuple[str, ...]

NESTING: Final = "__"
MASK: Final = "**********"

_SECRET_NAME = re.compile(r"SECRET|TOKEN|PASS|KEY|CREDENTIAL", re.IGNORECASE)
_URL_WITH_PASSWORD = re.compile(r"://[^/\s]*@")
# What Kubernetes adds for a service `lmcache-lookup`, or one whose name begins so:
# LMCACHE_LOOKUP_SERVICE_HOST, LMCACHE_LOOKUP_PORT=tcp://... Names of ports have at most 63
# characters: bounded, the pattern is linear in the length of a name.
_LINK_NAME = re.compile(
    r"(.*_)?(SERVICE_HOST|SERVICE_PORT(_\w{1,63})?|PORT_\d{1,5}_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)"
)
_LINK_PORT_NAME = re.compile(r"(.*_)?PORT")
_LINK_PORT_VALUE = re.compile(r"(tcp|udp|sctp)://\S+")


class EnvironmentReader:
    """Maps the variables of one prefix to fields of a settings model.

    A field `quota.max_bytes` is the variable `<prefix>QUOTA__MAX_BYTES`. Scalars are taken as text,
    everything else is read as YAML (of which JSON is a subset). An empty value counts as unset.
    Variables that Kubernetes adds for services are ignored.

    Args:
        model: The settings model.
        prefix: For example `LMCACHE_LOOKUP_`.
        reserved: Names (without the prefix) that are no settings but belong to the service, for
            example `CONFIG`.

    Attributes:
        fields: Every variable that sets something, with the path and the annotation of its field.
    """

    def __init__(
        self, model: type[BaseModel], prefix: str, reserved: frozenset[str] = frozenset()
    ) -> None:
        self._prefix = prefix
        self._reserved = reserved
        self.fields = {
            f"{prefix}{NESTING.join(path).upper()}": (path, annotation)
            for path, annotation in _fields(model)
        }

    def read(self, environ: Mapping[str, str]) -> tuple[dict[str, Any], dict[FieldPath, str]]:
        """Collect the values that `environ` sets.

        Returns:
            Nested values, fit to be merged over those of a file, and the variable that each path
            came from.

        Raises:
            ConfigError: A variable with our prefix sets nothing, or its text is not YAML where it
                has to be.
        """
        values: dict[str, Any] = {}
        origins: dict[FieldPath, str] = {}
        # Sorted, so that a whole model comes before its single fields, which then override it.
        for name in sorted(environ):
            text = environ[name]
            short = name.removeprefix(self._prefix)
            if (
                not name.upper().startswith(self._prefix)
                or text == ""
                or short in self._reserved
                or _is_service_link(short, text)
            ):
                continue
            if name not in self.fields:
                raise ConfigError(self._unknown(name, text))
            path, annotation = self.fields[name]
            _put(values, path, text if _is_scalar(annotation) else _parse_yaml(name, text))
            origins[path] = name
        return values, origins

    def _unknown(self, name: str, text: str) -> str:
        near = difflib.get_close_matches(name.upper(), sorted(self.fields), n=1)
        is_hidden = (
            _SECRET_NAME.search(name)
            or _URL_WITH_PASSWORD.search(text)
            or (near and is_secret(self.fields[near[0]][1]))
        )
        fix = f"did you mean {near[0]}?" if near else f"known: {', '.join(sorted(self.fields))}"
        return f"{name}={MASK if is_hidden else text!r} sets nothing; {fix}"


def is_secret(annotation: Any) -> bool:
    """Return whether a field so annotated holds a secret."""
    return any(alternative in (SecretStr, SecretBytes) for alternative in _alternatives(annotation))


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Return `base` with the leaves of `over` put over it; neither is changed."""
    result = dict(base)
    for name, value in over.items():
        below = result.get(name)
        result[name] = (
            merge(below, value)
            if isinstance(below, Mapping) and isinstance(value, Mapping)
            else value
        )
    return result


def _is_service_link(name: str, text: str) -> bool:
    if _LINK_NAME.fullmatch(name):
        return True
    return (
        _LINK_PORT_NAME.fullmatch(name) is not None and _LINK_PORT_VALUE.fullmatch(text) is not None
    )


def _fields(model: type[BaseModel], above: FieldPath = ()) -> Iterator[tuple[FieldPath, Any]]:
    for name, info in model.model_fields.items():
        path = (*above, name)
        yield path, info.annotation
        for alternative in _alternatives(info.annotation):
            if isinstance(alternative, type) and issubclass(alternative, BaseModel):
                yield from _fields(alternative, path)


def _alternatives(annotation: Any) -> Iterator[Any]:
    """Yield the members of a union, without `Annotated` wrappers; anything else unchanged."""
    origin = get_origin(annotation)
    if origin is Annotated:
        yield from _alternatives(get_args(annotation)[0])
    elif origin is Union or origin is types.UnionType:
        for member in get_args(annotation):
            yield from _alternatives(member)
    else:
        yield annotation


def _is_scalar(annotation: Any) -> bool:
    return not any(
        get_origin(alternative) in (list, tuple, dict, set, frozenset)
        or alternative in (list, tuple, dict, set, frozenset)
        or (isinstance(alternative, type) and issubclass(alternative, BaseModel))
        for alternative in _alternatives(annotation)
    )


def _parse_yaml(name: str, text: str) -> Any:
    try:
        return load_yaml(text)
    except DuplicateNameError as exc:
        raise ConfigError(
            f"{name}: the name {exc.name!r} is there twice; keep one of them"
        ) from None
    except yaml.YAMLError:
        raise ConfigError(
            f"{name}: its text is not YAML; write for example [a, b] or {{name: value}}"
        ) from None


def _put(values: dict[str, Any], path: FieldPath, value: Any) -> None:
    for name in path[:-1]:
        below = values.get(name)
        if not isinstance(below, dict):
            below = values[name] = {}
        values = below
    values[path[-1]] = value
