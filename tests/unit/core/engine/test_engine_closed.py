"""Closing an engine without its secrets, and opening it again."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from lmcache_core.errors import ConfigError
from lmcache_core.memory import HostMemoryAllocator
from lmcache_core.storage.disk.layout import DiskLayout
from lmcache_core.storage.disk.lock import DirectoryLock

from tests.fixtures.embedded import build_engine, embedded_engine
from tests.fixtures.prompts import CHUNK_BYTES, kv_of, tokens_of

TOKENS = tokens_of((0, 1, 2))


def test_closing_reads_no_secret_again(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("secret")
    engine = build_engine(
        HostMemoryAllocator(CHUNK_BYTES),
        remote_url="lm://127.0.0.1:9",
        remote_token_file=str(token),
    )
    engine.open()
    token.unlink()
    engine.close()
    with pytest.raises(ConfigError, match="remote_token_file"):
        engine.open()
    token.write_text("another")
    engine.open()
    engine.close()


def test_an_engine_that_could_not_open_works_once_it_can(tmp_path: Path) -> None:
    lock = DirectoryLock(DiskLayout(tmp_path).lock)
    lock.acquire()
    engine = build_engine(
        HostMemoryAllocator(8 * CHUNK_BYTES),
        tmp_path,
        tier_timeout_s=60.0,
        prefill_tokens_per_s=0.001,
    )
    with pytest.raises(ConfigError, match="in use by another process"):
        engine.open()
    lock.release()
    engine.open()
    engine.store(TOKENS, kvcaches=kv_of(TOKENS))
    engine.close()
    with embedded_engine(tmp_path, tier_timeout_s=60.0, prefill_tokens_per_s=0.001) as cache:
        assert cache.engine.lookup(TOKENS) == len(TOKENS)


def test_a_released_directory_is_free_while_a_forked_child_has_its_lock_open(
    tmp_path: Path,
) -> None:
    """As a child does between the fork and its first instruction."""
    lock, other = DirectoryLock(tmp_path / "lock"), DirectoryLock(tmp_path / "lock")
    lock.acquire()
    [fd] = [
        int(link.name)
        for link in Path("/proc/self/fd").iterdir()
        if link.is_symlink() and link.readlink() == tmp_path / "lock"
    ]
    copy = os.dup(fd)
    lock.release()
    other.acquire()
    other.release()
    os.close(copy)
