"""Writes `codec.json` next to itself, once: blobs of every profile, what they decode to, and the
ids of the tables. Like the other golden vectors, it is never written again to make a test pass:
another result is another version of the format.

`python -m tests.contract.golden.make_codec_vectors [--force]`
"""

from __future__ import annotations

import base64
import hashlib
import json
import sys
from pathlib import Path
from typing import Any

from lmcache_core.memory.dtypes import DTYPE_ITEMSIZE, num_bytes
from lmcache_core.record import RecordHeader, TensorSpec, decoded_bytes
from lmcache_core.serde import create_codec
from lmcache_core.serde.codec import ChunkCodec
from lmcache_core.serde.tables import bell_curves

DIRECTORY = Path(__file__).parent
NAMES = ("cachegen", "cachegen:high", "cachegen:low", "lossless")
TENSORS: dict[str, list[tuple[str, tuple[int, ...]]]] = {
    "keys and values": [("bfloat16", (2, 2, 65, 3))],
    "half precision": [("float16", (2, 1, 70, 4))],
    "single precision": [("float32", (1, 1, 66, 3))],
    "a few tokens": [("bfloat16", (2, 1, 3, 130))],
    "groups and what is no KV": [
        ("bfloat16", (2, 1, 64, 4)),
        ("uint8", (400,)),
        ("float8_e4m3fn", (2, 1, 8, 25)),
        ("float32", ()),
    ],
}
_EXPONENT_AT = {"bfloat16": (7, 127), "float16": (10, 15), "float32": (23, 127)}


def cases() -> list[tuple[str, str]]:
    """Codecs and what they encode; a few tokens are the same in all of the lossy ones."""
    return [
        (name, what)
        for name in NAMES
        for what in TENSORS
        if what != "a few tokens" or ":" not in name
    ]


def raw_payload(tensors: list[tuple[str, tuple[int, ...]]]) -> bytes:
    """A payload of whole numbers alone: bits of signs, small exponents and mantissas from
    SHA-256, no floating-point arithmetic.
    """
    return b"".join(_raw_tensor(dtype, shape, f"{dtype} {list(shape)}") for dtype, shape in tensors)


def vectors() -> dict[str, Any]:
    """What the file holds, computed again."""
    tables = bell_curves()
    frequencies = {
        levels: hashlib.sha256(tables.of(levels).frequencies.astype("<u2").tobytes()).hexdigest()
        for levels in tables.levels
    }
    blobs = [vector(name, what) for name, what in cases()]
    return {
        "tables": {"id": tables.id, "levels": list(tables.levels), "frequencies": frequencies},
        "payloads": blobs,
    }


def vector(name: str, what: str) -> dict[str, Any]:
    """One encoded payload and the digests of its raw and its decoded bytes."""
    codec = opened(name)
    try:
        raw = raw_payload(TENSORS[what])
        found = codec.encode(raw_specs(what), memoryview(raw))
        assert found is not None, f"{name} does not make {what} smaller"
        header = RecordHeader(b"", found.serde, found.profile, found.lossy, found.tensors, b"")
        out = bytearray(decoded_bytes(header))
        codec.decode(header, found.payload, memoryview(out))
        return {
            "codec": name,
            "tensors": what,
            "raw_sha256": hashlib.sha256(raw).hexdigest(),
            "serde": found.serde,
            "profile": found.profile,
            "lossy": found.lossy,
            "places": [f"{spec.offset}+{spec.length}" for spec in found.tensors],
            "groups": [
                f"{group.name}: {group.max_relative.hex()} {group.rms_relative:.9e}"
                for group in found.report.groups
            ],
            "payload": base64.b64encode(found.payload).decode(),
            "decoded_sha256": hashlib.sha256(out).hexdigest(),
        }
    finally:
        codec.close()


def raw_specs(what: str) -> tuple[TensorSpec, ...]:
    """The tensors of a raw payload, one after the other."""
    specs, at = [], 0
    for i, (dtype, shape) in enumerate(TENSORS[what]):
        length = num_bytes(shape, dtype)
        specs.append(TensorSpec(f"group {i}" if i else "", dtype, shape, at, length))
        at += length
    return tuple(specs)


def opened(name: str) -> ChunkCodec:
    """A codec, ready."""
    codec = create_codec(name, threads=1)
    assert codec is not None
    codec.open()
    return codec


def _raw_tensor(dtype: str, shape: tuple[int, ...], seed: str) -> bytes:
    size = num_bytes(shape, dtype)
    itemsize = DTYPE_ITEMSIZE[dtype]
    noise = b"".join(
        hashlib.sha256(f"{seed} {i}".encode()).digest() for i in range(size // 32 + 1)
    )[:size]
    if dtype not in _EXPONENT_AT:
        return bytes(byte % 12 for byte in noise)
    exponent_at, bias = _EXPONENT_AT[dtype]
    words = []
    for i in range(0, size, itemsize):
        word = int.from_bytes(noise[i : i + itemsize], "little")
        sign, small, mantissa = (
            word >> (8 * itemsize - 1),
            word >> exponent_at & 3,
            word & (1 << exponent_at - 3) - 1,
        )
        words.append(
            (sign << (8 * itemsize - 1) | (bias - small) << exponent_at | mantissa).to_bytes(
                itemsize, "little"
            )
        )
    return b"".join(words)


def main() -> int:
    """Write the file; with one that exists and no `--force`, leave it."""
    path = DIRECTORY / "codec.json"
    if path.exists() and "--force" not in sys.argv:
        print(f"{path} exists: golden vectors are not regenerated", file=sys.stderr)
        return 1
    path.write_text(json.dumps(vectors(), indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
