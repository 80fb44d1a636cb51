"""Damaged files: set aside for whoever wants to look, a bounded number of them, and gone as soon
as their space is needed.
"""

from __future__ import annotations

import logging
from pathlib import Path

from lmcache_core.storage.disk.files import DiskFiles
from lmcache_core.storage.disk.index import DiskIndex
from lmcache_core.storage.disk.layout import DiskLayout

logger = logging.getLogger(__name__)

MAX_BAD_FILES = 8


class Quarantine:
    """Files that are charged but never served. Not thread-safe: the store calls it under its lock
    for names.

    What could not be read is not among them: nothing is known about it.

    Args:
        layout: Where they go.
        index: What they are charged to.
        files: How they get there.
    """

    def __init__(self, layout: DiskLayout, index: DiskIndex, files: DiskFiles) -> None:
        self._layout = layout
        self._index = index
        self._files = files
        # Each with its charge, the oldest first.
        self._held: dict[Path, int] = {}
        self._left: dict[Path, int] = {}  # as many as an upgrade has written

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, path: Path) -> bool:
        return path in self._held or path in self._left

    def paths(self) -> list[Path]:
        """List every file, those of a later version included."""
        return [*self._held, *self._left]

    def leave(self, path: Path, charge: int) -> None:
        """Leave a good record of a later version where it is, until its space is needed."""
        self._index.charge_anyway(charge)
        self._left[path] = charge

    def take(self, path: Path, charge: int) -> None:
        """Set a damaged file aside; the oldest ones above `MAX_BAD_FILES` are removed. Never raises
        `OSError`.

        Args:
            path: The file. When it can be neither moved nor removed (a read-only disk), it stays
                charged where it is.
            charge: What it takes of the capacity; not charged yet.
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
        self.adopt(held, charge)

    def adopt(self, path: Path, charge: int) -> None:
        """Hold a file where it is, for removal when its space is needed. Never raises `OSError`."""
        self.forget(path)
        self._index.charge_anyway(charge)
        self._held[path] = charge
        if len(self._held) > MAX_BAD_FILES:
            self._remove_first(self._held)

    def remove_oldest(self) -> bool:
        """Remove the damaged file held longest, or else the oldest of a later version.

        Returns:
            False when there is none, or it cannot be removed: it is then held on, and tried last.
        """
        return self._remove_first(self._held) or self._remove_first(self._left)

    def forget(self, path: Path) -> int:
        """Charge a file no more and return what it was charged; nothing to do for another one."""
        charge = self._held.pop(path, 0) + self._left.pop(path, 0)
        self._index.unreserve(charge)
        return charge

    def _remove_first(self, files: dict[Path, int]) -> bool:
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
