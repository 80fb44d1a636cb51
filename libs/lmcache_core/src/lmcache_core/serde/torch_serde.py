"""The Torch serde: the output of `torch.save` after the checked head of `tensor_bytes`. Needs
torch.

Such a file is a zip archive with a pickle and the tensor's bytes. Nothing is unpickled: the pickle
of a plain tensor of the head's dtype and shape is known in advance, and an archive with any other
is refused. The tensor is created from the bytes.

Source: Python's `pickletools` (protocol 2); PKWARE's APPNOTE.TXT (zip), section 4.3.7; observed of
    torch 2.13.
"""

from __future__ import annotations

import io
import itertools
import math
import struct
import zipfile
from types import MappingProxyType

import torch

from lmcache_core._typing import override
from lmcache_core.errors import SerdeError
from lmcache_core.serde.base import BytesLike, PlainDeserializer, Serializer
from lmcache_core.serde.tensor_bytes import (
    SerdeId,
    TensorHead,
    contiguous_strides,
    decoded_tensor,
    dense,
    head_of,
    seal,
    unseal,
)

MAX_SHORT_TUPLE = 3
SHORT_TUPLE_OPCODE = 0x84
"""Plus the number of items, 1 to 3: the pickle's opcodes for short tuples."""
_FOLDER = "archive/"
_ENCRYPTED = 1
_ZIP_ERRORS = (zipfile.BadZipFile, EOFError, NotImplementedError, OSError, ValueError)
"""What `zipfile` raises for bytes that are no archive."""
_LOCAL_HEADER = struct.Struct("<26x2H")
"""Of a member, before its name, an extra field and its data: the lengths of the first two."""

_STORAGE_TYPES = MappingProxyType(
    {
        "float64": b"DoubleStorage",
        "float32": b"FloatStorage",
        "float16": b"HalfStorage",
        "bfloat16": b"BFloat16Storage",
        "int64": b"LongStorage",
        "int32": b"IntStorage",
        "int16": b"ShortStorage",
        "int8": b"CharStorage",
        "uint8": b"ByteStorage",
        "bool": b"BoolStorage",
    }
)
"""The dtypes that torch pickles by the type of their storage; it pickles newer ones as bytes and
a dtype.
"""


class TorchSerializer(Serializer):
    """Writes what `torch.save` writes."""

    @override
    def to_bytes(self, t: torch.Tensor) -> bytes:
        """Raises:
        SerdeError: This release of torch writes other archives than this serde knows to check:
            use the Safe or the Fast serde.
        """
        tensor = dense(t)
        file = io.BytesIO()
        torch.save(tensor, file)
        payload = file.getbuffer()
        head = head_of(SerdeId.TORCH, tensor, payload)
        try:
            _elements(head, payload)
        except SerdeError as exc:
            raise SerdeError(
                f"torch {torch.__version__} writes archives of another form; use the Safe or the"
                f" Fast serde: {exc}"
            ) from exc
        return seal(head, payload)


class TorchDeserializer(PlainDeserializer):
    """Reads what `TorchSerializer` wrote."""

    @override
    def from_bytes_normal(self, b: BytesLike) -> torch.Tensor:
        head, archive = unseal(b, SerdeId.TORCH)
        return decoded_tensor(head, _elements(head, archive))


def _elements(head: TensorHead, archive: memoryview) -> memoryview:
    """Return the tensor's bytes in an archive that `torch.save` wrote for a tensor of that dtype
    and shape.

    Raises:
        SerdeError: It is another archive.
    """
    members: dict[str, memoryview] = {}
    try:
        with zipfile.ZipFile(io.BytesIO(archive)) as file:
            infos = file.infolist()
        for info in infos:
            local = _LOCAL_HEADER.unpack_from(archive, info.header_offset)
            begin = info.header_offset + _LOCAL_HEADER.size + sum(local)
            member = archive[begin : begin + info.file_size]
            if (
                info.compress_type != zipfile.ZIP_STORED
                or info.flag_bits & _ENCRYPTED
                or len(member) != info.file_size
                or info.filename in members
            ):
                raise SerdeError(f"the archive's {info.filename!r} is not stored once, as is")
            members[info.filename] = member
    except (*_ZIP_ERRORS, struct.error) as exc:
        raise SerdeError(f"the payload is no archive: {exc}") from exc
    pickled, order, elements = (
        members.get(_FOLDER + name, memoryview(b"")) for name in ("data.pkl", "byteorder", "data/0")
    )
    if len(elements) != head.num_bytes:
        raise SerdeError(f"the archive does not hold {head.num_bytes} bytes of tensor")
    expected = pickle_of_tensor(head.dtype, head.shape)
    if len(pickled) != len(expected) or bytes(pickled) != expected:
        raise SerdeError(
            f"the archive's pickle is not that of a plain tensor of {head.dtype} {head.shape}"
        )
    if bytes(order[:8]) != b"little":
        raise SerdeError("the archive's tensor is not said to be little-endian")
    return elements


def pickle_of_tensor(dtype: str, shape: tuple[int, ...]) -> bytes:
    """Return the pickle that `torch.save` writes for a contiguous CPU tensor with its own memory: a
    constructor's name and its arguments.
    """
    memo = itertools.count()

    def kept(opcodes: bytes) -> bytes:
        return opcodes + b"q" + bytes((next(memo),))

    def named(module: bytes, name: bytes) -> bytes:
        return kept(b"c%b\n%b\n" % (module, name))

    def text(value: bytes) -> bytes:
        return kept(b"X" + struct.pack("<I", len(value)) + value)

    def numbers(values: tuple[int, ...]) -> bytes:
        items = b"".join(map(_number, values))
        if len(values) > MAX_SHORT_TUPLE:
            return kept(b"(" + items + b"t")
        return kept(items + bytes((SHORT_TUPLE_OPCODE + len(values),))) if values else b")"

    is_typed = dtype in _STORAGE_TYPES
    parts = [
        b"\x80\2"
        + named(b"torch._utils", b"_rebuild_tensor_v2" if is_typed else b"_rebuild_tensor_v3")
        + b"((",
        text(b"storage"),
        (
            named(b"torch", _STORAGE_TYPES[dtype])
            if is_typed
            else named(b"torch.storage", b"UntypedStorage")
        ),
        text(b"0"),
        text(b"cpu"),
        kept(_number(math.prod(shape)) + b"t"),
        b"Q" + _number(0),
        numbers(shape),
        numbers(contiguous_strides(shape)),
        b"\x89" + named(b"collections", b"OrderedDict"),
        kept(b")R"),
        b"" if is_typed else named(b"torch", dtype.encode()),
        kept(b"t"),
        kept(b"R") + b".",
    ]
    return b"".join(parts)


def _number(value: int) -> bytes:
    for opcode, size, bits in ((b"K", 1, 8), (b"M", 2, 16), (b"J", 4, 31)):
        if value < 1 << bits:
            return opcode + value.to_bytes(size, "little")
    size = value.bit_length() // 8 + 1
    return b"\x8a" + bytes((size,)) + value.to_bytes(size, "little")
