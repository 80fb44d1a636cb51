"""Every codec of chunks keeps the contract."""

from __future__ import annotations

import msgspec
import pytest
from lmcache_core.errors import SerdeError
from lmcache_core.serde import create_codec
from lmcache_core.serde.codec import ChunkCodec

from tests.suites.codec_payloads import header_of, kv_payload, specs_of
from tests.suites.codec_suite import ChunkCodecSuite


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


@pytest.mark.parametrize("serde", ["cachegen", "lossless"])
@pytest.mark.parametrize("name", ["cachegen", "cachegen:high", "lossless"])
def test_a_record_that_hides_its_loss_is_refused(name: str, serde: str) -> None:
    """Doors go by what the record says: what says nothing of a loss must not decode to one."""
    writer, reader = create_codec("cachegen:high"), create_codec(name)
    assert writer is not None
    assert reader is not None
    writer.open()
    reader.open()
    try:
        specs = specs_of(("bfloat16", (2, 2, 65, 64)))
        found = writer.encode(specs, memoryview(kv_payload(specs, 0)))
        assert found is not None
        assert found.lossy
        header = msgspec.structs.replace(header_of(found), serde=serde, lossy=False)
        assert reader.decodes(header)
        with pytest.raises(SerdeError, match="without loss"):
            reader.decode(header, found.payload, memoryview(bytearray(found.report.raw_bytes)))
    finally:
        writer.close()
        reader.close()
