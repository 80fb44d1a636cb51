"""The documented CacheGen serde: a tensor as bytes and back, on the codec that chunks are
encoded with. Needs torch and numba.
"""

from __future__ import annotations

from types import MappingProxyType

import torch

from lmcache_core._typing import override
from lmcache_core.config import LMCacheEngineConfig, LMCacheEngineMetadata
from lmcache_core.documented.serdes import (
    BytesLike,
    Deserializer,
    Serializer,
    check_elements,
    dense,
    seal,
    unseal,
)
from lmcache_core.errors import SerdeError
from lmcache_core.memory.dtypes import dtype_name
from lmcache_core.memory.views import bytes_under
from lmcache_core.record import RAW_SERDE, RecordHeader, TensorSpec
from lmcache_core.serde.cachegen import CacheGenConfig
from lmcache_core.serde.chunk_codec import CacheGenCodec, Profile
from lmcache_core.serde.codec import CACHEGEN_SERDE
from lmcache_core.serde.stated_size import check_stated_size

VLLM, HUGGINGFACE = "vllm", "huggingface"
_ORDERS = MappingProxyType({VLLM: (1, 0, 2, 3, 4), HUGGINGFACE: (1, 0, 3, 2, 4)})
"""The axes of KV, `[layers, 2, tokens, heads, size]` (vLLM) or `[layers, 2, heads, tokens, size]`,
as `[2, layers, tokens, heads, size]`. They swap axes in pairs, and so undo themselves.
"""


class _LayerBins:
    def make_key_bins(self, config: CacheGenConfig) -> torch.Tensor:
        """Return the bins of the keys of each layer, int64 `[nlayers]`."""
        return torch.tensor(config.bins_of_keys())

    def make_value_bins(self, config: CacheGenConfig) -> torch.Tensor:
        """Return the bins of the values of each layer, int64 `[nlayers]`."""
        return torch.tensor(config.bins_of_values())


class CacheGenSerializer(_LayerBins, Serializer):
    """Quantises and entropy-codes KV; what is no KV is encoded without loss. Constructing it makes
    the machine code ready.

    Args:
        config: `remote_serde` names the profile; the documented one where it names none.
        metadata: `fmt` says which axis of a five-dimensional tensor holds tokens.

    Raises:
        ConfigError: numba is not installed.
    """

    def __init__(self, config: LMCacheEngineConfig, metadata: LMCacheEngineMetadata) -> None:
        _, _, level = (config.remote_serde or "").partition(f"{CACHEGEN_SERDE}:")
        self._codec = CacheGenCodec(Profile(level) if level else Profile.STANDARD)
        self._codec.open()
        self._fmt = HUGGINGFACE if metadata.fmt == HUGGINGFACE else VLLM

    @override
    def to_bytes(self, tensor: torch.Tensor) -> bytes:
        """Encode a tensor, on the CPU.

        KV is `[layers, 2, tokens, heads, size]` (of Hugging Face `[layers, 2, heads, tokens,
        size]`) or `[2, layers, tokens, channels]`, of float32, float16 or bfloat16.
        """
        given = dense(tensor)
        fmt = self._fmt if given.dim() == 5 and given.shape[1] == 2 else ""
        kv = dense(given.permute(_ORDERS[fmt]).flatten(3)) if fmt else given
        raw = bytes_under(kv)
        spec = TensorSpec("", dtype_name(kv.dtype), tuple(kv.shape), 0, kv.nbytes)
        smaller = self._codec.encode((spec,), raw) if kv.nbytes else None
        if smaller is None:
            return seal(CACHEGEN_SERDE, given, raw, (fmt, RAW_SERDE, ""))
        return seal(CACHEGEN_SERDE, given, smaller.payload, (fmt, smaller.serde, smaller.profile))


class CacheGenDeserializer(_LayerBins, Deserializer):
    """Reads what any `CacheGenSerializer` wrote. Constructing it makes the machine code ready.

    Args:
        dtype: See `Deserializer`.

    Raises:
        ConfigError: numba is not installed.
    """

    def __init__(
        self,
        config: LMCacheEngineConfig,
        metadata: LMCacheEngineMetadata,
        dtype: torch.dtype | str | None,
    ) -> None:
        super().__init__(dtype)
        self._codec = CacheGenCodec(Profile.STANDARD)
        self._codec.open()

    @override
    def from_bytes(self, bs: BytesLike) -> torch.Tensor:
        head, payload = unseal(bs, CACHEGEN_SERDE)
        if len(head.details) != 3 or head.details[0] not in ("", *_ORDERS):
            raise SerdeError(f"the details {head.details} name no encoding")
        fmt, serde, profile = head.details
        if fmt and (len(head.shape) != 5 or head.shape[1] != 2):
            raise SerdeError(f"a tensor of shape {head.shape} has no axes of {fmt}")
        apart = tuple(head.shape[axis] for axis in _ORDERS[fmt]) if fmt else head.shape
        shape = (*apart[:3], apart[3] * apart[4]) if fmt else apart
        spec = TensorSpec("", head.dtype, shape, 0, len(payload))
        header = RecordHeader(b"", serde, profile, serde == CACHEGEN_SERDE, (spec,), b"")
        if serde == RAW_SERDE:
            check_elements(head, payload)
        elif self._codec.decodes(header):
            check_stated_size(header, payload)
        else:
            raise SerdeError(f"needs the tables of profile {profile!r}, which are not here")
        kv = torch.empty(shape, dtype=head.torch_dtype)
        out = bytes_under(kv)
        if serde == RAW_SERDE:
            out[:] = payload
        else:
            self._codec.decode(header, payload, out)
            check_elements(head, out)
        return self._converted(kv.view(apart).permute(_ORDERS[fmt]).contiguous() if fmt else kv)

    def get_output_buffer(self, nlayers: int, nchannels: int, ntokens: int) -> torch.Tensor:
        """Return a buffer for `decode_function_gpu`: uint8 `[ntokens, 2 * nlayers * nchannels]`."""
        return torch.zeros((ntokens, 2 * nlayers * nchannels), dtype=torch.uint8)
