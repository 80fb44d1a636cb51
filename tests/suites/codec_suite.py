"""What every codec of chunks must do. A test module subclasses `ChunkCodecSuite` and gives it
`make_codec`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from lmcache_core.errors import SerdeError
from lmcache_core.record import TensorSpec, decoded_bytes, encode_head
from lmcache_core.serde.codec import ChunkCodec, EncodedPayload

from tests.suites.codec_payloads import (
    CASES,
    GUARD,
    HOSTILE_BITS,
    KV_DTYPES,
    LARGEST_VALUES,
    bits_of_values,
    check_reported_errors,
    cut_to,
    decode_between_guards,
    header_of,
    is_large_kv,
    kv_payload,
    noise_payload,
    resized,
    specs_of,
    values_of,
)

NUM_CALLERS = 8


class ChunkCodecSuite(ABC):
    """The contract of `ChunkCodec`.

    Attributes:
        lossless: Whether KV comes back bit for bit.
        shrinks: Whether what is encoded is smaller than before, or else None; if not, it may be a
            little longer.
    """

    lossless = True
    shrinks = True

    @abstractmethod
    def make_codec(self, threads: int = 0) -> ChunkCodec:
        """The codec under test, not opened, with so many threads where it has any of its own."""

    def scale_is_of_plane(self, tokens: int) -> bool:
        """Whether errors of that many tokens are told relative to the largest value of a whole
        layer, not of each token.
        """
        return False

    @pytest.fixture
    def codec(self) -> Iterator[ChunkCodec]:
        """One that is open."""
        made = self.make_codec()
        made.open()
        yield made
        made.close()

    def encoded(
        self, codec: ChunkCodec, specs: tuple[TensorSpec, ...], payload: bytes
    ) -> EncodedPayload:
        """What becomes of KV, which every codec makes something of."""
        found = codec.encode(specs, memoryview(payload))
        assert found is not None
        return found

    def decoded(self, codec: ChunkCodec, found: EncodedPayload) -> bytes:
        """The raw payload, decoded between guards."""
        return decode_between_guards(codec, header_of(found), found.payload)

    @pytest.mark.parametrize("name", CASES)
    def test_what_was_encoded_comes_back_and_is_described(
        self, codec: ChunkCodec, name: str
    ) -> None:
        specs = specs_of(*CASES[name])
        payload = kv_payload(specs, len(name))
        found = codec.encode(specs, memoryview(payload))
        if found is None:
            assert self.shrinks
            assert not any(is_large_kv(case) for case in CASES[name]), "KV was not made smaller"
            return
        self.check_description(codec, specs, payload, found)
        raw = self.decoded(codec, found)
        if self.lossless or not found.lossy:
            assert raw == payload
            assert not found.lossy
            assert found.report.groups == ()
        else:
            check_reported_errors(specs, (payload, raw), found, self.scale_is_of_plane)

    def check_description(
        self,
        codec: ChunkCodec,
        specs: tuple[TensorSpec, ...],
        payload: bytes,
        found: EncodedPayload,
    ) -> None:
        """Compare what a codec says of its work with its work."""
        assert [(spec.group, spec.dtype, spec.shape) for spec in found.tensors] == [
            (spec.group, spec.dtype, spec.shape) for spec in specs
        ]
        num_elements = sum(math.prod(spec.shape) for spec in specs)
        report = found.report
        assert (report.raw_bytes, report.encoded_bytes) == (len(payload), len(found.payload))
        assert report.bits_per_element == (
            8 * len(found.payload) / num_elements if num_elements else 0.0
        )
        assert not self.shrinks or len(found.payload) < len(payload)
        header = header_of(found)
        encode_head(header, len(found.payload))
        assert codec.decodes(header)
        assert self.make_codec().serde == codec.serde
        assert decoded_bytes(header) == sum(spec.length for spec in specs)

    def test_kv_is_lossy_where_the_codec_says_so(self, codec: ChunkCodec) -> None:
        specs = specs_of(*CASES["plain"])
        assert (
            self.encoded(codec, specs, kv_payload(specs, 0)).lossy
            == codec.lossy
            == (not self.lossless)
        )

    def test_tensors_may_lie_apart(self, codec: ChunkCodec) -> None:
        specs = specs_of(*CASES["hybrid"])
        payload = kv_payload(specs, 1)
        apart = specs_of(*CASES["hybrid"], gap=7)
        data = bytearray(GUARD * (apart[-1].offset + apart[-1].length + 7))[
            : apart[-1].offset + apart[-1].length + 7
        ]
        for near, far in zip(specs, apart, strict=True):
            data[far.offset : far.offset + far.length] = payload[
                near.offset : near.offset + near.length
            ]
        plain, found = self.encoded(codec, specs, payload), self.encoded(codec, apart, bytes(data))
        assert bytes(found.payload) == bytes(plain.payload)
        assert found.tensors == plain.tensors

    def test_bytes_may_be_read_only_and_lie_anywhere(self, codec: ChunkCodec) -> None:
        specs = specs_of(*CASES["hybrid"])
        payload = kv_payload(specs, 2)
        found = self.encoded(codec, specs, payload)
        raw = self.decoded(codec, found)
        for shift in range(4):
            data = bytearray(shift) + payload
            again = codec.encode(
                specs,
                memoryview(data)[shift:].toreadonly() if shift % 2 else memoryview(data)[shift:],
            )
            assert again is not None
            assert bytes(data) == bytes(shift) + payload, "a payload is only read"
            assert bytes(again.payload) == bytes(found.payload)
            moved = bytearray(shift) + bytes(found.payload)
            for view in (memoryview(moved)[shift:], memoryview(moved)[shift:].toreadonly()):
                assert decode_between_guards(codec, header_of(found), view, shift) == raw
            assert bytes(moved) == bytes(shift) + bytes(found.payload)

    @pytest.mark.parametrize("change", [-1, 1, -100, 100, 4096])
    def test_room_of_another_size_is_refused(self, codec: ChunkCodec, change: int) -> None:
        specs = specs_of(*CASES["hybrid"])
        payload = kv_payload(specs, 3)
        found = self.encoded(codec, specs, payload)
        memory = bytearray(GUARD + bytes(len(payload) + change) + GUARD)
        with pytest.raises(SerdeError):
            codec.decode(
                header_of(found), found.payload, memoryview(memory)[len(GUARD) : -len(GUARD)]
            )
        assert memory[: len(GUARD)] == memory[-len(GUARD) :] == GUARD

    def test_many_callers_get_the_same(self, codec: ChunkCodec) -> None:
        cases = [specs_of(*CASES[name]) for name in ("plain", "hybrid", "latent", "float32")]
        payloads = [kv_payload(specs, 4) for specs in cases]
        expected = [
            self.encoded(codec, specs, payload)
            for specs, payload in zip(cases, payloads, strict=True)
        ]
        raws = [self.decoded(codec, found) for found in expected]

        def call(number: int) -> None:
            for turn in range(6):
                i = (number + turn) % len(cases)
                found = self.encoded(codec, cases[i], payloads[i])
                assert bytes(found.payload) == bytes(expected[i].payload)
                assert found.report == expected[i].report
                assert self.decoded(codec, expected[i]) == raws[i]

        with ThreadPoolExecutor(NUM_CALLERS) as callers:
            for future in [callers.submit(call, number) for number in range(NUM_CALLERS)]:
                future.result()

    @pytest.mark.parametrize("threads", [1, 2, 5])
    def test_threads_change_nothing(self, codec: ChunkCodec, threads: int) -> None:
        other = self.make_codec(threads)
        other.open()
        try:
            for name, tensors in CASES.items():
                specs = specs_of(*tensors)
                payload = kv_payload(specs, 5)
                ours, theirs = (
                    codec.encode(specs, memoryview(payload)),
                    other.encode(specs, memoryview(payload)),
                )
                assert (ours is None) == (theirs is None), name
                if ours is not None and theirs is not None:
                    assert bytes(ours.payload) == bytes(theirs.payload), name
                    assert (ours.tensors, ours.profile, ours.report) == (
                        theirs.tensors,
                        theirs.profile,
                        theirs.report,
                    ), name
                    assert self.decoded(codec, theirs) == self.decoded(other, ours), name
        finally:
            other.close()

    @pytest.mark.parametrize("dtype", KV_DTYPES)
    def test_what_is_not_finite_is_kept_bit_for_bit(self, codec: ChunkCodec, dtype: str) -> None:
        specs = specs_of((dtype, (2, 2, 65, 64)), (dtype, (2, 2, 65, 64)))
        clean = bytearray(kv_payload(specs, 6))
        half = len(clean) // 2
        for i, bits in enumerate(HOSTILE_BITS[dtype]):
            payload = bytearray(clean)
            size = len(payload) // (4 * 65 * 64 * 2)
            at = half + size * (i * 997 % (half // size))
            payload[at : at + size] = bits.to_bytes(size, "little")
            found = self.encoded(codec, specs, bytes(payload))
            assert found.lossy == (not self.lossless), "the first tensor is finite"
            assert self.decoded(codec, found)[half:] == payload[half:]
            assert {group.name.split()[0] for group in found.report.groups} == (
                {"g0"} if found.lossy else set()
            )

    @pytest.mark.parametrize("dtype", KV_DTYPES)
    def test_nothing_becomes_infinite(self, codec: ChunkCodec, dtype: str) -> None:
        specs = specs_of((dtype, (2, 2, 65, 64)))
        values = values_of(specs[0], kv_payload(specs, 10))
        largest = np.abs(values).max()
        for top in LARGEST_VALUES[dtype]:
            payload = bits_of_values(specs[0], cut_to(dtype, values * (top / largest)))
            assert np.isfinite(values_of(specs[0], payload)).all()
            found = self.encoded(codec, specs, payload)
            raw = self.decoded(codec, found)
            assert np.isfinite(values_of(specs[0], raw)).all(), top
            if found.lossy:
                check_reported_errors(specs, (payload, raw), found, self.scale_is_of_plane)
            else:
                assert raw == payload

    @pytest.mark.parametrize("name", ["plain", "float16", "float32", "seven tokens", "opaque"])
    def test_zeros_come_back_as_zeros(self, codec: ChunkCodec, name: str) -> None:
        specs = specs_of(*CASES[name])
        payload = bytes(specs[0].length)
        found = self.encoded(codec, specs, payload)
        assert self.decoded(codec, found) == payload
        assert all(
            (group.max_relative, group.rms_relative) == (0.0, 0.0) for group in found.report.groups
        )

    def test_what_cannot_be_made_smaller_is_left_alone(self, codec: ChunkCodec) -> None:
        specs = specs_of(("uint8", (5000,)))
        payload = noise_payload(5000)
        found = codec.encode(specs, memoryview(payload))
        if self.shrinks:
            assert found is None
        else:
            assert found is not None
            assert self.decoded(codec, found) == payload

    def test_a_chunk_of_nothing(self, codec: ChunkCodec) -> None:
        for specs in ((), specs_of(("bfloat16", (2, 0, 4, 8)))):
            found = codec.encode(specs, memoryview(b""))
            assert found is None or self.decoded(codec, found) == b""

    def test_it_works_while_it_is_open(self) -> None:
        specs = specs_of(*CASES["plain"])
        payload = kv_payload(specs, 7)
        codec = self.make_codec()
        with pytest.raises(SerdeError, match="not open"):
            codec.encode(specs, memoryview(payload))
        codec.open()
        codec.open()
        found = self.encoded(codec, specs, payload)
        raw = self.decoded(codec, found)
        codec.close()
        codec.close()
        with pytest.raises(SerdeError, match="not open"):
            codec.encode(specs, memoryview(payload))
        with pytest.raises(SerdeError, match="not open"):
            self.decoded(codec, found)
        codec.open()
        assert bytes(self.encoded(codec, specs, payload).payload) == bytes(found.payload)
        assert self.decoded(codec, found) == raw
        codec.close()

    def test_a_record_that_describes_other_tensors_is_refused(self, codec: ChunkCodec) -> None:
        specs = specs_of(("bfloat16", (2, 2, 65, 64)))
        found = self.encoded(codec, specs, kv_payload(specs, 8))
        for dtype, shape in (
            ("bfloat16", (2, 2, 64, 65)),
            ("float16", (2, 2, 65, 64)),
            ("bfloat16", (4, 65, 64)),
            ("float32", (1, 2, 65, 64)),
        ):
            spec = TensorSpec("g0", dtype, shape, 0, len(found.payload))
            other = EncodedPayload(
                found.payload, (spec,), found.serde, found.profile, found.lossy, found.report
            )
            try:
                raw = self.decoded(codec, other)
            except SerdeError:
                continue
            assert self.lossless, "quantised values of another shape or dtype"
            assert len(raw) == decoded_bytes(header_of(other))

    @pytest.mark.parametrize("name", ["plain", "opaque"])
    def test_bytes_that_are_missing_or_too_many_are_noticed(
        self, codec: ChunkCodec, name: str
    ) -> None:
        specs = specs_of(*CASES[name])
        found = self.encoded(codec, specs, kv_payload(specs, 9))
        data = bytes(found.payload)
        for length in (
            *range(0, min(200, len(data)), 7),
            len(data) // 2,
            len(data) - 2,
            len(data) - 1,
        ):
            with pytest.raises(SerdeError):
                self.decoded(codec, resized(found, data[:length]))
        for tail in (b"\0", b"\0\0", GUARD, data):
            with pytest.raises(SerdeError):
                self.decoded(codec, resized(found, data + tail))
