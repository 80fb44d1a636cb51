"""A digest computed alongside a copy, while the data is still in the processor's cache."""

from __future__ import annotations

from lmcache_core.record import payload_hasher

STEP_BYTES = 1 << 20
"""How much is copied between two updates of the digest; tuned on two cores of an AMD EPYC."""
SMALL_BYTES = 256 << 10
"""Up to this size, handing work to a thread takes longer than the work."""


class FollowingDigest:
    """The digest of a payload being copied, updated in the copying thread right after each piece.

    Args:
        payload: Filled or read from its beginning.
    """

    def __init__(self, payload: memoryview) -> None:
        self._payload = payload
        self._hasher = payload_hasher()
        self._num_digested = 0

    def copied(self, num_bytes: int) -> None:
        """Record that the first `num_bytes` bytes have been copied."""
        if num_bytes - self._num_digested >= STEP_BYTES:
            self._hasher.update(self._payload[self._num_digested : num_bytes])
            self._num_digested = num_bytes

    def finish(self) -> bytes:
        """Return the digest of the payload, all of which has been copied."""
        self._hasher.update(self._payload[self._num_digested :])
        return self._hasher.digest()
