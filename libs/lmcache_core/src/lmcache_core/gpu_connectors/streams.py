"""CUDA streams, on which copies run while the serving engine computes."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

STREAM_DEVICES = {"cuda"}


def has_streams(device: torch.device) -> bool:
    """Return whether copies on a device are only launched, and end later."""
    return device.type in STREAM_DEVICES


def finish(device: torch.device) -> None:
    """Wait for everything launched on the current stream."""
    if has_streams(device):
        torch.cuda.current_stream(device).synchronize()


def record_event(device: torch.device) -> torch.cuda.Event | None:
    """Return the end of everything launched on the current stream; None on a device without
    streams.
    """
    return torch.cuda.current_stream(device).record_event() if has_streams(device) else None


class ThreadStreams:
    """Gives each thread a stream of its own, of the lowest priority."""

    def __init__(self) -> None:
        self._of_thread = threading.local()

    @contextmanager
    def after(self, event: torch.cuda.Event | None) -> Iterator[None]:
        """Within, what this thread launches runs on its own stream, after `event`; without one, on
        the current stream.
        """
        if event is None:
            yield
            return
        stream: torch.cuda.Stream | None = getattr(self._of_thread, "stream", None)
        if stream is None:
            stream = torch.cuda.Stream(event.device)  # type: ignore[no-untyped-call]
            self._of_thread.stream = stream
        with torch.cuda.stream(stream):
            stream.wait_event(event)
            yield
