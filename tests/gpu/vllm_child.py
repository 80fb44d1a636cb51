"""A vLLM engine that is measured, in a process of its own: obeys lines of JSON, as the children of
the tests do.
"""

from __future__ import annotations

import hashlib
import time
from typing import Any

import torch
from lmcache_core.gpu_connectors.staging import StagingPair

from tests.bench.vllm_child import TimedChild
from tests.gpu.copies import Copies
from tests.vllm.engine_child import serve
from tests.vllm.engines import Engine, set_environment

NUM_NEW = 4
"""Tokens after a prompt: its blocks are read while it is still being served."""


class MeasuringChild(TimedChild):
    """Serves requests step by step, and looks at vLLM's memory meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self._num_requests = 0
        self._copies = Copies()
        StagingPair.near = self._copies.watched(StagingPair.near)  # type: ignore[method-assign]

    def prefill(self, name: str, tokens: list[int], num_stored: int) -> dict[str, Any]:
        """Serve one prompt.

        Args:
            name: Of the engine.
            tokens: The prompt.
            num_stored: Length of its part that consists of whole chunks.

        Returns:
            `seconds` until its first token, `num_cached` tokens as vLLM counts them, the `tokens`
            that follow, a digest of the `kv` of the stored part, "" without our connector, and
            whether copies of host memory `are_pinned`, by thread.
        """
        engine = self._engines[name]
        request, kv = self._add(engine, tokens, NUM_NEW), ""
        began, seconds, output = time.perf_counter(), 0.0, None
        while engine.llm.llm_engine.has_unfinished_requests():
            for output in engine.llm.llm_engine.step():
                assert output.request_id == request
                if not seconds:
                    seconds = time.perf_counter() - began
                    kv = kv_digest(engine, num_stored)
        assert output is not None
        return {
            "seconds": seconds,
            "num_cached": output.num_cached_tokens or 0,
            "tokens": list(output.outputs[0].token_ids),
            "kv": kv,
            "are_pinned": self._copies.are_pinned,
        }

    def serve(self, name: str, requests: list[dict[str, Any]]) -> dict[str, Any]:
        """Serve many requests, each of which comes before a certain step.

        Args:
            name: Of the engine.
            requests: `step`, `tokens` and `num_new` of each, in the order of their steps.

        Returns:
            Seconds of all `steps`, and of each request's `first` token, in their order.
        """
        engine, waiting = self._engines[name], list(requests)
        steps: list[float] = []
        came: dict[str, float] = {}
        first: dict[str, float] = {}
        while waiting or engine.llm.llm_engine.has_unfinished_requests():
            while waiting and waiting[0]["step"] <= len(steps):
                one = waiting.pop(0)
                came[self._add(engine, one["tokens"], one["num_new"])] = time.perf_counter()
            began = time.perf_counter()
            outputs = engine.llm.llm_engine.step()
            ended = time.perf_counter()
            steps.append(ended - began)
            for output in outputs:
                first.setdefault(output.request_id, ended - came[output.request_id])
        return {"steps": steps, "first": [first[request] for request in came]}

    def _add(self, engine: Engine, tokens: list[int], num_new: int) -> str:
        from vllm import SamplingParams

        self._num_requests += 1
        request = f"gpu-{self._num_requests}"
        sampling = SamplingParams(
            temperature=0.0, max_tokens=num_new, ignore_eos=True, detokenize=False
        )
        engine.llm.llm_engine.add_request(request, {"prompt_token_ids": tokens}, sampling)
        return request


def kv_digest(engine: Engine, num_tokens: int) -> str:
    """Digest of all bytes that vLLM's blocks hold for the first tokens of the only request."""
    if not hasattr(engine.connector, "_worker_side"):
        return ""
    cache = engine.llm.llm_engine.vllm_config.cache_config
    (request,) = engine.scheduler.requests
    (blocks,) = engine.scheduler.kv_cache_manager.get_block_ids(request)
    blocks = blocks[: num_tokens // cache.block_size]
    # vLLM's tensors as they were registered: its runner keeps them in other places by release.
    (group,) = engine.worker_connector._worker_side._transfers
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    digest = hashlib.blake2b()
    for tensor in group.memory.kvcaches:
        # Layouts differ in the axis of blocks, which a backend may have divided.
        axis = next(i for i, size in enumerate(tensor.shape) if size % cache.num_gpu_blocks == 0)
        by_block = tensor.movedim(axis, 0).unflatten(0, (cache.num_gpu_blocks, -1))
        content = by_block[blocks].cpu().contiguous()
        digest.update(content.view(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


if __name__ == "__main__":
    set_environment()
    serve(MeasuringChild())
