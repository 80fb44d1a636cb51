"""Converts tensors to bytes and back: the documented serdes, and the codecs of chunks that leave a
process.

Names are resolved on first use: most of them need torch, and a process without torch can import
this package.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from lmcache_core.errors import ConfigError
from lmcache_core.extras import install_line, resolve
from lmcache_core.serde.codec import ChunkCodec

if TYPE_CHECKING:
    from lmcache_core.documented.cachegen.serializer import CacheGenDeserializer, CacheGenSerializer
    from lmcache_core.documented.serdes import (
        Deserializer,
        DeserializerDebugWrapper,
        FastDeserializer,
        FastSerializer,
        SafeDeserializer,
        SafeSerializer,
        Serializer,
        SerializerDebugWrapper,
        TorchDeserializer,
        TorchSerializer,
    )

RAW = "naive"
CODEC_NAMES = ("cachegen", "cachegen:high", "cachegen:low", "lossless")
"""Codecs that do not need torch."""
DOCUMENTED_NAMES = ("torch", "safetensor", "fast")
SERDE_NAMES = (RAW, *DOCUMENTED_NAMES, *CODEC_NAMES)
_PROFILES = MappingProxyType(
    {"cachegen": "standard", "cachegen:high": "high", "cachegen:low": "low", "lossless": None}
)
_RESOLVED_LATER = MappingProxyType(
    {
        "CacheGenDeserializer": "documented.cachegen.serializer",
        "CacheGenSerializer": "documented.cachegen.serializer",
        "Deserializer": "documented.serdes",
        "DeserializerDebugWrapper": "documented.serdes",
        "DocumentedCodec": "documented.serdes",
        "FastDeserializer": "documented.serdes",
        "FastSerializer": "documented.serdes",
        "SafeDeserializer": "documented.serdes",
        "SafeSerializer": "documented.serdes",
        "Serializer": "documented.serdes",
        "SerializerDebugWrapper": "documented.serdes",
        "TorchDeserializer": "documented.serdes",
        "TorchSerializer": "documented.serdes",
    }
)

__all__ = [
    "CODEC_NAMES",
    "DOCUMENTED_NAMES",
    "SERDE_NAMES",
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


def create_codec(name: str | None, threads: int = 0) -> ChunkCodec | None:
    """Return the codec with that name, not opened; None for `naive` and None: payloads stay raw.

    Args:
        name: One of `SERDE_NAMES`.
        threads: Threads that work on one payload; 0: one for each processor.

    Raises:
        ConfigError: There is no such codec, or it needs a package that is missing.
    """
    if name is None or name == RAW:
        return None
    if name in DOCUMENTED_NAMES:
        try:
            codec: ChunkCodec = resolve(__name__, _RESOLVED_LATER, "DocumentedCodec")(name)
        except ModuleNotFoundError as exc:
            raise ConfigError(str(exc)) from exc
        return codec
    if name not in _PROFILES:
        raise ConfigError(f"serde {name!r}: must be one of {', '.join(SERDE_NAMES)}")
    try:
        from lmcache_core.serde.machine_code import settle_processor

        settle_processor()  # before the next line imports numba
        from lmcache_core.serde.chunk_codec import CacheGenCodec, Profile
    except ModuleNotFoundError as exc:
        raise ConfigError(
            f"this serde needs the package {exc.name!r}: {install_line('codec')}, or run the image"
            " lmcache-sidecar-codec"
        ) from exc
    level: Any = _PROFILES[name]
    return CacheGenCodec(None if level is None else Profile(level), threads)


def __getattr__(name: str) -> Any:
    return resolve(__name__, _RESOLVED_LATER, name)
