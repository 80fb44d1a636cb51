"""Rebuilds the index of a disk tier from the files in its directory. Reads heads, not payloads."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lmcache_core.errors import RecordError
from lmcache_core.keys import ChunkKey
from lmcache_core.record import RecordReason, decode_head
from lmcache_core.storage.disk.files import DiskFiles
from lmcache_core.storage.disk.index import DiskEntry
from lmcache_core.storage.disk.layout import (
    FILE_DEPTH,
    DiskLayout,
    is_record,
    is_shard,
    record_name,
    tenant_of,
)
from lmcache_core.storage.disk.record_file import opened, read_head

LATER_VERSION = frozenset({RecordReason.VERSION, RecordReason.EXTENSION})
"""A record with these reasons may be readable by another version, so it is not damaged."""


@dataclass
class Found:
    """The files found below the root of a disk tier.

    Attributes:
        records: Records whose heads are valid and whose sizes match, coldest (oldest) first.
        damaged: Files that are named like records and are not valid, with their sizes.
        later: Records that a later version has written, with their sizes.
        unread: Files and directories that could not be read, with the sizes of the files. Nothing
            is known about their content.
        error: The last error of those.
        num_foreign: Number of unknown names; they are left alone.
    """

    records: list[tuple[ChunkKey, DiskEntry]] = field(default_factory=list)
    damaged: list[tuple[Path, int]] = field(default_factory=list)
    later: list[tuple[Path, int]] = field(default_factory=list)
    unread: dict[Path, int] = field(default_factory=dict)
    error: OSError | None = None
    num_foreign: int = 0


def scan(layout: DiskLayout, files: DiskFiles, places: Sequence[Path]) -> Found:
    """Examine every file in these places: the root, directories below it, or single files."""
    found = Found()
    dated: list[tuple[int, ChunkKey, DiskEntry]] = []
    for path in (file for place in places for file in _files_in(layout, files, place, found)):
        size = 0
        try:
            status = files.stat(path)
            size = status.st_size
            tenant = tenant_of(path.parent.parent.name)
            assert tenant is not None, "foreign directories were skipped"
            key, entry = read_entry(files, tenant, path, status)
        except FileNotFoundError:
            continue
        except RecordError as exc:
            (found.later if exc.reason in LATER_VERSION else found.damaged).append((path, size))
            continue
        except OSError as exc:
            found.unread[path], found.error = size, exc
            continue
        dated.append((status.st_mtime_ns, key, entry))
    dated.sort(key=lambda item: item[0])
    found.records = [(key, entry) for _, key, entry in dated]
    return found


def _files_in(layout: DiskLayout, files: DiskFiles, path: Path, found: Found) -> Iterator[Path]:
    """Yield every file below that is named like a record: `<root>/<tenant>/<shard>/<record>`."""
    depth = len(path.relative_to(layout.root).parts)
    if depth == FILE_DEPTH:
        yield path
        return
    try:
        names = files.list_directory(path)
    except FileNotFoundError:
        return
    except NotADirectoryError:
        found.num_foreign += 1
        return
    except OSError as exc:
        found.unread[path], found.error = 0, exc
        return
    for name in names:
        if depth == 0 and name in (layout.lock.name, layout.temporary.name, layout.bad.name):
            continue
        is_ours = (
            tenant_of(name) is not None,
            is_shard(name),
            is_record(name) and name.startswith(path.name),
        )[depth]
        if is_ours:
            yield from _files_in(layout, files, path / name, found)
        else:
            found.num_foreign += 1


def read_entry(
    files: DiskFiles, tenant: str, path: Path, status: os.stat_result
) -> tuple[ChunkKey, DiskEntry]:
    """Return the key and entry of a record file, from its head.

    Args:
        tenant: Tenant whose directory holds the file.
        status: Its size and modification time, which is when it was stored.

    Raises:
        RecordError: It is not a whole record of the key that its name states.
        OSError: It cannot be read.
    """
    if not stat.S_ISREG(status.st_mode):
        raise RecordError(RecordReason.MAGIC, "not a regular file")
    with opened(files, path) as fd:
        head = read_head(files, fd)
    header, payload_bytes = decode_head(head)
    if len(head) + payload_bytes != status.st_size:
        raise RecordError(
            RecordReason.SHORT, f"{status.st_size} bytes, its head says {len(head) + payload_bytes}"
        )
    key = header.engine_key()
    if record_name(key) != path.name:
        raise RecordError(RecordReason.WRONG_KEY, "the file is not named after its key")
    return ChunkKey.of(tenant, key), DiskEntry(
        len(head), payload_bytes, header.lossy, status.st_mtime
    )
