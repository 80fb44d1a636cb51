"""Whether a load from host memory checks the digest: `verify_hot`."""

from __future__ import annotations

import itertools

from lmcache_core.errors import ConfigError, RecordError
from lmcache_core.record.chunk import Chunk
from lmcache_core.record.codec import verify_payload

SAMPLE_INTERVAL = 16
MODES = ("always", "sampled", "never")


class HotVerifier:
    """Decides, and checks.

    Args:
        mode: "always", "sampled" (1 in 16) or "never".
    """

    def __init__(self, mode: str) -> None:
        if mode not in MODES:
            raise ConfigError(f"verify_hot={mode!r}: must be always, sampled or never")
        self.mode = mode
        self._turns = itertools.count()

    @classmethod
    def lenient(cls, mode: str) -> HotVerifier:
        """As told by a sidecar, which may be newer than we are: a mode that is not known reads as "always"."""
        return cls(mode if mode in MODES else "always")

    def is_intact(self, chunk: Chunk) -> bool:
        """False when the digest was checked and differs."""
        if self.mode == "never" or (self.mode == "sampled" and next(self._turns) % SAMPLE_INTERVAL):
            return True
        try:
            verify_payload(chunk.header, chunk.memory.byte_array)
        except RecordError:
            return False
        return True
