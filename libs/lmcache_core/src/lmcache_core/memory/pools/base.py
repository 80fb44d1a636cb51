"""Interface of a pool, and what it hands out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(eq=False)
class KVObj:
    """A slot of a pool, and the part of it that one chunk fills.

    Attributes:
        chunk_idx: Which slot.
        size: Bytes of the chunk.
        data: A view of the slot's memory in the shape and dtype of the chunk; its content is
            undefined until it is written.
    """

    chunk_idx: int
    size: int
    data: torch.Tensor


class BasePool(ABC):
    """Hands out slots."""

    @abstractmethod
    def allocate(self, kv_chunk: torch.Tensor) -> KVObj | None:
        """A slot for a chunk of that shape and dtype; moves no data.

        Args:
            kv_chunk: The KV that is to be kept.

        Returns:
            A slot, owned by the caller until `free`; None when the pool is full.

        Raises:
            ValueError: Such a chunk does not fit a slot, whether the pool is full or not.
        """

    @abstractmethod
    def free(self, kv_obj: KVObj) -> None:
        """Take a slot back; its `data` is not to be used any more.

        Raises:
            IntegrityError: It is free already, or another pool's.
        """

    @abstractmethod
    def check_integrity(self) -> None:
        """Compare the books: each slot is free or handed out, once.

        Raises:
            IntegrityError: They do not balance.
        """
