"""What every serde must do. A test module subclasses `SerdeSuite` and gives it `make_serializer`
and `make_deserializer`.
"""

from __future__ import annotations

import random
import struct
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

import msgspec
import pytest
import torch
import xxhash
from lmcache_core.errors import SerdeError
from lmcache_core.memory.dtypes import DTYPE_ITEMSIZE
from lmcache_core.serde import Deserializer, Serializer

DTYPES = tuple(getattr(torch, name) for name in DTYPE_ITEMSIZE)
FLOATS = tuple(dtype for dtype in DTYPES if dtype.is_floating_point)
SHAPES = (
    (),
    (1,),
    (7,),
    (0,),
    (2, 0, 4),
    (2, 3),
    (1, 5, 1),
    (3, 2, 5, 7),
    (2, 2, 16, 2, 8),
    (1, 2, 1, 2, 1, 3, 1, 2, 1),
)
MAX_PATTERN_BITS = 16
APPENDIXES = (b"\0", b"\xff" * 16, bytes(4096))
"""What may follow the bytes of an encoding by mistake."""


def random_bits(dtype: torch.dtype, shape: Sequence[int], seed: int) -> torch.Tensor:
    """A tensor of random bits, NaNs of all kinds among them; of a bool only the last bit is
    random.
    """
    num_bytes = torch.Size(shape).numel() * dtype.itemsize
    data = torch.tensor(list(random.Random(seed).randbytes(num_bytes)), dtype=torch.uint8)
    return (data % 2 if dtype is torch.bool else data).view(dtype).view(tuple(shape))


def every_pattern(dtype: torch.dtype) -> torch.Tensor:
    """Every bit pattern of a dtype of one or two bytes, of a longer one those with all
    combinations of its first 16 bits; shuffled.
    """
    if dtype is torch.bool:
        return torch.tensor([False, True])
    num_patterns = 1 << min(8 * dtype.itemsize, MAX_PATTERN_BITS)
    order = torch.randperm(num_patterns, generator=torch.Generator().manual_seed(0))
    if dtype.itemsize == 1:
        return order.to(torch.uint8).view(dtype)
    bits = order << (8 * dtype.itemsize - MAX_PATTERN_BITS) | int(dtype.itemsize > 2)
    return (
        bits.view(torch.uint8)
        .view(num_patterns, 8)[:, : dtype.itemsize]
        .contiguous()
        .view(dtype)
        .view(-1)
    )


def sealed_by_hand(
    payload: bytes,
    *,
    serde: object,
    dtype: object,
    shape: Sequence[int],
    details: Sequence[str] = (),
    head: bytes | None = None,
) -> bytes:
    """An encoding with a right digest around any payload, made without the code under test.

    Args:
        payload: Its payload.
        serde: Name of the serde.
        dtype: Name of the dtype.
        shape: Sizes.
        details: Further facts in the head.
        head: Takes the place of all of these.
    """
    head = msgspec.msgpack.encode([serde, dtype, shape, details]) if head is None else head
    covered = struct.pack("<I", len(head)) + head + payload
    return xxhash.xxh3_128_digest(covered) + covered


def payload_of(data: bytes) -> bytes:
    """The payload in an encoding."""
    return data[20 + int.from_bytes(data[16:20], "little") :]


def bits_of(tensor: torch.Tensor) -> bytes:
    """The elements of a tensor in their order, as bytes."""
    return bytes(
        tensor.detach()
        .clone(memory_format=torch.contiguous_format)
        .view(-1)
        .view(torch.uint8)
        .numpy()
    )


def same_values_otherwise_laid_out(tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """The same values with other strides, or as a part of other memory."""
    order = tuple(reversed(range(tensor.dim())))
    yield "transposed", tensor.permute(order).contiguous().permute(order)
    yield (
        "at an offset",
        torch.cat((tensor.new_zeros(3), tensor.reshape(-1)))[3:].view(tensor.shape),
    )
    yield (
        "a part of longer memory",
        torch.cat((tensor.reshape(-1), tensor.new_zeros(5)))[: tensor.numel()].view(tensor.shape),
    )
    if tensor.dim():
        yield "every other element", torch.stack((tensor, tensor), dim=-1)[..., 0]
        yield (
            "a slice of each row",
            torch.stack((tensor, tensor), dim=-2).flatten(-2)[..., : tensor.shape[-1]],
        )
    if tensor.dim() and 1 in tensor.shape:
        strides = [
            1000 if size == 1 else stride
            for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
        ]
        yield "with strides that nothing needs", tensor.as_strided(tensor.shape, strides)


class SerdeSuite(ABC):
    """The contract of `Serializer` and `Deserializer`.

    Attributes:
        lossless: Whether values come back bit by bit. If not, within `max_relative_error` of the
            largest value.
        max_relative_error: See above.
        shapes: Shapes that are tried; override where a serde takes tensors of one kind only.
        flipped_shape: Shape of the tensor whose encoding is damaged, bit by bit: a small one.
    """

    lossless = True
    max_relative_error = 0.0
    shapes: tuple[tuple[int, ...], ...] = SHAPES
    flipped_shape: tuple[int, ...] = (2, 3)

    @abstractmethod
    def make_serializer(self) -> Serializer:
        """The serializer under test."""

    @abstractmethod
    def make_deserializer(self, dtype: torch.dtype | None) -> Deserializer:
        """Its deserializer, which returns tensors of that dtype, or as they were stored."""

    def takes(self, dtype: torch.dtype, shape: Sequence[int]) -> bool:
        """Whether such a tensor can be encoded; of others it is tested that they are refused."""
        return True

    def values(self, dtype: torch.dtype, shape: Sequence[int], seed: int = 0) -> torch.Tensor:
        """A tensor to encode: any bits where they come back, numbers where they come back
        nearly.
        """
        if self.lossless:
            return random_bits(dtype, shape, seed)
        return torch.randn(tuple(shape), generator=torch.Generator().manual_seed(seed)).to(dtype)

    def encoded(self, tensor: torch.Tensor) -> bytes:
        """One encoding, by a serializer of its own."""
        return self.make_serializer().to_bytes(tensor)

    def decoded(
        self, data: bytes | bytearray | memoryview, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """What a deserializer of its own makes of the bytes."""
        return self.make_deserializer(dtype).from_bytes(data)

    def assert_same(self, found: torch.Tensor, given: torch.Tensor, case: object) -> None:
        """Compare what was decoded with what had been encoded."""
        assert type(found) is torch.Tensor, case
        assert (found.shape, found.dtype, found.device.type) == (given.shape, given.dtype, "cpu"), (
            case
        )
        assert found.is_contiguous(), case
        assert not found.requires_grad, case
        if self.lossless:
            assert bits_of(found) == bits_of(given), case
        elif given.numel():
            error = (found.double() - given.detach().double()).abs().max()
            assert error <= self.max_relative_error * given.detach().double().abs().max(), case

    @pytest.fixture
    def small(self) -> bytes:
        """The encoding that is damaged."""
        dtype = next(
            dtype for dtype in (torch.bfloat16, *DTYPES) if self.takes(dtype, self.flipped_shape)
        )
        return self.encoded(self.values(dtype, self.flipped_shape))

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_what_was_encoded_comes_back_or_is_refused_at_once(self, dtype: torch.dtype) -> None:
        for seed, shape in enumerate(self.shapes):
            given = self.values(dtype, shape, seed)
            if not self.takes(dtype, shape):
                with pytest.raises(ValueError, match=r"\S"):
                    self.encoded(given)
                continue
            before = bits_of(given)
            data = self.encoded(given)
            assert type(data) is bytes
            self.assert_same(self.decoded(data), given, (dtype, shape))
            assert bits_of(given) == before, "the tensor is only read"

    def test_something_is_encoded_at_all(self) -> None:
        assert any(self.takes(dtype, shape) for dtype in FLOATS for shape in self.shapes)

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_strides_change_neither_values_nor_bytes(self, dtype: torch.dtype) -> None:
        for seed, shape in enumerate(shape for shape in self.shapes if self.takes(dtype, shape)):
            given = self.values(dtype, shape, seed)
            plain = self.encoded(given)
            assert self.encoded(given) == plain, "the same tensor, other bytes"
            for layout, other in same_values_otherwise_laid_out(given):
                assert bits_of(other) == bits_of(given), layout
                assert self.encoded(other) == plain, (dtype, shape, layout)

    @pytest.mark.parametrize("dtype", FLOATS, ids=str)
    def test_a_tensor_with_a_gradient_and_a_parameter_are_tensors(self, dtype: torch.dtype) -> None:
        for shape in (shape for shape in self.shapes if self.takes(dtype, shape)):
            given = self.values(dtype, shape)
            plain = self.encoded(given)
            assert (
                self.encoded(given.clone().requires_grad_())
                == self.encoded(torch.nn.Parameter(given))
                == plain
            )

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_no_bit_pattern_is_lost_or_else_it_is_refused(self, dtype: torch.dtype) -> None:
        patterns = every_pattern(dtype)
        for shape in (
            shape for shape in (tuple(patterns.shape), *self.shapes) if self.takes(dtype, shape)
        ):
            num_elements = torch.Size(shape).numel()
            given = patterns.repeat(-(-num_elements // len(patterns)))[:num_elements].view(shape)
            try:
                found = self.decoded(self.encoded(given))
            except ValueError:
                assert not self.lossless
                continue
            assert (found.shape, found.dtype) == (given.shape, given.dtype)
            assert not self.lossless or bits_of(found) == bits_of(given)

    @pytest.mark.parametrize("asked", DTYPES, ids=str)
    def test_it_is_converted_to_the_dtype_that_is_asked_for(self, asked: torch.dtype) -> None:
        for stored in DTYPES:
            for shape in (shape for shape in self.shapes if self.takes(stored, shape)):
                given = (
                    self.values(torch.int8, shape).to(stored)
                    if self.lossless
                    else self.values(stored, shape)
                )
                data = self.encoded(given)
                as_stored, found = self.decoded(data), self.decoded(data, asked)
                assert as_stored.dtype is stored
                assert (found.dtype, found.shape) == (asked, given.shape)
                assert bits_of(found) == bits_of(as_stored.to(asked)), (stored, shape)

    @pytest.mark.parametrize("dtype", [torch.complex64, "float7", "complex64"])
    def test_a_dtype_that_is_not_known_is_refused(self, dtype: torch.dtype) -> None:
        with pytest.raises(ValueError, match=str(dtype).removeprefix("torch.")):
            self.make_deserializer(dtype)

    @pytest.mark.parametrize(
        "given",
        [
            torch.zeros(2, 3, dtype=torch.complex64),
            torch.zeros(2, 3, device="meta"),
            torch.zeros(2, 3).to_sparse(),
        ],
        ids=str,
    )
    def test_a_tensor_that_cannot_be_encoded_is_refused(self, given: torch.Tensor) -> None:
        with pytest.raises(ValueError, match=r"\S"):
            self.encoded(given)

    @pytest.mark.parametrize(
        "owner",
        [bytes, bytearray, memoryview, lambda data: memoryview(bytearray(b"xx" + data))[2:]],
    )
    def test_bytes_may_be_of_any_type(self, small: bytes, owner: type[bytes]) -> None:
        assert bits_of(self.decoded(owner(small))) == bits_of(self.decoded(small))

    def test_the_result_owns_its_memory(self, small: bytes) -> None:
        given = bytearray(small)
        found = self.decoded(given)
        before = bits_of(found)
        other = self.decoded(given)
        other.reshape(-1).view(torch.uint8).fill_(1)
        assert bytes(given) == small, "writing to a result changed the bytes"
        given[:] = b"\xff" * len(given)
        given.clear()
        assert bits_of(found) == before, (
            "writing to the bytes or to another result changed a result"
        )

    def test_a_result_can_be_encoded_again(self, small: bytes) -> None:
        found = self.decoded(small)
        self.assert_same(self.decoded(self.encoded(found)), found, "again")

    def test_every_flipped_bit_is_noticed(self, small: bytes) -> None:
        deserializer = self.make_deserializer(None)
        taken = []
        for at in range(len(small)):
            for bit in range(8):
                data = bytearray(small)
                data[at] ^= 1 << bit
                try:
                    deserializer.from_bytes(data)
                except SerdeError:
                    continue
                taken.append((at, bit))
        assert taken == []

    def test_every_truncation_is_noticed(self, small: bytes) -> None:
        for length in range(len(small)):
            with pytest.raises(SerdeError):
                self.decoded(small[:length])

    @pytest.mark.parametrize("appendix", APPENDIXES, ids=len)
    def test_what_follows_is_noticed(self, small: bytes, appendix: bytes) -> None:
        for data in (small + appendix, appendix + small, small + small):
            with pytest.raises(SerdeError):
                self.decoded(data)

    @pytest.mark.parametrize("data", [None, "text", 7, [1, 2]], ids=repr)
    def test_what_is_no_bytes_is_refused(self, data: bytes) -> None:
        with pytest.raises(TypeError):
            self.decoded(data)
