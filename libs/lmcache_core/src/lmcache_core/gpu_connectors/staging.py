"""Buffers on the pages' device, between host memory and pages."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from lmcache_core.gpu_connectors.binding import Binding
from lmcache_core.gpu_connectors.streams import has_streams


class StagingPair:
    """Two buffers on the pages' device, each with a stream on which alone it is used: one is filled
    while the other is emptied. Thread-safe.

    Args:
        num_tokens: Size of each buffer; 0 keeps none. They are allocated on demand.
    """

    def __init__(self, num_tokens: int) -> None:
        self.num_tokens = num_tokens
        self.buffers = _Buffer(), _Buffer()
        self._turns = itertools.cycle(self.buffers)
        self._lock = threading.Lock()

    @contextmanager
    def near(
        self,
        content: torch.Tensor | None,
        binding: Binding,
        num_tokens: int,
        after: torch.cuda.Event | None = None,
    ) -> Iterator[torch.Tensor]:
        """Lend bytes on the pages' device for a memory object's content: those of the next buffer,
        or the content itself if it is already there and no buffers are kept.

        On a device with streams, the block runs on the buffer's stream, which first waits for what
        the caller's stream has been given, and for `after`. If the block raises, what it launched
        has ended.

        Args:
            content: uint8, flat; None if it is decoded into the lent bytes.
        """
        device, layout = binding.device, binding.layout

        def unkept() -> torch.Tensor:
            if content is not None and content.device == device and not self.num_tokens:
                return content
            return torch.empty(layout.num_bytes(num_tokens), dtype=torch.uint8, device=device)

        is_kept = 0 < num_tokens <= self.num_tokens
        if not (is_kept or has_streams(device)):
            yield unkept()
            return
        with self._lock:
            buffer = next(self._turns)
            with buffer.in_order(device, after):
                if is_kept:
                    kept = buffer.of_size(layout.num_bytes(self.num_tokens), device)
                    yield kept[: layout.num_bytes(num_tokens)]
                else:
                    yield unkept()


class _Buffer:
    def __init__(self) -> None:
        self.bytes: torch.Tensor | None = None
        self._stream: torch.cuda.Stream | None = None

    @contextmanager
    def in_order(self, device: torch.device, after: torch.cuda.Event | None) -> Iterator[None]:
        """Within, the stream is the current one. It starts behind the caller's and `after`."""
        if not has_streams(device):
            yield
            return
        if self._stream is None or self._stream.device != device:
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
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

    def of_size(self, num_bytes: int, device: torch.device) -> torch.Tensor:
        """Return at least `num_bytes` bytes, the same ones whenever possible."""
        found = self.bytes
        if found is None or found.device != device or found.shape[0] < num_bytes:
            # They outlive the caller's mode, and could otherwise be written only in that mode.
            with torch.inference_mode(False):
                found = torch.empty(num_bytes, dtype=torch.uint8, device=device)
            self.bytes = found
        return found
