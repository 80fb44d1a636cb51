"""The space of a disk tier: files that take it without being served, and the order of removal."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from lmcache_core.keys import ChunkKey
from lmcache_core.storage.disk.files import DiskFiles
from lmcache_core.storage.disk.index import DiskIndex
from lmcache_core.storage.disk.layout import DiskLayout

logger = logging.getLogger(__name__)

MAX_BAD_FILES = 8
MAX_VICTIMS_PER_WRITE = 1024
MAX_EXPIRED_PER_CALL = 16
"""Expired chunks that one call removes in passing; more than one, so that they do not accumulate.
"""


class Unread(NamedTuple):
    """A file or directory that exists and could not be read.

    Attributes:
        charge: Bytes of capacity it takes; 0 if unknown.
        needs_payload: Whether it counts as readable only if the payload can be read, not just the
            head.
    """

    charge: int
    needs_payload: bool = False


class DiskRoom:
    """Files that are charged but not served, and the order in which space is freed: expired chunks,
    damaged files, doubtful ones, records of a later version, then the policy's victims.

    An unreadable file is charged and never removed to make room, because its content is unknown.
    Not thread-safe: the store calls it under its lock for names.

    Args:
        index: The records held, and the accounting of all files.

    Attributes:
        unread_bytes: Sum of the charges in `unread`; kept because every write needs it.
        damaged: Damaged files and files that cannot be removed, with their charges; oldest first.
        doubtful: Files in place that were read as something other than their records, with their
            charges: what was read need not be what they hold.
        later: Records of a later version, with their charges.
    """

    def __init__(
        self,
        layout: DiskLayout,
        index: DiskIndex,
        files: DiskFiles,
        on_removed: Callable[[ChunkKey], None],
    ) -> None:
        self._layout = layout
        self._index = index
        self._files = files
        self._on_removed = on_removed
        self.damaged: dict[Path, int] = {}
        self.doubtful: dict[Path, int] = {}
        self.later: dict[Path, int] = {}
        self.unread: dict[Path, Unread] = {}
        self.unread_bytes = 0

    def reserve(self, charge: int, tenant: str) -> bool:
        """Reserve capacity and quota; False if not enough can be freed, counted if the quota is the
        reason.

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
        """Remove what exceeds quotas and capacity after a start with smaller ones, as far as files
        can be removed.
        """
        with contextlib.suppress(OSError):
            for tenant in self._index.tenants():
                while self._index.is_over_quota(tenant) and self._give_up_one(tenant):
                    pass
            while self._index.is_over_capacity and self._give_up_one():
                pass

    def expire(self, limit: int = MAX_EXPIRED_PER_CALL) -> bool:
        """Remove expired chunks, at most `limit` of them, and return whether there were any. Files
        that cannot be removed stay charged.
        """
        past = self._index.past(limit)
        for key in past:
            path = self._layout.record(key)
            try:
                self._files.unlink(path)  # first: never charge less than the real use
                self._index.evict(key)
            except OSError:
                self.hold_damaged(path, self._index.evict(key).charge)
            self._on_removed(key)
        return bool(past)

    def set_aside(self, path: Path, charge: int) -> None:
        """Move a damaged file aside, and remove the oldest ones above `MAX_BAD_FILES`. Never raises
        `OSError`.

        Args:
            path: The file. If it can be neither moved nor removed (a read-only disk), it stays in
                place and is charged.
            charge: Bytes of capacity it takes; not charged yet.
        """
        held = self._layout.new_bad()
        try:
            self._files.make_directory(self._layout.bad)
            self._files.rename(path, held)
        except FileNotFoundError:
            return
        except OSError as exc:
            logger.warning("cannot move damaged file aside: path=%s error=%r", path, exc.strerror)
            held = path
        self.hold_damaged(held, charge)

    def hold_damaged(self, path: Path, charge: int) -> None:
        """Charge a file in place and remove it when its space is needed. Never raises `OSError`."""
        self.forget(path)
        self._index.charge_anyway(charge)
        self.damaged[path] = charge
        if len(self.damaged) > MAX_BAD_FILES:
            self._remove_first(self.damaged)

    def hold_doubtful(self, path: Path, charge: int) -> None:
        """Keep a file in place that was read as no record until its space is needed."""
        self.forget(path)
        self._index.charge_anyway(charge)
        self.doubtful[path] = charge

    def hold_later(self, path: Path, charge: int) -> None:
        """Keep a good record of a later version in place until its space is needed."""
        self._index.charge_anyway(charge)
        self.later[path] = charge

    def hold_unread(self, path: Path, unread: Unread) -> None:
        """Charge an unreadable file until it can be read."""
        self._index.charge_anyway(unread.charge)
        self.unread_bytes += unread.charge
        self.unread[path] = unread

    def forget(self, path: Path) -> int | None:
        """Stop charging such a file and return its charge; None if it was not charged."""
        unread = self.unread.pop(path, None)
        if unread is not None:
            self.unread_bytes -= unread.charge
        charges = (
            unread and unread.charge,
            self.damaged.pop(path, None),
            self.doubtful.pop(path, None),
            self.later.pop(path, None),
        )
        held = [charge for charge in charges if charge is not None]
        self._index.unreserve(sum(held))
        return sum(held) if held else None

    def unlink(self, path: Path, charge: int) -> None:
        """Remove a file that is no longer charged; one that cannot be removed stays charged."""
        try:
            self._files.unlink(path)
        except OSError:
            self.hold_damaged(path, charge)

    def _remove_first(self, files: dict[Path, int]) -> bool:
        """Remove the file held longest; one that cannot be removed is kept, and tried last."""
        if not files:
            return False
        path = next(iter(files))
        charge = files.pop(path)
        try:
            self._files.unlink(path)
        except OSError:
            files[path] = charge
            return False
        self._index.unreserve(charge)
        return True

    def _give_up_one(self, tenant: str | None = None, charge: int = 0) -> bool:
        """Remove one file. For a tenant that is over its quota, or would be with `charge` more
        bytes, remove one of its own.
        """
        if self.expire(1):
            return True
        is_own = tenant is not None and self._index.is_over_quota(tenant, charge)
        if not is_own and any(map(self._remove_first, (self.damaged, self.doubtful, self.later))):
            return True
        key = self._index.victim(tenant if is_own else None)
        if key is None:
            return False
        try:
            self._files.unlink(self._layout.record(key))
        except OSError:
            self._index.find(key)  # count an access, so that the next write tries another one
            raise
        self._index.evict(key)
        self._on_removed(key)
        return True
