"""Digests of whole files, computed in parallel and cached between starts."""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec
import xxhash

from lmcache_core.errors import LayoutError

logger = logging.getLogger(__name__)

SEGMENT_BYTES = 256 << 20
"""Part of a file that one thread reads."""
READ_BYTES = 4 << 20
MAX_THREADS = 8
MIN_REMEMBERED_BYTES = 64 << 20
"""Smaller sets of files are re-read at each start: that takes less than a tenth of a second."""
MAX_REMEMBERED = 256
"""Sets of files to remember; the oldest are forgotten first."""
SETTLED_S = 2.0
"""Resolution of timestamps at worst: a file changed more recently is not remembered."""
MAX_LOCK_WAIT_S = 900.0
"""Longest wait for another process that is reading the same files."""
LOCK_POLL_S = 0.1
PROGRESS_S = 10.0
"""Interval between progress messages: hundreds of gigabytes on a network volume take minutes."""

_Stat = tuple[int, int, int, int, int]
"""Device, inode, size, and the times of the last change of content and of inode."""
_Known = list[tuple[_Stat, str]]
"""Version of each file, in the order of their paths, and its digest."""
_KNOWN = msgspec.json.Decoder(_Known)


def file_digests(files: Sequence[Path], lock_wait_s: float | None = None) -> list[str]:
    """Return a digest of every byte of each file.

    Processes that request the same files concurrently read them once, if they have a cache
    directory (`$XDG_CACHE_HOME/lmcache`, or `~/.cache/lmcache`) that no other user can write to.

    Args:
        lock_wait_s: How long to wait for another process that is reading them before reading them
            here, too; by default `MAX_LOCK_WAIT_S`.

    Raises:
        LayoutError: A file changes while it is being read.
        OSError: A file cannot be read.
    """
    paths = [file.resolve() for file in files]
    num_bytes = sum(path.stat().st_size for path in paths)
    directory = _cache_directory() if num_bytes >= MIN_REMEMBERED_BYTES else None
    if directory is None:
        return _read(paths)
    name = hashlib.sha256("\0".join(map(str, paths)).encode("utf-8", "surrogateescape")).hexdigest()
    memory = directory / f"weights-{name}.json"
    wait_s = MAX_LOCK_WAIT_S if lock_wait_s is None else lock_wait_s
    with _locked(directory / f"weights-{name}.lock", wait_s):
        stats, known = [_stat(path) for path in paths], _recalled(memory)
        if [stat for stat, _ in known] == stats:
            return [digest for _, digest in known]
        begin = time.monotonic()
        logger.info(
            "reading weights to identify their KV: files=%d gb=%.1f", len(paths), num_bytes / 1e9
        )
        digests = _read(paths)
        took_s = time.monotonic() - begin
        rate = num_bytes / 1e9 / max(took_s, 1e-9)
        logger.info("weights read: seconds=%.1f gb_per_s=%.1f", took_s, rate)
        if max(max(stat[3:]) for stat in stats) / 1e9 < time.time() - SETTLED_S:
            _remember(memory, list(zip(stats, digests, strict=True)))
        return digests


def _read(paths: Sequence[Path]) -> list[str]:
    before = [_stat(path) for path in paths]
    pieces = [(i, at) for i, stat in enumerate(before) for at in range(0, stat[2], SEGMENT_BYTES)]
    whole = [hashlib.sha256(stat[2].to_bytes(8, "little")) for stat in before]
    num_threads = min(MAX_THREADS, len(os.sched_getaffinity(0)), len(pieces) or 1)
    num_bytes, num_read, told_at = sum(stat[2] for stat in before), 0, time.monotonic()
    with ThreadPoolExecutor(num_threads, "lmcache-weights") as threads:
        for (i, at), digest in zip(
            pieces,
            threads.map(lambda piece: _digest(paths[piece[0]], piece[1]), pieces),
            strict=True,
        ):
            whole[i].update(digest)
            num_read += min(SEGMENT_BYTES, before[i][2] - at)
            if time.monotonic() - told_at >= PROGRESS_S:
                told_at = time.monotonic()
                logger.info("reading weights: gb=%.1f of_gb=%.1f", num_read / 1e9, num_bytes / 1e9)
    for path, stat in zip(paths, before, strict=True):
        if _stat(path) != stat:
            raise LayoutError(
                f"{path} changes while it is being read: start vLLM when the model is complete"
            )
    return [digest.hexdigest()[:32] for digest in whole]


def _digest(path: Path, begin: int) -> bytes:
    """Return the digest of one segment; xxHash and the read release the GIL."""
    hasher, buffer = xxhash.xxh3_128(), memoryview(bytearray(READ_BYTES))
    left = SEGMENT_BYTES
    with path.open("rb", buffering=0) as content:
        content.seek(begin)
        while left and (count := content.readinto(buffer[: min(left, READ_BYTES)])):
            hasher.update(buffer[:count])
            left -= count
    return hasher.digest()


def _stat(path: Path) -> _Stat:
    stat = path.stat()
    return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns


def _cache_directory() -> Path | None:
    """Return the directory for cached digests; None if other users can write there, or it is not
    writable.
    """
    try:
        directory = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "lmcache"
    except RuntimeError:  # a user without a home
        return None
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = directory.stat()
    except OSError as exc:
        logger.info("cannot cache digests of weights: directory=%s error=%s", directory, exc)
        return None
    if status.st_uid != os.geteuid() or status.st_mode & 0o022:
        logger.warning(
            "not caching digests of weights, other users can write there: directory=%s",
            directory,
        )
        return None
    return directory


@contextmanager
def _locked(path: Path, wait_s: float) -> Iterator[None]:
    """Hold a lock, so that one process reads while the others wait. Proceed without it if locking
    fails or takes too long.
    """
    try:
        file = path.open("ab")
    except OSError:
        yield
        return
    with file:
        begin = told_at = time.monotonic()
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                now = time.monotonic()
                if now >= begin + wait_s:
                    break
                if now - told_at >= PROGRESS_S:
                    told_at = now
                    logger.info(
                        "waiting for another process that is reading the same weights: seconds=%.0f"
                        " lock=%s",
                        now - begin,
                        path,
                    )
                time.sleep(LOCK_POLL_S)
            except OSError:  # a file system without locks
                break
        yield


def _recalled(memory: Path) -> _Known:
    try:
        return _KNOWN.decode(memory.read_bytes())
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return []


def _remember(memory: Path, known: _Known) -> None:
    part = memory.with_suffix(f".{os.getpid()}.part")
    try:
        part.write_bytes(msgspec.json.encode(known))
        part.replace(memory)
        others = sorted(memory.parent.glob("weights-*.json"), key=lambda path: path.stat().st_mtime)
        for old in others[:-MAX_REMEMBERED]:
            old.unlink(missing_ok=True)
            old.with_suffix(".lock").unlink(missing_ok=True)
    except OSError as exc:
        logger.info("cannot cache digests of weights: file=%s error=%s", memory, exc)
        with suppress(OSError):
            part.unlink(missing_ok=True)
