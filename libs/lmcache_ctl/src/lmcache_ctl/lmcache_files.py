"""Find LMCache's options in the files that hold them: its YAML file, an environment file,
Kubernetes manifests, and values of charts such as production-stack's.

In a manifest or values, an option is where a container reads it from: variables `LMCACHE_…`, also
`LMCACHE_…=…` in a list or a script, the JSON after `--kv-transfer-config`, LMCache's YAML file in a
ConfigMap, and `lmcacheConfig`. All else there is not LMCache's.
"""

from __future__ import annotations

import contextlib
import json
import re
import shlex
from collections.abc import Iterable, Mapping
from typing import Any, Final

import msgspec
from lmcache_core.config import OPTIONS
from lmcache_core.config.foreign_names import FOREIGN_NAMES
from lmcache_core.config.options import shown
from lmcache_core.config.sources import (
    CONFIG_FILE_ENV,
    ENV_PREFIX,
    as_named,
    content_of,
    documents_of,
    is_not_ours,
    parse_foreign,
    parse_text,
)
from lmcache_core.errors import ConfigError

RESP_NAMES: Final = ("resp_host", "resp_port", "resp_username", "resp_password")
"""What LMCache reads from the environment alone, for `resp://`."""
KNOWN: Final = frozenset({*OPTIONS, *FOREIGN_NAMES, *RESP_NAMES})
MAX_NAMES: Final = 512
"""In one file: each unknown one is compared with all known ones. LMCache has about 150."""
ANNOTATION: Final = (
    'to move a pod unchanged, give it the label lmcache.io/inject: "true" and the annotation'
    ' lmcache.io/replace-connector: "true" (docs/migration.md)'
)
CONNECTORS: Final = ("LMCacheConnectorV1", "LMCacheMPConnector", "LMCacheConnector")
STACK_NAMES: Final = {
    "cpuOffloadingBufferSize": "max_local_cpu_size",
    "diskOffloadingBufferSize": "max_local_disk_size",
    "remoteUrl": "remote_url",
    "remoteSerde": "remote_serde",
    "enableController": "enable_controller",
    "instanceId": "lmcache_instance_id",
    "controllerPort": "controller_url",
    "workerPort": "lmcache_worker_port",
    "enablePD": "enable_pd",
    "enableNixl": "enable_nixl",
    "nixlRole": "nixl_role",
    "nixlPeerHost": "nixl_receiver_host",
    "nixlPeerPort": "nixl_receiver_port",
    "nixlBufferSize": "nixl_buffer_size",
    "nixlBufferDevice": "nixl_buffer_device",
    "nixlEnableGc": "nixl_enable_gc",
}
"""production-stack's `lmcacheConfig`, and the option that its chart sets."""
STACK_MEMBERS: Final = ("lmcacheConfig", "lmCacheConfig")
_TRANSFER: Final = ("--kv-transfer-config", "--kv_transfer_config")
_TRANSFER_NAMES: Final = ("kv-transfer-config", "kv_transfer_config", "kvTransferConfig")
"""In a YAML file of vLLM's own, and in values."""
_LISTS_OF_VARIABLES: Final = ("env", "environment", "literals")
"""Of Compose and Kustomize: what follows the first `=` is the value, not a script."""
_SERVER_MEMORY: Final = "--l1-size-gb"
_VARIABLE = re.compile(r"\s*(?:export\s+)?([A-Za-z_]\w*)=(.*)")
_ASSIGNMENT = re.compile(rf"({ENV_PREFIX}\w+)=(.*)", re.DOTALL)
_SCRIPT = re.compile(rf"\b{ENV_PREFIX}\w+=")
_EXPANDED = re.compile(r"\$[\w({]|\{\{")
_NUMBER = re.compile(r"[+-]?\d[\d.]*(?:[eE][+-]?\d+)?")
_MAX_DEPTH = 100


class LMCacheOptions(msgspec.Struct):
    """What a file holds.

    Attributes:
        named: Values by LMCache's names and ours.
        where: Where each was found, "" in a file of options alone.
        notes: What is no option, by sentence.
        refused: A line for each option that cannot be read.
    """

    named: dict[str, Any] = msgspec.field(default_factory=dict)
    where: dict[str, str] = msgspec.field(default_factory=dict)
    notes: list[str] = msgspec.field(default_factory=list)
    refused: list[str] = msgspec.field(default_factory=list)


def read(path: str) -> LMCacheOptions:
    """Return what a file holds.

    Raises:
        ConfigError: It cannot be read, or holds nothing of LMCache's. The text shows none of the
            file's contents.
    """
    text = content_of(path)
    variables = _environment(text)
    reader = _Reader(path)
    if variables is not None:
        reader.environment(variables)
    else:
        documents = documents_of(text, path)
        if _is_plain(documents):
            named = as_named(documents[0] if documents else None, path, OPTIONS)
            for name, value in named.items():
                reader.found.named[name] = as_option(name, value)
        else:
            for number, document in enumerate(documents):
                reader.walk(document, f"document {number + 1}" if len(documents) > 1 else "")
            if not (reader.found.where or reader.found.refused or reader.found.notes):
                raise ConfigError(
                    f"{path}: holds no options of LMCache: neither variables {ENV_PREFIX}…, nor"
                    f" {_TRANSFER[0]}, nor lmcacheConfig; {ANNOTATION}"
                )
            reader.found.notes.insert(0, ANNOTATION)
    if len(reader.found.named) > MAX_NAMES:
        raise ConfigError(
            f"{path}: has {len(reader.found.named)} options, LMCache fewer than {MAX_NAMES}; is it"
            " the right file?"
        )
    return reader.found


def as_option(name: Any, value: Any) -> Any:
    """Return a number or truth value in quotes as LMCache reads it; any other value unchanged."""
    if not isinstance(value, str) or not isinstance(name, str):
        return value
    if name in OPTIONS:
        with contextlib.suppress(ConfigError):
            return parse_text(OPTIONS[name], value)
    elif name in FOREIGN_NAMES:
        text = value.strip()
        if text.lower() in ("true", "false", "null") or _NUMBER.fullmatch(text):
            return parse_foreign(name, text)
        if FOREIGN_NAMES[name].secret:  # a mapping, as JSON
            with contextlib.suppress(ValueError, RecursionError):
                return json.loads(value)
    return value


def _environment(text: bytes) -> list[tuple[str, str]] | None:
    """Return the variables if every line sets one; else None."""
    lines = [line.strip() for line in text.decode("utf-8", "replace").splitlines()]
    matches = [_VARIABLE.fullmatch(line) for line in lines if line and not line.startswith("#")]
    found = [(match[1], match[2]) for match in matches if match is not None]
    return found if found and len(found) == len(matches) else None


def _unquoted(text: str) -> str:
    if text[:1] in ("'", '"'):
        with contextlib.suppress(ValueError):
            return "".join(shlex.split(text, comments=True))
    return text.replace("\t#", " #").partition(" #")[0].strip()


def _is_plain(documents: list[Any]) -> bool:
    """Return whether that is LMCache's own file: one mapping that is nothing of Kubernetes'."""
    if len(documents) > 1:
        return False
    data = documents[0] if documents else None
    if not isinstance(data, Mapping):
        return not isinstance(data, list) or not any(isinstance(each, Mapping) for each in data)
    if any(name in data for name in KNOWN):
        return "kv_connector" not in data
    is_nested = any(isinstance(value, Mapping | list) for value in data.values())
    has_variables = any(isinstance(name, str) and name.startswith(ENV_PREFIX) for name in data)
    is_vllm = any(name in data for name in ("kind", "kv_connector", *_TRANSFER_NAMES))
    return not (is_nested or has_variables or is_vllm)


class _Reader:
    """Collects options."""

    def __init__(self, path: str) -> None:
        self.found = LMCacheOptions()
        self._path = path

    def environment(self, variables: Iterable[tuple[str, str]]) -> None:
        others = []
        for name, text in variables:
            if not name.startswith(ENV_PREFIX):
                others.append(name)
            elif text.startswith("'"):
                self._variable(name, _unquoted(text), name)
            else:
                self._assignment(name, _unquoted(text), name)
        if others:
            self.found.notes.append(f"left out, not LMCache's: {', '.join(others)}")

    def walk(self, data: Any, where: str, depth: int = 0) -> None:
        """Take what is below a value.

        Args:
            where: Its place in the file.
        """
        if depth > _MAX_DEPTH:
            self.found.refused.append(f"{self._path}: {where} is nested too deeply to be read")
        elif isinstance(data, Mapping):
            self._mapping(data, where, depth)
        elif isinstance(data, list):
            self._list(data, where, depth)
        elif isinstance(data, str):
            self._text(data, where, depth)

    def _mapping(self, data: Mapping[Any, Any], where: str, depth: int) -> None:
        if data.get("kv_connector") is not None:
            self._connector(data, where, depth)
            return
        is_encoded = data.get("kind") == "Secret"
        for name, value in data.items():
            place = f"{where}.{_name(name)}" if where else _name(name)
            if isinstance(name, str) and name.startswith(ENV_PREFIX):
                if isinstance(value, str) and where.endswith(_LISTS_OF_VARIABLES):
                    self._assignment(name, value, place)
                else:
                    self._variable(name, value, place)
            elif name == "annotations":  # one may hold all of the manifest as it was before
                continue
            elif name in STACK_MEMBERS and isinstance(value, Mapping):
                self._stack(value, place)
            elif name == "cacheserverSpec":
                self.found.notes.append(f"{place}: left out; the chart's cache_storage replaces it")
            elif name in _TRANSFER_NAMES:
                self._json(value, place, depth)
            elif name == "envFrom" and value:
                self.found.notes.append(
                    f"{place}: its variables are not read; migrate what it names, too"
                )
            elif is_encoded and name == "data" and isinstance(value, Mapping):
                for each in value:
                    self._refuse(f"{place}.{_name(each)}", "a Secret is not read; write its value")
            else:
                self.walk(value, place, depth + 1)

    def _list(self, data: list[Any], where: str, depth: int) -> None:
        for number, item in enumerate(data):
            place = f"{where}[{number}]"
            is_variable = isinstance(item, str) and where.endswith(_LISTS_OF_VARIABLES)
            if is_variable and (match := _ASSIGNMENT.fullmatch(item)):
                self._assignment(match[1], match[2], place)
                continue
            name = item.get("name") if isinstance(item, Mapping) else None
            if isinstance(name, str) and name.startswith(ENV_PREFIX):
                if "valueFrom" in item:
                    self._refuse(name, f"valueFrom at {place} is not read; write its value")
                elif any(mark in str(item.get("value", "")) for mark in ("$(", "{{")):
                    self._refuse(name, f"is expanded at {place}, not here; write its value")
                else:
                    self._variable(name, item.get("value"), place)
            elif item in _TRANSFER and number + 1 < len(data):
                self._json(data[number + 1], f"{where}[{number + 1}]", depth)
            else:
                self.walk(item, place, depth + 1)

    def _text(self, text: str, where: str, depth: int) -> None:
        """Take a word of a command line, a script, or LMCache's file in a ConfigMap."""
        option, is_whole, value = text.partition("=")
        if option in _TRANSFER and is_whole:
            self._json(value, where, depth)
        elif option.startswith(tuple(f"{name}." for name in _TRANSFER)):
            self._refuse(f"{where}: {option}", f"only JSON after {_TRANSFER[0]} is read")
        elif option == _SERVER_MEMORY:
            self.found.notes.append(
                f"{where}: options of lmcache server are not read; its {_SERVER_MEMORY} is arena_gb"
                " here, and per node"
            )
        elif (match := _ASSIGNMENT.fullmatch(text)) and not any(map(str.isspace, text)):
            self._assignment(match[1], match[2], where)
        elif _is_script(text):
            try:
                words = shlex.split(text, comments=True)
            except ValueError:
                self._refuse(where, "a script that cannot be read; write what it sets")
                return
            if words != [text]:
                self._list(words, where, depth + 1)
        elif any(f"{name}:" in text for name in KNOWN):
            with contextlib.suppress(ConfigError):
                for document in documents_of(text.encode("utf-8", "replace"), where):
                    if isinstance(document, Mapping) and any(name in document for name in KNOWN):
                        for name, each in document.items():
                            self._add(name, as_option(name, each), f"{where}.{_name(name)}")

    def _json(self, text: Any, where: str, depth: int) -> None:
        """Take what follows `--kv-transfer-config`."""
        try:
            config = json.loads(text) if isinstance(text, str) else text
        except (ValueError, RecursionError):
            config = None
        if isinstance(config, Mapping):
            self.walk(config, where, depth + 1)
        else:
            self._refuse(where, f"what follows {_TRANSFER[0]} must be a mapping in JSON")

    def _connector(self, config: Mapping[Any, Any], where: str, depth: int) -> None:
        """Take vLLM's configuration of a connector."""
        extra = config.get("kv_connector_extra_config")
        extra = extra if isinstance(extra, Mapping) else {}
        if config["kv_connector"] not in CONNECTORS:  # it may hold one of LMCache's
            self.walk(extra, f"{where}.kv_connector_extra_config", depth + 1)
            kept = shown(config["kv_connector"])
            self.found.notes.append(f"{where}: kv_connector={kept} is not LMCache's, left out")
            return
        self._role(config, "kv_role", where)
        others = [
            _name(name) for name in config if name not in ("kv_role", "kv_connector_extra_config")
        ]
        for name, value in extra.items():
            option = name.removeprefix("lmcache.") if isinstance(name, str) else ""
            if option == name or option == "" or option.startswith(("mp.", "mp_")):
                others.append(_name(name))
            else:
                self._add(option, as_option(option, value), f"{where}.{_name(name)}")
        self.found.notes.append(f"{where}: left out, no option of the cache: {', '.join(others)}")

    def _stack(self, config: Mapping[Any, Any], where: str) -> None:
        """Take production-stack's options."""
        if config.get("enabled") in (False, None):
            names = ", ".join(map(_name, config))
            self.found.notes.append(f"{where}: is not enabled there; left out: {names}")
            return
        self._role(config, "kvRole", where)
        others = []
        for name, value in config.items():
            place = f"{where}.{_name(name)}"
            if name in STACK_NAMES:
                option = STACK_NAMES[name]
                if value not in ("", None):
                    self._add(option, as_option(option, value), place)
            elif name not in ("enabled", "kvRole"):
                others.append(_name(name))
        if others:
            self.found.notes.append(f"{where}: left out, no option of LMCache: {', '.join(others)}")

    def _role(self, config: Mapping[Any, Any], name: str, where: str) -> None:
        role = config.get(name) or "kv_both"
        if role != "kv_both":
            self.found.notes.append(
                f"{where}.{name}={shown(role)}: keep it in vLLM's --kv-transfer-config"
            )

    def _assignment(self, variable: str, text: str, where: str) -> None:
        """Take what a shell or Compose sets, unless they expand it."""
        if _EXPANDED.search(text):
            self._refuse(variable, "is expanded where it is used, not here; write its value")
        else:
            self._variable(variable, text, where)

    def _variable(self, variable: str, value: Any, where: str) -> None:
        name = variable.removeprefix(ENV_PREFIX).lower()
        if variable == CONFIG_FILE_ENV:
            self.found.notes.append(
                f"{where}: names a file of its own, {shown(value)}: migrate that too"
            )
        elif name not in KNOWN and is_not_ours(variable, str(value)[:100]):
            self.found.notes.append(f"{where}: {variable} sets nothing here, left out")
        else:
            self._add(name, _of_variable(name, value), where)

    def _add(self, name: Any, value: Any, where: str) -> None:
        """Take an option; two values of one name are both left out."""
        known = self.found.named
        if name in self.found.where and name not in known:
            self._refuse(f"{name} at {where}", "has another value elsewhere, too")
        elif name in known and known[name] != value:
            self._refuse(
                f"{name} at {where} and at {self.found.where[name]}",
                "has two values; migrate one engine at a time",
            )
            del known[name]
        else:
            known[name] = value
            self.found.where.setdefault(name, where)

    def _refuse(self, what: str, why: str) -> None:
        self.found.refused.append(f"{self._path}: {what}: {why}")


def _is_script(text: str) -> bool:
    """Return whether a text holds words that set options."""
    is_option = any(name in text for name in (*_TRANSFER, _SERVER_MEMORY))
    return (is_option and text not in _TRANSFER) or _SCRIPT.search(text) is not None


def _of_variable(name: str, value: Any) -> Any:
    """Return what a variable means, whose text a manifest may hold as a number or truth value."""
    if not isinstance(value, str):
        return value
    if name in FOREIGN_NAMES:
        try:
            return parse_foreign(ENV_PREFIX + name.upper(), value)
        except ConfigError:
            return value
    return as_option(name, value)


def _name(name: Any) -> str:
    return name if isinstance(name, str) and len(name) < 100 else shown(name)
