"""Golden blobs: encoding gives these bytes, decoding them gives these values, whatever machine,
and whatever was changed since.
"""

from __future__ import annotations

import base64
import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from lmcache_core.record import RecordHeader, TensorSpec, decoded_bytes

from tests.contract.golden import make_codec_vectors
from tests.contract.golden.make_codec_vectors import TENSORS, cases, opened, raw_payload, raw_specs

FILE = Path(make_codec_vectors.__file__).with_name("codec.json")
GOLDEN: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
named = pytest.mark.parametrize(
    "case", GOLDEN["payloads"], ids=lambda case: f"{case['codec']}: {case['tensors']}"
)


def test_every_profile_and_payload_is_there() -> None:
    assert [(case["codec"], case["tensors"]) for case in GOLDEN["payloads"]] == cases()
    assert {bool(case["lossy"]) for case in GOLDEN["payloads"]} == {True, False}
    assert FILE.stat().st_size < 30_000


@named
def test_encoding_gives_these_bytes(case: dict[str, Any]) -> None:
    raw = raw_payload(TENSORS[case["tensors"]])
    assert hashlib.sha256(raw).hexdigest() == case["raw_sha256"], (
        "the vector's own raw bytes are others"
    )
    assert make_codec_vectors.vector(case["codec"], case["tensors"]) == case


@named
@pytest.mark.parametrize("reader", ["cachegen:low", "lossless"])
def test_any_codec_of_the_family_reads_them(case: dict[str, Any], reader: str) -> None:
    codec = opened(reader)
    payload = base64.b64decode(case["payload"])
    places = [map(int, place.split("+")) for place in case["places"]]
    raw_tensors = raw_specs(case["tensors"])
    specs = tuple(
        TensorSpec(spec.group, spec.dtype, spec.shape, *place)
        for spec, place in zip(raw_tensors, places, strict=True)
    )
    header = RecordHeader(b"", case["serde"], case["profile"], case["lossy"], specs, b"")
    assert codec.decodes(header)
    out = bytearray(decoded_bytes(header))
    codec.decode(header, memoryview(payload), memoryview(out))
    codec.close()
    assert hashlib.sha256(out).hexdigest() == case["decoded_sha256"]
    assert (case["decoded_sha256"] != case["raw_sha256"]) == case["lossy"]


def test_other_tables_are_not_taken_for_these() -> None:
    codec = opened("cachegen")
    tables = GOLDEN["tables"]["id"]
    other = tables[:-1] + ("0" if tables[-1] != "0" else "1")
    for profile, is_known in (
        (f"standard@{tables}", True),
        (f"any@{tables}", True),
        (f"standard@{other}", False),
        ("standard", False),
        ("", False),
    ):
        assert codec.decodes(RecordHeader(b"", "cachegen", profile, True, (), b"")) == is_known
    for serde in ("naive", "torch", "cachegen:high", ""):
        assert not codec.decodes(RecordHeader(b"", serde, f"standard@{tables}", True, (), b""))
    codec.close()
