"""What the scheduler's side and the workers tell each other, each step. Picklable, and free of
token ids.
"""

from __future__ import annotations

import functools
import socket
from dataclasses import dataclass, field
from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@functools.cache  # the scheduler compares it with the reports of every step
def this_host() -> str:
    """Name the machine, or the pod, that this process runs in."""
    return f"{socket.gethostname()} {_BOOT_ID.read_text().strip() if _BOOT_ID.exists() else ''}"


@dataclass(frozen=True)
class ChunkRun:
    """Consecutive chunks of one request in one cache group.

    Attributes:
        group: Number of the group among those that are cached (`CacheGroup.number`).
        first: Number of the first chunk in the request.
        hashes: Chunk hashes, 32 bytes each.
        block_ids: vLLM's blocks of all these chunks, in their order; 0 where there is none (any
            more).
    """

    group: int
    first: int
    hashes: tuple[bytes, ...]
    block_ids: tuple[int, ...]


@dataclass(frozen=True)
class Load:
    """KV that a worker is to put into vLLM's blocks.

    Attributes:
        request_id: Whose.
        begin: First token that vLLM does not have.
        end: One behind the last token that it was promised.
        runs: The chunks that overlap `[begin, end)`, one run for each group.
        is_async: vLLM waits for the request's id in `finished_recving`; otherwise the load is over
            before the forward pass.
        recompute_s: What computing one chunk anew costs; None: not known.
    """

    request_id: str
    begin: int
    end: int
    runs: tuple[ChunkRun, ...]
    is_async: bool
    recompute_s: float | None = None


@dataclass(frozen=True)
class Store:
    """Chunks that are complete in vLLM's blocks once this step's forward pass has run.

    Attributes:
        request_id: Whose.
        runs: The chunks.
        num_unsure: How many of its tokens, from the first, belong to chunks that may be stored
            already.
    """

    request_id: str
    runs: tuple[ChunkRun, ...]
    num_unsure: int = 0


@dataclass(frozen=True)
class StepPlan:
    """Everything that a worker is to do in one step.

    Attributes:
        loads: What to load, or to begin to load.
        stores: What to store behind it.
        waits_for_loads: Whether all requests wait for loads: nothing else can go on before one of
            these is over.
        recompute_s: As in `Load`.
        step: Its number, to be reported when it has ended; 0 where that is of no interest.
    """

    loads: tuple[Load, ...] = ()
    stores: tuple[Store, ...] = ()
    waits_for_loads: bool = False
    recompute_s: float | None = None
    step: int = 0


@dataclass
class WorkerReport:
    """What workers did in one step.

    Attributes:
        loaded: Requests of which a synchronous load is over.
        failed: Requests of which a load failed.
        is_out: A worker cannot use its KV memory: nothing is to be loaded.
        hosts: Where workers run, in the first report of each.
        step: `StepPlan.step`.
    """

    loaded: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)
    is_out: bool = False
    hosts: set[str] = field(default_factory=set)
    step: int = 0

    def aggregate(self, other: WorkerReport) -> WorkerReport:
        """This report and that of another worker as one."""
        self.loaded |= other.loaded
        self.failed |= other.failed
        self.is_out |= other.is_out
        self.hosts |= other.hosts
        self.step = max(self.step, other.step)
        return self
