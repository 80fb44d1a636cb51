"""CUDA streams, on which copies run while the serving engine computes."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

STREAM_DEVICES = {"cuda"}


def has_streams(device: torch.device) -> bool:
    """Return whether copies on a device are only launched, and end later."""
    return device.type in STREAM_DEVICES


def use_device(device: torch.device) -> None:
    """Make a device with streams the current one of this thread, before anything else of CUDA.

    A thread begins on device 0. Leaving a stream and waiting for an event open a context on the
    current device: some 500 MiB of a GPU that another rank computes on.
    """
    if has_streams(device):
        torch.cuda.set_device(device)


def record_event(device: torch.device) -> torch.cuda.Event | None:
    """Return the end of everything launched on the current stream; None on a device without
    streams. A thread that waits for it sleeps, and does not spin for as long as a step takes.
    """
    return _recorded(device) if has_streams(device) else None


def has_ended(event: torch.cuda.Event) -> bool:
    """Return whether what an event marks has ended on the device."""
    return bool(event.query())  # type: ignore[no-untyped-call]


def wait_on_device(event: torch.cuda.Event) -> None:
    """Let everything launched on the current stream from now on start after `event`; the host does
    not wait.
    """
    torch.cuda.current_stream(event.device).wait_event(event)


def wait_for_engine(events: Sequence[torch.cuda.Event], device: torch.device) -> None:
    """Wait until what a serving engine has recorded has ended. Threads may spin for its events: so
    this waits for one of ours, which ends after them.
    """
    if has_streams(device):
        for event in events:
            wait_on_device(event)
        events = [_recorded(device)]
    for event in events:
        event.synchronize()


@dataclass
class LaunchedCopies:
    """Copies of chunks that may still run on a device, in the order of their launch.

    Attributes:
        read: The end of each copy's part that reads the serving engine's memory.
        ended: The end of each copy that was not waited for.
    """

    read: list[torch.cuda.Event] = field(default_factory=list)
    ended: deque[torch.cuda.Event] = field(default_factory=deque)

    def wait_for_first(self) -> None:
        """Wait until the first of `ended` has ended, if there is one."""
        if self.ended:
            self.ended[0].synchronize()
            self.ended.popleft()

    def wait(self) -> None:
        """Wait until all have ended."""
        while self.ended:
            self.wait_for_first()


class ThreadStreams:
    """Gives each thread a stream of its own, of the lowest priority, on the device that it uses."""

    def __init__(self) -> None:
        self._of_thread = threading.local()

    @contextmanager
    def own(self, device: torch.device) -> Iterator[None]:
        """Within, what this thread launches runs on its own stream, if the device has streams."""
        if not has_streams(device):
            yield
            return
        use_device(device)
        stream: torch.cuda.Stream | None = getattr(self._of_thread, "stream", None)
        if stream is None:
            stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self._of_thread.stream = stream
        with torch.cuda.stream(stream):
            yield


def _recorded(device: torch.device) -> torch.cuda.Event:
    event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event
