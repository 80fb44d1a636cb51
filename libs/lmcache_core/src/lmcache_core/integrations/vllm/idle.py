"""A connector that does nothing, for a vLLM that ours do not fit: older, or newer than known.

Source: `vllm/distributed/kv_transfer/kv_connector/v1/base.py` of vLLM 0.9 to 0.33; what differs
    between them is looked up by name.
"""

from __future__ import annotations

import abc
import functools
import logging
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1 import base

from lmcache_core.integrations.vllm.logs import log_as_vllm

logger = logging.getLogger(__name__)

BASES: tuple[type, ...] = (base.KVConnectorBase_V1,)
if hasattr(base, "SupportsHMA"):  # without it vLLM may refuse a model with several cache groups
    BASES += (base.SupportsHMA,)


class IdleConnector(*BASES):  # type: ignore[misc]
    """Finds nothing and keeps nothing.

    Args:
        given: What vLLM passes; releases before 0.12 pass no cache groups.
        kv_cache_config: vLLM's cache groups; it looks for the name.
    """

    def __init__(self, *given: Any, kv_cache_config: Any = None, **more: Any) -> None:
        named = {} if kv_cache_config is None else {"kv_cache_config": kv_cache_config}
        super().__init__(*given, **named, **more)

    def get_num_new_matched_tokens(self, *_: Any, **__: Any) -> tuple[int, bool]:
        """Find nothing."""
        return 0, False

    def build_connector_meta(self, *_: Any, **__: Any) -> Any:
        """Tell the workers nothing."""
        return base.KVConnectorMetadata()

    def request_finished(self, *_: Any, **__: Any) -> tuple[bool, None]:
        """Hold no blocks."""
        return False, None

    def request_finished_all_groups(self, *_: Any, **__: Any) -> tuple[bool, None]:
        """Hold no blocks."""
        return False, None

    @property
    def requires_kv_delivery(self) -> bool:
        """False: nothing is stored."""
        return False


def _nothing(*_: Any, **__: Any) -> None:
    """Do nothing."""


for _name in IdleConnector.__abstractmethods__:  # as many as this vLLM has
    setattr(IdleConnector, _name, _nothing)
abc.update_abstractmethods(IdleConnector)


@functools.cache
def idle_connector(reason: str) -> type[IdleConnector]:
    """Return the class; log the reason, once in a process."""
    log_as_vllm()
    logger.error("model served without the cache: reason=%s", reason)
    return IdleConnector
