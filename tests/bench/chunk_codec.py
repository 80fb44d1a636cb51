"""A codec of the library on KV chunks, and a chunk of KV of Llama-3.1-8B's shape."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager

import msgspec
import torch
from lmcache_core.keys import CacheEngineKey
from lmcache_core.memory.dtypes import dtype_name
from lmcache_core.record import (
    REPORT_EXTENSION,
    Extension,
    RecordHeader,
    TensorSpec,
    encode_head,
    payload_digest,
    raw_header,
)
from lmcache_core.serde.codec import ChunkCodec, EncodedPayload

KEY = CacheEngineKey("vllm", "bench/codec", 1, 0, "0" * 64)
SEED = 31
CORRELATION = 0.6
OUTLIER_SHARE, OUTLIER_FACTOR = 0.03, 8.0
SCALE_SPREAD, OFFSET_SPREAD = (0.5, 0.3), (1.0, 0.1)
"""Of keys, and of values."""
VALUE_SCALE = 0.3


def raw_bytes(kv: torch.Tensor) -> memoryview:
    """Return the bytes of a contiguous chunk, not copied."""
    return memoryview(kv.view(torch.uint8).numpy()).cast("B")


class ChunkScheme:
    """Encodes and decodes chunks through the interface that the tiers use.

    Args:
        codec: Open; the caller closes it.
    """

    def __init__(self, codec: ChunkCodec) -> None:
        self._codec = codec

    def encode(self, kv: torch.Tensor) -> EncodedPayload | None:
        """Encode a contiguous chunk; None: it stays raw."""
        payload = raw_bytes(kv)
        spec = TensorSpec("", dtype_name(kv.dtype), tuple(kv.shape), 0, len(payload))
        return self._codec.encode((spec,), payload)

    def header(self, encoded: EncodedPayload) -> RecordHeader:
        """Return the header of its record, with the encoder's report."""
        report = Extension(REPORT_EXTENSION, False, msgspec.msgpack.encode(encoded.report))
        digest = payload_digest(encoded.payload)
        return RecordHeader(
            KEY.canonical(),
            encoded.serde,
            encoded.profile,
            encoded.lossy,
            encoded.tensors,
            digest,
            (report,),
        )

    def decode(self, header: RecordHeader, encoded: EncodedPayload, out: torch.Tensor) -> None:
        """Decode into a contiguous chunk of the same shape and dtype."""
        self._codec.decode(header, encoded.payload, raw_bytes(out))

    def __call__(self, kv: torch.Tensor) -> tuple[torch.Tensor, float]:
        """Return what a chunk decodes to, and its bits: those of the payload, and those by which
        the record's head is longer than that of the raw record.
        """
        encoded = self.encode(kv)
        num_bytes = kv.numel() * kv.itemsize
        if encoded is None:
            return kv, 8.0 * num_bytes
        header, decoded = self.header(encoded), torch.empty_like(kv)
        self.decode(header, encoded, decoded)
        raw_head = encode_head(raw_header(KEY, kv.shape, kv.dtype, header.digest), num_bytes)
        head = encode_head(header, len(encoded.payload))
        return decoded, float(8 * (len(encoded.payload) + len(head) - len(raw_head)))


@contextmanager
def opened(profile: str, num_threads: int) -> Iterator[ChunkScheme]:
    """Open a codec of the library by its name."""
    from lmcache_core.serde import create_codec

    codec = create_codec(profile, num_threads)
    if codec is None:
        raise ValueError(f"{profile!r} leaves chunks as they are: it is no codec")
    codec.open()
    with closing(codec):
        yield ChunkScheme(codec)


def synthetic_kv(num_tokens: int = 256, num_layers: int = 32, hidden: int = 1024) -> torch.Tensor:
    """Return a chunk, bf16 `[2, num_layers, num_tokens, hidden]`, the same every time. No such
    model is at hand, and speed and tables need its size.

    Each channel of each layer has a scale (log-normal, sigma 0.5 for keys and 0.3 for values) and
    an offset (normal, 1.0 and 0.1 of its scale); 3 % of the keys' channels have eight times the
    offset and scale. Along the tokens a channel is a Gaussian AR(1) of correlation 0.6. Values are
    0.3 of the keys' size.
    """
    dice = torch.Generator().manual_seed(SEED)
    kv = torch.empty(2, num_layers, num_tokens, hidden, dtype=torch.bfloat16)
    for side in range(2):
        scales = torch.randn(num_layers, hidden, generator=dice).mul(SCALE_SPREAD[side]).exp()
        offsets = torch.randn(num_layers, hidden, generator=dice) * OFFSET_SPREAD[side] * scales
        factors: torch.Tensor | float = VALUE_SCALE
        if side == 0:
            is_outlier = torch.rand(num_layers, hidden, generator=dice) < OUTLIER_SHARE
            factors = 1 + (OUTLIER_FACTOR - 1) * is_outlier
        scales, offsets = scales * factors, offsets * factors
        state = torch.randn(num_layers, hidden, generator=dice)
        for token in range(num_tokens):
            kv[side, :, token] = offsets + scales * state
            noise = torch.randn(num_layers, hidden, generator=dice)
            state = CORRELATION * state + (1 - CORRELATION**2) ** 0.5 * noise
    return kv
