"""Ways to encode a chunk, each a name and a function; what is measured of one is measured of
all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass

import msgspec
import torch
import zstandard
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

from tests.bench import codec_documented

RAW_NAME, RAW_BITS = "bf16, raw", 16
SCALE_BITS = 16
GROUP_SIZE = 32
ZSTD_LEVEL = 3
KEY = CacheEngineKey("vllm", "bench/codec", 1, 0, "0" * 64)


@dataclass(frozen=True)
class Scheme:
    """One way to encode.

    Attributes:
        name: As the tables say it.
        apply: Given a chunk, bf16 `[2, num_layers, num_tokens, hidden]`: what it decodes to, and
            how many bits it took, all counted.
        note: What is counted.
    """

    name: str
    apply: Callable[[torch.Tensor], tuple[torch.Tensor, float]]
    note: str = ""


def keep(kv: torch.Tensor) -> tuple[torch.Tensor, float]:
    """As it is."""
    return kv, float(kv.numel() * RAW_BITS)


def grouped(bits: int) -> Callable[[torch.Tensor], tuple[torch.Tensor, float]]:
    """Signed integers in groups of 32 channels, the largest magnitude of a group its scale, kept
    in float16.
    """
    top = 2 ** (bits - 1) - 1

    def apply(kv: torch.Tensor) -> tuple[torch.Tensor, float]:
        groups = kv.float().unflatten(-1, (-1, GROUP_SIZE))
        scales = (groups.abs().amax(-1, keepdim=True) / top).half().float()
        whole = (groups / scales.masked_fill(scales == 0, 1.0)).round().clamp(-top, top)
        return (whole * scales).flatten(-2).to(kv.dtype), float(
            kv.numel() * bits + scales.numel() * SCALE_BITS
        )

    return apply


def zstd(kv: torch.Tensor) -> tuple[torch.Tensor, float]:
    """The chunk's bytes through zstd."""
    packed = zstandard.ZstdCompressor(level=ZSTD_LEVEL).compress(raw_bytes(kv))
    decoded = torch.frombuffer(
        bytearray(zstandard.ZstdDecompressor().decompress(packed)), dtype=kv.dtype
    )
    return decoded.view(kv.shape), float(8 * len(packed))


def documented(kv: torch.Tensor) -> tuple[torch.Tensor, float]:
    """The documented algorithm, its coder ideal."""
    quantised = codec_documented.quantise(kv)
    return quantised.values(), quantised.bits()


def raw_bytes(kv: torch.Tensor) -> memoryview:
    """The bytes of a contiguous chunk, not copied."""
    return memoryview(kv.view(torch.uint8).numpy()).cast("B")


class CodecScheme:
    """A codec of the library, through the interface that the tiers use.

    Args:
        codec: Open; the caller closes it.
    """

    def __init__(self, codec: ChunkCodec) -> None:
        self._codec = codec

    def encode(self, kv: torch.Tensor) -> EncodedPayload | None:
        """Encode a contiguous chunk; None: it stays raw."""
        payload = raw_bytes(kv)
        return self._codec.encode(
            (TensorSpec("", dtype_name(kv.dtype), tuple(kv.shape), 0, len(payload)),), payload
        )

    def header(self, encoded: EncodedPayload) -> RecordHeader:
        """The header of its record, with what the encoder measured."""
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
        """The payload's bits, and those by which the record's head is longer than that of the
        raw record.
        """
        encoded = self.encode(kv)
        if encoded is None:
            return keep(kv)
        header, decoded = self.header(encoded), torch.empty_like(kv)
        self.decode(header, encoded, decoded)
        num_bytes = kv.numel() * kv.itemsize
        raw_head = encode_head(raw_header(KEY, kv.shape, kv.dtype, header.digest), num_bytes)
        head = encode_head(header, len(encoded.payload))
        return decoded, float(8 * (len(encoded.payload) + len(head) - len(raw_head)))


@contextmanager
def opened(profile: str, num_threads: int) -> Iterator[CodecScheme]:
    """A codec of the library by its name, ready, closed at the end."""
    from lmcache_core.serde import create_codec

    codec = create_codec(profile, num_threads)
    if codec is None:
        raise ValueError(f"{profile!r} leaves chunks as they are: it is no codec")
    codec.open()
    with closing(codec):
        yield CodecScheme(codec)


BASELINES = (
    Scheme(RAW_NAME, keep),
    Scheme("zstd -3 on bf16", zstd),
    Scheme("int8, groups of 32", grouped(8), "a float16 scale for each group"),
    Scheme("int4, groups of 32", grouped(4), "a float16 scale for each group"),
    Scheme("documented algorithm, ideal coder", documented, "streams, tables, lengths, maxima"),
)
