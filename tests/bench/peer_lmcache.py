"""LMCache's engine, the client of its multiprocess server, and its CacheGen, for `peer_child`. Runs
in LMCache's environment and imports nothing from this repository.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable
from typing import Any

import torch

TIMEOUT_S = 60.0
POLL_S = 0.0005
HINTS: Any = {"kv_layout": "NHD"}
Arguments = Callable[[Any], dict[str, Any]]


def engine(shape: Any, options: dict[str, Any]) -> tuple[Any, Arguments]:
    """Return an engine in this process, and a function that makes the arguments of its calls.

    Its own connectors need CUDA. Contiguous KV is copied in slices; for pages, its own functions
    for CPUs gather and scatter.
    """
    from lmcache.v1.cache_engine import LMCacheEngineBuilder
    from lmcache.v1.config import LMCacheEngineConfig
    from lmcache.v1.gpu_connector.gpu_connectors import GPUConnectorInterface
    from lmcache.v1.multiprocess.transfer_context import (
        gather_paged_kv_to_cpu,
        scatter_cpu_to_paged_kv,
    )

    class Connector(GPUConnectorInterface):
        def to_gpu(self, memory_obj: Any, start: int, end: int, **kwargs: Any) -> None:
            self.batched_to_gpu([memory_obj], [start], [end], **kwargs)

        def from_gpu(self, memory_obj: Any, start: int, end: int, **kwargs: Any) -> None:
            self.batched_from_gpu([memory_obj], [start], [end], **kwargs)

        def get_shape(self, num_tokens: int) -> torch.Size:
            return torch.Size([2, shape.num_layers, num_tokens, shape.hidden])

        def initialize_kvcaches_ptr(self, **_: Any) -> None:
            pass

    class Slices(Connector):
        def batched_to_gpu(
            self, memory_objs: Any, starts: list[int], ends: list[int], **kwargs: Any
        ) -> None:
            for memory_obj, start, end in zip(memory_objs, starts, ends, strict=True):
                kwargs["kv"][:, :, start:end] = memory_obj.tensor

        def batched_from_gpu(
            self, memory_objs: Any, starts: list[int], ends: list[int], **kwargs: Any
        ) -> None:
            for memory_obj, start, end in zip(memory_objs, starts, ends, strict=True):
                memory_obj.tensor.copy_(kwargs["kv"][:, :, start:end])

    class Pages(Connector):
        def batched_to_gpu(
            self, memory_objs: Any, starts: list[int], ends: list[int], **kwargs: Any
        ) -> None:
            blocks = kwargs["blocks"][starts[0] // shape.block_size : ends[-1] // shape.block_size]
            tensors = [memory_obj.tensor for memory_obj in memory_objs]
            scatter_cpu_to_paged_kv(
                kwargs["layers"], blocks, tensors, shape.blocks_per_chunk, layout_hints=HINTS
            )

        def batched_from_gpu(
            self, memory_objs: Any, starts: list[int], ends: list[int], **kwargs: Any
        ) -> None:
            blocks = kwargs["blocks"][starts[0] // shape.block_size : ends[-1] // shape.block_size]
            tensors = [memory_obj.tensor for memory_obj in memory_objs]
            gather_paged_kv_to_cpu(
                kwargs["layers"], blocks, shape.blocks_per_chunk, layout_hints=HINTS, out=tensors
            )

    config = LMCacheEngineConfig.from_defaults(chunk_size=shape.chunk_size, **options)
    metadata = _metadata(shape.model, shape.kv_shape, shape.chunk_size)
    connector = Pages() if shape.is_paged else Slices()
    made = LMCacheEngineBuilder.get_or_create(
        "bench", config, metadata, connector, lambda tensor, _: tensor, lambda item, _: item
    )
    made.post_init()
    return made, _paged if shape.is_paged else lambda kv: {"kv": kv.tensor}


def _paged(kv: Any) -> dict[str, Any]:
    layers = {f"layer.{i}": layer for i, layer in enumerate(kv.tensor)}
    return {"layers": layers, "blocks": kv.blocks}


def coder(model: str, kv: torch.Tensor) -> tuple[Any, Any]:
    """Return its CacheGen encoder and decoder. It asks the model's configuration for the number of
    layers.
    """
    from lmcache.v1.config import LMCacheEngineConfig
    from lmcache.v1.memory_management import MemoryFormat, MemoryObjMetadata, TensorMemoryObj
    from lmcache.v1.storage_backend.naive_serde import CreateSerde

    _, num_layers, num_tokens, hidden = kv.shape
    metadata = _metadata(model, (num_layers, 2, num_tokens, 1, hidden), num_tokens)
    config = LMCacheEngineConfig.from_defaults(chunk_size=num_tokens)
    serializer, deserializer = CreateSerde("cachegen", metadata, config)
    about = MemoryObjMetadata(kv.shape, kv.dtype, 0, kv.nbytes, 1, 0, MemoryFormat.KV_2LTD)

    def encode(kv: torch.Tensor) -> Any:
        return serializer.serialize(TensorMemoryObj(kv.view(torch.uint8).flatten(), about, None))

    return encode, lambda encoded: deserializer.deserialize(encoded).tensor


def _metadata(model: str, kv_shape: tuple[int, ...], chunk_size: int) -> Any:
    from lmcache.v1.metadata import LMCacheMetadata

    return LMCacheMetadata(
        model_name=model,
        world_size=1,
        local_world_size=1,
        worker_id=0,
        local_worker_id=0,
        kv_dtype=torch.bfloat16,
        kv_shape=kv_shape,
        chunk_size=chunk_size,
        role="worker",
        engine_id="bench",
    )


class Multiprocess:
    """What vLLM's worker and scheduler do at LMCache's multiprocess server: the worker copies
    between its pages and shared memory.

    Args:
        url: Address of the server.
    """

    def __init__(self, shape: Any, url: str) -> None:
        import zmq
        from lmcache.v1.multiprocess.transfer_context import create_transfer_context
        from lmcache.v1.multiprocess.transport.factory import RequestClientFactory

        self._shape = shape
        self._numbers = itertools.count()
        pages = {
            f"layer.{i}": torch.zeros(2, 1, shape.block_size, shape.num_heads, shape.head_size)
            for i in range(shape.num_layers)
        }
        pages = {name: page.to(torch.bfloat16) for name, page in pages.items()}
        self._client = RequestClientFactory.create(url, context=zmq.Context())
        self._transfer = create_transfer_context(
            pages, instance_id=os.getpid(), req_client=self._client, mode="engine_driven"
        )
        self._transfer.register(
            pages, shape.model, 1, shape.blocks_per_chunk, TIMEOUT_S, layout_hints=HINTS
        )

    def make_room(self) -> None:
        """Empty the server. It evicts once a second; what is stored before is not kept."""
        self._client.clear().result(timeout=TIMEOUT_S)

    def store(self, tokens: torch.Tensor, layers: Any, blocks: list[int]) -> None:
        """Store a prompt."""
        key = self._key(tokens)
        done = self._transfer.submit_store(
            key.request_id, key, layers, [blocks], None, self._shape.blocks_per_chunk
        )
        if not done.result(timeout=TIMEOUT_S):
            raise ValueError("a prompt was not stored")
        self._client.end_session(key.request_id).result(timeout=TIMEOUT_S)

    def lookup(self, tokens: torch.Tensor, search_range: list[str]) -> int:
        """Return how many tokens the server has."""
        key = self._key(tokens)
        found = self._locked(key)
        self._client.free_lookup_locks(key.no_worker_id_version(), 1).result(timeout=TIMEOUT_S)
        self._client.end_session(key.request_id).result(timeout=TIMEOUT_S)
        return found

    def promise(self, tokens: torch.Tensor) -> Any:
        """Look a prompt up as its scheduler does, without which the server does not serve it."""
        key = self._key(tokens)
        self._locked(key)
        return key

    def retrieve(
        self, tokens: torch.Tensor, layers: Any, blocks: list[int], promised: Any
    ) -> torch.Tensor:
        """Load what `promise` has looked up; return a mask of the tokens."""
        done = self._transfer.submit_retrieve(
            promised.request_id, promised, layers, [blocks], None, self._shape.blocks_per_chunk
        )
        is_loaded = bool(done.result(timeout=TIMEOUT_S))
        self._client.end_session(promised.request_id).result(timeout=TIMEOUT_S)
        return torch.full((len(tokens),), is_loaded)

    def _locked(self, key: Any) -> int:
        self._client.lookup(key.no_worker_id_version(), 1).result(timeout=TIMEOUT_S)
        while True:
            done = self._client.query_prefetch_status(key.request_id).result(timeout=TIMEOUT_S)
            if done is not None:
                return int(done) * self._shape.chunk_size
            time.sleep(POLL_S)

    def _key(self, tokens: torch.Tensor) -> Any:
        from lmcache.v1.multiprocess.custom_types import IPCCacheServerKey

        return IPCCacheServerKey(
            model_name=self._shape.model,
            world_size=1,
            worker_id=0,
            token_ids=tuple(tokens.tolist()),
            start=0,
            end=len(tokens),
            request_id=f"{os.getpid()}-{next(self._numbers)}",
            num_kv_readers=1,
        )


def multiprocess(shape: Any, options: dict[str, Any]) -> tuple[Any, Arguments]:
    """Return a client of a multiprocess server, as `engine` does."""
    return Multiprocess(shape, options["url"]), _paged
