"""Which chunks the serving engine holds with loss."""

from __future__ import annotations

import threading
from collections import OrderedDict

from lmcache_core.keys import CacheEngineKey

MAX_REMEMBERED_KEYS = 1 << 14


class LoadedWithLoss:
    """Remembers chunks that were loaded with loss; the oldest are forgotten first. Thread-safe.

    The serving engine may store what it has loaded, when no tier of this process has the chunk any
    more. Its values are then still not those that were computed, and must not be handed on as if
    they were.
    """

    def __init__(self) -> None:
        self._keys: OrderedDict[CacheEngineKey, None] = OrderedDict()
        self._lock = threading.Lock()

    def __contains__(self, key: CacheEngineKey) -> bool:
        with self._lock:
            return key in self._keys

    def note(self, key: CacheEngineKey, is_lossy: bool) -> None:
        """That chunk has just been loaded."""
        with self._lock:
            self._keys.pop(key, None)
            if is_lossy:
                self._keys[key] = None
                if len(self._keys) > MAX_REMEMBERED_KEYS:
                    self._keys.popitem(last=False)
