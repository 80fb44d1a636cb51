"""What the scheduler's side and the workers exchange in every step. Picklable; contains no token
ids.
"""

from __future__ import annotations

import functools
import socket
from dataclasses import dataclass, field
from pathlib import Path

from lmcache_core.keys import CHUNK_HASH_BYTES

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@functools.cache  # the scheduler compares it with the reports of every step
def this_host() -> str:
    """Identify the machine or pod that this process runs in."""
    return f"{socket.gethostname()} {_BOOT_ID.read_text().strip() if _BOOT_ID.exists() else ''}"


@dataclass(frozen=True)
class ChunkRun:
    """Consecutive chunks of one request in one cache group.

    Attributes:
        group: `CacheGroup.number`.
        first: Index of the first chunk in the request.
        hashes: Chunk hashes of `CHUNK_HASH_BYTES` each, packed.
        block_ids: vLLM's blocks of all these chunks, in order; `NULL_BLOCK` where there is none.
        is_tail: It is the tail of a prompt: one chunk with fewer blocks.
    """

    group: int
    first: int
    hashes: bytes
    block_ids: tuple[int, ...]
    is_tail: bool = False

    @property
    def num_chunks(self) -> int:
        """Number of chunks in this run."""
        return len(self.hashes) // CHUNK_HASH_BYTES

    @property
    def chunk_blocks(self) -> int:
        """Number of blocks in each of its chunks."""
        return len(self.block_ids) // self.num_chunks


@dataclass(frozen=True)
class Load:
    """KV for a worker to load into vLLM's blocks, while the request waits for its id in
    `finished_recving`.

    Attributes:
        begin: First token that vLLM does not have.
        end: One past the last token that vLLM was promised.
        runs: The chunks that overlap `[begin, end)`, one run for each group.
        recompute_s: Cost of computing one chunk; None if unknown.
    """

    request_id: str
    begin: int
    end: int
    runs: tuple[ChunkRun, ...]
    recompute_s: float | None = None


@dataclass(frozen=True)
class Store:
    """Chunks that are complete in vLLM's blocks once this step's forward pass has run."""

    request_id: str
    runs: tuple[ChunkRun, ...]


@dataclass(frozen=True)
class StepPlan:
    """Everything a worker does in one step.

    Attributes:
        waits_for_loads: All requests wait for loads: nothing is computed until one of them ends.
        step: The step's number, reported when it has ended; 0: not reported.
        held: Requests that have finished, and whose blocks vLLM keeps until every worker has named
            them in `finished_sending`.
        overwritten: Requests whose blocks vLLM may have given to others, which this step computes;
            None: any request may be among them.
    """

    loads: tuple[Load, ...] = ()
    stores: tuple[Store, ...] = ()
    waits_for_loads: bool = False
    recompute_s: float | None = None
    step: int = 0
    held: tuple[str, ...] = ()
    overwritten: frozenset[str] | None = frozenset()


@dataclass
class WorkerReport:
    """The results of one step from the workers.

    Attributes:
        failed: Requests with a failed load, and the first token that it did not bring.
        is_out: A worker cannot use its KV memory: nothing may be loaded.
        hosts: Hosts of the workers, in the first report of each.
        step: `StepPlan.step`.
    """

    failed: dict[str, int] = field(default_factory=dict)
    is_out: bool = False
    hosts: set[str] = field(default_factory=set)
    step: int = 0

    def aggregate(self, other: WorkerReport) -> WorkerReport:
        """Merge another worker's report into this one."""
        for request_id, token in other.failed.items():
            self.failed[request_id] = min(token, self.failed.get(request_id, token))
        self.is_out |= other.is_out
        self.hosts |= other.hosts
        self.step = max(self.step, other.step)
        return self
