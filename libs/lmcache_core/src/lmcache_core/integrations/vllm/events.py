"""KV events: tells vLLM's subscribers (routers, for example) which blocks the cache has."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from vllm.distributed.kv_events import BlockStored, KVCacheEvent
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

from lmcache_core.integrations.vllm.plan import ChunkRun, WorkerReport
from lmcache_core.integrations.vllm.requests import RequestState

MEDIUM = "CPU"
MAX_ANNOUNCEMENTS = 65536
"""Chunks whose storing has been planned and not been reported; the oldest are forgotten."""


class StoredEvents:
    """Makes an event of each chunk once all workers have stored it.

    Args:
        chunk_size: Tokens in a chunk.
        hash_block_size: Tokens behind one of vLLM's block hashes.
        num_ranks: Workers that store a chunk.
        indices: vLLM's number of each cache group.
    """

    def __init__(self, chunk_size: int, hash_block_size: int, num_ranks: int, indices: Sequence[int]) -> None:
        self._indices = tuple(indices)
        self._chunk_size = chunk_size
        self._block_size = hash_block_size
        self._num_ranks = num_ranks
        self._planned: OrderedDict[tuple[int, bytes], KVCacheEvent] = OrderedDict()
        self._ready: list[KVCacheEvent] = []

    def planned(self, state: RequestState, run: ChunkRun) -> None:
        """These chunks are about to be stored."""
        request, per_chunk = state.request, self._chunk_size // self._block_size
        lora = getattr(request, "lora_request", None)
        hashes: list[Any] = [maybe_convert_block_hash(block_hash) for block_hash in request.block_hashes]
        for i, chunk_hash in enumerate(run.hashes, run.first):
            blocks = hashes[i * per_chunk : (i + 1) * per_chunk]
            if len(blocks) < per_chunk:
                break
            self._planned[run.group, chunk_hash] = BlockStored(
                block_hashes=blocks,
                parent_block_hash=hashes[i * per_chunk - 1] if i else None,
                token_ids=list(request.all_token_ids[i * self._chunk_size : (i + 1) * self._chunk_size]),
                block_size=self._block_size,
                lora_id=None if lora is None else lora.lora_int_id,
                medium=MEDIUM,
                lora_name=None if lora is None else lora.lora_name,
                group_idx=self._indices[run.group],
            )
        while len(self._planned) > MAX_ANNOUNCEMENTS:
            self._planned.popitem(last=False)

    def reported(self, report: WorkerReport) -> None:
        """What workers have stored."""
        for chunk, num_workers in report.stored.items():
            event = self._planned.pop(chunk, None)
            if event is not None and num_workers >= self._num_ranks:
                self._ready.append(event)

    def take(self) -> list[KVCacheEvent]:
        """The events since the last call."""
        ready, self._ready = self._ready, []
        return ready
