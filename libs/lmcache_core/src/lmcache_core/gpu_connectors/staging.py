"""Memory on the pages' device through which chunks pass on their way to and from the host."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from lmcache_core.gpu_connectors.binding import Binding


class Staging:
    """Lends bytes on the pages' device, from a buffer that is kept when it is large enough.
    Thread-safe: one borrower at a time.

    Args:
        num_tokens: Room of the kept buffer; 0 keeps none. It is allocated when it is first needed.
    """

    def __init__(self, num_tokens: int) -> None:
        self.num_tokens = num_tokens
        self._buffer: torch.Tensor | None = None
        self._lock = threading.Lock()

    @contextmanager
    def near(
        self, content: torch.Tensor, binding: Binding, num_tokens: int
    ) -> Iterator[torch.Tensor]:
        """Bytes on the pages' device for a memory object's content: the content itself where it is
        there and no buffer is kept.

        The device must have finished with them when the block ends.

        Args:
            content: uint8, flat.
            binding: Says where the pages are.
            num_tokens: Tokens in the content.
        """
        if self.num_tokens == 0 and content.device == binding.device:
            yield content
        elif num_tokens > self.num_tokens:
            yield torch.empty_like(content, device=binding.device)
        else:
            with self._lock:
                capacity_bytes = binding.layout.num_bytes(self.num_tokens)
                if (
                    self._buffer is None
                    or self._buffer.device != binding.device
                    or self._buffer.shape[0] < capacity_bytes
                ):
                    with torch.inference_mode(
                        False
                    ):  # it outlives the caller's mode, and could be written in that one only
                        self._buffer = torch.empty(
                            capacity_bytes, dtype=torch.uint8, device=binding.device
                        )
                yield self._buffer[: content.shape[0]]
