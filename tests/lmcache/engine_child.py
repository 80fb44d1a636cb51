"""An unmodified LMCache engine, driven over stdin and stdout by JSON, one object a line. Runs where
LMCache is, and nothing of ours.

Its KV follows from the token ids, so that whoever retrieves knows what must come.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import torch
from lmcache.v1.cache_engine import LMCacheEngineBuilder
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.gpu_connector.gpu_connectors import GPUConnectorInterface
from lmcache.v1.metadata import LMCacheMetadata

NUM_LAYERS, NUM_HEADS, HEAD_SIZE = 4, 4, 32
HIDDEN = NUM_HEADS * HEAD_SIZE
NAME = "engine"


def kv_of(tokens: list[int]) -> torch.Tensor:
    """The KV that these tokens have: `[2, layers, tokens, hidden]`, bfloat16, another one for
    each token and what stands before it.
    """
    prefix = torch.tensor(tokens, dtype=torch.float64).cumsum(0)
    places = torch.arange(2 * NUM_LAYERS * HIDDEN, dtype=torch.float64).reshape(
        2, NUM_LAYERS, 1, HIDDEN
    )
    return torch.sin(places * 0.37 + prefix.reshape(1, 1, -1, 1)).to(torch.bfloat16)


class PlainConnector(GPUConnectorInterface):
    """Where a serving engine has its pages, this has one tensor."""

    def __init__(self) -> None:
        self.kv = torch.zeros(0)

    def to_gpu(self, memory_obj: Any, start: int, end: int, **_: Any) -> None:
        self.kv[:, :, start:end] = memory_obj.tensor

    def from_gpu(self, memory_obj: Any, start: int, end: int, **_: Any) -> None:
        memory_obj.tensor.copy_(self.kv[:, :, start:end])

    def batched_to_gpu(
        self, memory_objs: Any, starts: list[int], ends: list[int], **_: Any
    ) -> None:
        for memory_obj, start, end in zip(memory_objs, starts, ends, strict=True):
            self.to_gpu(memory_obj, start, end)

    def batched_from_gpu(
        self, memory_objs: Any, starts: list[int], ends: list[int], **_: Any
    ) -> None:
        for memory_obj, start, end in zip(memory_objs, starts, ends, strict=True):
            self.from_gpu(memory_obj, start, end)

    def get_shape(self, num_tokens: int) -> torch.Size:
        return torch.Size([2, NUM_LAYERS, num_tokens, HIDDEN])

    def initialize_kvcaches_ptr(self, **_: Any) -> None:
        pass


def answer(engine: Any, connector: PlainConnector, ask: dict[str, Any]) -> dict[str, Any]:
    tokens: list[int] = ask["tokens"]
    match ask["do"]:
        case "store":
            connector.kv = kv_of(tokens)
            engine.store(torch.tensor(tokens))
            return {}
        case "lookup":
            return {"num_tokens": int(engine.lookup(torch.tensor(tokens)))}
        case "retrieve":
            connector.kv = torch.full(
                (2, NUM_LAYERS, len(tokens), HIDDEN), float("nan"), dtype=torch.bfloat16
            )
            mask = engine.retrieve(torch.tensor(tokens))
            num = int(mask.sum())
            is_right = bool(mask[:num].all()) and torch.equal(
                connector.kv[:, :, :num], kv_of(tokens)[:, :, :num]
            )
            return {
                "num_tokens": num,
                "is_right": is_right,
                "rest_untouched": bool(connector.kv[:, :, num:].isnan().all()),
            }
        case other:
            raise ValueError(f"no such command: {other!r}")


def main() -> None:
    options = json.loads(sys.argv[1])
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what LMCache prints is no answer
    config = LMCacheEngineConfig.from_defaults(**options)
    chunk_size = options["chunk_size"]
    shape = (NUM_LAYERS, 2, chunk_size, NUM_HEADS, HEAD_SIZE)
    metadata = LMCacheMetadata(
        model_name="acme/tiny",
        world_size=1,
        local_world_size=1,
        worker_id=0,
        local_worker_id=0,
        kv_dtype=torch.bfloat16,
        kv_shape=shape,
        chunk_size=chunk_size,
        role="worker",
        engine_id=NAME,
    )
    connector = PlainConnector()
    engine = LMCacheEngineBuilder.get_or_create(
        NAME, config, metadata, connector, lambda tensor, _: tensor, lambda item, _: item
    )
    engine.post_init()
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(engine, connector, json.loads(line))), file=answers, flush=True)
    LMCacheEngineBuilder.destroy(NAME)


if __name__ == "__main__":
    main()
