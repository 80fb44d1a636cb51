"""The Fast serde: the tensor's bytes behind the checked head of `tensor_bytes`. Needs torch."""

from __future__ import annotations

import torch

from lmcache_core.memory.views import bytes_under
from lmcache_core.serde.base import BytesLike, PlainDeserializer, Serializer
from lmcache_core.serde.tensor_bytes import SerdeId, check_elements, dense, head_of, seal, unseal


class FastSerializer(Serializer):
    """Writes the bytes of the tensor as they are; two reads and one copy of them."""

    def to_bytes(self, t: torch.Tensor) -> bytes:
        """See `Serializer.to_bytes`."""
        tensor = dense(t)
        payload = bytes_under(tensor)
        return seal(head_of(SerdeId.FAST, tensor, payload), payload)


class FastDeserializer(PlainDeserializer):
    """Reads what `FastSerializer` wrote, shape included."""

    def from_bytes_normal(self, b: BytesLike) -> torch.Tensor:
        """See `PlainDeserializer.from_bytes_normal`."""
        head, payload = unseal(b, SerdeId.FAST)
        check_elements(head, payload)
        tensor = torch.empty(head.shape, dtype=head.torch_dtype, device="cpu")
        bytes_under(tensor)[:] = payload
        return tensor
