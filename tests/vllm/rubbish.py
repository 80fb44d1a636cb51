"""A connector that promises KV and brings something else."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1 import base

PARAMETER = "rubbish"
"""Of a request's `kv_transfer_params`: for how many tokens it gets rubbish."""
ASYNC, SYNC, FAILING = "async", "sync", "failing"
"""Ways to load: while the request waits; in its first step; so, and vLLM is told that it failed."""
RUBBISH = 0.25


@dataclass
class Loads(base.KVConnectorMetadata):
    """Blocks to load into, by request."""

    blocks: dict[str, list[int]]


class RubbishConnector(base.KVConnectorBase_V1):
    """Writes the same number everywhere. `way` in its extra config is how."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._way = vllm_config.kv_transfer_config.kv_connector_extra_config["way"]
        self._block_size = vllm_config.cache_config.block_size
        self._planned: dict[str, list[int]] = {}
        self._caches: dict[str, torch.Tensor] = {}
        self._received: set[str] = set()
        self._failed: set[int] = set()

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Any:
        num_tokens = (request.kv_transfer_params or {}).get(PARAMETER, 0) - num_computed_tokens
        return (num_tokens, self._way == ASYNC) if num_tokens > 0 else (0, False)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens:
            (ids,) = blocks.get_block_ids()
            end = request.kv_transfer_params[PARAMETER] // self._block_size
            begin = end - num_external_tokens // self._block_size
            self._planned[request.request_id] = ids[begin:end]

    def build_connector_meta(self, scheduler_output: Any) -> Loads:
        planned, self._planned = self._planned, {}
        return Loads(planned)

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._caches = kv_caches

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        for request_id, blocks in self._get_connector_metadata().blocks.items():
            for cache in self._caches.values():
                cache[blocks] = RUBBISH
            if self._way == ASYNC:
                self._received.add(request_id)
            if self._way == FAILING:
                self._failed.update(blocks)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        received, self._received = self._received, set()
        return None, received or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        failed, self._failed = self._failed, set()
        return failed

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(self, *args: Any, **kwargs: Any) -> None:
        pass

    def wait_for_save(self) -> None:
        pass
