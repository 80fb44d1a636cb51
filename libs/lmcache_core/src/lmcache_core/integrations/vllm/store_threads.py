"""Stores chunks in threads, while vLLM computes its next steps."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch

from lmcache_core.gpu_connectors.streams import has_ended
from lmcache_core.integrations.vllm.plan import Store

logger = logging.getLogger(__name__)

MAX_STORING_BYTES = 4 << 30
"""Limit on the KV that is being stored: vLLM's blocks are kept until they are copied."""
JOIN_S = 10.0


@dataclass(eq=False)
class PendingStore:
    """A store that has not ended.

    Attributes:
        recompute_s: Cost of computing one chunk; 0: unknown.
        computed: The end of the step that computes them, on a device with streams.
        read: What ends when its blocks have been read, on a device with streams; None until all
            copies are launched.
        is_given_up: Its blocks may have been overwritten before they were read.
    """

    store: Store
    num_bytes: int
    recompute_s: float
    computed: torch.cuda.Event | None
    read: Sequence[torch.cuda.Event] | None = None
    is_given_up: bool = False

    @property
    def is_copied(self) -> bool:
        """Whether its blocks have been read."""
        return self.read is not None and all(map(has_ended, self.read))


class StoreThreads:
    """Runs stores in two threads that end with the process: one launches the copies of one store
    after the other, and never waits for them; the other ends the stores in the same order.

    Args:
        begin: Launches the copies of a store, calls `launched`, and returns what ends the store;
            neither may raise.
        patience_s: How long a step waits for the launch of copies of blocks that it overwrites.
    """

    def __init__(
        self, begin: Callable[[PendingStore], Callable[[], None]], patience_s: float
    ) -> None:
        self._begin = begin
        self._patience_s = patience_s
        self._has_changed = threading.Condition()
        self._pending: list[PendingStore] = []
        self._waiting: queue.SimpleQueue[PendingStore | None] = queue.SimpleQueue()
        self._begun: queue.SimpleQueue[tuple[PendingStore, Callable[[], None]] | None] = (
            queue.SimpleQueue()
        )
        self._is_closing = False
        self._threads = [
            threading.Thread(target=work, name=name, daemon=True)
            for name, work in (("lmcache-stores", self._launch), ("lmcache-commits", self._end))
        ]

    def open(self) -> None:
        """Start the threads."""
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Stop after what was submitted, or after `JOIN_S`. Idempotent."""
        if self._threads[0].is_alive() and not self._is_closing:
            self.wait(JOIN_S)
            with self._has_changed:
                self._is_closing = True
                for pending in self._pending:
                    pending.is_given_up = True
                self._pending.clear()
            self._waiting.put(None)
            for thread in self._threads:
                thread.join(JOIN_S)
                if thread.is_alive():
                    logger.error(
                        "store did not end, leaving it: thread=%s waited_s=%g", thread.name, JOIN_S
                    )

    def wait(self, limit_s: float) -> bool:
        """Wait until everything submitted is stored, at most `limit_s`; return whether it is."""
        with self._has_changed:
            return self._has_changed.wait_for(lambda: not self._pending, limit_s)

    def submit(self, pending: PendingStore) -> bool:
        """Queue a store; False if that would exceed `MAX_STORING_BYTES`."""
        with self._has_changed:
            num_bytes = sum(other.num_bytes for other in self._pending)
            if self._is_closing or (
                num_bytes and num_bytes + pending.num_bytes > MAX_STORING_BYTES
            ):
                return False
            self._pending.append(pending)
            self._waiting.put(pending)
            return True

    def reads(self, request_id: str) -> bool:
        """Return whether blocks of a request are still to be copied."""
        with self._has_changed:
            return any(
                not (pending.is_given_up or pending.is_copied)
                for pending in self._pending
                if pending.store.request_id == request_id
            )

    def before_overwriting(self, request_ids: Collection[str] | None) -> list[torch.cuda.Event]:
        """Wait until the copies of these requests' blocks (None: of all) are launched. Return what
        ends when the blocks have been read; only then may they be overwritten.

        What is not launched within `patience_s`, or within that time after its step has ended on
        the device, is not stored.
        """

        def concerned() -> list[PendingStore]:
            return [
                pending
                for pending in self._pending
                if request_ids is None or pending.store.request_id in request_ids
            ]

        def unlaunched() -> list[PendingStore]:
            return [one for one in concerned() if one.read is None and not one.is_given_up]

        def wait() -> bool:
            return self._has_changed.wait_for(lambda: not unlaunched(), self._patience_s)

        with self._has_changed:
            computed = [one.computed for one in unlaunched() if one.computed is not None]
            running = [event for event in computed if not has_ended(event)]
            if wait():
                running = []
        for event in running:  # copies to memory that is not pinned are launched when it has ended
            event.synchronize()
        with self._has_changed:
            if running:
                wait()
            for pending in unlaunched():
                pending.is_given_up = True
            return [event for pending in concerned() for event in pending.read or ()]

    def launched(self, pending: PendingStore, read: Sequence[torch.cuda.Event]) -> None:
        """Record that all copies of a store are launched, and the ends of their reads."""
        with self._has_changed:
            pending.read = read
            self._has_changed.notify_all()

    def _launch(self) -> None:
        while (pending := self._waiting.get()) is not None:
            self._begun.put((pending, self._begin(pending)))
        self._begun.put(None)

    def _end(self) -> None:
        while (begun := self._begun.get()) is not None:
            pending, end = begun
            end()
            del begun, end  # else an arena that is gone would stay mapped until the next store
            with self._has_changed:
                if pending in self._pending:
                    self._pending.remove(pending)
                self._has_changed.notify_all()
