"""The header of what an encoded record decodes to."""

from __future__ import annotations

import pytest
from lmcache_core.errors import RecordError
from lmcache_core.record import (
    MAX_PAYLOAD_BYTES,
    REPORT_EXTENSION,
    UNSEALED_DIGEST,
    Extension,
    RecordHeader,
    TensorSpec,
    decoded_bytes,
    decoded_header,
)
from lmcache_core.testing.chunks import make_key

KEY = make_key("a").key.canonical()
SPECS = (
    TensorSpec("full", "bfloat16", (2, 3, 5), 0, 7),
    TensorSpec("", "uint8", (0,), 7, 0),
    TensorSpec("window", "float32", (4,), 7, 100),
)
KEPT, REPORT = Extension(9, False, b"kept"), Extension(REPORT_EXTENSION, False, b"measured")


def header_of(*specs: TensorSpec) -> RecordHeader:
    return RecordHeader(
        KEY, "cachegen", "standard@0123", True, specs, bytes(range(16)), (KEPT, REPORT)
    )


def test_tensors_lie_one_behind_the_other() -> None:
    header = decoded_header(header_of(*SPECS))
    assert [(spec.group, spec.dtype, spec.shape) for spec in header.tensors] == [
        (s.group, s.dtype, s.shape) for s in SPECS
    ]
    assert [(spec.offset, spec.length) for spec in header.tensors] == [(0, 60), (60, 0), (60, 16)]
    assert decoded_bytes(header_of(*SPECS)) == 76
    header.check(76)


def test_identity_and_loss_are_kept_and_the_measurement_is_not() -> None:
    header = decoded_header(header_of(*SPECS))
    assert (header.key, header.serde, header.profile, header.lossy) == (
        KEY,
        "naive",
        "standard@0123",
        True,
    )
    assert (header.digest, header.extensions) == (UNSEALED_DIGEST, (KEPT,))


def test_more_than_a_payload_may_have_is_refused() -> None:
    half = TensorSpec("", "uint8", (MAX_PAYLOAD_BYTES // 2,), 0, 1)
    assert decoded_bytes(header_of(half, half)) == MAX_PAYLOAD_BYTES
    with pytest.raises(RecordError, match="bounds"):
        decoded_bytes(header_of(half, half, TensorSpec("", "bool", (1,), 1, 0)))
