"""Closing an engine: in the middle of a call, without its secrets, and before it opens again."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
from lmcache_core.errors import ConfigError
from lmcache_core.memory import HostMemoryAllocator
from lmcache_core.storage.disk.layout import DiskLayout
from lmcache_core.storage.disk.lock import DirectoryLock

from tests.fixtures.embedded import build_engine, embedded_engine, until
from tests.fixtures.prompts import CHUNK_BYTES, kv_of, tokens_of

TOKENS = tokens_of((0, 1, 2))


@pytest.mark.parametrize("num_callers", [1, 2])
def test_closing_while_a_lock_is_held_ends_after_its_release(
    num_callers: int, tmp_path: Path
) -> None:
    """As a signal handler does that has interrupted a call, and a second one that came with it."""
    with embedded_engine(tmp_path, close_drain_s=0.0) as cache:
        cache.engine.store(TOKENS, kvcaches=kv_of(TOKENS))
        with cache.hot._lock:
            for _ in range(num_callers):
                cache.engine.close()
        until(lambda: cache.allocator.used_bytes == 0, "closing did not end")
        assert cache.engine.lookup(TOKENS) == 0
    names = {thread.name for thread in threading.enumerate()}
    assert "lmcache-storage" not in names


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
