"""Quantised KV as a blob, and back, where the tensor lies: the kernels' way to the bytes that
`QuantisedCoder` writes and reads.

Needs torch and `lmcache_kernels` (extra `kernels`), and a CUDA device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from lmcache_kernels.cachegen_decode import cachegen_decode
from lmcache_kernels.cachegen_encode import cachegen_encode
from lmcache_kernels.cachegen_quantize import cachegen_quantize_by_plane, cachegen_quantize_by_token
from lmcache_kernels.codec_shape import CodecShape, EncodedPlanes
from lmcache_kernels.codec_tables import CodecTables

from lmcache_core.errors import SerdeError
from lmcache_core.memory.dtypes import dtype_name
from lmcache_core.serde.blob import Head, Mode, Reader
from lmcache_core.serde.quantised import (
    KINDS,
    NotQuantisableError,
    PlaneLayout,
    Quantiser,
    can_be_quantised,
    check_model,
)
from lmcache_core.serde.tables import TableSet

Array = npt.NDArray[Any]
NOT_FINITE_BITS = 0x7F800000


def device_tables(tables: TableSet, device: torch.device) -> CodecTables:
    """Return the tables where kernels can read them, about 1.5 MiB: to be made once for a device.

    Args:
        tables: Of the codec.
        device: A CUDA device.
    """
    return CodecTables.of([tables.of(levels) for levels in tables.levels], device)


def encode_on_device(
    x: torch.Tensor, quantiser: Quantiser, tables: CodecTables
) -> tuple[list[Any], Array]:
    """Encode a tensor, and copy the blob to the host. Waits for the device.

    Args:
        x: float32, float16 or bfloat16 `[sides, layers, tokens, channels]`, on the tables' device.
            Strides are free.
        quantiser: How.
        tables: Of `device_tables`.

    Returns:
        As `QuantisedCoder.encode`: the pieces of the blob, in order, the same bytes; and errors,
        int64 `[planes, 3]`.

    Raises:
        NotQuantisableError: See there.
        SerdeError: It is no such tensor.
        KernelInputError: There is no kernel for its device.
    """
    layout = _layout(tuple(x.shape), x.dtype)
    kv = x.detach().reshape(layout.planes, layout.tokens, layout.channels).contiguous()
    by_token = quantiser.mode is Mode.BY_TOKEN
    planes = (
        cachegen_quantize_by_token(kv, quantiser.levels)
        if by_token
        else cachegen_quantize_by_plane(kv, quantiser.fineness)
    )
    encoded = cachegen_encode(
        planes.values, _shape(layout), quantiser.levels, tables, wraps=by_token
    )
    if planes.status.any():
        raise NotQuantisableError
    kind = KINDS[dtype_name(x.dtype)]
    head = Head(
        quantiser.mode, kind, x.dtype.itemsize, (layout.planes, layout.tokens, layout.channels, 0)
    )
    parts = (
        _packed_scales(planes.scales, x.dtype if by_token else torch.float32),
        encoded.shifts,
        encoded.shapes,
        encoded.lengths,
        encoded.words,
    )
    # One copy to the host instead of five, each of which would wait for the device.
    rest = torch.cat([part.reshape(-1).view(torch.uint8) for part in parts]).cpu().numpy()
    return [head.pack(), np.array(quantiser.levels, np.uint8), rest], planes.errors.cpu().numpy()


def decode_on_device(
    blob: memoryview, shape: Sequence[int], dtype: torch.dtype, tables: CodecTables
) -> torch.Tensor:
    """Decode a blob of mode by token or by plane. Waits for the device.

    Args:
        blob: All of it; any bytes are safe to give.
        shape: Of the tensor, `[sides, layers, tokens, channels]`.
        dtype: Of the tensor.
        tables: Of `device_tables`: those that it was encoded with.

    Returns:
        The tensor, on the tables' device, contiguous; the caller owns it.

    Raises:
        SerdeError: The bytes are no such blob of such a tensor.
        KernelInputError: There is no kernel for the device.
    """
    layout = _layout(tuple(shape), dtype)
    reader = Reader(blob)
    head = reader.head()
    if head.mode not in (Mode.BY_TOKEN, Mode.BY_PLANE):
        raise SerdeError(f"an encoded tensor of mode {head.mode.name}, expected a quantised one")
    sizes = (layout.planes, layout.tokens, layout.channels, 0)
    if (
        head.sizes != sizes
        or head.dtype != KINDS[dtype_name(dtype)]
        or head.itemsize != dtype.itemsize
    ):
        raise SerdeError(
            f"an encoded tensor of sizes {head.sizes} and dtype {head.dtype}, expected {sizes} and"
            f" {dtype}"
        )
    by_token = head.mode is Mode.BY_TOKEN
    levels = reader.array("u1", layout.planes)
    scales = _read_scales(
        reader,
        layout.planes * (layout.tokens if by_token else 1),
        dtype if by_token else torch.float32,
    )
    shifts = reader.array("<i2", layout.planes * layout.groups)
    shapes = reader.array("u1", layout.planes * layout.groups)
    lengths = reader.array("<u4", layout.planes * layout.sections)
    check_model((levels, shapes, lengths), layout, tuple(tables.levels))
    words = reader.array("<i2", int(lengths.sum(dtype=np.int64)))
    reader.finish()

    def on_device(array: Array, *sizes: int) -> torch.Tensor:
        return torch.from_numpy(array.copy()).reshape(sizes).to(tables.device)

    encoded = EncodedPlanes(
        on_device(shifts, layout.planes, layout.groups),
        on_device(shapes, layout.planes, layout.groups),
        on_device(lengths.astype(np.int32), layout.planes * layout.sections),
        on_device(words, len(words)),
    )
    out = torch.empty(
        (layout.planes, layout.tokens, layout.channels), dtype=dtype, device=tables.device
    )
    status = cachegen_decode(
        encoded,
        on_device(scales, layout.planes, -1),
        levels.tolist(),
        _shape(layout),
        tables,
        out,
        by_token,
    )
    if status.any():
        raise SerdeError("the streams of an encoded tensor are not those of an encoder")
    return out.view(tuple(shape))


def _layout(shape: tuple[int, ...], dtype: torch.dtype) -> PlaneLayout:
    name = str(dtype).removeprefix("torch.")
    if not can_be_quantised(name, shape):
        raise SerdeError(f"a tensor {list(shape)} of {name} cannot be quantised")
    return PlaneLayout(shape[0] * shape[1], shape[2], shape[3])


def _shape(layout: PlaneLayout) -> CodecShape:
    return CodecShape(layout.planes, layout.tokens, layout.channels, layout.group, layout.section)


def _packed_scales(scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return float32 bits as values of the dtype, which they all are."""
    return scales.view(torch.float32).to(dtype)


def _read_scales(reader: Reader, count: int, dtype: torch.dtype) -> Array:
    """Return float32 bits of scales that travelled as values of the dtype.

    Raises:
        SerdeError: One is negative or not finite.
    """
    raw = reader.array("<i4" if dtype == torch.float32 else "<i2", count)
    bits: Array = torch.from_numpy(raw.copy()).view(dtype).float().view(torch.int32).numpy()
    if ((bits < 0) | (bits >= NOT_FINITE_BITS)).any():
        raise SerdeError("an encoded tensor with a scale that is negative or not finite")
    return bits
