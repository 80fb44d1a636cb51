"""Sources of options: the environment and YAML files."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

from lmcache_core.config.foreign_names import FOREIGN_NAMES, in_our_names
from lmcache_core.config.options import KIND_NAMES, Option, did_you_mean, shown
from lmcache_core.errors import ConfigError

ENV_PREFIX = "LMCACHE_"
SERVICE_ENV_PREFIXES = tuple(
    f"{ENV_PREFIX}{name}_" for name in ("STORAGE", "LOOKUP", "BROKER", "SIDECAR", "CTL", "DEMO")
)
CONFIG_FILE_ENV = "LMCACHE_CONFIG_FILE"
MAX_FILE_BYTES = 1 << 20
DEFAULT_DISK_GB = 5.0
"""Size of a disk that a file, or a documented backend, names without a size."""
MAX_FOREIGN_CHARS = 1 << 10
"""Longest variable that is parsed as YAML, which may belong to another program: PyYAML takes about
10 µs per character.
"""
IGNORED_ENV_NAMES = ("LMCACHE_USE_EXPERIMENTAL", "LMCACHE_LOG_LEVEL", "LMCACHE_TRACK_USAGE")
_NONE_TEXTS = ("", "none", "null")
# Kubernetes adds these for a service `lmcache-vllm`, or any whose name begins the same:
# LMCACHE_VLLM_SERVICE_HOST, LMCACHE_VLLM_PORT=tcp://… Names of ports have at most 63 characters, so
# that the pattern is linear in the length of a name, which may belong to another program.
_LINK_NAME = re.compile(
    r"_(SERVICE_HOST|SERVICE_PORT(_\w{1,63})?|PORT_\d{1,5}_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)$"
)
_LINK_VALUE = re.compile(r"(tcp|udp|sctp)://")


def read_environment(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the variables with our prefix, of the process or of `environ`."""
    variables = os.environ if environ is None else environ
    return {name: text for name, text in variables.items() if name.startswith(ENV_PREFIX)}


def values_of_environment(
    variables: Mapping[str, str], options: Mapping[str, Option]
) -> dict[str, Any]:
    """Return the options that variables set.

    Args:
        variables: See `read_environment`.

    Raises:
        ConfigError: A variable names no option, or its text cannot be read.
    """
    named: dict[str, Any] = {}
    for variable, text in variables.items():
        name = variable.removeprefix(ENV_PREFIX).lower()
        if name in options:
            named[name] = parse_text(options[name], text)
        elif is_not_ours(variable, text):
            continue
        elif name in FOREIGN_NAMES:
            named[name] = parse_foreign(variable, text)
        else:
            raise ConfigError(
                f"environment: {variable} names no option{did_you_mean(name, options)}"
            )
    return in_our_names(named, options, "environment")


def values_of_file(path: str, options: Mapping[str, Option]) -> dict[str, Any]:
    """Return the options that a YAML file sets: by default no remote tier, and a default size for a
    disk that it names without one.

    Args:
        path: The file, at most `MAX_FILE_BYTES` long.

    Raises:
        ConfigError: As of `named_in_file`, or `in_our_names` refuses the content.
    """
    values = in_our_names(named_in_file(path, options), options, path)
    if values.get("local_disk") is not None:
        values.setdefault("max_local_disk_size", DEFAULT_DISK_GB)
    return {"remote_url": None} | values


def named_in_file(path: str, options: Mapping[str, Option]) -> dict[str, Any]:
    """Return what a YAML file sets, by our names and LMCache's; an empty text is None for an
    option that may be None.

    Args:
        path: The file, at most `MAX_FILE_BYTES` long.

    Raises:
        ConfigError: The file cannot be read, is not a mapping, or names something twice. The text
            shows none of the file's contents.
    """
    return as_named(document_of(content_of(path), path), path, options)


def content_of(path: str) -> bytes:
    """Return the bytes of a file.

    Raises:
        ConfigError: It cannot be read, or is longer than `MAX_FILE_BYTES`.
    """
    try:
        with Path(path).open("rb") as file:
            text = file.read(MAX_FILE_BYTES + 1)
    except OSError as exc:
        raise ConfigError(f"{path}: cannot be read: {exc.strerror}") from exc
    if len(text) > MAX_FILE_BYTES:
        raise ConfigError(f"{path}: is longer than {MAX_FILE_BYTES} bytes; is it the right file?")
    return text


def as_named(data: Any, path: str, options: Mapping[str, Option]) -> dict[Any, Any]:
    """Return what a file's document sets; see `named_in_file`."""
    if data is None:
        data = {}
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: must hold a mapping of options, not {type(data).__name__}")
    return {
        name: None if value == "" and name in options and options[name].optional else value
        for name, value in data.items()
    }


def document_of(text: bytes, path: str) -> Any:
    """Return the document of a YAML file.

    Raises:
        ConfigError: It is not YAML, has several documents, or names something twice. The text
            shows none of the file's contents.
    """
    from lmcache_core.strict_yaml import load_yaml

    return _parsed(load_yaml, text, path)


def documents_of(text: bytes, path: str) -> list[Any]:
    """Return all documents of a YAML file; see `document_of`."""
    from lmcache_core.strict_yaml import load_yaml_documents

    return cast("list[Any]", _parsed(load_yaml_documents, text, path))


def _parsed(load: Callable[[bytes], Any], text: bytes, path: str) -> Any:
    """Errors are raised without their cause: PyYAML's quote the file, which may contain a
    secret.
    """
    import yaml  # here, since a process that reads no file may not have it

    from lmcache_core.strict_yaml import DuplicateNameError

    try:
        return load(text)
    except DuplicateNameError as exc:
        raise ConfigError(
            f"{path}, line {exc.line}: the name {exc.name!r} is there twice; keep one of them"
        ) from None
    except yaml.MarkedYAMLError as exc:
        mark = exc.problem_mark
        place = f", line {mark.line + 1}, column {mark.column + 1}" if mark is not None else ""
        raise ConfigError(f"{path}{place}: is not valid YAML") from None
    except RecursionError:
        raise ConfigError(f"{path}: is nested too deeply; is it the right file?") from None
    except (yaml.YAMLError, ValueError) as exc:
        raise ConfigError(f"{path}: is not valid YAML ({type(exc).__name__})") from None


def is_not_ours(variable: str, text: str) -> bool:
    """Return whether a variable with our prefix is no option: another program's, a service's, or
    one that Kubernetes adds.
    """
    return (
        variable in (CONFIG_FILE_ENV, *IGNORED_ENV_NAMES)
        or variable.startswith(SERVICE_ENV_PREFIXES)
        or _LINK_NAME.search(variable) is not None
        or _LINK_VALUE.match(text) is not None
    )


def parse_text(option: Option, text: str) -> Any:
    """Return the value of a variable.

    Raises:
        ConfigError: It cannot be read.
    """
    stripped = text.strip()
    if option.optional and stripped.lower() in _NONE_TEXTS:
        return None
    if option.kind is str:
        return text
    try:
        if option.kind is bool:
            return {"true": True, "1": True, "false": False, "0": False}[stripped.lower()]
        return option.kind(stripped)
    except (KeyError, ValueError):
        wanted = "true or false" if option.kind is bool else f"a {KIND_NAMES[option.kind]}"
        raise ConfigError(
            f"environment: {ENV_PREFIX}{option.name.upper()}={shown(text)}: must be {wanted}"
        ) from None


def parse_foreign(variable: str, text: str) -> Any:
    """Return a list, mapping, number or truth value parsed as YAML; any other text unchanged.

    Raises:
        ConfigError: The text is too long for such a value.
    """
    if len(text) > MAX_FOREIGN_CHARS:
        raise ConfigError(
            f"environment: {variable} has {len(text)} characters: must have at most"
            f" {MAX_FOREIGN_CHARS}; leave it out or set it in the file of {CONFIG_FILE_ENV}"
        )
    import yaml

    from lmcache_core.strict_yaml import load_foreign_yaml

    try:
        return load_foreign_yaml(text)
    except (yaml.YAMLError, ValueError, RecursionError):
        return text
