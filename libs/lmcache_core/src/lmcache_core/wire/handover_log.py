"""What a connection has handed over, told in a line now and then: a server that ends hands over
thousands of chunks.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from lmcache_core.wire.served import HandoverNote, HasTenant, NoteHandovers

NOTE_INTERVAL_S: Final = 60.0
MAX_NOTED_TENANTS: Final = 16


@dataclass(slots=True)
class HandoverLog:
    """Counts what one connection hands over. The first chunk is told of at once, what follows once
    a minute, the rest at the end.

    Attributes:
        note: Who is told; None: nobody.
        client: Address and port of the other side.
        clock: Seconds that never go back.
    """

    note: NoteHandovers | None
    client: str
    clock: Callable[[], float] = time.monotonic
    _caller: HasTenant | None = None
    _tenants: set[str] = field(default_factory=set)
    _num_chunks: int = 0
    _num_bytes: int = 0
    _num_refused: int = 0
    _told_at: float = float("-inf")

    def add(self, caller: HasTenant | None, tenant: str, num_bytes: int, is_kept: bool) -> None:
        """Count a chunk.

        Args:
            caller: Whose connection it came by, as it is known now; None: nobody's.
            tenant: In whose namespace it was to be put.
            num_bytes: Of its payload.
            is_kept: Whether it was.
        """
        self._caller = caller
        if len(self._tenants) < MAX_NOTED_TENANTS:
            self._tenants.add(tenant)
        self._num_chunks += is_kept
        self._num_bytes += num_bytes * is_kept
        self._num_refused += not is_kept
        if self.clock() - self._told_at >= NOTE_INTERVAL_S:
            self.tell()

    def tell(self) -> None:
        """Tell of what has not been told of."""
        if self.note is not None and self._num_chunks + self._num_refused:
            tenants = tuple(sorted(self._tenants))
            self.note(
                HandoverNote(
                    self._caller,
                    self.client,
                    tenants,
                    self._num_chunks,
                    self._num_bytes,
                    self._num_refused,
                )
            )
        self._told_at = self.clock()
        self._tenants.clear()
        self._num_chunks = self._num_bytes = self._num_refused = 0
