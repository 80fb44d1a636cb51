"""Which codec a `remote_serde` names."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

from lmcache_core.errors import ConfigError
from lmcache_core.serde.codec import ChunkCodec
from lmcache_core.serde.entropy.processor import settle_processor

RAW = "naive"
CODEC_NAMES = ("cachegen", "cachegen:high", "cachegen:low", "lossless")
"""Codecs that need no torch."""
DOCUMENTED_NAMES = ("torch", "safetensor", "fast")
SERDE_NAMES = (RAW, *DOCUMENTED_NAMES, *CODEC_NAMES)
_PROFILES = MappingProxyType(
    {"cachegen": "standard", "cachegen:high": "high", "cachegen:low": "low", "lossless": None}
)


def create_codec(name: str | None, threads: int = 0) -> ChunkCodec | None:
    """The codec of that name, not opened; None for `naive` and None: payloads stay raw.

    Args:
        name: One of `SERDE_NAMES`.
        threads: How many work on one payload; 0: as many as there are processors.

    Raises:
        ConfigError: There is no such codec.
    """
    if name is None or name == RAW:
        return None
    if name in _PROFILES:
        return _create(name, threads)
    if name in DOCUMENTED_NAMES:
        from lmcache_core.serde.documented_codec import DocumentedCodec

        codec: ChunkCodec = DocumentedCodec(name)
        return codec
    raise ConfigError(f"serde {name!r}: must be one of {', '.join(SERDE_NAMES)}")


def _create(name: str, threads: int) -> ChunkCodec:
    try:
        settle_processor()  # before numba is imported, which the next line does
        from lmcache_core.serde.chunk_codec import CacheGenCodec
        from lmcache_core.serde.profiles import Profile
    except ModuleNotFoundError as exc:
        raise ConfigError(
            f"serde {name!r} needs the package {exc.name!r}: install lmcache-core[codec], or run"
            " the image lmcache-sidecar-codec"
        ) from exc
    level: Any = _PROFILES[name]
    return CacheGenCodec(None if level is None else Profile(level), threads)
