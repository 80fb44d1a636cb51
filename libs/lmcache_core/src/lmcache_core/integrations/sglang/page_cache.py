"""The pages of one rank: looked up and held by the scheduler's thread, loaded and stored by two
others. Imports nothing of SGLang.

    lookup ──stage, read, verify──> held ──load──> queued ──start──> copied by `lmcache-loads`
                                      └──not loaded within HELD_S──> released
"""

from __future__ import annotations

import hashlib
import logging
import queue
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lmcache_core.config import LMCacheEngineMetadata
from lmcache_core.engine import ChunkStore
from lmcache_core.engine.guard import CallGuard
from lmcache_core.engine.transfer import BegunLoad, KVTransfer, NamedChunk
from lmcache_core.gpu_connectors import PagedGPUConnector
from lmcache_core.gpu_connectors.streams import ThreadStreams, record_event, wait_for_engine
from lmcache_core.integrations.sglang.pools import Pool
from lmcache_core.keys import CHUNK_HASH_BYTES, ChunkChain, Lane
from lmcache_core.record import StagedFrom
from lmcache_core.token_database import identity_root

logger = logging.getLogger(__name__)

ASSUMED_TOKENS_PER_S = 50_000.0
"""Prefill rate without `prefill_tokens_per_s`: about that of an 8B model on an H100."""
LEAST_WAIT_S = 0.003
"""A lookup may always take this long: a healthy sidecar answers in a fraction of it."""
POLL_S = 0.001
HELD_S = 10.0
"""Pages that were looked up are held for so long. SGLang looks up again in each pass in which it
considers a request, and says nothing of those that end before.
"""
AGAIN_S = 1.0
"""A request of which nothing was found is not looked up again for so long."""
SWEEP_S = 2.0
MAX_STORING_PAGES = 1 << 15
"""Pages that wait to be stored: SGLang keeps their slots."""
JOIN_S = 10.0
_PAGE_TAG = b"lmcache/sglang-page/1\0"


@dataclass(eq=False)
class _Found:
    """What was found for a request.

    Attributes:
        keys: SGLang's names of its pages.
        begun: Holds those that were found; None if there are none.
        since: Time of the last lookup.
    """

    keys: tuple[str, ...]
    begun: BegunLoad | None
    since: float

    @property
    def num_pages(self) -> int:
        """How many pages, from the first, are held."""
        return 0 if self.begun is None else self.begun.num_fitting


@dataclass(eq=False)
class Load:
    """A load that SGLang has asked for; without `begun` it fails."""

    begun: BegunLoad | None
    num_pages: int
    slots: torch.Tensor


@dataclass(eq=False)
class _Store:
    """Pages to store, behind these events."""

    keys: Sequence[str]
    slots: torch.Tensor
    events: Sequence[Any]
    is_refused: bool = False


class PageCache:
    """Finds, loads and stores pages for one rank.

    Args:
        transfer: Moves pages between the pool and the store.
        page_size: Tokens of a page.
        stores: Whether this rank stores; where all have the same KV, one does.
        tokens_per_s: Prefill rate of the engine; None: `ASSUMED_TOKENS_PER_S`.
        timeout_s: Longest wait for slow tiers.
        guard: Catches every exception that must not reach SGLang.
    """

    def __init__(
        self,
        store: ChunkStore,
        transfer: KVTransfer,
        connector: PagedGPUConnector,
        pool: Pool,
        metadata: LMCacheEngineMetadata,
        page_size: int,
        guard: CallGuard,
        *,
        stores: bool = True,
        tokens_per_s: float | None = None,
        timeout_s: float = 2.0,
    ) -> None:
        self._store = store
        self._transfer = transfer
        self._connector = connector
        self._pool, self._device = pool, pool.device
        self._metadata = metadata
        self._page_size = page_size
        self._guard = guard
        self._stores = stores
        self._page_s = page_size / (tokens_per_s or ASSUMED_TOKENS_PER_S)
        self._timeout_s = timeout_s
        self._lane = Lane(
            metadata.fmt, metadata.model_name, metadata.world_size, metadata.worker_id
        )
        self._mark = f"{secrets.token_hex(4)}:"
        self._salt = ""
        self._epoch = b""
        self._root = b""
        self._found: dict[str, _Found] = {}
        self._queued: dict[str, Load] = {}
        self._lock = threading.Lock()
        self._loads: queue.Queue[Callable[[], None] | None] = queue.Queue()
        self._offloads: queue.Queue[_Store | None] = queue.Queue()
        self._num_storing = 0
        self._results: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._streams = ThreadStreams()
        self._threads = [
            threading.Thread(target=self._run_loads, name="lmcache-loads", daemon=True),
            threading.Thread(target=self._run_stores, name="lmcache-stores", daemon=True),
        ]

    def open(self) -> None:
        """Take what copies need of the device, and start the threads."""
        self._has_staging()
        for thread in self._threads:
            thread.start()

    def use_salt(self, salt: str) -> None:
        """Name pages with the salt of the tenant."""
        self._salt = salt
        self._root = hashlib.sha256(
            _PAGE_TAG + self._epoch + identity_root(self._metadata, salt)
        ).digest()

    def lookup(self, request: str, keys: Sequence[str]) -> int:
        """Return how many of these pages, from the first, are here and held, so that a load of them
        cannot fail. Waits no longer than computing them takes.

        Args:
            request: Id of the request.
            keys: SGLang's names of consecutive pages: 64 hex digits, each of all tokens up to its
                end.
        """
        now = time.monotonic()
        with self._lock:
            known = self._found.get(request)
            is_known = known is not None and known.keys == tuple(keys)
            if known is not None and is_known and known.begun is not None:
                known.since = now  # from here on, no sweep releases it
        if known is not None and is_known:
            if known.begun is None and now - known.since < AGAIN_S:
                return 0
            if known.begun is not None and self._store.holds(known.begun.chunks):
                return known.num_pages
        self._release([request])
        begun = self._begun(request, keys)
        with self._lock:
            self._found[request] = _Found(tuple(keys), begun, now)
        return 0 if begun is None else begun.num_fitting

    def queue_load(self, request: str, keys: Sequence[str], slots: torch.Tensor) -> None:
        """Queue a load of pages that were found into these slots. If they are gone it fails, in
        the way in which every rank learns of it.
        """
        self.cancel_load(request)
        with self._lock:
            found = self._found.pop(request, None)
        begun = None if found is None else found.begun
        if found is not None and begun is not None:
            is_same = found.keys[: len(keys)] == tuple(keys) and len(keys) <= found.num_pages
            if not is_same:
                self._transfer.abandon_load(begun)
                begun = None
        self._queued[request] = Load(begun, len(keys), slots)

    def cancel_load(self, request: str) -> bool:
        """Forget a load that has not begun; return whether there was one."""
        load = self._queued.pop(request, None)
        if load is not None and load.begun is not None:
            self._transfer.abandon_load(load.begun)
        return load is not None

    def take_queued(self) -> list[Load]:
        """Return the loads that are queued, and forget them."""
        loads, self._queued = list(self._queued.values()), {}
        return loads

    def start_loads(
        self,
        loads: Sequence[Load],
        when_loaded: Callable[[Sequence[int]], None],
        when_failed: Callable[[BaseException], None],
    ) -> None:
        """Begin loads; `when_loaded` is called in another thread with the numbers of layers that
        are there, and at the end, if not everything was loaded, `when_failed`.
        """
        # What was launched before may still compute the slots' numbers, or use the slots.
        before = record_event(self._device)
        bands = self._pool.layout.split(range(self._pool.num_layers))

        def work() -> None:
            is_loaded = False
            with (
                self._guard("retrieve"),
                torch.inference_mode(),
                self._streams.own(self._device),
            ):
                if before is not None:
                    before.synchronize()
                is_loaded = self._load(loads, lambda band: when_loaded(bands[band]))
            if is_loaded:
                when_loaded(bands[-1])
            else:
                when_failed(RuntimeError("pages were not loaded"))

        self._loads.put(work)

    def store(self, keys: Sequence[str], slots: torch.Tensor, events: Sequence[Any]) -> None:
        """Store pages from these slots, behind these events; `num_stored` counts it when it has
        ended.
        """
        with self._lock:
            is_refused = self._num_storing + len(keys) > MAX_STORING_PAGES
            self._num_storing += len(keys)
        self._offloads.put(_Store(tuple(keys), slots, events, is_refused or not self._root))

    @property
    def num_stored(self) -> int:
        """Number of stores that have ended, and whose results were not taken."""
        return self._results.qsize()

    def take_stored(self) -> bool:
        """Return whether the oldest store was complete."""
        return self._results.get_nowait()

    def reset(self) -> None:
        """Wait for all copies, and use nothing that was stored before: the weights may have been
        replaced.
        """
        self._loads.join()
        self._offloads.join()
        for request in list(self._queued):
            self.cancel_load(request)
        while self.num_stored:
            self.take_stored()
        self.begin_epoch()

    def begin_epoch(self) -> None:
        """Find nothing any more that was stored before, and share nothing from now on: the weights
        may be other ones.
        """
        self._epoch = secrets.token_bytes(CHUNK_HASH_BYTES)
        self.use_salt(self._salt)
        self._release(list(self._found))

    def close(self) -> None:
        """Finish what was begun, and release everything."""
        self.reset()
        self._loads.put(None)
        self._offloads.put(None)
        for thread in self._threads:
            thread.join(JOIN_S)

    def _hashes(self, keys: Sequence[str]) -> bytes:
        root = self._root
        return b"".join(hashlib.sha256(root + bytes.fromhex(key)).digest() for key in keys)

    def _named(self, keys: Sequence[str]) -> list[NamedChunk]:
        size, lane_keys = self._page_size, self._lane.keys(self._hashes(keys))
        return [(i * size, (i + 1) * size, key) for i, key in enumerate(lane_keys)]

    def _begun(self, request: str, keys: Sequence[str]) -> BegunLoad | None:
        """Return what is held of these pages from now on; None if it is nothing."""
        saving_s = len(keys) * self._page_s
        if not keys or not self._root or not self._store.is_worth(saving_s):
            return None
        if not self._has_staging():
            return None
        deadline = time.monotonic() + max(LEAST_WAIT_S, min(saving_s, self._timeout_s))
        num_staged = self._staged(request, keys, saving_s, deadline)
        try:
            if not num_staged:
                return None
            named = self._named(keys[:num_staged])
            left_s = max(LEAST_WAIT_S, deadline - time.monotonic())
            begun = self._transfer.begin_load(named, left_s / num_staged, is_promised=True)
        finally:
            self._store.unstage([self._mark + request])
        if begun.num_fitting:
            return begun
        self._transfer.abandon_load(begun)
        return None

    def _staged(self, request: str, keys: Sequence[str], saving_s: float, deadline: float) -> int:
        """Return how many of these pages, from the first, the store has staged for all ranks by
        then.
        """
        lane = self._lane
        hashes = self._hashes(keys)
        chain = ChunkChain(lane.fmt, lane.model_name, lane.world_size, lane.group, hashes)
        while True:
            left_s = deadline - time.monotonic()
            staged = self._store.stage(
                self._mark + request,
                [chain],
                recompute_s=self._page_s,
                wait_s=max(0.0, left_s),
                saving_s=saving_s,
            )
            if staged is None:
                return 0
            if staged.tiers and (staged.is_ready or left_s <= 0):
                return len(staged.tiers[0].partition(bytes([StagedFrom.NOWHERE]))[0])
            if left_s <= 0:
                return 0
            time.sleep(min(POLL_S, left_s))

    def _release(self, requests: Iterable[str] | None = None) -> None:
        """Forget what was looked up for these requests; by default for those that have not been
        loaded since.
        """
        oldest = time.monotonic() - HELD_S
        with self._lock:
            if requests is None:
                requests = [name for name, one in self._found.items() if one.since < oldest]
            forgotten = [self._found.pop(name) for name in requests if name in self._found]
        for found in forgotten:
            if found.begun is not None:
                self._transfer.abandon_load(found.begun)

    def _has_staging(self) -> bool:
        """Return whether there is memory on the device for copies, of which some is allocated if it
        is missing.
        """
        return self._connector.take_staging(self._device)

    def _arguments(self, slots: torch.Tensor, num_tokens: int) -> dict[str, Any]:
        kvcaches = self._pool.kvcaches
        return {"addresses": self._connector.addresses_of(kvcaches, slots, 0, num_tokens)}

    def _load(self, loads: Sequence[Load], when_band: Callable[[int], None]) -> bool:
        """Copy all pages, band after band: SGLang computes with the first layers meanwhile."""
        held = [load.begun for load in loads if load.begun is not None]
        num_pages = sum(load.num_pages for load in loads)
        try:
            if len(held) < len(loads):
                return False
            for load, begun in zip(loads, held, strict=True):
                self._transfer.shorten_load(begun, load.num_pages)
            slots = torch.cat([load.slots for load in loads])
            arguments = self._arguments(slots, num_pages * self._page_size)
            joined = self._transfer.joined_loads(held)
            held = []
        finally:
            for begun in held:
                self._transfer.abandon_load(begun)
        return self._transfer.finish_load(joined, arguments, when_group=when_band) == num_pages

    def _run_loads(self) -> None:
        while True:
            with self._guard("sweep"):
                self._release()
            try:
                work = self._loads.get(timeout=SWEEP_S)
            except queue.Empty:
                continue
            try:
                if work is None:
                    return
                work()
            finally:
                self._loads.task_done()

    def _run_stores(self) -> None:
        while True:
            store = self._offloads.get()
            is_stored = False
            try:
                if store is None:
                    return
                with (
                    self._guard("store"),
                    torch.inference_mode(),
                    self._streams.own(self._device),
                ):
                    is_stored = not store.is_refused and self._store_pages(store)
            finally:
                if store is not None:
                    with self._lock:
                        self._num_storing -= len(store.keys)
                    self._results.put(is_stored)
                self._offloads.task_done()

    def _store_pages(self, store: _Store) -> bool:
        if not self._stores:
            return True
        wait_for_engine(store.events, self._device)
        saving_s = len(store.keys) * self._page_s
        if not (self._store.is_worth(saving_s) and self._has_staging()):
            return False
        named = self._named(store.keys)
        return all(self._transfer.store(named, self._arguments(store.slots, named[-1][1])))
