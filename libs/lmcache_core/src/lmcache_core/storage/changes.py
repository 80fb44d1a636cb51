"""Which chunks have lately come or gone in the local tiers, for those who follow them."""

from __future__ import annotations

import secrets
from typing import Final

from lmcache_core.keys import CHUNK_HASH_BYTES
from lmcache_core.wire.messages import MAX_NAMES, Changes, Watch

MAX_CHANGED: Final = MAX_NAMES
"""Chunks that the log names; a follower that has missed more asks about all that it knows."""


class ChangeLog:
    """The latest changes, each chunk once, by the hash of its content: what became of it is a
    question of its own, so that no follower acts on a state that has passed.

    All methods belong to one event loop.
    """

    def __init__(self) -> None:
        self._log = secrets.randbits(62)
        self._place = 0
        self._first_place = 0
        self._changed: dict[str, int] = {}

    def note(self, chunk_hash: str) -> None:
        """Add a chunk that has come or gone. A name of another length than ours has no follower."""
        if len(chunk_hash) != 2 * CHUNK_HASH_BYTES:
            return
        self._changed.pop(chunk_hash, None)
        self._changed[chunk_hash] = self._place
        self._place += 1
        if len(self._changed) > MAX_CHANGED:
            oldest = next(iter(self._changed))
            self._first_place = self._changed.pop(oldest) + 1

    def lose(self) -> None:
        """Forget everything: more may have changed than single chunks can tell."""
        self._changed.clear()
        self._place += 1
        self._first_place = self._place

    def since(self, asked: Watch) -> Changes:
        """Return what has changed since an earlier answer, in the order of the latest changes."""
        if asked.log != self._log or not self._first_place <= asked.place <= self._place:
            return Changes(self._log, self._place, False, b"")
        hashes = []
        for chunk_hash in reversed(self._changed):
            if self._changed[chunk_hash] < asked.place:
                break
            hashes.append(bytes.fromhex(chunk_hash))
        return Changes(self._log, self._place, True, b"".join(reversed(hashes)))
