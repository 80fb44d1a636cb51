"""Stores chunks in a thread, while vLLM computes its next steps."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass

import torch

from lmcache_core.integrations.vllm.plan import Store

logger = logging.getLogger(__name__)

MAX_STORING_BYTES = 4 << 30
"""Limit on the KV that waits to be copied out of vLLM's blocks, which are kept until then."""
JOIN_S = 10.0


@dataclass(eq=False)
class PendingStore:
    """A store whose chunks have not all been copied out of vLLM's blocks.

    Attributes:
        store: What to store.
        num_bytes: Size of its chunks.
        recompute_s: Cost of computing one chunk; 0: unknown.
        computed: The end of the step that computes them, on a device with streams.
        num_runs: How many of its runs are still to be copied.
    """

    store: Store
    num_bytes: int
    recompute_s: float
    computed: torch.cuda.Event | None
    num_runs: int


class StoreThread:
    """Runs stores one after the other, in a thread that ends with the process.

    Args:
        store: Performs a store, and calls `copied` after each of its runs; must not raise.
        patience_s: How long a step waits for copies of blocks that it overwrites.
    """

    def __init__(self, store: Callable[[PendingStore], None], patience_s: float) -> None:
        self._store = store
        self._patience_s = patience_s
        self._has_changed = threading.Condition()
        self._waiting: deque[PendingStore] = deque()
        self._uncopied: list[PendingStore] = []
        self._is_busy = False
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="lmcache-stores", daemon=True)

    def open(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self) -> None:
        """Stop after what was submitted, or after `JOIN_S`. Idempotent."""
        if self._thread.is_alive() and not self._is_closing:
            self.wait(JOIN_S)
            with self._has_changed:
                self._is_closing = True
                self._uncopied.clear()
                self._waiting.clear()
                self._has_changed.notify_all()
            self._thread.join(JOIN_S)
            if self._thread.is_alive():
                logger.error(
                    "store did not end, leaving it: thread=%s waited_s=%g",
                    self._thread.name,
                    JOIN_S,
                )

    def wait(self, limit_s: float) -> bool:
        """Wait until everything submitted is stored, at most `limit_s`; return whether it is."""
        with self._has_changed:
            return self._has_changed.wait_for(lambda: not (self._waiting or self._is_busy), limit_s)

    def submit(self, pending: PendingStore) -> bool:
        """Queue a store; False if that would exceed `MAX_STORING_BYTES`."""
        with self._has_changed:
            num_bytes = sum(other.num_bytes for other in self._uncopied)
            if self._is_closing or (
                num_bytes and num_bytes + pending.num_bytes > MAX_STORING_BYTES
            ):
                return False
            self._uncopied.append(pending)
            self._waiting.append(pending)
            self._has_changed.notify_all()
            return True

    def reads(self, request_id: str) -> bool:
        """Return whether blocks of a request are still to be copied."""
        with self._has_changed:
            return any(pending.store.request_id == request_id for pending in self._uncopied)

    def before_overwriting(self, request_ids: Collection[str] | None) -> None:
        """Wait until the blocks of these requests (None: of all) are copied. What takes longer than
        `patience_s` after its step has ended on the device is not stored.
        """

        def awaited() -> list[PendingStore]:
            return [
                pending
                for pending in self._uncopied
                if request_ids is None or pending.store.request_id in request_ids
            ]

        if request_ids is None or request_ids:
            with self._has_changed:
                computed = [pending.computed for pending in awaited()]
            for event in computed:
                if event is not None:
                    event.synchronize()
            with self._has_changed:
                self._has_changed.wait_for(lambda: not awaited(), self._patience_s)
                for pending in awaited():
                    self._uncopied.remove(pending)

    def is_wanted(self, pending: PendingStore) -> bool:
        """Return whether a store's blocks are still unchanged."""
        with self._has_changed:
            return pending in self._uncopied

    def copied(self, pending: PendingStore) -> bool:
        """Record that one more run is copied; False if its blocks may have been overwritten."""
        with self._has_changed:
            if pending not in self._uncopied:
                return False
            pending.num_runs -= 1
            if not pending.num_runs:
                self._uncopied.remove(pending)
                self._has_changed.notify_all()
            return True

    def _run(self) -> None:
        while (pending := self._next()) is not None:
            self._store(pending)
            with self._has_changed:
                if pending in self._uncopied:
                    self._uncopied.remove(pending)
                self._is_busy = False
                self._has_changed.notify_all()

    def _next(self) -> PendingStore | None:
        with self._has_changed:
            self._has_changed.wait_for(lambda: self._waiting or self._is_closing)
            if not self._waiting:
                return None
            self._is_busy = True
            return self._waiting.popleft()
