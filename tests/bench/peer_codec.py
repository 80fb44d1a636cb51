"""CacheGen of ours or LMCache's on one chunk, for `peer_child`: processor time of one thread."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

MAX_ERROR = 0.15
"""Relative; the documented quantization alone gives 0.09 on KV of the demo's model."""
Coder = tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]


def ours(model: str, kv: torch.Tensor) -> Coder:
    """Return our encoder and decoder."""
    from lmcache_core.serde import create_codec

    from tests.bench.codec_schemes import CodecScheme

    codec = create_codec("cachegen", 1)
    assert codec is not None
    codec.open()  # as long as the process lives
    scheme, out = CodecScheme(codec), torch.empty_like(kv)

    def decode(encoded: Any) -> torch.Tensor:
        scheme.decode(scheme.header(encoded), encoded, out)
        return out

    return scheme.encode, decode


def lmcache(model: str, kv: torch.Tensor) -> Coder:
    """Return LMCache's. It asks the model's configuration for the number of layers."""
    from lmcache.v1.config import LMCacheEngineConfig
    from lmcache.v1.memory_management import MemoryFormat, MemoryObjMetadata, TensorMemoryObj
    from lmcache.v1.metadata import LMCacheMetadata
    from lmcache.v1.storage_backend.naive_serde import CreateSerde

    _, num_layers, num_tokens, hidden = kv.shape
    metadata = LMCacheMetadata(
        model_name=model,
        world_size=1,
        local_world_size=1,
        worker_id=0,
        local_worker_id=0,
        kv_dtype=kv.dtype,
        kv_shape=(num_layers, 2, num_tokens, 1, hidden),
        chunk_size=num_tokens,
        role="worker",
        engine_id="bench",
    )
    config = LMCacheEngineConfig.from_defaults(chunk_size=num_tokens)
    serializer, deserializer = CreateSerde("cachegen", metadata, config)
    about = MemoryObjMetadata(kv.shape, kv.dtype, 0, kv.nbytes, 1, 0, MemoryFormat.KV_2LTD)

    def encode(kv: torch.Tensor) -> Any:
        return serializer.serialize(TensorMemoryObj(kv.view(torch.uint8).flatten(), about, None))

    def decode(encoded: Any) -> torch.Tensor:
        loaded: torch.Tensor = deserializer.deserialize(encoded).tensor
        return loaded

    return encode, decode


class Codec:
    """Obeys as `peer_child.Driver` does.

    Args:
        kind: `ours-codec` or `lmcache-codec`.
        model: Directory of the chunk's model.
        chunk: File of the chunk, `[2, layers, tokens, hidden]` bf16, as torch saves it.
        calls: Calls a round.
    """

    def __init__(self, kind: str, model: str, chunk: str, calls: int) -> None:
        torch.set_num_threads(1)
        self._kv = torch.load(chunk)
        make = ours if kind == "ours-codec" else lmcache
        self._encode, self._decode = make(model, self._kv)
        self._calls = calls
        self._encoded = self._encode(self._kv)

    def encode(self, turn: int) -> dict[str, float]:
        """Encode; return the processor seconds of a call."""
        began = time.process_time()
        for _ in range(self._calls):
            self._encoded = self._encode(self._kv)
        return {"seconds": (time.process_time() - began) / self._calls}

    def decode(self, turn: int) -> dict[str, float]:
        """Decode; return the processor seconds of a call. The values must be near those encoded."""
        began = time.process_time()
        for _ in range(self._calls):
            decoded = self._decode(self._encoded)
        seconds = (time.process_time() - began) / self._calls
        error = float((decoded.float() - self._kv.float()).norm() / self._kv.float().norm())
        if not error < MAX_ERROR:
            raise ValueError(f"decoded values are off by {error:.3f}")
        return {"seconds": seconds}
