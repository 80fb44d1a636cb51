"""The Torch serde: what `torch.save` writes, after the checked head of `tensor_bytes`. Needs
torch.

Such a file is a zip archive that holds a pickle and the tensor's bytes. `torch.load` believes both:
a compressed member may unfold to a thousand times its length, and a storage that the pickle claims
to be longer than its bytes is read past their end. So it is given only archives that are found, by
our own reading, to be exactly what `torch.save` writes for one plain tensor of the head's dtype and
shape.

Source: PKWARE's APPNOTE.TXT (zip), sections 4.3.7, 4.3.12, 4.3.14-4.3.16; Python's `pickletools`
    (protocol 2); observed of torch 2.13.
"""

from __future__ import annotations

import io
import itertools
import math
import re
import struct
from types import MappingProxyType

import torch

from lmcache_core._typing import override
from lmcache_core.errors import SerdeError
from lmcache_core.serde.base import BytesLike, PlainDeserializer, Serializer
from lmcache_core.serde.tensor_bytes import (
    SerdeId,
    TensorHead,
    check_decoded,
    check_elements,
    contiguous_strides,
    dense,
    head_of,
    library_failures,
    seal,
    unseal,
)

MAX_MEMBERS = 16
MAX_SMALL_MEMBER_BYTES = 256
MAX_SHORT_TUPLE = 3
SHORT_TUPLE_OPCODE = 0x84
"""Plus the number of items, 1 to 3: the pickle's opcodes for short tuples."""
_FOLDER = b"archive/"
_SMALL_MEMBERS = re.compile(rb"byteorder|version|\.[a-z_./]+")
_ALLOWED_FLAGS = 0x0808
"""Bit 3: sizes follow the data; bit 11: names are UTF-8. Neither changes where the data lie;
encryption would be bit 0.
"""

_LOCAL = struct.Struct("<4s5H3I2H")
_MEMBER = struct.Struct("<4s6H3I5H2I")
_END64 = struct.Struct("<4sQ2H2I4Q")
_LOCATOR = struct.Struct("<4sIQI")
_END = struct.Struct("<4s4H2IH")
_TAIL_BYTES = _END64.size + _LOCATOR.size + _END.size

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
            _check_archive(head, payload)
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
        head, payload = unseal(b, SerdeId.TORCH)
        _check_archive(head, payload)
        with library_failures("torch"):
            tensor = torch.load(
                io.BytesIO(payload), map_location="cpu", weights_only=True, mmap=False
            )
        return check_decoded(head, tensor)


def _check_archive(head: TensorHead, archive: memoryview) -> None:
    """Check that an archive is what `torch.save` writes for a tensor of that dtype and shape."""
    members = _members(archive)
    elements = members.pop(b"data/0", None)
    if elements is None or len(elements) != head.num_bytes:
        raise SerdeError(f"the archive does not hold {head.num_bytes} bytes of tensor")
    if not _is(members.pop(b"data.pkl", None), pickle_of_tensor(head.dtype, head.shape)):
        raise SerdeError(
            f"the archive's pickle is not that of a plain tensor of {head.dtype} {head.shape}"
        )
    for name, member in members.items():
        if not _SMALL_MEMBERS.fullmatch(name) or len(member) > MAX_SMALL_MEMBER_BYTES:
            raise SerdeError(f"the archive holds {name!r} of {len(member)} bytes")
    if not _is(members.get(b"byteorder"), b"little"):
        raise SerdeError("the archive's tensor is not said to be little-endian")
    check_elements(head, elements)


def _is(member: memoryview | None, expected: bytes) -> bool:
    return member is not None and len(member) == len(expected) and bytes(member) == expected


def _members(archive: memoryview) -> dict[bytes, memoryview]:
    """Return the members of a zip archive without compression, with nothing ambiguous about it, by
    their names below `_FOLDER`.

    Whatever two readers could see differently is refused: comments, extra fields in the directory,
    sizes beyond 32 bits, gaps after the directory, several disks, a member twice.
    """
    end_at = len(archive) - _TAIL_BYTES
    if end_at < 0:
        raise SerdeError(f"{len(archive)} bytes are too short for an archive")
    end64 = _END64.unpack_from(archive, end_at)
    num_members, directory_bytes, directory_at = end64[7:]
    locator = _LOCATOR.unpack_from(archive, end_at + _END64.size)
    end = _END.unpack_from(archive, len(archive) - _END.size)
    if (
        (end64[:2], end64[4:7]) != ((b"PK\6\6", _END64.size - 12), (0, 0, num_members))
        or locator != (b"PK\6\7", 0, end_at, 1)
        or end != (b"PK\5\6", 0, 0, num_members, num_members, directory_bytes, directory_at, 0)
        or directory_at + directory_bytes != end_at
        or num_members > MAX_MEMBERS
    ):
        raise SerdeError("the payload does not end as an archive of torch does")
    members: dict[bytes, memoryview] = {}
    at = directory_at
    for _ in range(num_members):
        at, name, data = _member(archive, at, directory_at, end_at)
        if name in members:
            raise SerdeError(f"the archive holds {name!r} twice")
        members[name] = data
    if at != end_at:
        raise SerdeError("the archive's directory is longer than its members")
    return members


def _member(
    archive: memoryview, at: int, directory_at: int, end_at: int
) -> tuple[int, bytes, memoryview]:
    """Return one entry of an archive's directory: where the next one begins, the member's name, its
    bytes.

    The ends of the archive are longer than an entry, so that one can be unpacked wherever the
    directory goes on.
    """
    magic, _, _, flags, method, _, _, _, stored_bytes, num_bytes, name_bytes, *rest, local_at = (
        _MEMBER.unpack_from(archive, at)
    )
    extra_bytes, comment_bytes, disk, _, _ = rest
    next_at = at + _MEMBER.size + name_bytes
    name = bytes(archive[at + _MEMBER.size : next_at])
    if (
        magic != b"PK\1\2"
        or next_at > end_at
        or not name.startswith(_FOLDER)
        or extra_bytes
        or comment_bytes
        or disk
    ):
        raise SerdeError("the archive's directory is not as torch writes it")
    if flags & ~_ALLOWED_FLAGS or method or stored_bytes != num_bytes:
        raise SerdeError(
            f"{name!r} is not stored as it is: method {method}, flags {flags:#x}, {num_bytes} bytes"
            f" in {stored_bytes}"
        )
    if local_at + _LOCAL.size > directory_at:
        raise SerdeError(f"{name!r} lies outside the archive")
    local = _LOCAL.unpack_from(archive, local_at)
    name_at = local_at + _LOCAL.size
    data_at = name_at + name_bytes + local[-1]
    if (local[0], *local[2:4], local[-2]) != (
        b"PK\3\4",
        flags,
        method,
        name_bytes,
    ) or data_at + num_bytes > directory_at:
        raise SerdeError(f"{name!r} is not where the archive's directory says")
    if bytes(archive[name_at : name_at + name_bytes]) != name:
        raise SerdeError(f"{name!r} has another name where it lies")
    return next_at, name.removeprefix(_FOLDER), archive[data_at : data_at + num_bytes]


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
