"""The documented serdes `torch`, `safetensor` and `fast` as codecs of chunks. Imports torch when
opened.

They do not make data smaller; they are for servers whose other clients expect these encodings. Each
tensor of the chunk is one encoding.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING

from lmcache_core._typing import override
from lmcache_core.errors import ConfigError, SerdeError
from lmcache_core.extras import install_line
from lmcache_core.memory.dtypes import dtype_name
from lmcache_core.memory.views import bytes_under, tensor_over
from lmcache_core.record import RecordHeader, TensorSpec
from lmcache_core.serde.codec import ChunkCodec, EncodedPayload, EncodingReport

if TYPE_CHECKING:
    from lmcache_core.serde.base import Deserializer, Serializer

DOCUMENTED_SERDES = MappingProxyType(
    {
        "torch": ("torch_serde", "TorchSerializer", "TorchDeserializer"),
        "safetensor": ("safe_serde", "SafeSerializer", "SafeDeserializer"),
        "fast": ("tensor_bytes", "FastSerializer", "FastDeserializer"),
    }
)
"""Module and classes of each."""


class DocumentedCodec(ChunkCodec):
    """A `ChunkCodec` over a documented serializer and deserializer; lossless.

    Args:
        serde: One of `DOCUMENTED_SERDES`.
    """

    lossy = False

    def __init__(self, serde: str) -> None:
        if serde not in DOCUMENTED_SERDES:
            raise ConfigError(f"serde={serde!r}: must be one of {', '.join(DOCUMENTED_SERDES)}")
        self._serde = serde
        self._serializer: Serializer | None = None
        self._deserializer: Deserializer | None = None

    @property
    @override
    def serde(self) -> str:
        return self._serde

    @override
    def open(self) -> None:
        """Raises:
        ConfigError: torch or safetensors is not installed.
        """
        module_name, serializer, deserializer = DOCUMENTED_SERDES[self._serde]
        try:
            module = importlib.import_module(f"lmcache_core.serde.{module_name}")
        except ModuleNotFoundError as exc:
            raise ConfigError(
                f"this serde needs the package {exc.name!r}: {install_line('torch')}"
            ) from exc
        self._serializer = getattr(module, serializer)()
        self._deserializer = getattr(module, deserializer)(None)

    @override
    def close(self) -> None:
        self._serializer = self._deserializer = None

    @override
    def encode(self, tensors: Sequence[TensorSpec], payload: memoryview) -> EncodedPayload | None:
        """Encode a raw payload. Never returns None, although the result is a little longer: users
        of such a serde expect that encoding.
        """
        serializer = self._serializer
        if serializer is None:
            raise SerdeError(f"the codec {self.serde} is not open")
        pieces: list[bytes] = []
        specs: list[TensorSpec] = []
        at = 0
        for spec in tensors:
            view = payload[spec.offset : spec.offset + spec.length]
            pieces.append(serializer.to_bytes(tensor_over(view, spec.shape, spec.dtype)))
            specs.append(TensorSpec(spec.group, spec.dtype, spec.shape, at, len(pieces[-1])))
            at += len(pieces[-1])
        num_elements = sum(math.prod(spec.shape) for spec in tensors)
        report = EncodingReport(8 * at / num_elements if num_elements else 0.0, len(payload), at)
        encoded = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        return EncodedPayload(memoryview(encoded), tuple(specs), self.serde, "", False, report)

    @override
    def decodes(self, header: RecordHeader) -> bool:
        return header.serde == self.serde

    @override
    def decode(self, header: RecordHeader, payload: memoryview, out: memoryview) -> None:
        deserializer = self._deserializer
        if deserializer is None:
            raise SerdeError(f"the codec {self.serde} is not open")
        at = 0
        for spec in header.tensors:
            tensor = deserializer.from_bytes(payload[spec.offset : spec.offset + spec.length])
            if tuple(tensor.shape) != spec.shape or dtype_name(tensor.dtype) != spec.dtype:
                raise SerdeError(
                    f"a tensor of {tensor.dtype} {tuple(tensor.shape)} where the record says"
                    f" {spec.dtype} {spec.shape}"
                )
            data = bytes_under(tensor)
            if at + len(data) > len(out):
                raise SerdeError(f"tensors of more than the {len(out)} bytes that are due")
            out[at : at + len(data)] = data
            at += len(data)
        if at != len(out):
            raise SerdeError(f"{at} bytes were decoded where {len(out)} are due")
