"""vLLM's tiering manager with our tier behind it, driven as vLLM's scheduler drives it."""

from __future__ import annotations

import random
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np

CHUNK_BYTES = 64 << 10
NUM_ROWS = 128
JOB_BOUND_S = 20.0
"""Longest time of a job, whatever the sidecar does."""


class Offloading:
    """vLLM's tiering manager with our tier.

    Args:
        socket: The sidecar's socket.
        num_rows: Chunks that fit into vLLM's host memory.
        identity: Of the KV.
        timeout_s: Longest wait of the tier for the sidecar.
        kv_events: Whether vLLM publishes events, and the tier's among them.
        **parallel: Of vLLM's `OffloadingParallelConfig`.
    """

    def __init__(
        self,
        socket: Path,
        num_rows: int = NUM_ROWS,
        identity: str = "weights",
        timeout_s: float = 2.0,
        kv_events: bool = False,
        **parallel: Any,
    ) -> None:
        from vllm.v1.kv_offload import config as c
        from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

        sizes = dict.fromkeys(("world_size", "tp_size", "pp_size", "pcp_size", "dcp_size"), 1)
        sizes |= {"rank": 0, "data_parallel_index": 0, "data_parallel_size": 1} | parallel
        tier = {
            "type": "LMCacheTier",
            "module_path": "lmcache_core.integrations.vllm_tier",
            "sidecar_socket": str(socket),
            "identity": identity,
            "timeout_s": timeout_s,
            "enable_kv_events": kv_events,
        }
        spec = TieringOffloadingSpec(
            c.OffloadingConfig(
                groups=(c.OffloadingGroupConfig(16, ("layers.0",), 0),),
                worker_kv_bytes_per_block=CHUNK_BYTES // sizes["world_size"],
                enable_kv_cache_events=kv_events,
                extra_config={
                    "cpu_bytes_to_use": num_rows * CHUNK_BYTES,
                    "secondary_tiers": [tier],
                },
                engine_id=uuid.uuid4().hex,
                model=c.OffloadingModelConfig(f"/models/{uuid.uuid4().hex}/llama", "bfloat16"),
                cache=c.OffloadingCacheConfig(16, 1),
                parallel=c.OffloadingParallelConfig(
                    **sizes, data_parallel_rank_local=None, is_parallelism_agnostic=True
                ),
            )
        )
        self.manager = spec.get_manager()
        # Since 0.33 every call of the manager needs it
        self._lock = getattr(self.manager, "lock", nullcontext())
        self.rows = np.frombuffer(self.manager.primary_tier.get_kv_memoryview(), np.uint8)
        self.rows = self.rows.reshape(num_rows, CHUNK_BYTES)
        self._num_requests = 0

    def step(self) -> None:
        """End a step of the scheduler."""
        from vllm.v1.kv_offload.base import ScheduleEndContext

        with self._lock:
            self.manager.on_schedule_end(ScheduleEndContext((), ()))

    def reset_cache(self) -> None:
        """Reset as vLLM does while its workers copy nothing."""
        with self._lock:
            self.manager.reset_cache()
            if hasattr(self.manager, "on_reset_flushed"):  # since 0.33
                self.manager.on_reset_flushed()

    def take_events(self) -> list[Any]:
        with self._lock:
            return list(self.manager.take_events())

    def await_jobs(self) -> None:
        deadline = time.monotonic() + JOB_BOUND_S
        while self._has_pending_work():
            assert time.monotonic() < deadline, "a job hangs"
            self.step()
            time.sleep(0.002)

    def _has_pending_work(self) -> bool:
        with self._lock:
            return bool(self.manager.has_pending_work())

    @contextmanager
    def request(self) -> Iterator[Any]:
        from vllm.v1.kv_offload.base import ReqContext

        self._num_requests += 1
        context = ReqContext(f"r{self._num_requests}")
        with self._lock:
            self.manager.on_new_request(context)
        yield context
        with self._lock:
            self.manager.on_request_finished(context)

    def store(self, numbers: Sequence[int]) -> None:
        """Store chunks as vLLM does once a step has computed them."""
        with self.request() as context, self._lock:
            prepared = self.manager.prepare_store([key_of(n) for n in numbers], context)
            if prepared is None:
                return
            for key, row in zip(prepared.keys_to_store, prepared.store_spec.chunk_ids, strict=True):
                self.rows[row] = np.frombuffer(content_of(number_of(key)), np.uint8)
            if prepared.keys_to_store:
                self.manager.complete_store(prepared.keys_to_store, context)

    def load(self, numbers: Sequence[int]) -> list[bool]:
        """Look for chunks until vLLM knows; fail if one that it has found is not what was stored.

        Returns:
            Whether each was found.
        """
        from vllm.v1.kv_offload.base import LookupResult

        deadline, left, found = time.monotonic() + JOB_BOUND_S, list(numbers), set()
        with self.request() as context:
            while left:
                assert time.monotonic() < deadline, "a lookup hangs"
                with self._lock:
                    results = {n: self.manager.lookup(key_of(n), context) for n in left}
                    left = [
                        n
                        for n, result in results.items()
                        if result in (LookupResult.RETRY, LookupResult.HIT_PENDING)
                    ]
                    hits = [n for n, result in results.items() if result is LookupResult.HIT]
                    keys = [key_of(n) for n in hits]
                    if hits:
                        spec = self.manager.prepare_load(keys, context)
                        for n, row in zip(hits, spec.chunk_ids, strict=True):
                            assert bytes(self.rows[row]) == content_of(n), f"chunk {n} is wrong"
                        self.manager.complete_load(keys, context)
                        found |= set(hits)
                self.step()
                time.sleep(0.002)
        return [n in found for n in numbers]

    def close(self) -> None:
        self.rows = np.empty(0)
        self.manager.shutdown()


def key_of(number: int) -> bytes:
    from vllm.v1.kv_offload.base import make_offload_key

    return make_offload_key(number.to_bytes(32, "big"), 0)


def number_of(key: bytes) -> int:
    return int.from_bytes(key[:32], "big")


def content_of(number: int) -> bytes:
    return random.Random(number).randbytes(1024) * (CHUNK_BYTES // 1024)
