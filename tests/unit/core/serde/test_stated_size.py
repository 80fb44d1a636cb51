"""What an encoded record states: sizes that are compared with what it has, and what its encoder
measured.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest
from lmcache_core.errors import SerdeError
from lmcache_core.memory.dtypes import DTYPE_ITEMSIZE
from lmcache_core.record import REPORT_EXTENSION, Extension, RecordHeader, encode_head
from lmcache_core.serde import CODEC_NAMES, DOCUMENTED_NAMES, create_codec, stated_size, tables
from lmcache_core.serde.codec import (
    MAX_REPORT_BYTES,
    ChunkCodec,
    EncodingReport,
    GroupError,
    encoding_report,
    report_extension,
)
from lmcache_core.serde.lossless import RUN_ELEMENTS
from lmcache_core.serde.stated_size import check_stated_size

from tests.suites.chunks import make_chunk
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


REPORT = EncodingReport(
    3.5, 1000, 440, (GroupError("keys 0-9", 0.04, 0.01), GroupError("values 0-1", 0.05, 0.02))
)


def header_with(*extensions: Extension) -> RecordHeader:
    return msgspec.structs.replace(make_chunk("a").header, extensions=extensions)


def test_a_report_comes_back_from_a_record() -> None:
    extension = report_extension(REPORT)
    assert extension is not None
    assert (extension.id, extension.must_understand) == (REPORT_EXTENSION, False)
    header = header_with(Extension(7, False, b"other"), extension)
    assert encoding_report(header) == REPORT
    encode_head(header, make_chunk("a").memory.get_size())


@pytest.mark.parametrize(
    "data",
    [
        b"",
        msgspec.msgpack.encode([1.0, 2, 3, [["a", "b", 1]]]),
        msgspec.msgpack.encode([1.0, 2, 3, [["name", 1.0, 1.0]]]).replace(
            b"name", b"\xff\xfe\xfd\xfc"
        ),
        b"\x94" + b"\x91" * 16_000,
    ],
    ids=["nothing", "other types", "not UTF-8", "nested deeply"],
)
def test_a_damaged_report_is_none(data: bytes) -> None:
    assert encoding_report(header_with(Extension(REPORT_EXTENSION, False, data))) is None


def test_the_length_is_bounded_for_writer_and_reader() -> None:
    long = EncodingReport(
        1.0, 1, 1, tuple(GroupError("x" * 100, 1.0, 1.0) for _ in range(MAX_REPORT_BYTES // 100))
    )
    assert report_extension(long) is None
    assert (
        encoding_report(
            header_with(Extension(REPORT_EXTENSION, False, msgspec.msgpack.encode(long)))
        )
        is None
    )


def test_smallest_sizes_are_those_of_the_codec() -> None:
    assert stated_size.RUN_ELEMENTS == RUN_ELEMENTS
    words = tables.LANES * tables.STATE_WORDS
    assert 4 + 2 * words == stated_size.STREAM_BYTES
    assert DTYPE_ITEMSIZE["bfloat16"] == 2
