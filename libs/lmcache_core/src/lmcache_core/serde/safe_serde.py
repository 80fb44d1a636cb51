"""The Safe serde: a safetensors file of one tensor after the checked head of `tensor_bytes`. Needs
torch and safetensors.

Files are written by the library; only files that are exactly what it writes for one tensor of the
head's dtype and shape are read, which needs no library.

Source: the format is https://huggingface.co/docs/safetensors, "Format": length of the header as
    u64, the header as JSON, the data.
"""

from __future__ import annotations

from types import MappingProxyType

import safetensors
import safetensors.torch
import torch

from lmcache_core._typing import override
from lmcache_core.errors import SerdeError
from lmcache_core.serde.base import BytesLike, PlainDeserializer, Serializer
from lmcache_core.serde.tensor_bytes import (
    SerdeId,
    TensorHead,
    decoded_tensor,
    dense,
    head_of,
    seal,
    unseal,
)

TENSOR_KEY = "tensor_bytes"
MAX_HEADER_BYTES = 8 << 10
_LENGTH_BYTES = 8
_DTYPES = MappingProxyType(
    {
        "float64": "F64",
        "float32": "F32",
        "float16": "F16",
        "bfloat16": "BF16",
        "float8_e4m3fn": "F8_E4M3",
        "float8_e5m2": "F8_E5M2",
        "int64": "I64",
        "int32": "I32",
        "int16": "I16",
        "int8": "I8",
        "uint8": "U8",
        "bool": "BOOL",
    }
)
"""Names of the dtypes in safetensors."""


class SafeSerializer(Serializer):
    """Writes the tensor as a safetensors file, under the key `tensor_bytes`."""

    @override
    def to_bytes(self, t: torch.Tensor) -> bytes:
        """Raises:
        SerdeError: This release of safetensors writes other files than this serde knows to
            check: use the Fast serde.
        """
        tensor = dense(t)
        payload: bytes = safetensors.torch.save({TENSOR_KEY: tensor})
        head = head_of(SerdeId.SAFETENSOR, tensor, payload)
        try:
            _elements(head, memoryview(payload))
        except SerdeError as exc:
            raise SerdeError(
                f"safetensors {safetensors.__version__} writes files of another form; use the Fast"
                f" serde: {exc}"
            ) from exc
        return seal(head, payload)


class SafeDeserializer(PlainDeserializer):
    """Reads what `SafeSerializer` wrote."""

    @override
    def from_bytes_normal(self, b: BytesLike) -> torch.Tensor:
        head, file = unseal(b, SerdeId.SAFETENSOR)
        return decoded_tensor(head, _elements(head, file))


def _elements(head: TensorHead, file: memoryview) -> memoryview:
    """Return the data of a file that is exactly what safetensors writes for a tensor of that dtype
    and shape, under our key and without metadata.

    Raises:
        SerdeError: The file differs.
    """
    header_bytes = int.from_bytes(file[:_LENGTH_BYTES], "little")
    data_at = _LENGTH_BYTES + header_bytes
    if header_bytes > MAX_HEADER_BYTES or len(file) != data_at + head.num_bytes:
        raise SerdeError(
            f"a file of {len(file)} bytes with a header of {header_bytes} does not hold"
            f" {head.num_bytes} bytes of tensor"
        )
    sizes = ",".join(map(str, head.shape))
    entry = (
        f'{{"dtype":"{_DTYPES[head.dtype]}","shape":[{sizes}],"data_offsets":[0,{head.num_bytes}]}}'
    )
    # Spaces after it align the data.
    if bytes(file[_LENGTH_BYTES:data_at]).rstrip(b" ") != f'{{"{TENSOR_KEY}":{entry}}}'.encode():
        raise SerdeError(
            f"the file's header is not that of one tensor of {head.dtype} {head.shape}"
        )
    return file[data_at:]
