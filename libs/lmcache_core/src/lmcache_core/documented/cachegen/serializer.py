"""The documented CacheGen serde: a tensor as bytes and back, on the codec that chunks are
encoded with. Needs torch and numba.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from lmcache_core._typing import override
from lmcache_core.config import LMCacheEngineConfig, LMCacheEngineMetadata
from lmcache_core.errors import SerdeError
from lmcache_core.memory.dtypes import dtype_name
from lmcache_core.memory.views import bytes_under
from lmcache_core.record import RAW_SERDE, RecordHeader, TensorSpec
from lmcache_core.serde.base import BytesLike, Deserializer, Serializer
from lmcache_core.serde.chunk_codec import CacheGenCodec, Profile
from lmcache_core.serde.codec import CACHEGEN_SERDE, LOSSLESS_SERDE
from lmcache_core.serde.tensor_bytes import SerdeId, check_elements, dense, head_of, seal, unseal

if TYPE_CHECKING:
    from lmcache_core.serde.cachegen import CacheGenConfig

_ANY_AXES, _TOKENS_THIRD, _TOKENS_FOURTH = 0, 1, 2
"""The axes of a tensor: any; `[layers, 2, tokens, heads, size]`; `[layers, 2,
heads, tokens, size]`.
"""
_ORDERS = {_TOKENS_THIRD: (1, 0, 2, 3, 4), _TOKENS_FOURTH: (1, 0, 3, 2, 4)}
"""Of these axes, as `[2, layers, tokens, heads, size]`."""
_ENCODINGS = (RAW_SERDE, LOSSLESS_SERDE, CACHEGEN_SERDE)
HUGGINGFACE = "huggingface"


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
        self._profile = Profile(level) if level else Profile.STANDARD
        self._codec = CacheGenCodec(self._profile)
        self._codec.open()
        self._axes = _TOKENS_FOURTH if metadata.fmt == HUGGINGFACE else _TOKENS_THIRD

    @override
    def to_bytes(self, tensor: torch.Tensor) -> bytes:
        """Encode a tensor, on the CPU.

        KV is `[layers, 2, tokens, heads, size]` (of Hugging Face `[layers, 2, heads, tokens,
        size]`) or `[2, layers, tokens, channels]`, of float32, float16 or bfloat16.
        """
        given = dense(tensor)
        axes = self._axes_of(given)
        kv = dense(_to_planes(given, axes))
        raw = bytes_under(kv)
        spec = TensorSpec("", dtype_name(kv.dtype), tuple(kv.shape), 0, kv.nbytes)
        smaller = self._codec.encode((spec,), raw) if kv.nbytes else None
        serde, profile, payload = (
            (RAW_SERDE, "", raw)
            if smaller is None
            else (smaller.serde, smaller.profile, smaller.payload)
        )
        return _sealed(given, axes, (serde, profile), payload)

    def _axes_of(self, given: torch.Tensor) -> int:
        return self._axes if given.dim() == 5 and given.shape[1] == 2 else _ANY_AXES


class CacheGenDeserializer(_LayerBins, Deserializer):
    """Reads what any `CacheGenSerializer` wrote. Constructing it makes the machine code ready.

    Args:
        config: Of the engine.
        metadata: What the KV is.
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
        self._buffer: torch.Tensor | None = None

    @override
    def from_bytes(self, bs: BytesLike) -> torch.Tensor:
        head, body = unseal(bs, SerdeId.CACHEGEN)
        if (
            len(body) < 3
            or body[0] > _TOKENS_FOURTH
            or body[1] >= len(_ENCODINGS)
            or not 3 + body[2] <= len(body)
        ):
            raise SerdeError("the payload names no known encoding")
        axes, serde = body[0], _ENCODINGS[body[1]]
        profile = bytes(body[3 : 3 + body[2]]).decode("ascii", "replace")
        payload = body[3 + body[2] :]
        if axes != _ANY_AXES and (len(head.shape) != 5 or head.shape[1] != 2):
            raise SerdeError(
                f"a tensor of shape {head.shape} has no tokens in a place of their own"
            )
        shape = _planes_shape(head.shape, axes)
        spec = TensorSpec("", head.dtype, shape, 0, len(payload))
        header = RecordHeader(b"", serde, profile, serde == CACHEGEN_SERDE, (spec,), b"")
        if serde == RAW_SERDE:
            if len(payload) != head.num_bytes:
                raise SerdeError(f"{len(payload)} raw bytes of a tensor of {head.num_bytes}")
        elif not self._codec.decodes(header):
            raise SerdeError(f"needs the tables of profile {profile!r}, which are not here")
        kv = torch.empty(shape, dtype=head.torch_dtype)
        out = bytes_under(kv)
        if serde == RAW_SERDE:
            out[:] = payload
        else:
            self._codec.decode(header, payload, out)
        check_elements(head, out)
        return self._converted(_from_planes(kv, head.shape, axes))

    def get_output_buffer(self, nlayers: int, nchannels: int, ntokens: int) -> torch.Tensor:
        """Return a buffer for `decode_function_gpu`, kept from call to call: uint8 `[ntokens, 2 *
        nlayers * nchannels]`.
        """
        width = 2 * nlayers * nchannels
        if (
            self._buffer is None
            or self._buffer.shape[1] != width
            or self._buffer.shape[0] < ntokens
        ):
            self._buffer = torch.zeros((ntokens, width), dtype=torch.uint8)
        return self._buffer[:ntokens]


def _sealed(given: torch.Tensor, axes: int, encoding: tuple[str, str], payload: BytesLike) -> bytes:
    """Return a payload, by serde and profile, in the container."""
    serde, profile = encoding
    marks = bytes([axes, _ENCODINGS.index(serde), len(profile)]) + profile.encode()
    body = b"".join((marks, payload))
    return seal(head_of(SerdeId.CACHEGEN, given, body), body)


def _to_planes(given: torch.Tensor, axes: int) -> torch.Tensor:
    """Return `[2, layers, tokens, channels]`, where the axes are known."""
    return given if axes == _ANY_AXES else given.permute(_ORDERS[axes]).flatten(3)


def _planes_shape(shape: tuple[int, ...], axes: int) -> tuple[int, ...]:
    if axes == _ANY_AXES:
        return shape
    *planes, heads, size = (shape[axis] for axis in _ORDERS[axes])
    return *planes, heads * size


def _from_planes(kv: torch.Tensor, shape: tuple[int, ...], axes: int) -> torch.Tensor:
    """Return what `_to_planes` was given, contiguous."""
    if axes == _ANY_AXES:
        return kv
    order = _ORDERS[axes]  # swaps axes in pairs, and so undoes itself
    return kv.reshape([shape[axis] for axis in order]).permute(order).contiguous()
