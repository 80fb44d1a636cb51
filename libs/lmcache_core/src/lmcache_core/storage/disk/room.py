"""Makes room on a disk tier: removes files, and the entries that tell of them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from lmcache_core.keys import ChunkKey
from lmcache_core.storage.disk.files import DiskFiles
from lmcache_core.storage.disk.index import DiskIndex
from lmcache_core.storage.disk.layout import DiskLayout
from lmcache_core.storage.disk.quarantine import Quarantine

MAX_VICTIMS_PER_WRITE = 1024
MAX_EXPIRED_PER_CALL = 16
"""Chunks whose time is over that a call removes on its way; more than one, so that they do not
pile up.
"""


class DiskRoom:
    """What goes, and in which order: chunks whose time is over, damaged files, then the policy's
    victims.

    Not thread-safe: the store calls it under its lock for names.

    Args:
        layout: Where files lie.
        index: What is held.
        files: How files are touched.
        quarantine: Damaged files, and those that cannot be removed.
        on_removed: Called with every key that is given up.
    """

    def __init__(
        self,
        layout: DiskLayout,
        index: DiskIndex,
        files: DiskFiles,
        quarantine: Quarantine,
        on_removed: Callable[[ChunkKey], None],
    ) -> None:
        self._layout = layout
        self._index = index
        self._files = files
        self._quarantine = quarantine
        self._on_removed = on_removed

    def reserve(self, charge: int, tenant: str) -> bool:
        """Take a part of the capacity and of the tenant's quota; False, and counted if the quota is
        why, when so much cannot be had.

        Raises:
            OSError: A victim's file cannot be removed.
        """
        for _ in range(MAX_VICTIMS_PER_WRITE):
            if self._index.reserve(charge, tenant):
                return True
            if not self._give_up_one(tenant, charge):
                break
        if self._index.is_over_quota(tenant, charge):
            self._index.refuse()
        return False

    def shrink(self) -> None:
        """Give up what exceeds quotas and capacity, after a start with smaller ones; as far as
        files can be removed.
        """
        with contextlib.suppress(OSError):
            for tenant in self._index.tenants():
                while self._index.is_over_quota(tenant) and self._give_up_one(tenant):
                    pass
            while self._index.is_over_capacity and self._give_up_one():
                pass

    def expire(self, limit: int = MAX_EXPIRED_PER_CALL) -> bool:
        """Remove chunks whose time is over, at most `limit` of them; whether there were any.
        What cannot be removed stays charged.
        """
        past = self._index.past(limit)
        for key in past:
            path = self._layout.record(key)
            try:
                self._files.unlink(path)
                self._index.evict(key)
            except OSError:
                self._quarantine.adopt(path, self._index.evict(key).charge)
            self._on_removed(key)
        return bool(past)

    def _give_up_one(self, tenant: str | None = None, charge: int = 0) -> bool:
        """Remove one file; for a tenant that is over its quota, or would be with so much more,
        one of its own.
        """
        if self.expire(1):
            return True
        is_own = tenant is not None and self._index.is_over_quota(tenant, charge)
        if not is_own and self._quarantine.remove_oldest():
            return True
        key = self._index.victim(tenant if is_own else None)
        if key is None:
            return False
        try:
            self._files.unlink(self._layout.record(key))
        except OSError:
            self._index.find(key)  # an access, so that the next write tries another one
            raise
        self._index.evict(key)
        self._on_removed(key)
        return True
