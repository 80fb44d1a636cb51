"""Interface of GPU connectors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch

from lmcache_core.memory.base import MemoryObj

if TYPE_CHECKING:
    from lmcache_core.record import TensorSpec


class GPUConnectorInterface(ABC):
    """Copies the KV of `[start, end)` between a serving engine's memory and a memory object in
    KV_BLOB format.
    """

    @abstractmethod
    def from_gpu(self, memory_obj: MemoryObj, start: int, end: int, **kwargs: Any) -> None:
        """Fill the memory object, whose shape is `get_shape(end - start)`, from the serving engine.

        Args:
            memory_obj: Filled; the caller holds a reference.
            start: First token.
            end: One past the last token.
            **kwargs: The serving engine's memory, as each connector defines it.

        Raises:
            ValueError: A kwarg is missing, or engine memory or memory object do not have the
                declared shape, dtype or format.
        """

    @abstractmethod
    def to_gpu(self, memory_obj: MemoryObj, start: int, end: int, **kwargs: Any) -> None:
        """Fill the serving engine's memory from the memory object. Arguments and errors as in
        `from_gpu`.
        """

    @abstractmethod
    def get_shape(self, num_tokens: int) -> torch.Size:
        """Return the shape of the memory object for that many tokens: `[2, num_layers, num_tokens,
        hidden_dim]`.
        """


@runtime_checkable
class DescribesTensors(Protocol):
    """Ability: a connector whose memory objects hold several tensors, for a model with layers of
    different shapes.
    """

    def tensor_specs(self, num_tokens: int) -> tuple[TensorSpec, ...]:
        """Return each tensor's group, dtype, shape, and place in the memory object, bytes."""


class OrderedGPUConnector(GPUConnectorInterface):
    """A connector that copies a chunk in the order of its bytes and says how far it is, so that a
    digest can follow in the cache.

    `from_gpu` and `to_gpu` take one more keyword argument, `progress`: called now and then, in the
    same thread, with how many bytes of the memory object, from the first, are filled or have been
    copied. A connector that never calls it is right, too. What is called makes no
    tensors: it may run in inference mode.
    """
