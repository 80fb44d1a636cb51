"""Connector options in a container: those that ours would refuse, and LMCache's. When LMCache's
connector is replaced, its useful options carry over.

LMCache's names and what they mean are one table, `lmcache_core.config.foreign_names`. This module
adds what follows from the sidecar: it owns the tiers, so their sizes become its sizes, and their
addresses come from its settings.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from lmcache_core.config import LMCacheEngineConfig
from lmcache_core.config.engine_config import OPTIONS
from lmcache_core.config.foreign_names import in_our_names
from lmcache_core.config.options import problems_of
from lmcache_core.config.sources import CONFIG_FILE_ENV, ENV_PREFIX, values_of_environment
from lmcache_core.errors import ConfigError

from lmcache_webhook.injection.pod import Container, DeclinedError
from lmcache_webhook.injection.sidecar import ROLE, SOCKET_PATH, transfer_config

MAX_OPTION_CHARS: Final = 16 << 10
"""Of all variables LMCACHE_… of a container, and of a `--kv-transfer-config` that is replaced:
reading them takes up to 10 µs a character.
"""
MAX_EXTRA_OPTIONS: Final = 128
"""In one `kv_connector_extra_config`: each unknown one is compared with all known ones."""
ALLOCATOR: Final = "PYTORCH_CUDA_ALLOC_CONF"
REFUSED_ALLOCATOR: Final = "expandable_segments:True"
CONNECTORS: Final = ("LMCacheConnectorV1", "LMCacheMPConnector")
WORDS: Final = ("--kv-transfer-config", "--kv_transfer_config")
PREFIX: Final = "lmcache."
_EXTRA: Final = "kv_connector_extra_config"
_SIZES: Final = ("max_local_cpu_size", "max_local_disk_size")
_TIERS: Final = frozenset(
    [
        *(name for name, option in OPTIONS.items() if option.documented and option.beside_sidecar),
        *(*_SIZES, "eviction_policy", "local_device", "max_local_cache_size", "cache_policy"),
        "sidecar_socket",
    ]
)
"""Names that describe tiers, or another sidecar. With the pod's sidecar our connector ignores or
refuses them.
"""
_REPLACED: Final = ("kv_connector", "kv_connector_module_path", _EXTRA)
"""Members of LMCache's configuration that ours has for itself. Every other one is vLLM's own."""
_SERVER: Final = ("mp.", "mp_")
"""How names begin of the server that LMCacheMPConnector talks to. The sidecar replaces it."""

Place = tuple[str, int]


def check_options(container: Container, extra: Mapping[str, Any]) -> None:
    """Refuse a container whose variables and options in `extra` our connector could not read, or
    with which vLLM refuses connectors: vLLM would exit at its start.

    Raises:
        DeclinedError: The container is refused.
    """
    variables = {variable.name: variable.value or "" for variable in container.env or ()}
    if REFUSED_ALLOCATOR in variables.get(ALLOCATOR, ""):
        raise DeclinedError(
            f"vLLM refuses every connector with {ALLOCATOR} as the container {container.name} has"
            f" it: leave {REFUSED_ALLOCATOR} out"
        )
    try:
        values = values_of_environment(_texts(container), OPTIONS)
        # In the connector's order: first the environment alone.
        for more in ({}, {**extra, "sidecar_socket": SOCKET_PATH}):
            LMCacheEngineConfig.from_defaults(**{"remote_url": None} | values | more)
        if {**values, **extra}.get("enable_blending"):
            raise ConfigError(
                "enable_blending=True: vLLM lets a connector load prefixes only; set it to false"
            )
    except ConfigError as exc:
        raise DeclinedError(
            f"the container {container.name} has options that the connector cannot read"
            f" ({_line(exc)})"
        ) from exc


@dataclass(frozen=True, slots=True)
class ReplaceableConnector:
    """LMCache's connector, as words of a container's command line ask for it.

    Attributes:
        name: One of `CONNECTORS`.
        words: Where its option is: member of the container and index, in order.
        config: The value of the option.
        num_chars: Length of its text.
    """

    name: str
    words: tuple[Place, ...]
    config: Mapping[str, Any]
    num_chars: int


@dataclass(frozen=True, slots=True)
class CarriedOver:
    """What LMCache's options become.

    Attributes:
        extra: Options of our connector, by its names.
        members: Other members of vLLM's configuration, to keep.
        arena_gb: Size of LMCache's host memory, GiB; None where it is not given.
        disk_gb: Size of its disk, GiB; None where it has none.
        variables: Indexes of the variables that describe tiers, in order.
        left_out: Options that our configuration or the sidecar's settings replace, or that are no
            option of LMCache's, as the pod spells them.
    """

    extra: Mapping[str, Any]
    members: Mapping[str, str | float]
    arena_gb: float | None
    disk_gb: float | None
    variables: tuple[int, ...]
    left_out: tuple[str, ...]


def find_lmcache(container: Container) -> ReplaceableConnector | None:
    """Return LMCache's connector if words of the command line name it in JSON; None if they name
    another one or none, or if it is named in a script or variable.
    """
    words = [
        ((member, index), word)
        for member, line in (("command", container.command), ("args", container.args))
        for index, word in enumerate(line or ())
    ]
    for position, (place, word) in enumerate(words):
        option, is_whole, value = word.partition("=")
        if option not in WORDS:
            continue
        places = [place]
        if not is_whole and position + 1 < len(words):
            following, value = words[position + 1]
            places.append(following)
        try:
            config = json.loads(value)
        except (ValueError, RecursionError):
            return None
        name = config.get("kv_connector") if isinstance(config, dict) else None
        return (
            ReplaceableConnector(name, tuple(places), config, len(value))
            if name in CONNECTORS
            else None
        )
    return None


def carry_over(container: Container, connector: ReplaceableConnector) -> CarriedOver:
    """Return what LMCache's options in the command line and the variables become.

    Raises:
        DeclinedError: An option requests something unsupported, or cannot be read.
    """
    if any(variable.name == CONFIG_FILE_ENV for variable in container.env or ()):
        raise _irreplaceable(
            connector,
            f"the webhook cannot see the file that {CONFIG_FILE_ENV} names; write its options as"
            f" variables {ENV_PREFIX}… and leave the file out",
        )
    if container.envFrom:
        raise _irreplaceable(
            connector,
            "the webhook cannot see the variables of envFrom, and vLLM would not start with some of"
            " LMCache's; list in env what the container needs of them and leave envFrom out",
        )
    extra = connector.config.get(_EXTRA) or {}
    if (
        not isinstance(extra, dict)
        or len(extra) > MAX_EXTRA_OPTIONS
        or connector.num_chars > MAX_OPTION_CHARS
    ):
        raise _irreplaceable(
            connector,
            f"{_EXTRA} must be a mapping of at most {MAX_EXTRA_OPTIONS} options, and all of the"
            f" configuration at most {MAX_OPTION_CHARS} characters; shorten it",
        )
    unread = {name for name in extra if not name.startswith(PREFIX) or _is_server(name)}
    named = {_plain(name): value for name, value in extra.items() if name not in unread}
    texts = {name: text for name, text in _texts(container).items() if not _is_server(name)}
    try:
        translated = in_our_names(named, OPTIONS, _EXTRA)
        values = values_of_environment(texts, OPTIONS) | translated
        sizes = {name: values[name] for name in _SIZES if values.get(name)}
        ours = {name: value for name, value in translated.items() if name not in _TIERS}
        if problems := problems_of(ours | sizes, OPTIONS):
            raise ConfigError("\n".join(problems))
    except ConfigError as exc:
        raise _irreplaceable(connector, _line(exc)) from exc
    except RecursionError:
        raise _irreplaceable(connector, f"{_EXTRA} is nested too deeply; shorten it") from None
    has_disk = bool(values.get("local_disk"))
    needed = {"max_local_cpu_size", "max_local_cache_size"}
    if has_disk:
        needed.add("max_local_disk_size")
    if "max_local_cache_size" in {*named, *map(_plain, texts)}:
        needed.add("local_device")  # which says what has that size
    for variable in container.env or ():
        if (
            variable.valueFrom
            and variable.name.startswith(ENV_PREFIX)
            and _plain(variable.name) in needed - named.keys()
        ):
            raise _irreplaceable(
                connector,
                f"the sidecar's size depends on {variable.name}, whose valueFrom the webhook cannot"
                " see; write it as a value",
            )
    reached = sizes.keys() & needed
    if reached:
        reached.add("max_local_cache_size")  # an older name of one of these options
    members, lost = _members(connector.config)
    variables = [
        (index, variable.name)
        for index, variable in enumerate(container.env or ())
        if variable.name.startswith(ENV_PREFIX)
        and (_plain(variable.name) in _TIERS or _is_server(variable.name))
    ]
    return CarriedOver(
        extra=ours,
        members=members,
        arena_gb=sizes.get("max_local_cpu_size"),
        disk_gb=sizes.get("max_local_disk_size") if has_disk else None,
        variables=tuple(index for index, _ in variables),
        left_out=(
            *(
                name
                for name in [*(name for _, name in variables), *extra]
                if name in unread or _is_server(name) or _plain(name) in _TIERS - reached
            ),
            *lost,
        ),
    )


def _members(config: Mapping[str, Any]) -> tuple[dict[str, str | float], list[str]]:
    """Return the members of vLLM's configuration to keep, and the names of those that are lost:
    ours has another value, or theirs is neither text nor a number, as all of vLLM's are.
    """
    ours = transfer_config()
    kept: dict[str, str | float] = {}
    lost = []
    for name, value in config.items():
        if name in _REPLACED or value is None or value == ours.get(name):
            continue
        if (name == ROLE or name not in ours) and isinstance(value, str | int | float):
            kept[name] = value
        else:
            lost.append(name)
    return kept, lost


def _irreplaceable(connector: ReplaceableConnector, why: str) -> DeclinedError:
    return DeclinedError(f"{connector.name} cannot be replaced: {why}")


def _texts(container: Container) -> dict[str, str]:
    """Return the variables that a connector reads as options and whose value is in the pod.

    Raises:
        DeclinedError: They are longer than the limit.
    """
    texts = {
        variable.name: variable.value or ""
        for variable in container.env or ()
        if variable.name.startswith(ENV_PREFIX) and not variable.valueFrom
    }
    length = sum(map(len, texts.values()))
    if length > MAX_OPTION_CHARS:
        raise DeclinedError(
            f"the variables {ENV_PREFIX}… of the container {container.name} have {length}"
            f" characters together, above the {MAX_OPTION_CHARS} that are read: remove what the"
            " connector does not need"
        )
    return texts


def _plain(name: str) -> str:
    """Return the name of an option as a configuration file has it."""
    if name.startswith(ENV_PREFIX):
        return name.removeprefix(ENV_PREFIX).lower()
    return name.removeprefix(PREFIX)


def _is_server(name: str) -> bool:
    return name.startswith((ENV_PREFIX, PREFIX)) and _plain(name).startswith(_SERVER)


def _line(error: ConfigError) -> str:
    return "; ".join(str(error).splitlines())
