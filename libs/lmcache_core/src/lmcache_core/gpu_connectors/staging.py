"""Buffers on the pages' device, between host memory and pages."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from lmcache_core.gpu_connectors.binding import Binding
from lmcache_core.gpu_connectors.streams import finish


class StagingBuffer:
    """Lends bytes on the pages' device, from a buffer that is kept if it is large enough.
    Thread-safe: one borrower at a time.

    Args:
        num_tokens: Size of the kept buffer; 0 keeps none. It is allocated on demand.
    """

    def __init__(self, num_tokens: int) -> None:
        self.num_tokens = num_tokens
        self._buffer: torch.Tensor | None = None
        self._lock = threading.Lock()

    @contextmanager
    def near(
        self, content: torch.Tensor | None, binding: Binding, num_tokens: int
    ) -> Iterator[torch.Tensor]:
        """Lend bytes on the pages' device for a memory object's content: the content itself if it
        is already there and no buffer is kept.

        When the block ends, the device must have finished with them, or must use them again on the
        same stream only.

        Args:
            content: uint8, flat; None if it is decoded into the lent bytes.
            binding: The pages.
            num_tokens: Tokens in the content.
        """
        size = binding.layout.num_bytes(num_tokens)
        if self.num_tokens == 0 and content is not None and content.device == binding.device:
            yield content
        elif num_tokens > self.num_tokens:
            yield torch.empty(size, dtype=torch.uint8, device=binding.device)
        else:
            with self._lock:
                capacity_bytes = binding.layout.num_bytes(self.num_tokens)
                if (
                    self._buffer is None
                    or self._buffer.device != binding.device
                    or self._buffer.shape[0] < capacity_bytes
                ):
                    # It outlives the caller's mode, and could otherwise be written only in that
                    # mode.
                    with torch.inference_mode(False):
                        self._buffer = torch.empty(
                            capacity_bytes, dtype=torch.uint8, device=binding.device
                        )
                yield self._buffer[:size]


class StagingPair:
    """Two staging buffers, each with a stream: a chunk is copied into one while the chunk in the
    other is scattered. Thread-safe: one borrower at a time.

    Args:
        num_tokens: Size of each buffer, as for `StagingBuffer`.
    """

    def __init__(self, num_tokens: int) -> None:
        self.buffers = StagingBuffer(num_tokens), StagingBuffer(num_tokens)
        self._second: torch.cuda.Stream | None = None
        self._lock = threading.Lock()

    @contextmanager
    def in_turn(
        self, device: torch.device
    ) -> Iterator[Iterator[tuple[torch.cuda.Stream, StagingBuffer]]]:
        """Lend the buffers in turn, each with the stream on which alone it may be used: the current
        one, and another that starts behind it. Waits for both when the block ends.
        """
        with self._lock:
            first = torch.cuda.current_stream(device)
            if self._second is None or self._second.device != device:
                self._second = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            second = self._second
            second.wait_stream(first)
            try:
                yield itertools.cycle(zip((first, second), self.buffers, strict=True))
            finally:
                first.wait_stream(second)
                finish(device)
