"""Tensors as bytes and back: the documented serdes, and the codecs of chunks that leave a process.

Names are resolved on first use: most of them need torch, and a process without torch can import
this package.
"""

from __future__ import annotations

import importlib
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lmcache_core.serde.base import Deserializer, Serializer
    from lmcache_core.serde.cachegen.serializer import CacheGenDeserializer, CacheGenSerializer
    from lmcache_core.serde.debug import DeserializerDebugWrapper, SerializerDebugWrapper
    from lmcache_core.serde.fast_serde import FastDeserializer, FastSerializer
    from lmcache_core.serde.registry import create_codec
    from lmcache_core.serde.safe_serde import SafeDeserializer, SafeSerializer
    from lmcache_core.serde.torch_serde import TorchDeserializer, TorchSerializer

_RESOLVED_LATER = MappingProxyType(
    {
        "CacheGenDeserializer": "cachegen.serializer",
        "CacheGenSerializer": "cachegen.serializer",
        "Deserializer": "base",
        "DeserializerDebugWrapper": "debug",
        "FastDeserializer": "fast_serde",
        "FastSerializer": "fast_serde",
        "SafeDeserializer": "safe_serde",
        "SafeSerializer": "safe_serde",
        "Serializer": "base",
        "SerializerDebugWrapper": "debug",
        "TorchDeserializer": "torch_serde",
        "TorchSerializer": "torch_serde",
        "create_codec": "registry",
    }
)

__all__ = [
    "CacheGenDeserializer",
    "CacheGenSerializer",
    "Deserializer",
    "DeserializerDebugWrapper",
    "FastDeserializer",
    "FastSerializer",
    "SafeDeserializer",
    "SafeSerializer",
    "Serializer",
    "SerializerDebugWrapper",
    "TorchDeserializer",
    "TorchSerializer",
    "create_codec",
]


def __getattr__(name: str) -> Any:
    if name in _RESOLVED_LATER:
        return getattr(importlib.import_module(f"{__name__}.{_RESOLVED_LATER[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
