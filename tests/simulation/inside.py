"""What the simulation's judges read inside the product.

Its public doors do more than show: reading a chunk holds it, counts it as an access, and may remove
expired ones. A judge must change nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any


def chunks_in_memory(hot: Any) -> Mapping[Any, Any]:
    """Return the chunks of a tier in memory, by key."""
    chunks: Mapping[Any, Any] = hot._chunks
    return chunks


def pinned_chunks(node: Any) -> Mapping[Any, Any]:
    """Return the pins of a node, by key."""
    pins: Mapping[Any, Any] = node.pins._pins
    return pins


def store_of(disk: Any) -> Any:
    """Return the files of a disk tier."""
    return disk._store


def room_of(store: Any) -> Any:
    """Return the books of a disk tier about its files, also those it cannot read."""
    return store._room


def names_on_disk(disk: Any) -> Sequence[Any]:
    """Return the keys of all chunks of a disk tier, also of expired ones. It takes no lock, which a
    stopped process may hold.
    """
    return () if disk is None else list(disk._index._entries)


def files_of_disk(disk: Any, root: Path) -> Iterator[Path]:
    """Yield all files that a disk tier knows."""
    from lmcache_core.storage.disk.layout import DiskLayout

    layout, room = DiskLayout(root), room_of(store_of(disk))
    yield layout.lock
    yield from map(layout.record, names_on_disk(disk))
    for paths in (room.unread, room.damaged, room.doubtful, room.later):
        yield from paths


def has_unsent(connection: Any) -> bool:
    """Return whether an engine's connection to its sidecar has something left to send."""
    return bool(connection._unsent)
