"""Every codec of chunks keeps the contract."""

from __future__ import annotations

import pytest
from lmcache_core.serde import create_codec
from lmcache_core.serde.codec import ChunkCodec
from lmcache_core.testing.codec_suite import ChunkCodecSuite


class NamedSuite(ChunkCodecSuite):
    name = ""

    def make_codec(self, threads: int = 0) -> ChunkCodec:
        codec = create_codec(self.name, threads)
        assert codec is not None
        return codec


class TestLossless(NamedSuite):
    name = "lossless"


class TestCacheGen(NamedSuite):
    name = "cachegen"
    lossless = False


class OwnProfileSuite(NamedSuite):
    lossless = False

    def scale_is_of_plane(self, tokens: int) -> bool:
        return tokens >= 64


class TestCacheGenHigh(OwnProfileSuite):
    name = "cachegen:high"


class TestCacheGenLow(OwnProfileSuite):
    name = "cachegen:low"


class DocumentedSuite(NamedSuite):
    shrinks = False


class TestTorch(DocumentedSuite):
    name = "torch"


class TestSafetensor(DocumentedSuite):
    name = "safetensor"


class TestFast(DocumentedSuite):
    name = "fast"


@pytest.mark.parametrize("name", ["naive", None])
def test_raw_is_no_codec(name: str | None) -> None:
    assert create_codec(name) is None
