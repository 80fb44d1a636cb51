"""The listener for unmodified LMCache clients: off by default, without credentials, bound to one
tenant.

Source: `docs/protocols.md`, "LMCache compatibility".
"""

from __future__ import annotations

from typing import Final

from lmcache_core.telemetry import Counters
from lmcache_core.wire import ServedStore

from lmcache_storage.compat.dialect import DIALECTS
from lmcache_storage.compat.server import CompatServer
from lmcache_storage.compat.session import CompatLimits
from lmcache_storage.compat.values import MAX_HEAD_BYTES, ForeignValues
from lmcache_storage.settings import StorageSettings

RECEIVING_SHARE: Final = 4
"""Values on their way in may hold one part in this many of the host memory."""

__all__ = ["CompatServer", "create_compat_server"]


def create_compat_server(
    settings: StorageSettings, store: ServedStore, counters: Counters
) -> CompatServer | None:
    """The listener that the settings ask for, not yet open; None when they ask for none.

    Args:
        settings: Options.
        store: Where values are kept.
        counters: Where it counts, under the names of `lmcache_storage.metrics`.
    """
    port, tenant = settings.lmcache_compat_port, settings.lmcache_compat_tenant
    if port is None or tenant is None:
        return None
    dialect = DIALECTS[settings.lmcache_compat_dialect]
    limits = CompatLimits(
        settings.lmcache_compat_max_connections,
        settings.max_record_bytes - MAX_HEAD_BYTES,
        settings.memory_bytes // RECEIVING_SHARE,
    )
    values = ForeignValues(store, tenant, dialect.name, counters)
    return CompatServer(values, dialect, limits, counters, settings.lmcache_compat_host, port)
