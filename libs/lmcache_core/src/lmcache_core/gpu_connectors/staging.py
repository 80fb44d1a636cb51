"""Buffers on the pages' device, between host memory and pages."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from lmcache_core.errors import CapacityError
from lmcache_core.gpu_connectors.binding import Binding
from lmcache_core.gpu_connectors.layout import GROUP_ALIGN_BYTES
from lmcache_core.gpu_connectors.streams import has_streams

logger = logging.getLogger(__name__)

STORE_PRIORITY, LOAD_PRIORITY = 0, -1
"""Priorities of streams: lower numbers go first, and 0 is last. Requests wait for loads."""
REST_S = 60.0
"""A device without room for buffers is not asked again for so long: each time, torch would wait for
it and free what the serving engine caches.
"""
SCRATCH_PART = 2
"""Scratch has one part in this many of a buffer's size: encoded content is smaller."""


class Staging:
    """The buffers of any number of connectors to pages on one device. Thread-safe.

    Attributes:
        gathered: Those between pages and host memory.
        scattered: Those between host memory and pages.
    """

    def __init__(self) -> None:
        room = _Room()
        self.gathered = StagingPair(room, STORE_PRIORITY)
        self.scattered = StagingPair(room, LOAD_PRIORITY)

    def take(self, num_bytes: int, device: torch.device, decodes: bool) -> bool:
        """Allocate buffers of that size that are missing; return whether all are here.

        Args:
            decodes: With scratch for decoding.
        """
        try:
            self.gathered.take(num_bytes, device)
            self.scattered.take(sum(_parts(num_bytes)) if decodes else num_bytes, device)
        except CapacityError:
            return False
        return True


class StagingPair:
    """Two buffers on the pages' device for one direction, each with a stream on which alone it is
    used: one is filled while the other is emptied. Thread-safe.

    Connectors that share it take the buffers in turn. The host waits for none of their copies: a
    buffer's stream overwrites its content behind all that was launched with it.
    """

    def __init__(self, room: _Room, priority: int) -> None:
        self._room = room
        self._buffers = _Buffer(priority), _Buffer(priority)
        self._turns = itertools.cycle(self._buffers)
        self._lock = threading.Lock()

    def take(self, num_bytes: int, device: torch.device) -> None:
        """Allocate buffers of that size that are missing.

        Raises:
            CapacityError: The device has no room.
        """
        if not all(buffer.fits(num_bytes, device) for buffer in self._buffers):
            with self._lock:
                for buffer in self._buffers:
                    with buffer.in_order(device, None):
                        buffer.of_size(num_bytes, device, self._room)

    @contextmanager
    def near(
        self,
        content: torch.Tensor | None,
        binding: Binding,
        num_tokens: int,
        kept_tokens: int,
        after: torch.cuda.Event | None = None,
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Lend bytes on the pages' device for a memory object's content: those of the next buffer,
        or the content itself if it is already there and no buffers are kept. Lend scratch with
        them: there is some if the bytes are a buffer's and the content is decoded into them.

        On a device with streams, the block runs on the buffer's stream, which first waits for what
        the caller's stream has been given, and for `after`. If the block raises, what it launched
        has ended.

        Args:
            content: uint8, flat; None if it is decoded into the lent bytes.
            kept_tokens: Size of buffers that are kept; 0: none is.

        Raises:
            CapacityError: The device has no room.
        """
        device, num_bytes = binding.device, binding.layout.num_bytes(num_tokens)

        def unkept() -> tuple[torch.Tensor, torch.Tensor]:
            if content is not None and content.device == device and not kept_tokens:
                return content, content[:0]
            made = self._room.take(num_bytes, device)
            return made, made[:0]

        is_kept = 0 < num_tokens <= kept_tokens
        if not (is_kept or has_streams(device)):
            yield unkept()
            return
        with self._lock:
            buffer = next(self._turns)
            with buffer.in_order(device, after):
                if is_kept:
                    size = binding.layout.num_bytes(kept_tokens)
                    size, scratch = _parts(size) if content is None else (size, 0)
                    kept = buffer.of_size(size + scratch, device, self._room)
                    yield kept[:num_bytes], kept[size : size + scratch]
                else:
                    yield unkept()


def _parts(num_bytes: int) -> tuple[int, int]:
    """Return the sizes of a buffer's parts for content and for scratch, which is aligned."""
    size = -(-num_bytes // GROUP_ALIGN_BYTES) * GROUP_ALIGN_BYTES
    return size, size // SCRATCH_PART


class _Buffer:
    def __init__(self, priority: int) -> None:
        self._priority = priority
        self._bytes: torch.Tensor | None = None
        self._stream: torch.cuda.Stream | None = None

    @contextmanager
    def in_order(self, device: torch.device, after: torch.cuda.Event | None) -> Iterator[None]:
        """Within, the stream is the current one. It starts behind the caller's and `after`."""
        if not has_streams(device):
            yield
            return
        if self._stream is None or self._stream.device != device:
            self._stream = torch.cuda.Stream(device, self._priority)  # type: ignore[no-untyped-call]
        stream = self._stream
        stream.wait_stream(torch.cuda.current_stream(device))
        if after is not None:
            stream.wait_event(after)
        with torch.cuda.stream(stream):
            try:
                yield
            except BaseException:
                stream.synchronize()
                raise

    def fits(self, num_bytes: int, device: torch.device) -> bool:
        """Return whether that many bytes are here."""
        found = self._bytes
        return found is not None and found.device == device and found.shape[0] >= num_bytes

    def of_size(self, num_bytes: int, device: torch.device, room: _Room) -> torch.Tensor:
        """Return at least `num_bytes` bytes, the same ones whenever possible."""
        if self._bytes is None or not self.fits(num_bytes, device):
            self._bytes = room.take(num_bytes, device)
        return self._bytes


class _Room:
    """A device's memory, of which nothing is asked for a while after a refusal."""

    def __init__(self) -> None:
        self._rests_until_s = 0.0

    def take(self, num_bytes: int, device: torch.device) -> torch.Tensor:
        """Return new bytes, which can be written in any mode.

        Raises:
            CapacityError: There is no room, or was none a moment ago.
        """
        now_s = time.monotonic()
        if now_s < self._rests_until_s:
            raise CapacityError(f"{device} had no room for copies, and is asked again later")
        try:
            # They outlive the caller's mode, and could otherwise be written only in that mode.
            with torch.inference_mode(False):
                return torch.empty(num_bytes, dtype=torch.uint8, device=device)
        except torch.OutOfMemoryError as exc:
            self._rests_until_s = now_s + REST_S
            logger.warning(
                "no room for copies on the device, nothing is loaded or stored meanwhile:"
                " device=%s size_mb=%.1f retry_in_s=%g",
                device,
                num_bytes / (1 << 20),
                REST_S,
            )
            raise CapacityError(f"{device} has no room for copies: {exc}") from exc
