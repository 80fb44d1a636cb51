"""Rebuilds what a disk tier holds from what lies in its directory. Heads are read, payloads are not."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from lmcache_core.errors import RecordError
from lmcache_core.keys import ChunkKey
from lmcache_core.record import RecordReason, decode_head
from lmcache_core.storage.disk.files import DiskFiles
from lmcache_core.storage.disk.index import DiskEntry
from lmcache_core.storage.disk.layout import DiskLayout, is_record, is_shard, record_name, tenant_of
from lmcache_core.storage.disk.record_file import opened, read_head


@dataclass
class Found:
    """What lies below the root of a disk tier.

    Attributes:
        records: Whole records as far as their heads tell, coldest (oldest) first.
        damaged: Files that are named like records and are none, with their sizes.
        num_foreign: Names that are not ours; they are left alone.
    """

    records: list[tuple[ChunkKey, DiskEntry]] = field(default_factory=list)
    damaged: list[tuple[Path, int]] = field(default_factory=list)
    num_foreign: int = 0


def scan(layout: DiskLayout, files: DiskFiles) -> Found:
    """Look at every file. Raises `OSError` only if the root itself cannot be read."""
    found = Found()
    dated: list[tuple[int, ChunkKey, DiskEntry]] = []
    for tenant, path in _candidates(layout, files, found):
        size = 0
        try:
            status = files.stat(path)
            size = status.st_size
            key, entry = read_entry(files, tenant, path, status)
        except FileNotFoundError:
            continue
        except (OSError, RecordError):
            found.damaged.append((path, size))
            continue
        dated.append((status.st_mtime_ns, key, entry))
    dated.sort(key=lambda item: item[0])
    found.records = [(key, entry) for _, key, entry in dated]
    return found


def _candidates(layout: DiskLayout, files: DiskFiles, found: Found) -> Iterator[tuple[str, Path]]:
    own = {layout.lock.name, layout.temporary.name, layout.bad.name}
    for directory in files.list_directory(layout.root):
        if directory in own:
            continue
        tenant = tenant_of(directory)
        shards = None if tenant is None else _names(files, layout.root / directory)
        if tenant is None or shards is None:
            found.num_foreign += 1
            continue
        for shard in shards:
            names = _names(files, layout.root / directory / shard) if is_shard(shard) else None
            if names is None:
                found.num_foreign += 1
                continue
            for name in names:
                if is_record(name) and name.startswith(shard):
                    yield tenant, layout.root / directory / shard / name
                else:
                    found.num_foreign += 1


def _names(files: DiskFiles, path: Path) -> list[str] | None:
    try:
        return files.list_directory(path)
    except OSError:
        return None


def read_entry(files: DiskFiles, tenant: str, path: Path, status: os.stat_result) -> tuple[ChunkKey, DiskEntry]:
    """What a record file says that it holds.

    Args:
        files: How it is touched.
        tenant: Whose directory it lies in.
        path: The file.
        status: Its size and its time, which is when it was stored.

    Raises:
        RecordError: It is not a whole record of the key that it is named after.
        OSError: It cannot be read.
    """
    with opened(files, path) as fd:
        head = read_head(files, fd)
    header, payload_bytes = decode_head(head)
    if len(head) + payload_bytes != status.st_size:
        raise RecordError(RecordReason.SHORT, f"{status.st_size} bytes, its head says {len(head) + payload_bytes}")
    key = header.engine_key()
    if record_name(key) != path.name:
        raise RecordError(RecordReason.WRONG_KEY, "the file is not named after its key")
    return ChunkKey(tenant, key), DiskEntry(len(head), payload_bytes, header.lossy, status.st_mtime)
