"""The engine's chunk store in embedded mode: tiers in this process, behind a sync interface."""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
import threading
import weakref
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from lmcache_core._typing import override
from lmcache_core.concurrency import LoopThread, TaskSupervisor, Workers
from lmcache_core.config import LMCacheEngineConfig
from lmcache_core.config.options import directory_of_url
from lmcache_core.errors import LMCacheError, UnavailableError
from lmcache_core.forks import OPEN_IN_EACH_PROCESS
from lmcache_core.keys import DEFAULT_TENANT, CacheEngineKey, ChunkChain, ChunkKey
from lmcache_core.memory.base import MemoryAllocatorInterface, MemoryFormat, MemoryObj
from lmcache_core.record import Chunk, HotVerifier, Miss, MissReason, Result, Staged, release_all
from lmcache_core.record.chunk_store import ChunkStore, NotLent
from lmcache_core.security import ClientTls, TlsFiles, TokenFile, client_context
from lmcache_core.storage.eviction import TierLimits
from lmcache_core.storage.stack import LOCAL_TIERS, TierStack
from lmcache_core.storage.staging import STAGED_SHARE, SWEEP_INTERVAL_S, ChunkBudget, Stager
from lmcache_core.storage.tiers import (
    DiskSpec,
    HotSpec,
    PeersSpec,
    RemoteSpec,
    TiersSpec,
    build_tiers,
)
from lmcache_core.telemetry import MISSED_CHUNKS_TOTAL, Counters

if TYPE_CHECKING:
    from lmcache_core.storage.peer_group import PeerGroup

logger = logging.getLogger(__name__)

OPEN_TIMEOUT_S = 10.0
CODECS_OPEN_TIMEOUT_S = 180.0
"""The limit if a serde has machine code: code not compiled at installation is compiled then."""
MARGIN_S = 0.5
PUT_SHARE = 8
"""A put, which waits for no tier, may take one part in this many of a tier's deadline: an engine
step waits for it.
"""
PUT_CHUNK_S = 0.001
"""Extra time for each chunk of a put."""
MAX_PREFETCHES = 64

T = TypeVar("T")


class StorageManager(ChunkStore):
    """The tiers in this process as the engine's chunk store.

    Hot chunks are served in the caller's thread; only others cross to the loop thread. Tiers that
    do not answer in time are misses. Before `open` and after `close` it acts as an empty cache that
    stores nothing; so it does in a forked child of the process that has opened it. What is still
    open when the interpreter ends is closed then.

    Args:
        counters: Counters for misses.
        workers: Threads that check digests; opened and closed by their owner.
        chunk_bytes: Size of the largest payload of a chunk that the engine can use; a larger record
            in a slower tier is a miss. None: unknown.
    """

    def __init__(
        self,
        config: LMCacheEngineConfig,
        memory_allocator: MemoryAllocatorInterface,
        counters: Counters,
        workers: Workers | None = None,
        chunk_bytes: int | None = None,
    ) -> None:
        self._most_bytes = chunk_bytes
        self._peers: PeerGroup | None = None
        if config.enable_p2p:
            from lmcache_core.storage.peer_group import PeerGroup

            self._peers = PeerGroup(config)
        self._spec = partial(engine_spec, config, memory_allocator, self._peers, counters)
        self._tiers = build_tiers(self._spec())
        self._hot = self._tiers.hot
        self._open_timeout_s = (
            CODECS_OPEN_TIMEOUT_S
            if {config.remote_serde, config.local_disk_serde} - {None, "naive"}
            else OPEN_TIMEOUT_S
        )
        self._keep_hot = config.local_cpu
        self._timeout_s = config.tier_timeout_s
        self._close_drain_s = config.close_drain_s
        self._verifier = HotVerifier(config.verify_hot)
        self._counters = counters
        self._workers = workers or Workers("lmcache-digest")
        self._loop = LoopThread("lmcache-storage")
        self._tasks = TaskSupervisor("lmcache-storage")
        self._was_opened = False
        self._opened: TierStack | None = None  # what is to be closed
        self._closing: asyncio.Task[None] | None = None
        self._used: TierStack | None = None
        self._staging: Stager | None = None
        self._salt = config.salt
        self._prefetches = threading.Semaphore(MAX_PREFETCHES)

    def open(self, on_salt: Callable[[str], None]) -> None:
        """Start the loop thread and open the tiers.

        Raises:
            ConfigError: A tier's options are wrong, a token or TLS file cannot be read, or another
                process owns its directory.
            UnavailableError: The tiers did not open in time, or it was opened before a fork.
        """
        if self._loop.is_inherited:
            raise UnavailableError(OPEN_IN_EACH_PROCESS)
        if self._was_opened:  # a slower tier can be opened only once
            self._tiers = build_tiers(self._spec(), self._hot)
        self._was_opened = True
        self._closing = None
        on_salt(self._salt)
        self._loop.open()
        _open_managers.add(self)
        try:
            stack = self._loop.run(self._open_stack(), self._open_timeout_s)
        except BaseException:
            self._loop.close()
            raise
        if self._closing is None:
            self._used = stack

    def close(self) -> None:
        """Finish background writes within `close_drain_s` seconds, abandon the rest, and stop the
        loop thread.

        Idempotent; every concurrent caller waits until it is done. In a forked child it leaves
        everything to the parent.
        """
        self._used = None
        if self._loop.is_inherited:
            return
        try:
            self._loop.run(self._close_tiers(), self._close_drain_s + MARGIN_S)
        except UnavailableError as exc:
            if self._opened is not None:
                logger.warning(
                    "tiers did not close, leaving them: tiers=%s error=%s",
                    ",".join(tier.name for tier in self._tiers.lower),
                    exc,
                )
        finally:
            self._loop.close()
        self._opened = None
        # Drop what was stored or lifted during the close, or if the tiers did not close in time.
        self._hot.clear_now()
        _open_managers.discard(self)

    @property
    def _stack(self) -> TierStack | None:
        """The tiers between `open` and `close`; None in a forked child, where nothing runs that
        would answer, and where another thread's locks may be held for ever.
        """
        if self._used is not None and self._loop.is_inherited:
            self._used = None
            logger.warning(
                "%s; computing without a cache: pid=%d", OPEN_IN_EACH_PROCESS, os.getpid()
            )
        return self._used

    @override
    def lookup(self, keys: Sequence[CacheEngineKey], search_range: Sequence[str] | None) -> int:
        stack, names = self._stack, _names(keys)
        if stack is None:
            return 0
        held = [False] * len(names)
        for tier in (self._hot, *self._tiers.lower):
            if search_range is not None and tier.name not in search_range:
                continue
            found = tier.contains_now(names)
            if found is None:
                break
            held = [has or now for has, now in zip(held, found, strict=True)]
            if all(held):
                return len(names)
        else:
            return _num_first(held)
        tiers = self._wait(
            stack.batched_tiers(names, self._timeout_s, search_range), self._timeout_s
        )
        return _num_first(held if tiers is None else [tier is not None for tier in tiers])

    @override
    def prefetch(self, keys: Sequence[CacheEngineKey]) -> None:
        """Begin to lift chunks into host memory, in at most `MAX_PREFETCHES` concurrent lifts."""
        stack = self._stack
        if stack is None or not self._prefetches.acquire(blocking=False):
            return
        try:
            self._loop.submit(self._lift(stack, _names(keys)))
        except UnavailableError:
            self._prefetches.release()

    def is_worth(self, saving_s: float) -> bool:
        """Return True: the tiers are in this process and answer without delay."""
        return True

    @override
    def stage(
        self,
        ticket: str,
        chains: Sequence[ChunkChain],
        *,
        is_prefix: bool = True,
        recompute_s: float | None = None,
        wait_s: float | None = None,
        saving_s: float = 0.0,
        source: str | None = None,
    ) -> Staged | None:
        staging = self._staging
        if staging is None or self._stack is None:
            return None
        return staging.run(
            staging.stage(
                ticket,
                chains,
                deadline_s=self._timeout_s,
                is_prefix=is_prefix,
                recompute_s=recompute_s,
                source=source,
            )
        )

    @override
    def unstage(self, tickets: Sequence[str]) -> None:
        staging = self._staging
        if staging is not None and self._stack is not None:
            staging.run(staging.unstage(tickets))

    @override
    def reserve(
        self, keys: Sequence[CacheEngineKey], shapes: Sequence[Sequence[int]], dtype: str
    ) -> list[MemoryObj | NotLent]:
        if self._stack is None:
            return [NotLent.NO_ROOM] * len(shapes)
        return [
            NotLent.KNOWN
            if is_known
            else self._hot.allocate_tensor(shape, dtype, MemoryFormat.KV_BLOB) or NotLent.NO_ROOM
            for is_known, shape in zip(self._hot.contains_many(_names(keys)), shapes, strict=True)
        ]

    @property
    @override
    def needs_digests(self) -> bool:
        return self._verifier.needs_digests

    @override
    def put(self, chunks: Sequence[Chunk]) -> list[bool]:
        stack = self._stack
        if stack is not None and not self._tiers.lower and self._keep_hot:
            kept_hot = self._hot.put_many(chunks)
            if self._stack is None:
                self._hot.clear_now()  # closed concurrently
            return kept_hot
        limit_s = self._timeout_s / PUT_SHARE + PUT_CHUNK_S * len(chunks)
        kept = (
            None if stack is None else self._wait(stack.batched_put(chunks), limit_s, margin_s=0.0)
        )
        return [False] * len(chunks) if kept is None else kept

    @override
    def get(
        self,
        keys: Sequence[CacheEngineKey],
        recompute_s: float | None = None,
        check_later: bool = False,
    ) -> list[Chunk]:
        stack, names = self._stack, _names(keys)
        results = None if stack is None else self._all_from_hot(names)
        if stack is not None and results is None:
            limit_s = (
                self._timeout_s
                if recompute_s is None
                else min(self._timeout_s, recompute_s * len(names))
            )
            work = stack.batched_get(
                names,
                self._timeout_s,
                prefix_only=True,
                recompute_s=recompute_s,
                most_bytes=self._most_bytes,
            )
            results = self._wait(work, limit_s, release_all)
        return self._prefix(
            [Miss(MissReason.UNAVAILABLE)] * len(names) if results is None else results, check_later
        )

    @override
    def reject(self, chunk: Chunk) -> None:
        self._hot.remove_many([chunk.key])

    def evict(self, keys: Sequence[CacheEngineKey]) -> int:
        """Remove chunks from the tiers of this process (host memory and disk), including chunks
        still being written, and return how many there were.
        """
        stack = self._stack
        num_removed = (
            None
            if stack is None
            else self._wait(stack.batched_remove(_names(keys), LOCAL_TIERS), self._timeout_s)
        )
        return num_removed or 0

    @override
    def forget(self, keys: Sequence[CacheEngineKey]) -> None:
        self.evict(keys)

    @override
    def release(self, chunks: Sequence[Chunk]) -> bool:
        for chunk in chunks:
            chunk.memory.ref_count_down()
        return True

    @override
    def abort(self, memories: Sequence[MemoryObj]) -> None:
        for memory in memories:
            memory.ref_count_down()

    @override
    def stats(self) -> dict[str, dict[str, int]]:
        stack = self._stack
        return {} if stack is None else stack.stats()

    def _wait(
        self,
        work: Coroutine[Any, Any, T],
        limit_s: float,
        discard: Callable[[T], None] | None = None,
        margin_s: float = MARGIN_S,
    ) -> T | None:
        """Return the result of `work`, which has `limit_s` seconds, or None if there is none in
        time, with a margin.
        """
        try:
            return self._loop.run(work, limit_s + margin_s, discard)
        except UnavailableError as exc:
            logger.warning("tiers did not answer: error=%s", exc)
            return None
        except ValueError as exc:
            # The engine's caller would take the original exception for a wrong argument.
            raise LMCacheError(f"a tier failed: {exc!r}") from exc

    async def _open_stack(self) -> TierStack:
        tiers, peers = self._tiers, self._peers
        stack = tiers.stack(None if peers is None else peers.announcer, keep_hot=self._keep_hot)
        try:
            await stack.open()
            if peers is not None:
                await peers.open(stack, tiers.disk)
            if self._closing is not None:
                raise UnavailableError("it was closed while it was being opened")
        except BaseException:
            await stack.close()
            raise
        self._opened = stack
        room = ChunkBudget(self._hot.stats()["capacity_bytes"] // STAGED_SHARE)
        self._staging = Stager(stack, DEFAULT_TENANT, room, self._start_lift)
        self._staging.most_bytes = self._most_bytes
        self._tasks = TaskSupervisor("lmcache-storage")
        self._tasks.repeat("stage-leases", self._expire_tickets, SWEEP_INTERVAL_S)
        return stack

    async def _close_tiers(self) -> None:
        """Close what is open, once for all callers."""
        if self._closing is None:
            self._closing = asyncio.create_task(self._close_stack(), name="close-tiers")
        await asyncio.shield(self._closing)

    async def _close_stack(self) -> None:
        staging, self._staging = self._staging, None
        if staging is not None:
            staging.run(staging.close())
        await self._tasks.close()
        if self._peers is not None:
            await self._peers.close()
        if self._opened is not None:
            await self._opened.close(self._close_drain_s)
            self._opened = None

    def _start_lift(self, work: Coroutine[Any, Any, None]) -> bool:
        try:
            self._loop.submit(work).add_done_callback(_log_failure)
        except UnavailableError:
            return False
        return True

    async def _expire_tickets(self) -> None:
        staging = self._staging
        if staging is not None:
            staging.run(staging.expire())

    async def _lift(self, stack: TierStack, names: Sequence[ChunkKey]) -> None:
        try:
            release_all(
                await stack.batched_get(
                    names, self._timeout_s, prefix_only=True, most_bytes=self._most_bytes
                )
            )
        finally:
            self._prefetches.release()

    def _all_from_hot(self, names: Sequence[ChunkKey]) -> list[Result] | None:
        """Return the results from host memory; None if slower tiers may have more to add."""
        if self._tiers.lower and not all(self._hot.contains_many(names)):
            return None
        results = self._hot.results(names)
        if self._tiers.lower and any(isinstance(result, Miss) for result in results):
            release_all(results)  # one was evicted concurrently
            return None
        return results

    def _prefix(self, results: Sequence[Result], check_later: bool) -> list[Chunk]:
        """Return the chunks before the first miss, or before the first one damaged in host memory;
        the others are released and counted.
        """
        chunks = list(_leading_chunks(results))
        if check_later:
            chunks = [
                c.unchecked() if c.tier == self._hot.name and self._verifier.chooses() else c
                for c in chunks
            ]
            self._count_first_miss(results, len(chunks))
            release_all(results[len(chunks) :])
            return chunks
        from_hot = [i for i, chunk in enumerate(chunks) if chunk.tier == self._hot.name]
        num_intact = self._verifier.num_intact([chunks[i] for i in from_hot], self._workers)
        num_good = len(chunks)
        if num_intact < len(from_hot):
            num_good = from_hot[num_intact]
            self._counters.add(MISSED_CHUNKS_TOTAL, len(results) - num_good, MissReason.CORRUPT)
            self.reject(chunks[num_good])
        else:
            self._count_first_miss(results, num_good)
        release_all(results[num_good:])
        return chunks[:num_good]

    def _count_first_miss(self, results: Sequence[Result], num_chunks: int) -> None:
        if num_chunks < len(results):
            first = results[num_chunks]
            assert isinstance(first, Miss)
            self._counters.add(MISSED_CHUNKS_TOTAL, len(results) - num_chunks, first.reason)


_open_managers: weakref.WeakSet[StorageManager] = weakref.WeakSet()


def _close_open_managers() -> None:
    """Close what its owner has left open. Finalizers run later, when no thread can write any more;
    they find it closed.
    """
    with ExitStack() as closing:
        for manager in list(_open_managers):
            if not manager._loop.is_inherited:
                closing.callback(manager.close)
                with suppress(UnavailableError):
                    manager._loop.submit(manager._close_tiers())  # all at the same time


atexit.register(_close_open_managers)


def _log_failure(lift: Future[None]) -> None:
    if not lift.cancelled() and lift.exception() is not None:
        logger.error("lifting chunks failed", exc_info=lift.exception())


def _names(keys: Sequence[CacheEngineKey]) -> list[ChunkKey]:
    return [ChunkKey.of(DEFAULT_TENANT, key) for key in keys]


def _num_first(held: Sequence[bool]) -> int:
    return next((i for i, has in enumerate(held) if not has), len(held))


def _leading_chunks(results: Sequence[Result]) -> Iterator[Chunk]:
    for result in results:
        if isinstance(result, Miss):
            return
        yield result


BYTES_PER_GB = 1 << 30


def engine_spec(
    config: LMCacheEngineConfig,
    memory: MemoryAllocatorInterface,
    peers: PeerGroup | None = None,
    counters: Counters | None = None,
) -> TiersSpec:
    """Describe the tiers of an embedded engine.

    Raises:
        ConfigError: The token file or a TLS file cannot be read, or a package that a serde needs is
            not installed.
    """
    from lmcache_core.storage.codecs import create_codecs

    limits = TierLimits(ttl_s=config.chunk_ttl_s)
    disk = remote = None
    if config.local_disk is not None:
        disk = DiskSpec(
            path=Path(directory_of_url(config.local_disk)),
            capacity_bytes=int(config.max_local_disk_size * BYTES_PER_GB),
            limits=limits,
            fsync=config.disk_fsync,
            serde=config.local_disk_serde,
        )
    if config.remote_url is not None:
        token_file = config.remote_token_file
        remote = RemoteSpec(
            url=config.remote_url,
            timeout_s=config.tier_timeout_s,
            token=None if token_file is None else TokenFile(Path(token_file), "remote_token_file"),
            serde=config.remote_serde,
            tls=_tls(config),
            locate=None if peers is None else peers.locate,
        )
    serdes = {
        option: None if tier is None else tier.serde
        for option, tier in (("local_disk_serde", disk), ("remote_serde", remote))
    }
    spec = TiersSpec(
        hot=HotSpec(memory=memory, limits=limits),
        disk=disk,
        remote=remote,
        policy=config.eviction_policy,
        codecs=create_codecs(serdes, decode_documented=True, counters=counters),
        seals=config.verify_hot != "never",
    )
    if peers is None:
        return spec
    return replace(
        spec, peers=PeersSpec(backend=peers.make_tier()), removed_from=peers.removed_from
    )


def _tls(config: LMCacheEngineConfig) -> ClientTls | None:
    files = TlsFiles.of(config, "remote_tls_cert_file", "remote_tls_key_file", "remote_tls_ca_file")
    return ClientTls(client_context(files)) if files.paths else None
