"""What the connector copies between host memory and a device: its threads, whether the memory is
pinned, and copies that are late.
"""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from lmcache_core.gpu_connectors.binding import Binding
from lmcache_core.gpu_connectors.staging import StagingPair

STORES, LOADS = "lmcache-stores", "lmcache-loads"
"""Threads of the connectors."""


class Copies:
    """What threads copy through staging buffers, where each copy is given its stream.

    Args:
        max_spin_cycles: How long, at most, a GPU is kept from beginning each copy.

    Attributes:
        are_pinned: By thread, whether CUDA takes the host memory of its last copy for pinned.
    """

    def __init__(self, max_spin_cycles: int = 0) -> None:
        self.are_pinned: dict[str, bool] = {}
        self._max_spin_cycles = max_spin_cycles
        self._dice = random.Random(0)

    def watched(self, near: Any) -> Any:
        """Return what to put in the place of `StagingPair.near`."""

        @contextlib.contextmanager
        def watched_near(
            pair: StagingPair, content: torch.Tensor | None, binding: Binding, *args: Any
        ) -> Iterator[Any]:
            with near(pair, content, binding, *args) as lent:
                self._spin(binding.device)
                if content is not None:
                    self.are_pinned[threading.current_thread().name] = content.is_pinned()
                yield lent

        return watched_near

    def watched_runs(self, in_order: Any) -> Any:
        """Return what to put in the place of `StagingPair.in_order`, in which copy engines move
        runs of pinned memory.
        """

        @contextlib.contextmanager
        def watched_in_order(pair: StagingPair, device: torch.device, *args: Any) -> Iterator[None]:
            with in_order(pair, device, *args):
                self._spin(device)
                self.are_pinned[threading.current_thread().name] = True
                yield

        return watched_in_order

    def _spin(self, device: torch.device) -> None:
        if self._max_spin_cycles and device.type == "cuda":
            torch.cuda._sleep(self._dice.randrange(self._max_spin_cycles))


def require_pinned(are_pinned: Mapping[str, bool]) -> None:
    """Assert that the last store and the last load were copied into and out of pinned memory."""
    found = {thread: are_pinned.get(thread) for thread in (STORES, LOADS)}
    if not all(found.values()):
        raise AssertionError(f"copies of pinned memory, by thread: {found}")
