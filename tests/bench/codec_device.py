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
from lmcache_core.serde.plane_layout import PlaneLayout
from lmcache_core.serde.quantised_blob import Quantiser
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
PER_LAUNCH = (1, 2, 8)
"""Chunks that are encoded or decoded by one launch of each kernel."""


@dataclass(frozen=True)
class Subject:
    """A profile and chunks of one shape on a device.

    Attributes:
        chunks: bf16 `[2, layers, tokens, channels]` each, or several of them in one tensor.
        quantiser: Of the profile.
        shape: Of a tensor in `chunks`, in planes.
        levels: Of its planes.
        tables: On the device.
    """

    chunks: list[torch.Tensor]
    quantiser: Quantiser
    shape: CodecShape
    levels: tuple[int, ...]
    tables: CodecTables

    @classmethod
    def of(cls, profile: Profile, chunks: list[torch.Tensor], per_launch: int = 1) -> Subject:
        """A profile on those chunks, so many of them in one tensor."""
        sides, layers, tokens, channels = chunks[0].shape
        cut = PlaneLayout(sides * layers, tokens, channels)
        planes = per_launch * cut.planes
        quantiser = quantiser_of(profile, chunks[0].shape)
        if per_launch > 1:
            firsts = range(0, len(chunks), per_launch)
            chunks = [torch.stack(chunks[first : first + per_launch]) for first in firsts]
        return cls(
            chunks,
            quantiser,
            CodecShape(planes, tokens, channels, cut.group, cut.section),
            quantiser.levels * per_launch,
            device_tables(bell_curves(), chunks[0].device),
        )

    @property
    def by_token(self) -> bool:
        """Whether tokens have scales of their own."""
        return self.quantiser.mode is Mode.BY_TOKEN

    def encode(self, chunk: torch.Tensor) -> tuple[QuantizedPlanes, EncodedPlanes]:
        """One tensor, to words on the device."""
        kv, levels = chunk.view(self.shape.sizes), self.levels
        planes = (
            cachegen_quantize_by_token(kv, levels)
            if self.by_token
            else cachegen_quantize_by_plane(kv, self.quantiser.fineness)
        )
        return planes, cachegen_encode(
            planes.values, self.shape, levels, self.tables, wraps=self.by_token
        )

    def decode(self, planes: QuantizedPlanes, encoded: EncodedPlanes, out: torch.Tensor) -> None:
        """One tensor, from words on the device."""
        target = out.view(self.shape.sizes)
        cachegen_decode(
            encoded,
            planes.scales,
            self.levels,
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
        figures += launch_figures(profile, chunks, figures[0], torch.cuda.synchronize)
        figures += figures_of(Subject.of(profile, chunks), profile, figures[0])
    return figures


def launch_figures(
    profile: Profile, chunks: list[torch.Tensor], limit: Figure, wait: Callable[[], object]
) -> list[Figure]:
    """Kernels alone, on words that stay on the device, by the number of chunks in a launch.

    Args:
        profile: Of the codec.
        chunks: To be encoded.
        limit: A copy of them on the device.
        wait: Waits for the device.

    Raises:
        AssertionError: Chunks that are decoded together have other values than one by itself.
    """
    figures, alone = [], None
    for number in PER_LAUNCH:
        subject = Subject.of(profile, chunks, number)
        encoded = [subject.encode(chunk) for chunk in subject.chunks]
        targets = [torch.zeros_like(chunk) for chunk in subject.chunks]

        def encode(_turn: int) -> None:
            for chunk in subject.chunks:  # noqa: B023 (run at once)
                subject.encode(chunk)  # noqa: B023
            wait()

        def decode(_turn: int) -> None:
            for (planes, words), target in zip(encoded, targets, strict=True):  # noqa: B023
                subject.decode(planes, words, target)  # noqa: B023
            wait()

        for name, work, note in (
            ("encode", encode, "waits once a launch, for the lengths"),
            ("decode", decode, "one warp a section of 128 channels"),
        ):
            title = f"GPU: cachegen {profile}: {name}, {number} chunks a launch"
            figures.append(Figure(title, limit.num_bytes, timed(work), limit, note))
        decoded = torch.cat([target.view(-1, *chunks[0].shape) for target in targets])
        alone = decoded if alone is None else alone
        if not torch.equal(decoded.view(torch.int16), alone.view(torch.int16)):
            raise AssertionError(f"{profile}: other values from {number} chunks in a launch")
    return figures


def figures_of(subject: Subject, profile: Profile, limit: Figure) -> list[Figure]:
    """Whole blobs, which end and begin on the host.

    Raises:
        AssertionError: A blob is not the CPU codec's, or other values came back.
    """
    check(subject, profile)
    blobs = [_blob(subject, chunk) for chunk in subject.chunks]
    shape, dtype = subject.chunks[0].shape, subject.chunks[0].dtype
    works: list[tuple[str, Callable[[], object], str]] = [
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
