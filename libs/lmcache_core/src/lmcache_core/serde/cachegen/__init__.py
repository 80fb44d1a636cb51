"""The documented CacheGen surface: quantise KV, code it in one stream for each layer and channel,
and back.

Names are resolved on first use: most of them need torch, and coding needs numba (extra `codec`); a
process without either can import this package and its configuration.
"""

from __future__ import annotations

import importlib
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lmcache_core.serde.cachegen.config import CacheGenConfig, QuantizationSpec
    from lmcache_core.serde.cachegen.encoder_impl import CacheGenEncoderImpl
    from lmcache_core.serde.cachegen.outputs import (
        CacheGenEncoderOutput,
        CacheGenGPUBytestream,
        CacheGenGPUEncoderOutput,
    )
    from lmcache_core.serde.cachegen.quantization import (
        concat_max,
        do_dequantize,
        quant,
        torch_quant,
        torch_quant_vectorized,
    )
    from lmcache_core.serde.cachegen.streams import (
        collect_bytes,
        decode_chunk,
        decode_function_gpu,
        encode_function,
        encode_ntokens,
        recombine_bytes,
    )

_RESOLVED_LATER = MappingProxyType(
    {
        "CacheGenConfig": "config",
        "CacheGenEncoderImpl": "encoder_impl",
        "CacheGenEncoderOutput": "outputs",
        "CacheGenGPUBytestream": "outputs",
        "CacheGenGPUEncoderOutput": "outputs",
        "QuantizationSpec": "config",
        "collect_bytes": "streams",
        "concat_max": "quantization",
        "decode_chunk": "streams",
        "decode_function_gpu": "streams",
        "do_dequantize": "quantization",
        "encode_function": "streams",
        "encode_ntokens": "streams",
        "quant": "quantization",
        "recombine_bytes": "streams",
        "torch_quant": "quantization",
        "torch_quant_vectorized": "quantization",
    }
)

__all__ = [
    "CacheGenConfig",
    "CacheGenEncoderImpl",
    "CacheGenEncoderOutput",
    "CacheGenGPUBytestream",
    "CacheGenGPUEncoderOutput",
    "QuantizationSpec",
    "collect_bytes",
    "concat_max",
    "decode_chunk",
    "decode_function_gpu",
    "do_dequantize",
    "encode_function",
    "encode_ntokens",
    "quant",
    "recombine_bytes",
    "torch_quant",
    "torch_quant_vectorized",
]


def __getattr__(name: str) -> Any:
    if name in _RESOLVED_LATER:
        return getattr(importlib.import_module(f"{__name__}.{_RESOLVED_LATER[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
