"""Measure the compression, the error and the speed of codecs on this machine."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt
from lmcache_core.keys import CacheEngineKey
from lmcache_core.record import UNSEALED_DIGEST, RecordHeader, TensorSpec
from lmcache_core.serde import create_codec
from lmcache_core.serde.codec import ChunkCodec, GroupError

from lmcache_ctl.codec.kv import Kv
from lmcache_ctl.codec.records import LayerErrors, worst_by_layers
from lmcache_ctl.errors import CtlError
from lmcache_ctl.output import (
    Columns,
    error_text,
    print_table,
    print_text,
    ratio_text,
    size_text,
    speed_text,
)

ROUNDS = 3
"""The fastest of so many counts: on a shared machine the others measure the neighbours."""
BITS = 8

T = TypeVar("T")


class Measurement(msgspec.Struct, frozen=True):
    """What one profile did to some KV.

    Attributes:
        profile: Its name, as `remote_serde` says it.
        num_chunks: Chunks given to the codec.
        num_kept_raw: Chunks kept raw because encoding would not have made them smaller.
        raw_bytes: All payloads before.
        encoded_bytes: All payloads after.
        ratio: How many times smaller.
        bits_per_element: Bits of the payloads for each element, everything counted but records'
            heads.
        errors: What the encoder measured, by group of layers, the worst of all chunks.
        rms_relative: Root of the mean square of decoded minus stored, relative to that of what was
            stored, over all finite values: measured here, on what was decoded. None where values of
            such a dtype are not read here.
        is_equal: Whether every decoded byte is the stored one.
        encode_bytes_per_s: Raw bytes a second.
        decode_bytes_per_s: Raw bytes a second; None where nothing was encoded.
    """

    profile: str
    num_chunks: int
    num_kept_raw: int
    raw_bytes: int
    encoded_bytes: int
    ratio: float
    bits_per_element: float
    errors: list[LayerErrors]
    rms_relative: float | None
    is_equal: bool
    encode_bytes_per_s: float
    decode_bytes_per_s: float | None


class MeasuredKv(msgspec.Struct, frozen=True):
    """What profiles did to the same KV.

    Attributes:
        source: Where the KV is from, for people.
        num_tokens: How many tokens.
        profiles: In the order that was asked for.
    """

    source: str
    num_tokens: int
    profiles: list[Measurement]


def measure_profile(kv: Kv, profile: str, threads: int = 0) -> Measurement:
    """Encode and decode every chunk.

    Args:
        kv: Of at least one token.
        profile: A name that `create_codec` knows, but not `naive`.
        threads: How many work on one chunk; 0: as many as there are processors.

    Raises:
        ConfigError: There is no such codec, or a package that it needs is missing.
        CtlError: A codec without loss has lost something.
    """
    codec = create_codec(profile, threads)
    if codec is None:
        raise CtlError(f"profile {profile!r} encodes nothing, so there is nothing to measure")
    codec.open()
    try:
        tally = _Tally()
        for specs, raw in kv.chunks():
            tally.add(codec, specs, raw)
    finally:
        codec.close()
    if not codec.lossy and not tally.is_equal:
        raise CtlError(
            f"profile {profile!r} is said to lose nothing, but what it decoded differs: do not use"
            " it, and report this"
        )
    return tally.measurement(profile)


class _Tally:
    """Sums over chunks."""

    def __init__(self) -> None:
        self.is_equal = True
        self._num_chunks = self._num_kept_raw = self._num_elements = 0
        self._raw_bytes = self._encoded_bytes = self._decoded_bytes = 0
        self._encode_s = self._decode_s = 0.0
        self._groups: list[GroupError] = []
        self._difference = self._power = 0.0
        self._is_readable = True

    def add(self, codec: ChunkCodec, specs: Sequence[TensorSpec], raw: memoryview) -> None:
        """Encode and decode one chunk, `ROUNDS` times each."""
        elapsed_s, encoded = _fastest(lambda: codec.encode(specs, raw))
        self._encode_s += elapsed_s
        self._num_chunks += 1
        self._num_elements += sum(math.prod(spec.shape) for spec in specs)
        self._raw_bytes += len(raw)
        self._encoded_bytes += len(raw) if encoded is None else len(encoded.payload)
        if encoded is None:
            self._num_kept_raw += 1
            self._add_difference(specs, raw, raw)
            return
        self._groups += encoded.report.groups
        key = CacheEngineKey("measure", "", 1, 0, "0" * 64).canonical()
        how = (encoded.serde, encoded.profile, encoded.lossy, encoded.tensors)
        header, out = RecordHeader(key, *how, UNSEALED_DIGEST), memoryview(bytearray(len(raw)))
        elapsed_s, _ = _fastest(lambda: codec.decode(header, encoded.payload, out))
        self._decode_s += elapsed_s
        self._decoded_bytes += len(raw)
        self._add_difference(specs, raw, out)

    def measurement(self, profile: str) -> Measurement:
        """Return the figures of all chunks."""
        rms = math.sqrt(self._difference / self._power) if self._power else 0.0
        return Measurement(
            profile=profile,
            num_chunks=self._num_chunks,
            num_kept_raw=self._num_kept_raw,
            raw_bytes=self._raw_bytes,
            encoded_bytes=self._encoded_bytes,
            ratio=self._raw_bytes / self._encoded_bytes,
            bits_per_element=BITS * self._encoded_bytes / self._num_elements,
            errors=worst_by_layers(self._groups),
            rms_relative=0.0 if self.is_equal else rms if self._is_readable else None,
            is_equal=self.is_equal,
            encode_bytes_per_s=self._raw_bytes / self._encode_s,
            decode_bytes_per_s=(
                self._decoded_bytes / self._decode_s if self._decoded_bytes else None
            ),
        )

    def _add_difference(
        self, specs: Sequence[TensorSpec], raw: memoryview, decoded: memoryview
    ) -> None:
        self.is_equal = self.is_equal and raw == decoded
        for spec in specs:
            part = slice(spec.offset, spec.offset + spec.length)
            stored, got = _as_float(raw[part], spec.dtype), _as_float(decoded[part], spec.dtype)
            if stored is None or got is None:
                self._is_readable = False
                continue
            finite = np.isfinite(stored)
            apart = np.subtract(got, stored, where=finite, out=np.zeros_like(stored))
            self._power += float(np.square(stored, where=finite, out=np.zeros_like(stored)).sum())
            self._difference += float(np.square(apart).sum())


def _fastest(work: Callable[[], T]) -> tuple[float, T]:
    """Return seconds of the fastest of `ROUNDS`, and what the last one gave."""
    times = []
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        result = work()
        times.append(time.perf_counter() - begin)
    return min(times), result


def _as_float(data: memoryview, dtype: str) -> npt.NDArray[np.float64] | None:
    """Return values as float64; None for a dtype that numpy does not have."""
    known = {"bfloat16": "<u2", "float32": "<f4", "float16": "<f2", "uint8": "u1"}
    if dtype not in known:
        return None
    values: npt.NDArray[Any] = np.frombuffer(data, known[dtype])
    if dtype == "bfloat16":
        values = (values.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return values.astype(np.float64)


def print_measurements(measured: MeasuredKv) -> None:
    """Print a table with a line for each profile."""
    rows = []
    for one in measured.profiles:
        errors = ("0", "0")
        if not one.is_equal:
            largest = max(group.max_relative for group in one.errors)
            errors = error_text(largest), error_text(one.rms_relative)
        speeds = speed_text(one.encode_bytes_per_s), speed_text(one.decode_bytes_per_s)
        size = f"{one.bits_per_element:.2f}", ratio_text(one.ratio)
        rows.append((one.profile, *size, *errors, "yes" if one.is_equal else "no", *speeds))
    raw = size_text(measured.profiles[0].raw_bytes)
    titles = ["profile", "bits", "ratio", "max error", "rms error", "equal", "enc GB/s", "dec GB/s"]
    print_table(f"{measured.source}: {measured.num_tokens} tokens, {raw}", Columns(titles), rows)
    print_text(
        "bits: of an element, everything counted. max: largest error, relative to the largest value"
        " of its token or channel, as the encoder says; rms: of all values, measured on what was"
        " decoded. equal: bit for bit. GB: 10^9 raw bytes, best of 3."
    )
