"""What an encoder measured, in a record and out of it again."""

from __future__ import annotations

import msgspec
import pytest
from lmcache_core.record import REPORT_EXTENSION, Extension, RecordHeader, encode_head
from lmcache_core.serde.codec import (
    MAX_REPORT_BYTES,
    EncodingReport,
    GroupError,
    encoding_report,
    report_extension,
)

from tests.suites.chunks import make_chunk

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


def test_another_extension_is_no_report() -> None:
    assert encoding_report(header_with(Extension(2, False, msgspec.msgpack.encode(REPORT)))) is None


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
