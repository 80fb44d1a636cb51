"""The bytes of one encoded tensor: a fixed head, then arrays whose sizes follow from it.
Specification: `docs/codec.md`.
"""

from __future__ import annotations

import math
import struct
from enum import IntEnum
from typing import TYPE_CHECKING

from lmcache_core.errors import SerdeError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

MAGIC = b"KVB1"
HEAD = struct.Struct("<4sBBBBIIII")
Buffer = bytes | bytearray | memoryview


class Mode(IntEnum):
    """How a tensor is encoded."""

    STORED = 0
    LOSSLESS = 1
    BY_TOKEN = 2
    BY_PLANE = 3


class Head:
    """The fixed fields of a blob.

    Attributes:
        dtype: Number of the element type; its meaning depends on the mode.
        itemsize: Bytes of an element.
        sizes: Four numbers, whose meaning depends on the mode.
    """

    __slots__ = ("dtype", "itemsize", "mode", "sizes")

    def __init__(
        self, mode: Mode, dtype: int, itemsize: int, sizes: tuple[int, int, int, int]
    ) -> None:
        self.mode = mode
        self.dtype = dtype
        self.itemsize = itemsize
        self.sizes = sizes

    def pack(self) -> bytes:
        """Return its bytes."""
        return HEAD.pack(MAGIC, self.mode, self.dtype, self.itemsize, 0, *self.sizes)


class Reader:
    """Reads a blob from the front, never beyond its end.

    Raises:
        SerdeError: From every method, if there are too few bytes or they are invalid.
    """

    def __init__(self, blob: memoryview) -> None:
        self._blob = blob
        self._at = 0

    def head(self) -> Head:
        """Return the head."""
        magic, mode, dtype, itemsize, reserved, *sizes = HEAD.unpack(self.take(HEAD.size))
        if magic != MAGIC or reserved or mode not in Mode.__members__.values():
            raise SerdeError("not an encoded tensor, or one of a later version")
        return Head(Mode(mode), dtype, itemsize, (sizes[0], sizes[1], sizes[2], sizes[3]))

    def take(self, num_bytes: int) -> memoryview:
        """Return the next bytes."""
        if not 0 <= num_bytes <= len(self._blob) - self._at:
            raise SerdeError(
                f"an encoded tensor of {len(self._blob)} bytes ends where {num_bytes} more are"
                f" needed at {self._at}"
            )
        self._at += num_bytes
        return self._blob[self._at - num_bytes : self._at]

    def array(self, dtype: str, count: int) -> npt.NDArray[np.generic]:
        """Return the next array, little-endian; a view if it is aligned, else a copy."""
        import numpy as np  # heads are read where there are no packages for codecs

        view = self.take(np.dtype(dtype).itemsize * count)
        return np.require(np.frombuffer(view, dtype), requirements=["A"])

    @property
    def left(self) -> int:
        """Number of bytes that have not been read yet."""
        return len(self._blob) - self._at

    def finish(self) -> None:
        """Check that nothing is left."""
        if self.left:
            raise SerdeError(f"{self.left} bytes too many after an encoded tensor")


def next_power_of_two(number: int) -> int:
    """Return the smallest power of two that is at least that number."""
    return 1 << max(0, math.ceil(number) - 1).bit_length()
