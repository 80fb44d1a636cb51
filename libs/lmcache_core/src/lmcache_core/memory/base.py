"""Interfaces of memory: the format of a chunk, the reference-counted object that holds one, and the
allocator.

No torch at run time.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple

from lmcache_core.memory.dtypes import num_bytes

if TYPE_CHECKING:
    import torch


class MemoryFormat(Enum):
    """How to interpret the bytes of a memory object. The numbers are documented and never
    change.
    """

    UNDEFINED = 0
    KV_BLOB = 1
    """`[2, num_layers, num_tokens, hidden_dim]`"""
    BINARY = 2
    """A compressed or otherwise encoded array."""
    BINARY_BUFFER = 3
    """Encoded bytes outside any arena."""

    def token_dim(self) -> int:
        """Return the dimension that counts tokens."""
        return 2 if self is MemoryFormat.KV_BLOB else 0


@dataclass(slots=True)
class MemoryObjMetadata:
    """Content and location of a memory object.

    Attributes:
        shape: Shape of the tensor in it (`torch.Size` is a tuple of ints).
        dtype: `torch.dtype`, its name, or None for plain bytes.
        address: Offset in the arena, bytes.
        phy_size: Bytes taken from the arena, alignment included.
        ref_count: References held; at zero the memory is freed.
    """

    shape: Sequence[int]
    dtype: torch.dtype | str | None
    address: int
    phy_size: int
    ref_count: int
    fmt: MemoryFormat = MemoryFormat.UNDEFINED

    def get_size(self) -> int:
        """Return the size of the content in bytes, without alignment."""
        return num_bytes(self.shape, self.dtype if self.dtype is not None else "uint8")


class MemoryObj(ABC):
    """A reference-counted piece of memory. Release a reference with `with obj:` or
    `ref_count_down()`.
    """

    __slots__ = ("metadata",)
    metadata: MemoryObjMetadata
    """Description of the content. Not a copy: do not change it."""

    def get_memory_format(self) -> MemoryFormat:
        """Return the format of the content."""
        return self.metadata.fmt

    @abstractmethod
    def ref_count_up(self) -> None:
        """Take one more reference."""

    @abstractmethod
    def ref_count_down(self) -> None:
        """Release one reference; releasing the last one frees the memory."""

    @abstractmethod
    def get_ref_count(self) -> int:
        """Return the references held now."""

    @property
    @abstractmethod
    def byte_array(self) -> memoryview:
        """The content as bytes, `get_size()` of them, sharing memory. Valid while a reference is
        held.
        """

    @property
    @abstractmethod
    def tensor(self) -> torch.Tensor:
        """The content as a tensor of `metadata.shape` and `metadata.dtype`, sharing memory.
        Needs torch.
        """

    def get_size(self) -> int:
        """Return the size of the content in bytes, without alignment."""
        return self.metadata.get_size()

    def __enter__(self) -> MemoryObj:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.ref_count_down()


class FreeBlock(NamedTuple):
    """A free extent `[start, start + size)` of an arena, bytes."""

    start: int
    size: int


class MemoryAllocatorInterface(ABC):
    """Allocates memory objects."""

    @abstractmethod
    def allocate(
        self,
        shape: Sequence[int],
        dtype: torch.dtype | str | None,
        fmt: MemoryFormat = MemoryFormat.UNDEFINED,
    ) -> MemoryObj | None:
        """Return memory for a tensor of that shape and dtype.

        Returns:
            An object with one reference, which the caller owns; its content is undefined. None if
                there is no room.
        """

    @abstractmethod
    def free(self, memory_obj: MemoryObj) -> None:
        """Free the memory. Not for callers, which release references with `ref_count_down`
        instead.
        """

    @abstractmethod
    def get_ref_count(self, memory_obj: MemoryObj) -> int:
        """Return the references held on that object."""

    @abstractmethod
    def check_integrity(self) -> None:
        """Check the accounting: free + used is the capacity, nothing overlaps, neighbours are
        coalesced.

        Raises:
            IntegrityError: It does not add up.
        """
