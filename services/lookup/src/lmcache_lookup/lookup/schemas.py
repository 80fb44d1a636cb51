"""Bodies of questions."""

from __future__ import annotations

from typing import Final

from lmcache_core.lookup.requests import ChunksRequest, PackedChunksRequest

from lmcache_lookup.formats import Body

CHUNKS: Final = Body(ChunksRequest, PackedChunksRequest)
