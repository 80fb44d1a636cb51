"""A lookup's commands are what the client library would send."""

from __future__ import annotations

import os

import hiredis
import pytest
from lmcache_lookup.index.bucket_reads import MAX_TENANTS_KEPT, BucketReads
from lmcache_lookup.index.packing import bucket_key, bucket_of, split_by_bucket


def test_commands_are_as_the_client_library_encodes_them() -> None:
    chunk_ids = [os.urandom(16) for _ in range(400)]
    reads = BucketReads()
    for number in range(MAX_TENANTS_KEPT + 2):
        tenant = f"tenant-{number}"
        commands = reads.of(tenant, split_by_bucket(chunk_ids))
        keys = sorted({bucket_key(tenant, bucket_of(chunk_id)) for chunk_id in chunk_ids})
        assert [command.key for command in commands] == keys
        for command in commands if number in (0, MAX_TENANTS_KEPT + 1) else ():
            inside = [
                chunk_id
                for chunk_id in chunk_ids
                if bucket_key(tenant, bucket_of(chunk_id)) == command.key
            ]
            assert (
                command.short()
                == command.full()
                == hiredis.pack_command(("HMGET", command.key, *inside))
            )  # type: ignore[arg-type]
    assert reads.of("tenant-0", split_by_bucket([])) == []


def test_ids_of_another_length_are_refused() -> None:
    with pytest.raises(ValueError, match="zip"):
        split_by_bucket([b"x" * 16, b"y" * 33])
