"""The codec's kernels on a GPU, beside a copy of the same bytes in its memory; nothing is
reported unless the bytes are the CPU codec's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from lmcache_core.serde.blob import Mode
from lmcache_core.serde.chunk_codec import Profile, quantiser_of
from lmcache_core.serde.codec import CACHEGEN_SERDE
from lmcache_core.serde.device import (
    decode_on_device,
    device_tables,
    encode_on_device,
)
from lmcache_core.serde.quantised_blob import PlaneLayout, Quantiser
from lmcache_core.serde.tables import bell_curves
from lmcache_kernels.cachegen_decode import cachegen_decode
from lmcache_kernels.cachegen_encode import cachegen_encode
from lmcache_kernels.cachegen_quantize import (
    QuantizedPlanes,
    cachegen_quantize_by_plane,
    cachegen_quantize_by_token,
)
from lmcache_kernels.codec_shape import CodecShape, EncodedPlanes
from lmcache_kernels.codec_tables import CodecTables

from tests.bench.codec_schemes import opened
from tests.bench.codec_synthetic import synthetic_kv
from tests.bench.measure import Figure, timed

NUM_CHUNKS = 8
"""Chunks of a round: more than a GPU's caches hold."""


@dataclass(frozen=True)
class Subject:
    """A profile and chunks of one shape on a device.

    Attributes:
        chunks: bf16 `[2, layers, tokens, channels]` each.
        quantiser: Of the profile.
        shape: Of a chunk, in planes.
        tables: On the device.
    """

    chunks: list[torch.Tensor]
    quantiser: Quantiser
    shape: CodecShape
    tables: CodecTables

    @classmethod
    def of(cls, profile: Profile, chunks: list[torch.Tensor]) -> Subject:
        """A profile on those chunks."""
        sides, layers, tokens, channels = chunks[0].shape
        cut = PlaneLayout(sides * layers, tokens, channels)
        shape = CodecShape(cut.planes, tokens, channels, cut.group, cut.section)
        return cls(
            chunks,
            quantiser_of(profile, chunks[0].shape),
            shape,
            device_tables(bell_curves(), chunks[0].device),
        )

    @property
    def by_token(self) -> bool:
        """Whether tokens have scales of their own."""
        return self.quantiser.mode is Mode.BY_TOKEN

    def encode(self, chunk: torch.Tensor) -> tuple[QuantizedPlanes, EncodedPlanes]:
        """One chunk, to words on the device."""
        kv, levels = chunk.view(self.shape.sizes), self.quantiser.levels
        planes = (
            cachegen_quantize_by_token(kv, levels)
            if self.by_token
            else cachegen_quantize_by_plane(kv, self.quantiser.fineness)
        )
        return planes, cachegen_encode(
            planes.values, self.shape, levels, self.tables, wraps=self.by_token
        )

    def decode(self, planes: QuantizedPlanes, encoded: EncodedPlanes, out: torch.Tensor) -> None:
        """One chunk, from words on the device."""
        target = out.view(self.shape.sizes)
        cachegen_decode(
            encoded,
            planes.scales,
            self.quantiser.levels,
            self.shape,
            self.tables,
            target,
            self.by_token,
        )


def gpu_figures() -> list[Figure]:
    """Every profile, encode and decode; none without CUDA."""
    if not torch.cuda.is_available():
        return []
    kv = synthetic_kv()
    chunks = [kv.to("cuda") for _ in range(NUM_CHUNKS)]
    num_bytes = NUM_CHUNKS * kv.nbytes
    targets = [torch.zeros_like(chunk) for chunk in chunks]
    copies = timed(
        _finished(
            lambda: [target.copy_(chunk) for target, chunk in zip(targets, chunks, strict=True)]
        )
    )
    figures = [
        Figure(
            f"limit: device copy of {NUM_CHUNKS} chunks, {torch.cuda.get_device_name()}",
            num_bytes,
            copies,
        )
    ]
    for profile in Profile:
        figures += figures_of(Subject.of(profile, chunks), profile, targets, figures[0])
    return figures


def figures_of(
    subject: Subject, profile: Profile, targets: list[torch.Tensor], limit: Figure
) -> list[Figure]:
    """Kernels alone, on words that stay on the device; and whole blobs, which end and begin on the
    host.

    Raises:
        AssertionError: A blob is not the CPU codec's, or other values came back.
    """
    check(subject, profile)
    encoded = [subject.encode(chunk) for chunk in subject.chunks]
    blobs = [_blob(subject, chunk) for chunk in subject.chunks]

    def decode() -> None:
        for (planes, words), target in zip(encoded, targets, strict=True):
            subject.decode(planes, words, target)

    shape, dtype = subject.chunks[0].shape, subject.chunks[0].dtype
    works: list[tuple[str, Callable[[], object], str]] = [
        (
            "encode, kernels",
            lambda: [subject.encode(chunk) for chunk in subject.chunks],
            "chunk by chunk; waits once a chunk, for the lengths",
        ),
        ("decode, kernels", decode, "chunk by chunk; one warp a section of 128 channels"),
        (
            "encode to host",
            lambda: [_blob(subject, chunk) for chunk in subject.chunks],
            "with the copy of the blob to pageable memory",
        ),
        (
            "decode from host",
            lambda: [decode_on_device(blob, shape, dtype, subject.tables) for blob in blobs],
            "with checks and the copy",
        ),
    ]
    return [
        Figure(
            f"GPU: cachegen {profile}: {name}", limit.num_bytes, timed(_finished(work)), limit, note
        )
        for name, work, note in works
    ]


def check(subject: Subject, profile: Profile) -> None:
    """That the first chunk becomes the bytes and the values that the CPU codec makes of it.

    Raises:
        AssertionError: It does not.
    """
    kv = subject.chunks[0].cpu()
    with opened(
        CACHEGEN_SERDE if profile is Profile.STANDARD else f"{CACHEGEN_SERDE}:{profile}", 0
    ) as codec:
        expected = codec.encode(kv)
        blob = _blob(subject, subject.chunks[0])
        if expected is None or bytes(blob) != bytes(expected.payload):
            raise AssertionError(f"{profile}: the kernels wrote another blob than the CPU codec")
        wanted = torch.empty_like(kv)
        codec.decode(codec.header(expected), expected, wanted)
    values = decode_on_device(blob, kv.shape, kv.dtype, subject.tables)
    if not torch.equal(values.cpu().view(torch.int16), wanted.view(torch.int16)):
        raise AssertionError(f"{profile}: the kernels read other values than the CPU codec")


def _blob(subject: Subject, chunk: torch.Tensor) -> memoryview:
    pieces, _ = encode_on_device(chunk, subject.quantiser, subject.tables)
    return memoryview(b"".join(memoryview(piece).cast("B") for piece in pieces))


def _finished(work: Callable[[], object]) -> Callable[[int], None]:
    def run(_turn: int) -> None:
        work()
        torch.cuda.synchronize()

    return run
