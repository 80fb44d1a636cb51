"""Tiers behind vLLM's own offloading, for `peer_child`: vLLM's scheduler side and its host memory
are real. Its copies between KV blocks and that memory need a GPU and are not measured.
"""

from __future__ import annotations

import time
import uuid
from typing import Any

import numpy as np
import torch
from vllm.v1.kv_offload import config as c
from vllm.v1.kv_offload.base import LookupResult, ReqContext, ScheduleEndContext, make_offload_key
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from tests.bench.peer_child import Shape

TIMEOUT_S = 60.0
POLL_S = 0.0005


class Offloading:
    """vLLM's tiering manager, with host memory for one prompt and a tier below it. Obeys as
    `peer_child.Driver` does.

    Args:
        tier: Of `secondary_tiers`.
    """

    def __init__(self, shape: Shape, tier: dict[str, Any]) -> None:
        self._num_chunks = shape.num_tokens // shape.chunk_size
        self._chunk_bytes = shape.num_bytes // self._num_chunks
        self.engine_id = uuid.uuid4().hex
        sizes = dict.fromkeys(("world_size", "tp_size", "pp_size", "pcp_size", "dcp_size"), 1)
        sizes |= {"rank": 0, "data_parallel_index": 0, "data_parallel_size": 1}
        self._spec = TieringOffloadingSpec(
            c.OffloadingConfig(
                groups=(c.OffloadingGroupConfig(shape.chunk_size, ("layers.0",), 0),),
                worker_kv_bytes_per_block=self._chunk_bytes,
                enable_kv_cache_events=False,
                extra_config={"cpu_bytes_to_use": shape.num_bytes, "secondary_tiers": [tier]},
                engine_id=self.engine_id,
                model=c.OffloadingModelConfig(f"/models/{uuid.uuid4().hex}/llama", "bfloat16"),
                cache=c.OffloadingCacheConfig(shape.chunk_size, 1),
                parallel=c.OffloadingParallelConfig(
                    **sizes, data_parallel_rank_local=None, is_parallelism_agnostic=True
                ),
            )
        )
        self._manager = self._spec.get_manager()
        view = self._manager.primary_tier.get_kv_memoryview()
        self._rows = np.frombuffer(view, np.uint8).reshape(self._num_chunks, self._chunk_bytes)
        bits = torch.empty((self._num_chunks, self._chunk_bytes), dtype=torch.uint8)
        self._source = bits.random_(generator=torch.Generator().manual_seed(1)).numpy()

    def refusal(self, turn: int) -> str:
        """Return why vLLM does not copy between KV blocks and host memory here, "" if it does."""
        try:
            self._spec.get_worker({})
        except Exception as exc:  # vLLM raises this very class
            return str(exc)
        return ""

    def store(self, turn: int) -> float:
        """Store a prompt that is in host memory; return the seconds until the tier has it."""
        context = self._begin(f"store {turn}")
        prepared = self._manager.prepare_store(self._keys(turn), context)
        if prepared is None or len(prepared.keys_to_store) != self._num_chunks:
            raise ValueError(f"host memory has no room for prompt {turn}")
        self._mark(turn)
        rows = prepared.store_spec.chunk_ids
        for chunk, row in enumerate(rows):
            self._rows[row] = self._source[chunk]
        began = time.perf_counter()
        self._manager.complete_store(prepared.keys_to_store, context)
        self._await(lambda: not self._manager.has_pending_work())
        seconds = time.perf_counter() - began
        self._manager.on_request_finished(context)
        return seconds

    def retrieve(self, turn: int) -> float:
        """Have a prompt loaded into host memory; return the seconds. Every byte is compared."""
        keys, context = self._keys(turn), self._begin(f"load {turn}")
        self._rows[:] = 0
        began = time.perf_counter()
        self._await(lambda: self._is_found(keys, context))
        seconds = time.perf_counter() - began
        self._mark(turn)
        rows = self._manager.prepare_load(keys, context).chunk_ids
        for chunk, row in enumerate(rows):
            if not np.array_equal(self._rows[row], self._source[chunk]):
                raise ValueError(f"other bytes than were stored came back for prompt {turn}")
        self._manager.complete_load(keys, context)
        self._manager.on_request_finished(context)
        return seconds

    def close(self) -> None:
        """Free the host memory, which is a file that would stay."""
        self._rows = np.empty(0)
        self._manager.shutdown()

    def _is_found(self, keys: list[Any], context: ReqContext) -> bool:
        found = [self._manager.lookup(key, context) for key in keys]
        if LookupResult.MISS in found:
            raise ValueError("the tier has lost a chunk")
        return all(result is LookupResult.HIT for result in found)

    def _await(self, is_done: Any) -> None:
        deadline = time.monotonic() + TIMEOUT_S
        while not is_done():
            if time.monotonic() > deadline:
                raise TimeoutError("the tier does not answer in time")
            self._manager.on_schedule_end(ScheduleEndContext((), ()))
            time.sleep(POLL_S)

    def _begin(self, name: str) -> ReqContext:
        context = ReqContext(name)
        self._manager.on_new_request(context)
        return context

    def _mark(self, turn: int) -> None:
        self._source[:, 0] = turn % 256

    def _keys(self, turn: int) -> list[Any]:
        first = turn * self._num_chunks
        return [
            make_offload_key((first + i).to_bytes(32, "big"), 0) for i in range(self._num_chunks)
        ]
