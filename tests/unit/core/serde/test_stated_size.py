"""What an encoded record states is compared with what it has."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest
from lmcache_core.errors import SerdeError
from lmcache_core.memory.dtypes import DTYPE_ITEMSIZE
from lmcache_core.serde import CODEC_NAMES, DOCUMENTED_NAMES, create_codec, stated_size, tables
from lmcache_core.serde.codec import ChunkCodec
from lmcache_core.serde.lossless import RUN_ELEMENTS
from lmcache_core.serde.stated_size import check_stated_size

from tests.suites.codec_payloads import CASES, header_of, kv_payload, specs_of


@pytest.fixture(params=[*CODEC_NAMES, *DOCUMENTED_NAMES])
def codec(request: pytest.FixtureRequest) -> Iterator[ChunkCodec]:
    made = create_codec(request.param)
    assert made is not None
    made.open()
    yield made
    made.close()


@pytest.mark.parametrize("case", CASES)
def test_encoded_records_pass(codec: ChunkCodec, case: str) -> None:
    specs = specs_of(*CASES[case])
    raw = kv_payload(specs, 0)
    for payload in (raw, bytes(len(raw))):
        found = codec.encode(specs, memoryview(payload))
        if found is not None:
            check_stated_size(header_of(found), found.payload)


def test_a_shape_larger_than_what_is_encoded_is_refused(codec: ChunkCodec) -> None:
    specs = specs_of(("bfloat16", (2, 4, 64, 64)))
    found = codec.encode(specs, memoryview(kv_payload(specs, 0)))
    assert found is not None
    (spec,) = found.tensors
    for shape in ((2, 4, 64, 128), (2, 400, 64, 64), (1 << 20,)):
        header = msgspec.structs.replace(
            header_of(found), tensors=(msgspec.structs.replace(spec, shape=shape),)
        )
        with pytest.raises(SerdeError):
            check_stated_size(header, found.payload)


def test_smallest_sizes_are_those_of_the_codec() -> None:
    assert stated_size.RUN_ELEMENTS == RUN_ELEMENTS
    words = tables.LANES * tables.STATE_WORDS
    assert 4 + 2 * words == stated_size.STREAM_BYTES
    assert DTYPE_ITEMSIZE["bfloat16"] == 2
