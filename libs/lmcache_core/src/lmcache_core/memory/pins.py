"""References that belong to somebody who may vanish."""

from __future__ import annotations

import itertools
import threading

from lmcache_core.errors import CapacityError, IntegrityError
from lmcache_core.memory.base import MemoryObj

MAX_PINS = 16384
"""References that one session may hold."""


class PinSession:
    """The references of one session (a connection, a request); `close` gives all of them back,
    once. Thread-safe.

    Args:
        session_id: Whose they are; named in errors.
        max_pins: Most references held at once.
    """

    def __init__(self, session_id: str, max_pins: int = MAX_PINS) -> None:
        self.session_id = session_id
        self._max_pins = max_pins
        self._lock = threading.Lock()
        self._pinned: dict[int, list[MemoryObj]] = {}
        self._num_pins = 0
        self._is_closed = False

    @property
    def num_pins(self) -> int:
        """References held."""
        return self._num_pins

    def pin(self, memory_obj: MemoryObj) -> None:
        """Take a reference on behalf of the session; the same object may be pinned several times.

        Raises:
            CapacityError: The session holds as many as it may, or has ended.
            IntegrityError: The object is free already.
        """
        with self._lock:
            if self._is_closed:
                raise CapacityError(f"session {self.session_id} has ended and pins nothing")
            if self._num_pins >= self._max_pins:
                raise CapacityError(
                    f"session {self.session_id} holds {self._num_pins} pins; release some first"
                )
            memory_obj.ref_count_up()
            self._pinned.setdefault(id(memory_obj), []).append(memory_obj)
            self._num_pins += 1

    def unpin(self, memory_obj: MemoryObj) -> None:
        """Give one reference on that object back. A session that has ended has given all back
        already: nothing happens.

        Raises:
            IntegrityError: The session holds none on it.
        """
        with self._lock:
            if self._is_closed:
                return
            held = self._pinned.get(id(memory_obj))
            if held is None:
                raise IntegrityError(
                    f"session {self.session_id} holds no pin on memory at"
                    f" {memory_obj.metadata.address}"
                )
            held.pop()
            if not held:
                del self._pinned[id(memory_obj)]
            self._num_pins -= 1
        memory_obj.ref_count_down()

    def close(self) -> None:
        """End the session: everything it holds is given back at once, and it pins nothing any more.
        Idempotent.

        Raises:
            IntegrityError: Memory that it pinned is free already; the rest has been given back
                nevertheless.
        """
        with self._lock:
            self._is_closed = True
            pinned, self._pinned = self._pinned, {}
            self._num_pins = 0
        failure: IntegrityError | None = None
        for memory_obj in itertools.chain.from_iterable(pinned.values()):
            try:
                memory_obj.ref_count_down()
            except IntegrityError as exc:
                failure = exc
        if failure is not None:
            raise failure

    def check_integrity(self) -> None:
        """Compare the books.

        Raises:
            IntegrityError: A pinned object is free, or the number of pins is not the one counted.
        """
        with self._lock:
            if sum(len(held) for held in self._pinned.values()) != self._num_pins:
                raise IntegrityError(
                    f"session {self.session_id} does not hold the {self._num_pins} pins that it"
                    " counts"
                )
            for held in self._pinned.values():
                if held[0].get_ref_count() < 1:
                    raise IntegrityError(
                        f"session {self.session_id} pins memory at {held[0].metadata.address} that"
                        " is free"
                    )

    def __enter__(self) -> PinSession:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()
