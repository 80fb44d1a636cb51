"""Damaged files: set aside for whoever wants to look, a bounded number of them, and gone as soon as their space is needed."""

from __future__ import annotations

import logging
from collections import deque
from pathlib import Path

from lmcache_core.storage.disk.files import DiskFiles
from lmcache_core.storage.disk.index import DiskIndex
from lmcache_core.storage.disk.layout import DiskLayout

logger = logging.getLogger(__name__)

MAX_BAD_FILES = 8


class Quarantine:
    """Files that are charged but never served. Not thread-safe: the store calls it under its lock for names.

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
        self._held: deque[tuple[Path, int]] = deque()
        self._left: dict[Path, int] = {}  # the oldest first; as many as an upgrade has written

    def __len__(self) -> int:
        return len(self._held)

    def leave(self, path: Path, charge: int) -> None:
        """Leave a good record of a later version where it is, until its space is needed."""
        self._index.charge_anyway(charge)
        self._left[path] = charge

    def take(self, path: Path, charge: int) -> None:
        """Set a damaged file aside; the oldest ones above `MAX_BAD_FILES` are removed. Never raises `OSError`.

        Args:
            path: The file. When it can be neither moved nor removed (a read-only disk), it stays charged where it is.
            charge: What it takes of the capacity; not charged yet.
        """
        held = self._layout.new_bad()
        try:
            self._files.make_directory(self._layout.bad)
            self._files.rename(path, held)
        except FileNotFoundError:
            return
        except OSError as exc:
            logger.warning("cannot move damaged file %s aside: %s", path, exc.strerror)
            held = path
        self.adopt(held, charge)

    def adopt(self, path: Path, charge: int) -> None:
        """Hold a file where it is, for removal when its space is needed. Never raises `OSError`."""
        self._index.charge_anyway(charge)
        self._held.append((path, charge))
        if len(self._held) > MAX_BAD_FILES:
            self._remove_first_held()

    def remove_oldest(self) -> bool:
        """Remove the damaged file held longest, or else the oldest of a later version.

        Returns:
            False when there is none, or it cannot be removed: it is then held on, and tried last.
        """
        return self._remove_first_held() or self._remove_first_left()

    def forget(self, path: Path) -> None:
        """A good record has been renamed over that file."""
        for item in [item for item in self._held if item[0] == path]:
            self._held.remove(item)
            self._index.unreserve(item[1])
        self._index.unreserve(self._left.pop(path, 0))

    def _remove_first_held(self) -> bool:
        if not self._held:
            return False
        path, charge = self._held.popleft()
        is_removed = self._remove(path, charge)
        if not is_removed:
            self._held.append((path, charge))
        return is_removed

    def _remove_first_left(self) -> bool:
        if not self._left:
            return False
        path = next(iter(self._left))
        charge = self._left.pop(path)
        is_removed = self._remove(path, charge)
        if not is_removed:
            self._left[path] = charge
        return is_removed

    def _remove(self, path: Path, charge: int) -> bool:
        try:
            self._files.unlink(path)
        except OSError:
            return False
        self._index.unreserve(charge)
        return True
