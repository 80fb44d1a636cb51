"""The tiers of one process as one: hot memory in front, slower tiers behind it."""

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
from lmcache_core.record import Chunk, Miss, MissReason, Result
from lmcache_core.storage.base import IsUnwanted, StorageBackend
from lmcache_core.storage.hot import LocalCPUBackend
from lmcache_core.storage.write_behind import WriteBehind

logger = logging.getLogger(__name__)

LOCAL_TIERS = ("Hot", "LocalDiskBackend")
"""Those that keep chunks in this pod."""
DEFAULT_TIMEOUT_S = 2.0
GRACE_S = 0.05
"""What a tier may need to give back, at the deadline, what it has; one that needs longer loses
that too.
"""
TIER_CLOSE_S = 30.0
"""How long a tier may take to close: longer than any tier of ours waits for its threads and
tasks.
"""
FIRST_RETRY_S = 1.0
MAX_RETRY_S = 30.0
"""Between two attempts to open a tier."""
DEFAULT_PENDING_SHARE = 2
"""Writes that wait for all slower tiers together may hold one part in this many of the hot tier."""


@dataclass(frozen=True, slots=True)
class ReadLimit:
    """How long chunks may be waited for. On the event loop only.

    Attributes:
        deadline: On the loop's clock.
        recompute_s: What recomputing one chunk costs; None when that is not known.
    """

    deadline: float
    recompute_s: float | None = None

    def left_s(self, num_chunks: int) -> float:
        """Return the seconds that so many chunks are worth, and that are left; not positive when
        there are none.
        """
        left_s = self.deadline - asyncio.get_running_loop().time()
        return left_s if self.recompute_s is None else min(left_s, self.recompute_s * num_chunks)


class StackListener(Protocol):
    """Hears what tiers keep and forget; called on the loop, must not block."""

    def stored(self, key: ChunkKey, tier: str, num_bytes: int) -> None:
        """Note that a tier now holds a chunk, complete and readable."""


class TierStack:
    """Tiers in order of speed. All calls are batched and run on one event loop.

    Args:
        hot: The host-memory tier; every chunk that enters the process lands in its arena.
        lower: Slower tiers, fastest first; opened and closed by the stack.
        written: Those of them that every new chunk is written to; None means all.
        listener: Hears of chunks that tiers of this process have kept.
        keep_hot: Keep chunks that are stored or lifted in host memory; False uses it only on the
            way through.
        pending_bytes: Bounds on the writes that wait, by tier; equal parts of what
            `DEFAULT_PENDING_SHARE` leaves for those that are not named.

    Attributes:
        hot: As given.
        lower: Those of the slower tiers that are open.
        keep_hot: As given.
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
        """Open every tier; one that cannot be had is left out until it can, since a broken disk
        must not stop what works without it.

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

        A tier that has not closed after `TIER_CLOSE_S` is logged and left.
        """
        await self._opening.close()
        await asyncio.gather(*(writer.close(drain_s) for writer in self._writers.values()))
        try:
            await _close_all(self.lower)
        finally:
            await _close_all([self.hot])

    async def drain(self, timeout_s: float) -> bool:
        """Wait until every accepted chunk has reached (or failed to reach) the slower tiers;
        False when that took too long.
        """
        return all(
            await asyncio.gather(*(writer.drain(timeout_s) for writer in self._writers.values()))
        )

    def allocate(self, num_bytes: int) -> MemoryObj | None:
        """Return arena memory, by eviction if need be; one reference owned by the caller."""
        return self.hot.allocate(num_bytes)

    async def batched_tiers(
        self,
        keys: Sequence[ChunkKey],
        timeout_s: float = DEFAULT_TIMEOUT_S,
        search_range: Sequence[str] | None = None,
    ) -> list[str | None]:
        """Return for each chunk the fastest tier that has it, or None; tiers outside `search_range`
        (all when None) are not asked.
        """
        found: list[str | None] = [None] * len(keys)
        deadline = asyncio.get_running_loop().time() + timeout_s
        for tier in (self.hot, *self.lower):
            missing = [i for i, name in enumerate(found) if name is None]
            if not missing:
                break
            if search_range is not None and tier.name not in search_range:
                continue
            held: Sequence[bool] = ()
            with contextlib.suppress(TimeoutError, UnavailableError):
                async with asyncio.timeout_at(deadline):
                    held = await tier.batched_contains([keys[i] for i in missing])
            for i, has in zip(missing, held, strict=False):  # none without an answer
                found[i] = tier.name if has else None
        return found

    async def batched_get(
        self,
        keys: Sequence[ChunkKey],
        timeout_s: float = DEFAULT_TIMEOUT_S,
        prefix_only: bool = False,
        search_range: Sequence[str] | None = None,
        recompute_s: float | None = None,
    ) -> list[Result]:
        """Read chunks, each from the fastest tier that has it; what comes from below is kept hot.

        A tier is not asked for more than is expected to come by the deadline: the rest are misses
        with reason `deadline`.

        Args:
            keys: Their names.
            timeout_s: Deadline for the whole call; what has not come by then is a miss.
            prefix_only: Give back nothing behind the first miss.
            search_range: Names of the lower tiers that are asked; None means all.
            recompute_s: What recomputing one chunk costs; the deadline is then at most that, for
                the chunks that are not hot.

        Returns:
            Results in the order of the keys; the caller owns every chunk.
        """
        began = asyncio.get_running_loop().time()
        results = self.hot.results(keys)
        missing = _missing(results)
        if missing and self.lower:
            limit_s = (
                timeout_s if recompute_s is None else min(timeout_s, recompute_s * len(missing))
            )
            try:
                await self._fill_from_below(
                    keys, results, ReadLimit(began + limit_s, recompute_s), search_range
                )
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
        """Keep chunks hot and write them to the slower tiers in the background (chunks are
        borrowed).
        """
        kept = self._keep(chunks) if self.keep_hot else [True] * len(chunks)
        held = [chunk for chunk, is_kept in zip(chunks, kept, strict=True) if is_kept]
        for writer in self._writers.values():
            writer.offer(held)
        return kept

    async def batched_remove(
        self, keys: Sequence[ChunkKey], search_range: Sequence[str] | None = None
    ) -> int:
        """Forget chunks in the tiers named (all when None); how many were in the one that held
        most.
        """
        return await self._remove(
            frozenset(keys).__contains__, search_range, lambda tier: tier.batched_remove(keys)
        )

    async def clear(
        self, tenant: str | None = None, search_range: Sequence[str] | None = None
    ) -> int:
        """Forget everything (of that tenant) in the tiers named (all when None); how many were
        in the one that held most.
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
            # Chunks stay hot until what is on its way to a tier is there, or a reader would see
            # them go and come back.
            await asyncio.gather(
                *(
                    writer.arrived(is_unwanted, DEFAULT_TIMEOUT_S)
                    for writer in self._writers.values()
                )
            )
            for writer in self._writers.values():
                writer.forget(is_unwanted)
            # Without a wait since the line above: what is put from here on is put after the
            # removal, and is written when that is over.
            counts = [await remove(tier) for tier in tiers]
        return max(counts, default=0)

    @property
    def num_pending_bytes(self) -> int:
        """Return bytes of memory held for writes to slower tiers; zero does not mean that nothing
        waits: see `is_writing`.
        """
        return sum(writer.pending_bytes for writer in self._writers.values())

    @property
    def num_waiting_names(self) -> int:
        """Return chunks that wait by name alone for slower tiers, counted once per tier; their
        bytes are not pending yet.
        """
        return sum(len(writer.later) for writer in self._writers.values())

    @property
    def is_writing(self) -> bool:
        """Return whether an accepted chunk neither reached nor failed to reach a slower tier."""
        return any(writer.is_writing for writer in self._writers.values())

    def stats(self) -> dict[str, dict[str, int]]:
        """Return figures of every tier, by its name."""
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
        """Fill in what the slower tiers bring in time."""
        missing = _missing(results)
        if self.keep_hot and await self._reads.wait_for_others(
            [keys[i] for i in missing], limit.left_s(len(missing))
        ):
            for i, result in zip(
                missing, self.hot.results([keys[i] for i in missing]), strict=True
            ):
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
            try:
                async with asyncio.timeout(limit_s + GRACE_S):
                    got = await tier.batched_get(wanted, self.hot.allocate, limit_s)
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
        """Open a tier as soon as it can be. It holds what it held, also what was removed from the
        others meanwhile.
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
        """Read a tier that has opened, in its place, and begin to write to it."""
        self.lower = tuple(tier for tier in self._tiers if tier is opened or tier in self.lower)
        writer = self._written_to.get(opened.name)
        if writer is not None:
            self._writers[opened.name] = writer
            writer.open()

    def _written(self, chunk: Chunk, tier: str) -> None:
        if self._listener is not None:
            self._listener.stored(chunk.key, tier, chunk.num_bytes)


async def _close_all(tiers: Sequence[StorageBackend]) -> None:
    """Close tiers, all at once.

    Raises:
        Exception: One of them failed other than by being unavailable; the others are closed all the
            same.
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
        keys: Their names.
        unwanted: Those of them that are being removed: the task must not keep them.
        done: Set when the read is over.
    """

    keys: frozenset[ChunkKey]
    unwanted: set[ChunkKey] = field(default_factory=set)
    done: asyncio.Event = field(default_factory=asyncio.Event)


class InflightReads:
    """The reads of one stack, and the removals that they must not undo. On its event loop only."""

    def __init__(self) -> None:
        self._active: list[InflightRead] = []
        self._removals: dict[object, IsUnwanted] = {}

    @contextmanager
    def reading(self, keys: Sequence[ChunkKey]) -> Iterator[InflightRead]:
        """Announce a read of these chunks for as long as the context lasts."""
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
        """Announce that these chunks are being removed from one tier after the other.

        Reads in progress, or begun meanwhile, may still find them in a tier whose turn is to come.
        They do not keep them, even when they end later: a caller that saw a chunk gone must not
        see it again.
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
        """Wait up to `timeout_s` seconds until no other task is reading these chunks; False if
        none was.
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
