"""The documented serdes: one tensor as bytes, and back; wrappers that log; and the codec of chunks
over them. Needs torch and safetensors.

    digest | length of the head u32 | head, MessagePack | payload

The digest is xxh3-128 of everything after it. It detects damage; it does not authenticate the
writer, so what a head claims is checked as well. A payload is the tensor's bytes (Fast), a
safetensors file (Safe), or what `torch.save` writes (Torch). Nothing is unpickled: of the archive
that `torch.save` writes, only the tensor's bytes are read.
"""

from __future__ import annotations

import io
import logging
import math
import struct
import time
import zipfile
from abc import ABC, abstractmethod
from collections.abc import Sequence
from types import MappingProxyType
from typing import Annotated, ClassVar

import msgspec
import safetensors.torch
import torch

from lmcache_core._typing import override
from lmcache_core.errors import ConfigError, SerdeError
from lmcache_core.memory.dtypes import DTYPE_ITEMSIZE, dtype_name, num_bytes
from lmcache_core.memory.views import bytes_under, tensor_over
from lmcache_core.record import RecordHeader, TensorSpec, payload_digest
from lmcache_core.record.header import DIGEST_BYTES
from lmcache_core.serde.codec import ChunkCodec, EncodedPayload, EncodingReport

logger = logging.getLogger(__name__)

BytesLike = bytes | bytearray | memoryview
"""Input of the deserializers: contiguous bytes of any owner, only read and not kept."""
MAX_DIMENSIONS = 64
"""Limit of torch."""
MAX_EXTENT = 1 << 56
"""Bound on the product of all sizes, with an empty dimension counted as one: torch multiplies them
without checking, even for an empty tensor.
"""
MAX_TENSOR_BYTES = 4 << 30
TENSOR_KEY = "tensor_bytes"
"""Documented name of the tensor in a safetensors file."""
TORCH_MEMBER = "archive/data/0"
"""Name of the tensor's bytes in the archive that `torch.save` writes."""
_LENGTH = struct.Struct("<I")
_Size = Annotated[int, msgspec.Meta(ge=0, le=MAX_EXTENT)]


class SerdeHead(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What precedes a payload.

    Attributes:
        details: Further facts that the serde needs.
    """

    serde: str
    dtype: str
    shape: Annotated[tuple[_Size, ...], msgspec.Meta(max_length=MAX_DIMENSIONS)]
    details: tuple[str, ...] = ()

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensor itself."""
        return num_bytes(self.shape, self.dtype)

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype, as torch has it."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    def fault(self) -> str | None:
        """Return which bound is exceeded, None if none is."""
        if self.dtype not in DTYPE_ITEMSIZE:
            return f"dtype {self.dtype!r} is not known"
        if len(self.shape) > MAX_DIMENSIONS:
            return f"{len(self.shape)} dimensions; at most {MAX_DIMENSIONS} can be encoded"
        if math.prod(max(size, 1) for size in self.shape) > MAX_EXTENT:
            return f"shape {self.shape}; the product of its sizes may be at most {MAX_EXTENT}"
        if self.num_bytes > MAX_TENSOR_BYTES:
            return f"{self.num_bytes} bytes of tensor; at most {MAX_TENSOR_BYTES} can be encoded"
        return None


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(SerdeHead)


def seal(
    serde: str, tensor: torch.Tensor, payload: BytesLike, details: tuple[str, ...] = ()
) -> bytes:
    """Return a payload of a tensor with its head and their digest."""
    head = _ENCODER.encode(SerdeHead(serde, dtype_name(tensor.dtype), tuple(tensor.shape), details))
    covered = b"".join((_LENGTH.pack(len(head)), head, payload))
    return payload_digest(covered) + covered


def unseal(data: BytesLike, serde: str) -> tuple[SerdeHead, memoryview]:
    """Check the digest and the head. Allocates nothing that grows with what the head claims.

    Args:
        data: All bytes that `seal` returned.
        serde: The serde requested; another one is refused.

    Returns:
        The head, and the payload: a view of `data`.

    Raises:
        SerdeError: The bytes are not those of such a tensor, or are damaged.
    """
    view = memoryview(data)
    if not view.c_contiguous:
        raise ValueError("bytes with gaps cannot be decoded: copy them with bytes()")
    view = view.cast("B") if view.nbytes else memoryview(b"")
    head_at = DIGEST_BYTES + _LENGTH.size
    if len(view) < head_at:
        raise SerdeError(f"{len(view)} bytes are too short for an encoded tensor")
    if payload_digest(view[DIGEST_BYTES:]) != view[:DIGEST_BYTES]:
        raise SerdeError("damaged, or not an encoded tensor: the digest does not match")
    payload_at = head_at + _LENGTH.unpack_from(view, DIGEST_BYTES)[0]
    try:
        head = _DECODER.decode(view[head_at:payload_at])
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        raise SerdeError(f"the head of an encoded tensor cannot be read: {exc}") from exc
    if head.serde != serde:
        raise SerdeError(f"encoded by serde {head.serde!r}, read as {serde!r}")
    if (fault := head.fault()) is not None:
        raise SerdeError(f"out of bounds: {fault}")
    return head, view[payload_at:]


def dense(t: torch.Tensor) -> torch.Tensor:
    """Return the tensor in the form that all serdes write: a plain contiguous CPU tensor with
    exactly its own memory. Copies only if necessary.

    Raises:
        TypeError: Not a tensor.
        ValueError: Its dtype, layout or shape cannot be encoded.
    """
    if not isinstance(t, torch.Tensor):
        raise TypeError(f"{type(t).__name__} cannot be encoded: give a torch.Tensor")
    dtype = dtype_name(t.dtype)
    if t.layout is not torch.strided or t.is_nested or t.is_meta:
        raise ValueError(
            f"a tensor of layout {t.layout} on {t.device} cannot be encoded: give a dense one that"
            " has values"
        )
    if (fault := SerdeHead("", dtype, tuple(t.shape)).fault()) is not None:
        raise ValueError(f"a tensor cannot be encoded: {fault}")
    plain = t.detach().as_subclass(torch.Tensor).to("cpu").resolve_neg()
    # An empty view may begin past the end of an empty storage.
    is_whole = plain.storage_offset() == 0 and plain.untyped_storage().nbytes() == plain.nbytes
    if is_whole and plain.stride() == torch.empty(plain.shape, device="meta").stride():
        return plain
    return torch.empty(plain.shape, dtype=plain.dtype, device="cpu").copy_(plain)


def check_elements(head: SerdeHead, elements: memoryview) -> None:
    """Check that bytes are those of a tensor: as many as it has, and of a bool only 0 and 1, since
    others are undefined behaviour in torch.

    Raises:
        SerdeError: They are not.
    """
    if len(elements) != head.num_bytes:
        raise SerdeError(
            f"{len(elements)} bytes of tensor for {list(head.shape)} of {head.dtype}, which takes"
            f" {head.num_bytes}"
        )
    if (
        head.dtype == "bool"
        and len(elements)
        and int(tensor_over(elements, (len(elements),), "uint8").max()) > 1
    ):
        raise SerdeError("a bool that is neither 0 nor 1")


class Serializer(ABC):
    """Writes a tensor as bytes that describe it completely: values, shape and dtype. Stateless and
    thread-safe.
    """

    @abstractmethod
    def to_bytes(self, t: torch.Tensor) -> bytes:
        """Encode a tensor.

        Args:
            t: A dense tensor on any device, of any shape and strides, of a dtype of
                `DTYPE_ITEMSIZE`. Only read.

        Returns:
            Its encoding. The caller owns it.

        Raises:
            ValueError: This serde cannot encode such a tensor; the text says what it accepts.
        """


class Deserializer(ABC):
    """Reads the output of the same serde's `Serializer`. Stateless and thread-safe.

    Args:
        dtype: Dtype of the tensors that `from_bytes` returns, a `torch.dtype` or its name; None: as
            stored.

    Raises:
        ValueError: Not a dtype of `DTYPE_ITEMSIZE`.
    """

    def __init__(self, dtype: torch.dtype | str | None) -> None:
        self.dtype: torch.dtype | None = (
            None if dtype is None else getattr(torch, dtype_name(dtype))
        )

    @abstractmethod
    def from_bytes(self, bs: BytesLike) -> torch.Tensor:
        """Decode a tensor.

        Args:
            bs: All bytes of one encoding, and no more. Only read, and not referenced by the result.

        Returns:
            A contiguous CPU tensor of the stored shape, of this deserializer's dtype. The caller
                owns it and its memory.

        Raises:
            SerdeError: The bytes are not an encoding of this serde, or are damaged. Detecting this
                takes time and memory bounded by the length of `bs`.
        """

    def _converted(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor in the requested dtype; the same object if it already has that
        dtype.
        """
        return tensor if self.dtype is None else tensor.to(self.dtype)


class _PlainSerializer(Serializer):
    SERDE: ClassVar[str]

    @override
    def to_bytes(self, t: torch.Tensor) -> bytes:
        tensor = dense(t)
        return seal(self.SERDE, tensor, self._payload(tensor))

    @abstractmethod
    def _payload(self, tensor: torch.Tensor) -> BytesLike:
        """Return the payload of a dense tensor."""


class _PlainDeserializer(Deserializer):
    SERDE: ClassVar[str]

    @override
    def from_bytes(self, bs: BytesLike) -> torch.Tensor:
        """Decode and convert; takes up to eight times the stored bytes (uint8 to float64)."""
        return self._converted(self.from_bytes_normal(bs))

    def from_bytes_normal(self, b: BytesLike) -> torch.Tensor:
        """Decode without conversion: return the tensor in the stored dtype.

        Raises:
            SerdeError: See `from_bytes`.
        """
        head, payload = unseal(b, self.SERDE)
        elements = self._elements(head, payload)
        check_elements(head, elements)
        tensor = torch.empty(head.shape, dtype=head.torch_dtype, device="cpu")
        bytes_under(tensor)[:] = elements
        return tensor

    @abstractmethod
    def _elements(self, head: SerdeHead, payload: memoryview) -> memoryview:
        """Return the tensor's bytes in a payload.

        Raises:
            SerdeError: There are none.
        """


class FastSerializer(_PlainSerializer):
    """Writes the bytes of the tensor."""

    SERDE = "fast"

    @override
    def _payload(self, tensor: torch.Tensor) -> BytesLike:
        return bytes_under(tensor)


class FastDeserializer(_PlainDeserializer):
    """Reads the output of `FastSerializer`, shape included."""

    SERDE = "fast"

    @override
    def _elements(self, head: SerdeHead, payload: memoryview) -> memoryview:
        return payload


class SafeSerializer(_PlainSerializer):
    """Writes the tensor as a safetensors file, under the key `tensor_bytes`."""

    SERDE = "safetensor"

    @override
    def _payload(self, tensor: torch.Tensor) -> BytesLike:
        return _safetensors_file(tensor)


class SafeDeserializer(_PlainDeserializer):
    """Reads what `SafeSerializer` wrote: exactly the file that safetensors writes."""

    SERDE = "safetensor"

    @override
    def _elements(self, head: SerdeHead, payload: memoryview) -> memoryview:
        data_at = len(payload) - head.num_bytes
        if data_at < 0:
            return payload  # too short: `check_elements` says so
        file = _safetensors_file(torch.empty(head.shape, dtype=head.torch_dtype))
        if len(payload) != len(file) or payload[:data_at] != file[:data_at]:
            raise SerdeError(
                f"not the safetensors file of one tensor of {head.dtype} {list(head.shape)}"
            )
        return payload[data_at:]


def _safetensors_file(tensor: torch.Tensor) -> bytes:
    file: bytes = safetensors.torch.save({TENSOR_KEY: tensor})
    return file


class TorchSerializer(_PlainSerializer):
    """Writes what `torch.save` writes."""

    SERDE = "torch"

    @override
    def _payload(self, tensor: torch.Tensor) -> BytesLike:
        """Raises:
        SerdeError: This release of torch writes other archives than this serde reads.
        """
        file = io.BytesIO()
        torch.save(tensor, file)
        with zipfile.ZipFile(file) as archive:
            if TORCH_MEMBER not in archive.namelist():
                raise SerdeError(
                    f"torch {torch.__version__} writes archives of another form; use the Safe or"
                    " the Fast serde"
                )
        return file.getbuffer()


class TorchDeserializer(_PlainDeserializer):
    """Reads what `TorchSerializer` wrote, without its pickle: the head has shape and dtype."""

    SERDE = "torch"

    @override
    def _elements(self, head: SerdeHead, payload: memoryview) -> memoryview:
        try:
            with zipfile.ZipFile(io.BytesIO(payload)) as archive:
                member = archive.getinfo(TORCH_MEMBER)
                if member.compress_type != zipfile.ZIP_STORED or member.file_size > len(payload):
                    raise SerdeError(f"{TORCH_MEMBER} of the archive is not stored uncompressed")
                return memoryview(archive.read(member))
        except (zipfile.BadZipFile, KeyError, EOFError, OSError, RuntimeError, ValueError) as exc:
            raise SerdeError(f"the payload is no archive of a tensor: {exc}") from exc


class SerializerDebugWrapper(Serializer):
    """Forwards to a serializer and writes one debug line a call."""

    def __init__(self, s: Serializer) -> None:
        self._wrapped = s

    @override
    def to_bytes(self, t: torch.Tensor) -> bytes:
        begin = time.perf_counter()
        encoded = self._wrapped.to_bytes(t)
        _log("encoded", self._wrapped, t, len(encoded), begin)
        return encoded


class DeserializerDebugWrapper(Deserializer):
    """Forwards to a deserializer and writes one debug line a call."""

    def __init__(self, d: Deserializer) -> None:
        super().__init__(d.dtype)
        self._wrapped = d

    @override
    def from_bytes(self, bs: BytesLike) -> torch.Tensor:
        begin = time.perf_counter()
        tensor = self._wrapped.from_bytes(bs)
        _log("decoded", self._wrapped, tensor, memoryview(bs).nbytes, begin)
        return tensor


def _log(done: str, serde: object, tensor: torch.Tensor, num_bytes: int, begin: float) -> None:
    logger.debug(
        "%s: serde=%s dtype=%s shape=%s bytes=%d took_ms=%.3f",
        done,
        type(serde).__name__,
        tensor.dtype,
        tuple(tensor.shape),
        num_bytes,
        (time.perf_counter() - begin) * 1e3,
    )


_SERDES = MappingProxyType(
    {
        writer.SERDE: (writer(), reader(None))
        for writer, reader in (
            (TorchSerializer, TorchDeserializer),
            (SafeSerializer, SafeDeserializer),
            (FastSerializer, FastDeserializer),
        )
    }
)


class DocumentedCodec(ChunkCodec):
    """A `ChunkCodec` over a documented serializer and deserializer; lossless. Each tensor of the
    chunk is one encoding, a little longer than before: it is for servers whose other clients
    expect it.

    Args:
        serde: `torch`, `safetensor` or `fast`.
    """

    lossy = False

    def __init__(self, serde: str) -> None:
        if serde not in _SERDES:
            raise ConfigError(f"serde={serde!r}: must be one of {', '.join(_SERDES)}")
        self._serde = serde
        self._is_open = False

    @property
    @override
    def serde(self) -> str:
        return self._serde

    @override
    def open(self) -> None:
        self._is_open = True

    @override
    def close(self) -> None:
        self._is_open = False

    @property
    def _opened(self) -> tuple[Serializer, Deserializer]:
        if not self._is_open:
            raise SerdeError(f"the codec {self.serde} is not open")
        return _SERDES[self._serde]

    @override
    def encode(self, tensors: Sequence[TensorSpec], payload: memoryview) -> EncodedPayload | None:
        serializer, _ = self._opened
        pieces: list[bytes] = []
        specs: list[TensorSpec] = []
        at = 0
        for spec in tensors:
            view = payload[spec.offset : spec.offset + spec.length]
            pieces.append(serializer.to_bytes(tensor_over(view, spec.shape, spec.dtype)))
            specs.append(TensorSpec(spec.group, spec.dtype, spec.shape, at, len(pieces[-1])))
            at += len(pieces[-1])
        num_elements = sum(math.prod(spec.shape) for spec in tensors)
        report = EncodingReport(8 * at / num_elements if num_elements else 0.0, len(payload), at)
        encoded = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        return EncodedPayload(memoryview(encoded), tuple(specs), self.serde, "", False, report)

    @override
    def decodes(self, header: RecordHeader) -> bool:
        return header.serde == self.serde

    @override
    def decode(self, header: RecordHeader, payload: memoryview, out: memoryview) -> None:
        _, deserializer = self._opened
        at = 0
        for spec in header.tensors:
            tensor = deserializer.from_bytes(payload[spec.offset : spec.offset + spec.length])
            if tuple(tensor.shape) != spec.shape or dtype_name(tensor.dtype) != spec.dtype:
                raise SerdeError(
                    f"a tensor of {tensor.dtype} {tuple(tensor.shape)} where the record says"
                    f" {spec.dtype} {spec.shape}"
                )
            data = bytes_under(tensor)
            if at + len(data) > len(out):
                raise SerdeError(f"tensors of more than the {len(out)} bytes that are due")
            out[at : at + len(data)] = data
            at += len(data)
        if at != len(out):
            raise SerdeError(f"{at} bytes were decoded where {len(out)} are due")
