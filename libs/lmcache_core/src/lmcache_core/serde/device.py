"""Decodes blobs of quantised KV on the device: kernels for the bytes that `QuantisedCoder` writes.

Needs torch and `lmcache_kernels` (extra `kernels`), and a CUDA device.
"""

from __future__ import annotations

import importlib.util
import math

import torch
from lmcache_kernels.cachegen_decode import (
    cachegen_decode,
    cachegen_decode_reference,
    random_planes,
)
from lmcache_kernels.codec_shape import CodecShape, EncodedPlanes
from lmcache_kernels.codec_tables import CodecTables

from lmcache_core.errors import SerdeError
from lmcache_core.memory.device_copies import launch_copy
from lmcache_core.memory.dtypes import dtype_name
from lmcache_core.memory.views import tensor_over
from lmcache_core.record import RecordHeader
from lmcache_core.serde.blob import HEAD, Mode, Reader
from lmcache_core.serde.codec import CACHEGEN_SERDE, TABLES_MARK, encoding_of
from lmcache_core.serde.plane_layout import PlaneLayout
from lmcache_core.serde.quantised_blob import (
    KINDS,
    can_be_quantised,
    read_quantised,
)
from lmcache_core.serde.tables import TableSet, bell_curves


def device_tables(tables: TableSet, device: torch.device) -> CodecTables:
    """Return the tables where kernels can read them, about 1.5 MiB: to be made once for a device.

    Args:
        device: A CUDA device.
    """
    return CodecTables.of([tables.of(levels) for levels in tables.levels], device)


CHECKED_TOKENS, CHECKED_CHANNELS = 8, (33, 64)
"""The tensor with which kernels are tried; channels without and with `CodecShape.is_direct`."""


def device_encodings(device_type: str) -> tuple[str, ...]:
    """Return the encodings that kernels decode on such devices (`encoding_of`)."""
    has_kernels = device_type == "cuda" and importlib.util.find_spec("triton") is not None
    return (f"{CACHEGEN_SERDE}{TABLES_MARK}{bell_curves().id}",) if has_kernels else ()


def decodes_rightly(device: torch.device, dtype: torch.dtype, tokens: int, channels: int) -> bool:
    """Return whether the kernels decode a small known tensor on a device as the reference does. The
    first call for a kind of GPU compiles them, which takes seconds: as they are needed for chunks
    of that size.
    """
    known = bell_curves()
    alphabets = {levels: known.of(levels) for levels in known.levels}
    is_direct = _shape(PlaneLayout(1, tokens, channels)).is_direct
    layout = PlaneLayout(2, CHECKED_TOKENS, CHECKED_CHANNELS[is_direct])
    levels = (15, 7)
    encoded = random_planes(_shape(layout), levels, alphabets, seed=0)
    is_right = True
    for by_token in (True, False):
        scales = torch.full((2, CHECKED_TOKENS if by_token else 1), 0.375).view(torch.int32)
        expected = torch.empty(_shape(layout).sizes, dtype=dtype)
        cachegen_decode_reference(
            encoded, scales, levels, _shape(layout), alphabets, expected, by_token
        )
        out = torch.empty_like(expected, device=device)
        status = cachegen_decode(
            EncodedPlanes(
                encoded.shifts.to(device),
                encoded.shapes.to(device),
                encoded.lengths.to(device),
                encoded.words.to(device),
            ),
            scales.to(device),
            levels,
            _shape(layout),
            device_tables(known, device),
            out,
            by_token,
        )
        bits = expected.view(torch.uint8)
        is_right = is_right and not status.any() and torch.equal(out.cpu().view(torch.uint8), bits)
    return is_right


class DeviceDecoder:
    """Decodes records of quantised KV on a device. Thread-safe.

    Holds nothing on the device before its first use.

    Args:
        device: A CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        self._known = bell_curves()
        self._device = device
        self._tables: CodecTables | None = None
        self._encoding = f"{CACHEGEN_SERDE}{TABLES_MARK}{self._known.id}"

    def takes(self, header: RecordHeader) -> bool:
        """Return whether a record's payload can be given to `begin`."""
        return encoding_of(header) == self._encoding

    def take_tables(self) -> CodecTables:
        """Return the tables on the device; from the first call on they are kept there."""
        if self._tables is None:
            with torch.inference_mode(False):  # as for staging: it outlives the caller's mode
                self._tables = device_tables(self._known, self._device)
        return self._tables

    def begin(
        self,
        header: RecordHeader,
        payload: memoryview,
        out: torch.Tensor,
        scratch: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Begin to decode a record on the current stream, without waiting for the device.

        Args:
            payload: Its payload, which does not change before the device is done. Copied beside
                other work if it is in pinned memory.
            out: uint8, flat, contiguous, on the tables' device: filled with the tensors, one after
                the other.
            scratch: uint8, flat, on the same device, used on this stream only; memory is allocated
                for what it has no room for.

        Returns:
            uint8, on the device: all zeros if `out` is right; with anything else it is meaningless.

        Raises:
            SerdeError: The payload is not such a record, or has another size than `out`.
            KernelInputError: There is no kernel for the device.
        """
        tables = self.take_tables()
        if scratch is None:
            scratch = torch.empty(0, dtype=torch.uint8, device=self._device)
        status = []
        at = 0
        for spec in header.tensors:
            dtype: torch.dtype = getattr(torch, spec.dtype)
            layout = _layout(spec.shape, dtype)
            size = math.prod(spec.shape) * dtype.itemsize
            values = out[at : at + size]
            if len(values) < size:
                break
            blob = payload[spec.offset : spec.offset + spec.length]
            planes = values.view(dtype).view(layout.planes, layout.tokens, layout.channels)
            status.append(_begin_decoding(blob, layout, planes, tables, scratch))
            at += size
        if at != len(out) or len(status) < len(header.tensors):
            raise SerdeError(f"a record of tensors of another size than {len(out)} bytes")
        return torch.cat(status)


def _begin_decoding(
    blob: memoryview,
    layout: PlaneLayout,
    out: torch.Tensor,
    tables: CodecTables,
    scratch: torch.Tensor,
) -> torch.Tensor:
    """Check a blob in host memory, and decode the same bytes on the device.

    Args:
        out: The tensor `[planes, tokens, channels]` on the device.
        tables: Those that it was encoded with.
        scratch: See `begin`; for the words, which are most of the blob and its last array.

    Returns:
        See `cachegen_decode`.
    """
    reader = Reader(blob)
    head = reader.head()
    if head.mode not in (Mode.BY_TOKEN, Mode.BY_PLANE):
        raise SerdeError(f"an encoded tensor of mode {head.mode.name}, expected a quantised one")
    kind = KINDS[dtype_name(out.dtype)]
    if head.dtype != kind:
        raise SerdeError(f"an encoded tensor of dtype {head.dtype}, expected {kind}")
    found = read_quantised(reader, head, layout, tables.levels)
    host = tensor_over(blob, (len(blob),), None)
    num_bytes = found.words.nbytes
    words = scratch[:num_bytes]
    if len(words) < num_bytes:
        words = torch.empty(num_bytes, dtype=torch.uint8, device=out.device)
    front = torch.empty(len(blob) - num_bytes, dtype=torch.uint8, device=out.device)
    for target, source in (front, host[: len(front)]), (words, host[len(front) :]):
        launch_copy(target, source, host=source)
    at = HEAD.size + layout.planes

    def part(dtype: torch.dtype, *shape: int) -> torch.Tensor:
        """Return the next array of the blob, aligned."""
        nonlocal at
        begin, at = at, at + math.prod(shape) * dtype.itemsize
        return front[begin:at].clone().view(dtype).view(shape)

    num_scales = layout.tokens if found.by_token else 1
    scale_dtype = out.dtype if found.by_token else torch.float32
    scales = part(scale_dtype, layout.planes, num_scales).float().view(torch.int32)
    groups = layout.planes, layout.groups
    planes = EncodedPlanes(
        part(torch.int16, *groups),
        part(torch.uint8, *groups),
        part(torch.int32, layout.planes * layout.sections),
        words.view(torch.int16),
    )
    return cachegen_decode(
        planes, scales, found.levels, _shape(layout), tables, out, found.by_token
    )


def _layout(shape: tuple[int, ...], dtype: torch.dtype) -> PlaneLayout:
    name = str(dtype).removeprefix("torch.")
    if not can_be_quantised(name, shape):
        raise SerdeError(f"a tensor {list(shape)} of {name} cannot be quantised")
    return PlaneLayout(shape[0] * shape[1], shape[2], shape[3])


def _shape(layout: PlaneLayout) -> CodecShape:
    return CodecShape(layout.planes, layout.tokens, layout.channels, layout.group, layout.section)
