"""Digests computed alongside a copy, while the data is still in the processor's cache."""

from __future__ import annotations

import time
from concurrent.futures import Future

from lmcache_core.concurrency import Workers
from lmcache_core.record import payload_hasher

FILL_STEP_BYTES = 2 << 20
FILL_POLL_S = 100e-6
MAX_IDLE_POLLS = 20
"""After this many steps in a row the thread turns to other work; the next step resumes it."""
INLINE_BYTES = 256 << 10
"""Below this size, digesting takes less time than handing the work to a thread."""
CHECK_STEP_BYTES = 1 << 20
"""Tuned on two cores of an AMD EPYC with 32 MiB of last-level cache: a separate thread works best
with larger steps than the copying thread.
"""


class FillingDigest:
    """The digest of a payload being filled, computed in another thread that follows the copy.

    That thread polls the progress of the copy: waking it for each step would slow the copy by
    several percent.

    Args:
        payload: Filled from its beginning; must stay valid until the future returned by `finish` is
            done.
        workers: Threads that compute the digest.
    """

    def __init__(self, payload: memoryview, workers: Workers) -> None:
        self._payload = payload
        self._workers = workers
        self._hasher = payload_hasher()
        self._num_filled = 0
        self._num_digested = 0
        self._is_over = False
        self._follower: Future[None] | None = None

    def filled(self, num_bytes: int) -> None:
        """Record that the first `num_bytes` bytes are final."""
        self._num_filled = num_bytes
        is_idle = self._follower is None or self._follower.done()
        if is_idle and num_bytes - self._num_digested >= FILL_STEP_BYTES:
            self._follower = self._workers.submit(self._follow)

    def finish(self) -> Future[bytes]:
        """Return the digest of the payload, all of which has been filled."""
        self._num_filled = len(self._payload)
        self._is_over = True
        return self._workers.submit(self._digest, self._follower)

    def abandon(self) -> None:
        """Wait until the payload is no longer being read."""
        self._is_over = True
        if self._follower is not None:
            self._follower.result()

    def _follow(self) -> None:
        num_idle = 0
        while not self._is_over and num_idle < MAX_IDLE_POLLS:
            if self._num_filled - self._num_digested >= FILL_STEP_BYTES:
                self._take_up()
                num_idle = 0
            else:
                time.sleep(FILL_POLL_S)
                num_idle += 1

    def _digest(self, follower: Future[None] | None) -> bytes:
        if follower is not None:
            follower.result()  # it has already started, and ends because nothing more will come
        self._take_up()
        return self._hasher.digest()

    def _take_up(self) -> None:
        end = self._num_filled
        self._hasher.update(self._payload[self._num_digested : end])
        self._num_digested = end


class FollowingDigest:
    """The digest of a payload being copied, updated in the copying thread right after each piece.

    Args:
        payload: Copied from its beginning.
    """

    def __init__(self, payload: memoryview) -> None:
        self._payload = payload
        self._hasher = payload_hasher()
        self._num_digested = 0

    def copied(self, num_bytes: int) -> None:
        """Record that the first `num_bytes` bytes have been copied."""
        if num_bytes - self._num_digested >= CHECK_STEP_BYTES:
            self._hasher.update(self._payload[self._num_digested : num_bytes])
            self._num_digested = num_bytes

    def finish(self) -> bytes:
        """Return the digest of the payload, all of which has been copied."""
        self._hasher.update(self._payload[self._num_digested :])
        return self._hasher.digest()
