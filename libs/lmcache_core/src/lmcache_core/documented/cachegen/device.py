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
    FOREIGN_STREAMS,
    KINDS,
    NotQuantisableError,
    PlaneLayout,
    Quantiser,
    can_be_quantised,
    read_quantised,
)
from lmcache_core.serde.tables import TableSet

Array = npt.NDArray[Any]


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
    scales = planes.scales.view(torch.float32)
    parts = (
        scales.to(x.dtype) if by_token else scales,  # float32 bits of values of the dtype
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
    kind = KINDS[dtype_name(dtype)]
    if head.dtype != kind:
        raise SerdeError(f"an encoded tensor of dtype {head.dtype}, expected {kind}")
    found = read_quantised(reader, head, layout, tables.levels)

    def on_device(array: Array) -> torch.Tensor:
        return torch.from_numpy(array.copy()).to(tables.device)

    encoded = EncodedPlanes(
        on_device(found.shifts),
        on_device(found.shapes),
        on_device(found.lengths.reshape(-1)),
        on_device(found.words),
    )
    scales = on_device(found.scales.view(np.int32))
    sizes = layout.planes, layout.tokens, layout.channels
    out = torch.empty(sizes, dtype=dtype, device=tables.device)
    status = cachegen_decode(
        encoded, scales, found.levels, _shape(layout), tables, out, found.by_token
    )
    if status.any():
        raise SerdeError(FOREIGN_STREAMS)
    return out.view(tuple(shape))


def _layout(shape: tuple[int, ...], dtype: torch.dtype) -> PlaneLayout:
    name = str(dtype).removeprefix("torch.")
    if not can_be_quantised(name, shape):
        raise SerdeError(f"a tensor {list(shape)} of {name} cannot be quantised")
    return PlaneLayout(shape[0] * shape[1], shape[2], shape[3])


def _shape(layout: PlaneLayout) -> CodecShape:
    return CodecShape(layout.planes, layout.tokens, layout.channels, layout.group, layout.section)
