"""What an encoder measured of its own work, as an extension of the record. No torch."""

from __future__ import annotations

import msgspec

from lmcache_core.record import REPORT_EXTENSION, Extension, RecordHeader
from lmcache_core.serde.codec import EncodingReport

MAX_REPORT_BYTES = 16 << 10
_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(EncodingReport)


def report_extension(report: EncodingReport) -> Extension | None:
    """The extension that carries a report; None for one that is longer than `MAX_REPORT_BYTES`,
    since a record must not grow by it.
    """
    data = _ENCODER.encode(report)
    return Extension(REPORT_EXTENSION, False, data) if len(data) <= MAX_REPORT_BYTES else None


def encoding_report(header: RecordHeader) -> EncodingReport | None:
    """The report that a record carries; None when there is none that can be read here: it is for
    people, and never decides anything.
    """
    for extension in header.extensions:
        if extension.id == REPORT_EXTENSION and len(extension.data) <= MAX_REPORT_BYTES:
            try:
                return _DECODER.decode(extension.data)
            except (msgspec.DecodeError, UnicodeDecodeError):
                return None
    return None
