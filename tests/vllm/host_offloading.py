"""vLLM's tiered offloading where there is no GPU: its scheduler's side is real, and only the copies
between its KV blocks and its host memory, which need CUDA, are done here, at once.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec


class HostTieringSpec(TieringOffloadingSpec):
    """Settings as of `TieringOffloadingSpec`, with chunks of one block."""

    def get_worker(self, kv_caches: Any) -> OffloadingWorker:
        region = SharedOffloadRegion(
            engine_id=self._engine_id,
            num_chunks=self.num_chunks,
            rank=self.config.parallel.rank,
            kv_bytes_per_chunk=self.kv_bytes_per_chunk,
            cpu_page_size=self.cpu_page_size_per_worker,
        )
        return HostWorker(kv_caches, region)


class HostWorker(OffloadingWorker):
    """Copies blocks before it returns."""

    def __init__(self, kv_caches: Any, region: SharedOffloadRegion) -> None:
        self._region = region
        self._refs = kv_caches.group_data_refs
        self._blocks = [one.tensor for one in kv_caches.tensors]
        self._rows = [
            region.create_next_worker_view(one.page_size_bytes) for one in kv_caches.tensors
        ]
        self._finished: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        for block, row in self._pairs(src_spec, dst_spec):
            row.copy_(block)
        self._finished.append(TransferResult(job_id, True))
        return True

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        for block, row in self._pairs(dst_spec, src_spec):
            block.copy_(row)
        self._finished.append(TransferResult(job_id, True))
        return True

    def get_finished(self) -> list[TransferResult]:
        finished, self._finished = self._finished, []
        return finished

    def wait(self, job_ids: set[int]) -> None:
        pass

    def shutdown(self) -> None:
        self._rows.clear()
        self._region.cleanup()

    def _pairs(self, of_engine: Any, of_host: Any) -> list[tuple[Any, Any]]:
        """What of a block of each layer belongs to what of a row."""
        groups = [group for group, n in enumerate(of_engine.group_sizes) for _ in range(n)]
        return [
            (
                self._blocks[ref.tensor_idx][block][: ref.page_size_bytes],
                self._rows[ref.tensor_idx][row][: ref.page_size_bytes],
            )
            for group, block, row in zip(
                groups, of_engine.block_ids, of_host.block_ids, strict=True
            )
            for ref in self._refs[group]
        ]
