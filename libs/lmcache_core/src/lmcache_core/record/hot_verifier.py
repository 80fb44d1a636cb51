"""Decides whether a load from host memory checks the digest: `verify_hot`."""

from __future__ import annotations

import random
from collections.abc import Sequence

from lmcache_core.concurrency import Workers
from lmcache_core.errors import ConfigError, RecordError
from lmcache_core.record.chunk import Chunk
from lmcache_core.record.codec import verify_payload

SAMPLE_INTERVAL = 16
MODES = ("always", "sampled", "never")


class HotVerifier:
    """Chooses chunks to check, and checks them.

    Args:
        mode: "always", "sampled" (a random one of each 16) or "never".
    """

    def __init__(self, mode: str, rng: random.Random | None = None) -> None:
        if mode not in MODES:
            raise ConfigError(f"verify_hot={mode!r}: must be always, sampled or never")
        self.mode = mode
        self._rng = rng or random.Random()  # noqa: S311 (a sample, not a secret)
        self._left = self._chosen = 0

    @classmethod
    def lenient(cls, mode: str) -> HotVerifier:
        """Return a verifier for the mode that a sidecar names; an unknown mode, of a newer sidecar,
        reads as "always".
        """
        return cls(mode if mode in MODES else "always")

    @property
    def needs_digests(self) -> bool:
        """Whether any chunk may be checked, so that each must have its digest from the start."""
        return self.mode != "never"

    def num_intact(self, chunks: Sequence[Chunk], workers: Workers) -> int:
        """Return how many of the chunks, from the first, were not found damaged; the checks run in
        parallel.
        """
        chosen = [i for i, _ in enumerate(chunks) if self.chooses()]
        checks = [workers.submit(_is_intact, chunks[i]) for i in chosen]
        # Wait for all of them: the caller releases the memory when this returns.
        verdicts = [check.result() for check in checks]
        return next(
            (i for i, is_intact in zip(chosen, verdicts, strict=True) if not is_intact), len(chunks)
        )

    def chooses(self) -> bool:
        """Return whether the next chunk is to be checked."""
        return self.mode == "always" or (self.mode == "sampled" and self._is_sampled())

    def _is_sampled(self) -> bool:
        # Not every sixteenth: for prompts of 16 chunks that would always be the same one. Threads
        # may race here: a group then has one chunk more or less.
        if self._left <= 0:
            self._left, self._chosen = SAMPLE_INTERVAL, self._rng.randrange(SAMPLE_INTERVAL)
        self._left -= 1
        return self._left == self._chosen


def _is_intact(chunk: Chunk) -> bool:
    try:
        verify_payload(chunk.header, chunk.memory.byte_array)
    except RecordError:
        return False
    return True
