"""Compares the shapes that an encoded record states with its payload, before memory is taken for
them. No torch, no numpy: servers that decode nothing check what their clients store.
"""

from __future__ import annotations

from lmcache_core.errors import SerdeError
from lmcache_core.memory.dtypes import DTYPE_ITEMSIZE, num_bytes
from lmcache_core.record import RecordHeader, TensorSpec
from lmcache_core.serde import DOCUMENTED_NAMES
from lmcache_core.serde.blob import HEAD, Head, Mode, Reader
from lmcache_core.serde.codec import CACHEGEN_SERDE, LOSSLESS_SERDE
from lmcache_core.serde.plane_layout import PlaneLayout

STREAM_BYTES = 132
"""Smallest stream: its length, and the final states of its coders."""
RUN_ELEMENTS = 1 << 15
"""Most elements of one stream in a blob without loss."""
TABLE_BYTES = 4
"""Smallest table of frequencies: one symbol."""
GROUP_BYTES = 3
"""Shift and shape of a group of channels."""


def check_stated_size(header: RecordHeader, payload: memoryview) -> None:
    """Check that the payload is one from which tensors of the stated shapes can be decoded, as far
    as its size and the heads of its blobs say. Reads only these heads.

    What states no more bytes than it has passes, and so does a record of an unknown serde.

    Raises:
        SerdeError: It states more than can be decoded from it.
    """
    if header.serde not in (CACHEGEN_SERDE, LOSSLESS_SERDE, *DOCUMENTED_NAMES):
        return
    for spec in header.tensors:
        least_bytes = size = num_bytes(spec.shape, spec.dtype)
        if size <= spec.length:
            continue
        if header.serde not in DOCUMENTED_NAMES:  # those make nothing smaller
            blob = Reader(payload[spec.offset : spec.offset + spec.length])
            least_bytes = HEAD.size + _least_bytes(spec, blob.head(), size)
        if spec.length < least_bytes:
            raise SerdeError(
                f"{spec.length} bytes for {list(spec.shape)} of {spec.dtype}, which are encoded in"
                f" at least {least_bytes}"
            )


def _least_bytes(spec: TensorSpec, head: Head, size: int) -> int:
    """Return the size of the smallest blob with that head, which must be one of the tensor."""
    if head.mode is Mode.STORED:
        return size
    if head.mode is Mode.LOSSLESS:
        elements, block = head.sizes[0] | head.sizes[1] << 32, head.sizes[2]
        if elements * head.itemsize != size or not block:
            raise _mismatch(spec, head)
        num_tables, num_streams = -(-elements // block), -(-elements // RUN_ELEMENTS)
        return (
            num_tables * TABLE_BYTES + num_streams * STREAM_BYTES + elements * (head.itemsize - 1)
        )
    planes, tokens, channels, _ = head.sizes
    if planes * tokens * channels * DTYPE_ITEMSIZE[spec.dtype] != size:
        raise _mismatch(spec, head)
    layout = PlaneLayout(planes, tokens, channels)
    scale_bytes = 4 if head.mode is Mode.BY_PLANE else tokens * head.itemsize
    of_plane = 1 + scale_bytes + layout.groups * GROUP_BYTES + layout.sections * STREAM_BYTES
    return planes * of_plane


def _mismatch(spec: TensorSpec, head: Head) -> SerdeError:
    return SerdeError(
        f"an encoded tensor of sizes {head.sizes} in a record that states {list(spec.shape)} of"
        f" {spec.dtype}"
    )
