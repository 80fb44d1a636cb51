"""Options of the connector: `kv_connector_extra_config`, a file, and the environment."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmcache_core.config import LMCacheEngineConfig
from lmcache_core.config.engine_config import OPTIONS
from lmcache_core.config.options import did_you_mean
from lmcache_core.config.sources import ENV_PREFIX, read_environment
from lmcache_core.errors import ConfigError

logger = logging.getLogger(__name__)

PREFIX = "lmcache."
LOAD, FORMER_LOAD = "async", "sync"
"""The option `load` has one value left."""
BLOCKS, TOKENS = "blocks", "tokens"
AUTO = "auto"
TEXTS = ("kv_cache_layout", "model_name", "revision", "config_file")
OWN_OPTIONS = ("load", "layout", "kv_events", *TEXTS)
KNOWN = (*OWN_OPTIONS, *OPTIONS)
TIER_OPTIONS = ("sidecar_socket", "max_local_cpu_size", "local_disk", "remote_url")


@dataclass(frozen=True)
class ConnectorOptions:
    """Options, checked.

    Attributes:
        layout: Content of a chunk: "tokens", so that engines with other layouts can use it; or
            "blocks", vLLM's blocks unchanged, for backends with packed blocks.
        kv_cache_layout: Layout to request from vLLM, in its terms; None: vLLM's choice.
        model_name: Name under which KV is shared; None: the model's.
        revision: Revision of the weights; None: their fingerprint.
        kv_events: Whether vLLM's publisher tells routers what the sidecar has.
    """

    engine: LMCacheEngineConfig
    layout: str
    kv_cache_layout: str | None = None
    model_name: str | None = None
    revision: str | None = None
    kv_events: bool = False


def read_options(extra: Mapping[str, Any], device: str) -> ConnectorOptions:
    """Read the options of an engine.

    Args:
        extra: `kv_connector_extra_config`: options of `LMCacheEngineConfig` and those above, with
            or without the prefix "lmcache.".
        device: Type of vLLM's device: on "cpu", blocks are packed.

    Raises:
        ConfigError: An option is unknown or its value is invalid.
    """
    named = {
        name.removeprefix(PREFIX): value
        for name, value in extra.items()
        if name.startswith(PREFIX) or name in KNOWN
    }
    unknown = [name for name in named if name not in KNOWN]
    if unknown:
        raise ConfigError(
            f"kv_connector_extra_config: {PREFIX}{unknown[0]} is no"
            f" option{did_you_mean(unknown[0], KNOWN)}"
        )
    for name in extra:
        meant = _meant(name)
        if name not in KNOWN and not name.startswith(PREFIX) and meant is not None:
            raise ConfigError(
                f"kv_connector_extra_config: {name} is no option; did you mean {PREFIX}{meant!s}?"
            )
    own = {name: named.pop(name, None) for name in OWN_OPTIONS}
    for name in TEXTS:
        if own[name] is not None and not (isinstance(own[name], str) and own[name]):
            raise ConfigError(
                f"kv_connector_extra_config: {PREFIX}{name}={own[name]!r}: must be text, or"
                " left out"
            )
    if own["load"] == FORMER_LOAD:  # engines that were started with it must still start
        logger.warning(
            "%sload=%s has no effect, all loads are asynchronous: leave the option out",
            PREFIX,
            FORMER_LOAD,
        )
    elif own["load"] not in (None, LOAD):
        raise ConfigError(
            f"kv_connector_extra_config: {PREFIX}load={own['load']!r}: must be {LOAD}, or left out"
        )
    layout = own["layout"] or AUTO
    if layout not in (choices := (AUTO, BLOCKS, TOKENS)):
        raise ConfigError(
            f"kv_connector_extra_config: {PREFIX}layout={layout!r}: must be one of"
            f" {', '.join(choices)}"
        )
    if layout == AUTO:
        layout = BLOCKS if device == "cpu" else TOKENS
    if own["kv_events"] not in (None, False, True):
        raise ConfigError(
            f"kv_connector_extra_config: {PREFIX}kv_events={own['kv_events']!r}: must be true or"
            " false"
        )
    engine = _engine_config(own["config_file"], named)
    if own["kv_events"] and engine.sidecar_socket is None:
        raise ConfigError(
            f"{PREFIX}kv_events=true: only a sidecar tells what it has; set {PREFIX}sidecar_socket"
        )
    if engine.sidecar_socket is not None and Path(engine.sidecar_socket).is_dir():
        raise ConfigError(
            f"sidecar_socket={engine.sidecar_socket!r}: is a directory; set it to the socket that"
            " the sidecar names in its log"
        )
    if engine.enable_blending:
        raise ConfigError(
            "enable_blending=True: vLLM lets a connector load prefixes only; set it to false,"
            " prefixes are reused without it"
        )
    return ConnectorOptions(
        engine,
        layout,
        own["kv_cache_layout"],
        own["model_name"],
        own["revision"],
        bool(own["kv_events"]),
    )


def _meant(name: str) -> str | None:
    """Return the option that a name without our prefix probably means: one with the same spelling
    or the same beginning.
    """

    def letters(text: str) -> str:
        return "".join(filter(str.isalnum, text.lower()))

    spelt = letters(name)
    bare = spelt.removeprefix("lmcache")
    for known in KNOWN:
        if letters(known) in (spelt, bare):
            return known
    if bare == spelt:
        return None
    return (difflib.get_close_matches(bare, KNOWN, n=1, cutoff=0.0) or [KNOWN[0]])[0]


def _engine_config(config_file: str | None, named: Mapping[str, Any]) -> LMCacheEngineConfig:
    """Return the cache's options: those of the file or the environment, overridden by the extra
    config.
    """
    if config_file:
        base = LMCacheEngineConfig.from_file(config_file)
    else:
        base = LMCacheEngineConfig.from_env()
    in_environment = {name.removeprefix(ENV_PREFIX).lower() for name in read_environment()}
    has_place = not (in_environment | set(named)).isdisjoint(TIER_OPTIONS)
    if not config_file and not has_place and "config_file" not in in_environment:
        raise ConfigError(
            f'kv_connector_extra_config names no place for KV: set "{PREFIX}sidecar_socket" to the'
            f' socket of the pod\'s sidecar, or "{PREFIX}max_local_cpu_size" to some GB for a cache'
            " inside vLLM"
        )
    of_base = {name: getattr(base, name) for name in OPTIONS}
    return LMCacheEngineConfig(**of_base | dict(named) | {"save_unfull_chunk": False})
