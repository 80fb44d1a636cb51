"""Reads from one peer, in a thread of its own."""

from __future__ import annotations

import gc
import logging
import os
import queue
import threading
import time
from collections.abc import Callable
from typing import Final

from lmcache_core.mover.messages import Read

from lmcache_mover.nixl import Memory, NixlError, ReadingAgent

logger = logging.getLogger(__name__)

POLL_S: Final = 0.0002
CANCEL_S: Final = 0.5
"""How long a read that was cancelled may go on: another try costs the peer's agent."""


class PeerReader:
    """Reads from one peer, through an agent that no other peer's reads use.

    A read that was given up still writes. Only destroying its agent ends it. So the agent is
    destroyed when any read fails, or goes on `CANCEL_S` after it was cancelled; the next read makes
    another one.

    Args:
        blob: What the peer's mover has told.
        quiet: Called with the id and the error of each read once nothing writes for it any more.
    """

    def __init__(self, memory: Memory, blob: bytes, quiet: Callable[[int, str], None]) -> None:
        self._memory = memory
        self._blob = blob
        self._quiet = quiet
        self._requests: queue.SimpleQueue[Read | None] = queue.SimpleQueue()
        self._underway: set[int] = set()
        self._cancelled: dict[int, float] = {}
        self._agent: ReadingAgent | None = None
        self._is_leaving = False
        threading.Thread(target=self._run, name="peer", daemon=True).start()

    def read(self, request: Read) -> None:
        """Begin a read."""
        self._requests.put(request)

    def cancel(self, number: int) -> None:
        """Nobody waits for a read any more."""
        self._cancelled[number] = time.monotonic() + CANCEL_S

    def leave(self) -> None:
        """Begin no more reads; the thread ends with those underway."""
        self._requests.put(None)

    def _run(self) -> None:
        while not self._is_leaving:
            first = self._requests.get()
            if first is None:
                return
            error = "given up"
            try:
                self._live(first)
            except NixlError as exc:
                error = str(exc)
                logger.warning("reads from a peer failed: error=%s", exc)
            self._require_destroyed()
            for number in list(self._underway):
                self._end(number, error)

    def _live(self, first: Read) -> None:
        """Read until the agent must go, or the peer is left.

        Raises:
            NixlError: A read has failed.
        """
        self._underway.add(first.id)
        with ReadingAgent(self._memory, self._blob) as agent:
            self._agent = agent
            self._begin(agent, first)
            while self._underway or not self._is_leaving:
                self._take_requests(agent)
                for number in agent.ended():
                    self._end(number, "")
                now = time.monotonic()
                if any(self._cancelled.get(number, now) < now for number in self._underway):
                    return
                if self._underway:
                    time.sleep(POLL_S)

    def _require_destroyed(self) -> None:
        """End the process if something still holds the last agent."""
        if self._agent is None or self._agent.is_destroyed:
            return
        gc.collect()
        if not self._agent.is_destroyed:
            logger.error("an agent cannot be destroyed, ending instead")
            os._exit(1)

    def _take_requests(self, agent: ReadingAgent) -> None:
        """Begin the reads that wait; without any underway, wait for one."""
        while not self._is_leaving:
            try:
                request = self._requests.get(block=not self._underway)
            except queue.Empty:
                return
            if request is None:
                self._is_leaving = True
            else:
                self._underway.add(request.id)
                self._begin(agent, request)

    def _begin(self, agent: ReadingAgent, request: Read) -> None:
        if request.id in self._cancelled:
            self._end(request.id, "given up")
        else:
            agent.begin(request.id, request.pieces)

    def _end(self, number: int, error: str) -> None:
        self._underway.discard(number)
        self._quiet(number, error)
        self._cancelled.pop(number, None)  # `cancel` is not called any more
