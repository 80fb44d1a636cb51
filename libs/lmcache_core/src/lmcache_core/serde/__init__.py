"""Tensors as bytes and back: the documented serdes, and the codecs of chunks that leave a process.

Names are resolved on first use: most of them need torch, and a process without torch can import
this package.
"""

from __future__ import annotations

import importlib
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lmcache_core.documented.cachegen.serializer import CacheGenDeserializer, CacheGenSerializer
    from lmcache_core.documented.debug_serde import DeserializerDebugWrapper, SerializerDebugWrapper
    from lmcache_core.serde.base import Deserializer, Serializer
    from lmcache_core.serde.fast_serde import FastDeserializer, FastSerializer
    from lmcache_core.serde.registry import create_codec
    from lmcache_core.serde.safe_serde import SafeDeserializer, SafeSerializer
    from lmcache_core.serde.torch_serde import TorchDeserializer, TorchSerializer

_RESOLVED_LATER = MappingProxyType(
    {
        "CacheGenDeserializer": "documented.cachegen.serializer",
        "CacheGenSerializer": "documented.cachegen.serializer",
        "Deserializer": "serde.base",
        "DeserializerDebugWrapper": "documented.debug_serde",
        "FastDeserializer": "serde.fast_serde",
        "FastSerializer": "serde.fast_serde",
        "SafeDeserializer": "serde.safe_serde",
        "SafeSerializer": "serde.safe_serde",
        "Serializer": "serde.base",
        "SerializerDebugWrapper": "documented.debug_serde",
        "TorchDeserializer": "serde.torch_serde",
        "TorchSerializer": "serde.torch_serde",
        "create_codec": "serde.registry",
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
        return getattr(importlib.import_module(f"lmcache_core.{_RESOLVED_LATER[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
