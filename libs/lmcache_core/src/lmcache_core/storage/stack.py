"""The tiers of one process as one store: hot memory first, then the slower tiers."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Protocol

from lmcache_core.concurrency import TaskSupervisor, cancel_and_join
from lmcache_core.errors import ConfigError, UnavailableError
from lmcache_core.keys import ChunkKey
from lmcache_core.memory.base import MemoryObj
from lmcache_core.names import DISK_TIER, MEMORY_TIER
from lmcache_core.record import Chunk, Miss, MissReason, Result
from lmcache_core.storage.base import IsUnwanted, StorageBackend
from lmcache_core.storage.expected import ExpectedChunks
from lmcache_core.storage.hot import LocalCPUBackend
from lmcache_core.storage.write_behind import WriteBehind

logger = logging.getLogger(__name__)

LOCAL_TIERS = (MEMORY_TIER, DISK_TIER)
"""Tiers that keep chunks in this pod."""
DEFAULT_TIMEOUT_S = 2.0
GRACE_S = 0.05
"""Extra time for a tier, at the deadline, to return what it has; a tier that needs longer loses it.
"""
TIER_CLOSE_S = 30.0
"""How long a tier may take to close: longer than any of our tiers waits for its threads and tasks.
"""
FIRST_RETRY_S = 1.0
MAX_RETRY_S = 30.0
"""Bounds on the interval between two attempts to open a tier."""
DEFAULT_PENDING_SHARE = 2
"""Pending writes to all slower tiers together may hold one part in this many of the memory tier."""


@dataclass(frozen=True, slots=True)
class ReadLimit:
    """How long a read may wait for chunks. For use on the event loop.

    Attributes:
        deadline: Time on the loop's clock.
        recompute_s: Cost of recomputing one chunk; None if unknown.
        most_bytes: Size of the largest payload that the reader can use; None if unknown.
    """

    deadline: float
    recompute_s: float | None = None
    most_bytes: int | None = None

    def left_s(self, num_chunks: int) -> float:
        """Return how many seconds remain that reading `num_chunks` is worth; not positive if none
        do.
        """
        left_s = self.deadline - asyncio.get_running_loop().time()
        return left_s if self.recompute_s is None else min(left_s, self.recompute_s * num_chunks)


class StackListener(Protocol):
    """Notified of chunks that tiers store and drop; called on the loop, must not block."""

    def stored(self, key: ChunkKey, tier: str, num_bytes: int) -> None:
        """Handle a chunk that a tier now holds, complete and readable."""


class TierStack:
    """Tiers in order of speed. All calls are batched and run on one event loop.

    Args:
        hot: The host-memory tier; every chunk that enters the process lands in its arena.
        lower: Slower tiers, fastest first; opened and closed by the stack.
        written: Those of the slower tiers that every new chunk is written to; None: all.
        listener: Notified of chunks that tiers of this process have stored.
        keep_hot: Keep chunks that are stored or lifted in host memory; if False, they only pass
            through it.
        pending_bytes: Bounds on pending writes, by tier; other tiers get equal parts of what
            `DEFAULT_PENDING_SHARE` leaves.

    Attributes:
        lower: The slower tiers that are open.
        expected: Chunks that will soon be put; noted by those who put them.
    """

    def __init__(
        self,
        hot: LocalCPUBackend,
        lower: Sequence[StorageBackend] = (),
        written: Sequence[StorageBackend] | None = None,
        listener: StackListener | None = None,
        keep_hot: bool = True,
        pending_bytes: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        self.hot = hot
        self.lower = self._tiers = tuple(lower)
        self.keep_hot = keep_hot
        self._opening = TaskSupervisor("reconnect-tiers")
        self._listener = listener
        self._reads = InflightReads()
        self.expected = ExpectedChunks()
        behind = self.lower if written is None else written
        num_unnamed = sum(tier.name not in pending_bytes for tier in behind)
        share = hot.stats()["capacity_bytes"] // DEFAULT_PENDING_SHARE // max(1, num_unnamed)
        find = partial(hot.get_many, is_access=False) if keep_hot else None
        self._written_to = {
            tier.name: WriteBehind(tier, pending_bytes.get(tier.name, share), self._written, find)
            for tier in behind
        }
        self._writers: dict[str, WriteBehind] = {}

    async def open(self) -> None:
        """Open every tier. One that is unavailable is left out and retried, so that a broken disk
        does not stop the others.

        Raises:
            ConfigError: A tier's options are wrong, or another process owns its directory.
        """
        await self.hot.open()
        self.lower = ()
        for tier in self._tiers:
            try:
                await tier.open()
            except UnavailableError as exc:
                logger.error("tier unavailable, retrying: tier=%s error=%s", tier.name, exc)
                self._opening.start(tier.name, self._open_later(tier))
            else:
                self._join(tier)

    async def close(self, drain_s: float = 0.0) -> None:
        """Finish background writes for up to `drain_s` seconds, then close every tier. Idempotent.

        A tier that has not closed after `TIER_CLOSE_S` is logged and abandoned.
        """
        await self._opening.close()
        await asyncio.gather(*(writer.close(drain_s) for writer in self._writers.values()))
        try:
            await _close_all(self.lower)
        finally:
            await _close_all([self.hot])

    async def drain(self, timeout_s: float) -> bool:
        """Wait until every accepted chunk has reached the slower tiers or failed to; False if that
        took too long.
        """
        return all(
            await asyncio.gather(*(writer.drain(timeout_s) for writer in self._writers.values()))
        )

    def allocate(self, num_bytes: int) -> MemoryObj | None:
        """Return arena memory, evicting chunks if necessary; the caller owns one reference."""
        return self.hot.allocate(num_bytes)

    async def batched_tiers(
        self,
        keys: Sequence[ChunkKey],
        timeout_s: float = DEFAULT_TIMEOUT_S,
        search_range: Sequence[str] | None = None,
    ) -> list[str | None]:
        """Return for each chunk the fastest tier that has it, or None; only tiers in `search_range`
        (None: all) are asked.
        """
        found: list[str | None] = [None] * len(keys)
        deadline = asyncio.get_running_loop().time() + timeout_s
        if search_range is None or self.hot.name in search_range:
            found = [self.hot.name if has else None for has in self.hot.contains_many(keys)]
        for tier in self.lower:
            missing = [i for i, name in enumerate(found) if name is None]
            if not missing:
                break
            if search_range is not None and tier.name not in search_range:
                continue
            held: Sequence[bool] = ()
            with contextlib.suppress(TimeoutError, UnavailableError):
                async with asyncio.timeout_at(deadline):
                    held = await tier.batched_contains([keys[i] for i in missing])
            for i, has in zip(missing, held, strict=False):  # empty without an answer
                found[i] = tier.name if has else None
        return found

    async def batched_get(
        self,
        keys: Sequence[ChunkKey],
        timeout_s: float = DEFAULT_TIMEOUT_S,
        prefix_only: bool = False,
        search_range: Sequence[str] | None = None,
        recompute_s: float | None = None,
        most_bytes: int | None = None,
    ) -> list[Result]:
        """Read chunks, each from the fastest tier that has it; chunks from slower tiers are kept
        hot.

        A tier is not asked for more than it is expected to deliver by the deadline; the rest are
        misses with reason `deadline`.

        Args:
            timeout_s: Deadline of the whole call; chunks that have not arrived by then are misses.
            prefix_only: Return nothing after the first miss.
            search_range: Names of the slower tiers to ask; None: all.
            recompute_s: Cost of recomputing one chunk; bounds the deadline for chunks that are not
                hot.
            most_bytes: Size of the largest payload that the reader can use; a larger one in a
                slower tier is a miss. None: unknown (`LocalCPUBackend.receive_asked`).

        Returns:
            Results in the order of the keys; the caller owns every chunk.
        """
        began = asyncio.get_running_loop().time()
        results = self.hot.results(keys)
        missing = _missing(results)
        if missing and (self.lower or self.expected):
            limit_s = (
                timeout_s if recompute_s is None else min(timeout_s, recompute_s * len(missing))
            )
            try:
                limit = ReadLimit(began + limit_s, recompute_s, most_bytes)
                await self._fill_from_below(keys, results, limit, search_range)
            except BaseException:
                _release(results, 0)
                raise
        if prefix_only:
            num_prefix = next(
                (i for i, result in enumerate(results) if isinstance(result, Miss)), len(results)
            )
            _release(results, num_prefix)
        return results

    async def batched_put(self, chunks: Sequence[Chunk]) -> list[bool]:
        """Store chunks in hot memory and write them to the slower tiers in the background (chunks
        are borrowed).
        """
        kept = self._keep(chunks) if self.keep_hot else [True] * len(chunks)
        held = [chunk for chunk, is_kept in zip(chunks, kept, strict=True) if is_kept]
        for writer in self._writers.values():
            writer.offer(held)
        return kept

    def replace_hot(self, held: Chunk, better: Chunk) -> bool:
        """Call `LocalCPUBackend.replace`, and tell the listener the new size."""
        is_replaced = self.hot.replace(held, better)
        if is_replaced:
            self._written(better, self.hot.name)
        return is_replaced

    async def batched_remove(
        self, keys: Sequence[ChunkKey], search_range: Sequence[str] | None = None
    ) -> int:
        """Remove chunks from the named tiers (None: all); return how many the tier with the most of
        them held.
        """
        return await self._remove(
            frozenset(keys).__contains__, search_range, lambda tier: tier.batched_remove(keys)
        )

    async def clear(
        self, tenant: str | None = None, search_range: Sequence[str] | None = None
    ) -> int:
        """Remove everything (of that tenant) from the named tiers (None: all); return how many
        chunks the tier with the most of them held.
        """
        return await self._remove(
            lambda key: tenant is None or key.tenant == tenant,
            search_range,
            lambda tier: tier.clear(tenant),
        )

    async def _remove(
        self,
        is_unwanted: IsUnwanted,
        search_range: Sequence[str] | None,
        remove: Callable[[StorageBackend], Awaitable[int]],
    ) -> int:
        tiers = [
            tier
            for tier in (self.hot, *self.lower)
            if search_range is None or tier.name in search_range
        ]
        with ExitStack() as held:
            for writer in self._writers.values():
                held.enter_context(writer.holding_back(is_unwanted))
            if self.hot in tiers:
                held.enter_context(self._reads.removing(is_unwanted))
            # Chunks stay hot until writes underway have arrived, or a reader would see them vanish
            # and come back.
            await asyncio.gather(
                *(
                    writer.arrived(is_unwanted, DEFAULT_TIMEOUT_S)
                    for writer in self._writers.values()
                )
            )
            for writer in self._writers.values():
                writer.forget(is_unwanted)
            # No await since the line above: anything put from here on follows the removal, and is
            # written once that has finished.
            counts = [await remove(tier) for tier in tiers]
        return max(counts, default=0)

    @property
    def num_pending_bytes(self) -> int:
        """Return bytes of memory held for writes to slower tiers. Zero does not mean that nothing
        waits: see `is_writing`.
        """
        return sum(writer.pending_bytes for writer in self._writers.values())

    @property
    def num_waiting_names(self) -> int:
        """Return chunks that wait by name only, once for each slower tier; their bytes are not
        pending yet.
        """
        return sum(len(writer.later) for writer in self._writers.values())

    @property
    def is_writing(self) -> bool:
        """Return whether any accepted chunk is still on its way to a slower tier."""
        return any(writer.is_writing for writer in self._writers.values())

    def stats(self) -> dict[str, dict[str, int]]:
        """Return the figures of every tier, by its name."""
        figures = {tier.name: dict(tier.stats()) for tier in (self.hot, *self.lower)}
        for name, writer in self._writers.items():
            figures[name] |= {
                "pending_write_bytes": writer.pending_bytes,
                "dropped_writes": writer.num_dropped,
                "unkept_writes": writer.num_failed,
            }
        return figures

    async def _fill_from_below(
        self,
        keys: Sequence[ChunkKey],
        results: list[Result],
        limit: ReadLimit,
        search_range: Sequence[str] | None,
    ) -> None:
        """Fill in the chunks that slower tiers deliver in time."""
        missing = _missing(results)
        for arrivals in (self.expected.wait, self._reads.wait_for_others) if self.keep_hot else ():
            wanted = [keys[i] for i in missing]
            if await arrivals(wanted, limit.left_s(len(missing))):
                for i, result in zip(missing, self.hot.results(wanted), strict=True):
                    results[i] = result
                missing = _missing(results)
        with self._reads.reading([keys[i] for i in missing]) as read:
            for tier in self.lower:
                missing = _missing(results)
                if not missing:
                    break
                if search_range is None or tier.name in search_range:
                    await self._fill(tier, keys, missing, results, limit, read)

    async def _fill(
        self,
        tier: StorageBackend,
        keys: Sequence[ChunkKey],
        missing: list[int],
        results: list[Result],
        limit: ReadLimit,
        read: InflightRead,
    ) -> None:
        limit_s = limit.left_s(len(missing))
        num_asked = len(missing) if limit_s > 0 else 0
        num_asked = tier.num_worth(num_asked, limit_s, limit.recompute_s)
        wanted = [keys[i] for i in missing[:num_asked]]
        got: Sequence[Result] = [Miss(MissReason.DEADLINE)] * len(wanted)
        if wanted:
            allocate = partial(self.hot.receive_asked, most_bytes=limit.most_bytes)
            try:
                async with asyncio.timeout(limit_s + GRACE_S):
                    got = await tier.batched_get(wanted, allocate, limit_s)
            except TimeoutError:
                pass
            except UnavailableError:
                got = [Miss(MissReason.UNAVAILABLE)] * len(wanted)
        got = [*got, *[Miss(MissReason.DEADLINE)] * (len(missing) - len(wanted))]
        if self.keep_hot:
            arrived = [result for result in got if isinstance(result, Chunk)]
            self._keep([chunk for chunk in arrived if chunk.key not in read.unwanted])
        for i, result in zip(missing, got, strict=True):
            if isinstance(result, Chunk) or result.reason is not MissReason.NEVER_STORED:
                results[i] = result

    def _keep(self, chunks: Sequence[Chunk]) -> list[bool]:
        kept = self.hot.put_many(chunks)
        for chunk, is_kept in zip(chunks, kept, strict=True):
            if is_kept:
                self._written(chunk, self.hot.name)
        return kept

    async def _open_later(self, tier: StorageBackend) -> None:
        """Open a tier as soon as possible. It may still hold chunks that were removed from the
        others since.
        """
        pause_s = FIRST_RETRY_S
        last = ""
        while True:
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, MAX_RETRY_S)
            try:
                await tier.open()
            except (UnavailableError, ConfigError) as exc:
                if str(exc) != last:
                    last = str(exc)
                    logger.warning("tier still unavailable: tier=%s error=%s", tier.name, exc)
                continue
            logger.info("tier available: tier=%s", tier.name)
            self._join(tier)
            return

    def _join(self, opened: StorageBackend) -> None:
        self.lower = tuple(tier for tier in self._tiers if tier is opened or tier in self.lower)
        writer = self._written_to.get(opened.name)
        if writer is not None:
            self._writers[opened.name] = writer
            writer.open()

    def _written(self, chunk: Chunk, tier: str) -> None:
        if self._listener is not None:
            self._listener.stored(chunk.key, tier, chunk.num_bytes)


async def _close_all(tiers: Sequence[StorageBackend]) -> None:
    """Close tiers concurrently.

    Raises:
        Exception: One failed other than by being unavailable; the others are closed anyway.
    """
    closing = {asyncio.create_task(tier.close(), name=f"close/{tier.name}"): tier for tier in tiers}
    if not closing:
        return
    try:
        done, left = await asyncio.wait(closing, timeout=TIER_CLOSE_S)
        for task in left:
            logger.error(
                "tier did not close, leaving it: tier=%s waited_s=%g",
                closing[task].name,
                TIER_CLOSE_S,
            )
    finally:
        await cancel_and_join(closing.keys())
    for task in done:
        try:
            task.result()
        except UnavailableError as exc:
            logger.warning("tier did not close well: tier=%s error=%s", closing[task].name, exc)


def _release(results: list[Result], start: int) -> None:
    for i in range(start, len(results)):
        result = results[i]
        if isinstance(result, Chunk):
            result.release()
            results[i] = Miss(MissReason.NEVER_STORED)


def _missing(results: Sequence[Result]) -> list[int]:
    return [i for i, result in enumerate(results) if isinstance(result, Miss)]


@dataclass(eq=False)
class InflightRead:
    """Chunks that one task is reading from slower tiers.

    Attributes:
        unwanted: Those being removed: the task must not keep them.
    """

    keys: frozenset[ChunkKey]
    unwanted: set[ChunkKey] = field(default_factory=set)
    done: asyncio.Event = field(default_factory=asyncio.Event)


class InflightReads:
    """Reads in progress of one stack, and the removals that they must not undo. For its event
    loop.
    """

    def __init__(self) -> None:
        self._active: list[InflightRead] = []
        self._removals: dict[object, IsUnwanted] = {}

    @contextmanager
    def reading(self, keys: Sequence[ChunkKey]) -> Iterator[InflightRead]:
        """Register a read of these chunks for the duration of the context."""
        read = InflightRead(frozenset(keys))
        for is_unwanted in self._removals.values():
            read.unwanted.update(filter(is_unwanted, read.keys))
        self._active.append(read)
        try:
            yield read
        finally:
            self._active.remove(read)
            read.done.set()

    @contextmanager
    def removing(self, is_unwanted: IsUnwanted) -> Iterator[None]:
        """Register the removal of these chunks, which proceeds tier by tier.

        Reads that overlap with it may still find them in a tier that comes later. Such reads do not
        keep the chunks, even if they end after the removal: a chunk that a caller has seen
        disappear must not reappear.
        """
        for read in self._active:
            read.unwanted.update(filter(is_unwanted, read.keys))
        removal = object()
        self._removals[removal] = is_unwanted
        try:
            yield
        finally:
            del self._removals[removal]

    async def wait_for_others(self, keys: Sequence[ChunkKey], timeout_s: float) -> bool:
        """Wait up to `timeout_s` seconds for other tasks that are reading these chunks; False if
        there were none.
        """
        wanted = set(keys)
        others = [read for read in self._active if not wanted.isdisjoint(read.keys)]
        if not others:
            return False
        try:
            async with asyncio.timeout(timeout_s):
                for read in others:
                    await read.done.wait()
        except TimeoutError:
            pass
        return True
