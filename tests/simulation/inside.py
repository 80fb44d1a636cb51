"""What the simulation's judges read inside the product.

Its public doors do more than show: reading a chunk holds it, counts it as an access, and may remove
expired ones. A judge must change nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any


def chunks_in_memory(node: Any) -> Mapping[Any, Any]:
    """Return the chunks in a node's memory, by key."""
    chunks: Mapping[Any, Any] = node.stack.hot._chunks
    return chunks


def pinned_chunks(node: Any) -> Mapping[Any, Any]:
    """Return the pins of a node, by key."""
    pins: Mapping[Any, Any] = node.pins._pins
    return pins


def disk_room(disk: Any) -> Any:
    """Return the books of a disk tier about its files, also those it cannot read."""
    return disk._store._room


def is_disk_loaded(disk: Any) -> bool:
    """Return whether a disk tier has read its directory."""
    return bool(disk._store.is_loaded)


def files_of_disk(disk: Any) -> Iterator[Path]:
    """Yield all files that a disk tier knows."""
    layout, room = disk._layout, disk_room(disk)
    yield layout.lock
    yield from (layout.record(key) for key in disk._index._entries)
    for paths in (room.unread, room.damaged, room.doubtful, room.later):
        yield from paths
