"""Options of the connector: those in `kv_connector_extra_config`, a file, and the environment."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lmcache_core.config import LMCacheEngineConfig
from lmcache_core.errors import ConfigError
from lmcache_core.integrations.connector_options import PREFIX, OptionReader

logger = logging.getLogger(__name__)

LOAD, FORMER_LOAD = "async", "sync"
"""The option `load` has one value left."""
BLOCKS, TOKENS = "blocks", "tokens"
AUTO = "auto"
READER = OptionReader(
    "kv_connector_extra_config", "vLLM", ("load", "layout", "kv_events", "kv_cache_layout")
)


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
    own, engine = READER.read(extra)
    READER.check_text("kv_cache_layout", own["kv_cache_layout"])
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
    if own["kv_events"] and engine.sidecar_socket is None:
        raise ConfigError(
            f"{PREFIX}kv_events=true: only a sidecar tells what it has; set {PREFIX}sidecar_socket"
        )
    return ConnectorOptions(
        engine,
        layout,
        own["kv_cache_layout"],
        own["model_name"],
        own["revision"],
        bool(own["kv_events"]),
    )
