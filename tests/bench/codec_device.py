"""The codec's kernel on a GPU, next to a copy of the same bytes in its memory; nothing is reported
unless the values are the CPU codec's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from lmcache_core.record import RecordHeader
from lmcache_core.serde.blob import Reader
from lmcache_core.serde.chunk_codec import Profile
from lmcache_core.serde.codec import CACHEGEN_SERDE
from lmcache_core.serde.device import DeviceDecoder, device_tables
from lmcache_core.serde.plane_layout import PlaneLayout
from lmcache_core.serde.quantised_blob import QuantisedBlob, read_quantised
from lmcache_core.serde.tables import bell_curves
from lmcache_kernels.cachegen_decode import cachegen_decode
from lmcache_kernels.codec_shape import CodecShape, EncodedPlanes
from lmcache_kernels.codec_tables import CodecTables

from tests.bench.codec_schemes import opened
from tests.bench.codec_synthetic import synthetic_kv
from tests.bench.measure import Figure, timed

NUM_CHUNKS = 8
"""Chunks of a round: more than a GPU's caches hold."""
PER_LAUNCH = (1, 2, 8)
"""Chunks that are decoded by one launch."""


@dataclass(frozen=True)
class Record:
    """A chunk, encoded by the CPU codec.

    Attributes:
        header: The record's header.
        payload: Its payload: one blob.
        values: What the CPU codec decodes, bf16 `[2, layers, tokens, channels]`.
    """

    header: RecordHeader
    payload: memoryview
    values: torch.Tensor

    @classmethod
    def of(cls, profile: Profile, kv: torch.Tensor) -> Record:
        """Encode and decode a chunk on the CPU."""
        name = CACHEGEN_SERDE if profile is Profile.STANDARD else f"{CACHEGEN_SERDE}:{profile}"
        with opened(name, 0) as codec:
            encoded = codec.encode(kv)
            assert encoded is not None
            values = torch.empty_like(kv)
            codec.decode(codec.header(encoded), encoded, values)
            return cls(codec.header(encoded), encoded.payload, values)

    @property
    def layout(self) -> PlaneLayout:
        """Of the blob."""
        sides, layers, tokens, channels = self.values.shape
        return PlaneLayout(sides * layers, tokens, channels)

    @property
    def blob(self) -> QuantisedBlob:
        """The arrays of the blob."""
        reader = Reader(self.payload)
        return read_quantised(reader, reader.head(), self.layout, bell_curves().levels)


@dataclass(frozen=True)
class Launch:
    """Several chunks as the kernel takes them, on a device.

    Attributes:
        encoded: Their streams.
        scales: Their scales.
        levels: Of their planes.
        shape: Of all their planes.
        by_token: Whether tokens have scales of their own.
        out: Where values go, bf16 `[planes, tokens, channels]`.
    """

    encoded: EncodedPlanes
    scales: torch.Tensor
    levels: list[int]
    shape: CodecShape
    by_token: bool
    out: torch.Tensor

    @classmethod
    def of(cls, record: Record, number: int, device: torch.device) -> Launch:
        """So many copies of a record in one launch."""
        blob, cut = record.blob, record.layout
        parts = (blob.shifts, blob.shapes, blob.lengths.reshape(-1), blob.words)
        shape = CodecShape(number * cut.planes, cut.tokens, cut.channels, cut.group, cut.section)
        return cls(
            EncodedPlanes(*(_repeated(part, number, device) for part in parts)),
            _repeated(blob.scales.view("i4"), number, device),
            blob.levels * number,
            shape,
            blob.by_token,
            torch.zeros(shape.sizes, dtype=torch.bfloat16, device=device),
        )

    def decode(self, tables: CodecTables) -> None:
        """Decode on the device, without waiting for it."""
        cachegen_decode(
            self.encoded, self.scales, self.levels, self.shape, tables, self.out, self.by_token
        )


def _repeated(part: npt.NDArray[Any], number: int, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(np.concatenate([part] * number)).to(device)


def gpu_figures() -> list[Figure]:
    """Every profile; none without CUDA."""
    if not torch.cuda.is_available():
        return []
    kv = synthetic_kv()
    device = torch.device("cuda")
    chunks = [kv.to(device) for _ in range(NUM_CHUNKS)]
    targets = [torch.zeros_like(chunk) for chunk in chunks]
    copies = timed(
        _finished(
            lambda: [target.copy_(chunk) for target, chunk in zip(targets, chunks, strict=True)]
        )
    )
    name = f"limit: device copy of {NUM_CHUNKS} chunks, {torch.cuda.get_device_name()}"
    figures = [Figure(name, NUM_CHUNKS * kv.nbytes, copies)]
    for profile in Profile:
        record = Record.of(profile, kv)
        figures += launch_figures(profile, record, device, figures[0], torch.cuda.synchronize)
        figures.append(record_figure(profile, record, targets, figures[0]))
    return figures


def launch_figures(
    profile: Profile,
    record: Record,
    device: torch.device,
    limit: Figure,
    wait: Callable[[], object],
) -> list[Figure]:
    """The kernel alone, on words that are on the device, by the number of chunks in a launch.

    Args:
        profile: Of the record.
        record: The chunk.
        device: Where it is decoded.
        limit: A copy of `NUM_CHUNKS` of them on the device.
        wait: Waits for the device.

    Raises:
        AssertionError: Other values came back than from the CPU codec.
    """
    figures, tables = [], device_tables(bell_curves(), device)
    for number in PER_LAUNCH:
        launches = [Launch.of(record, number, device) for _ in range(NUM_CHUNKS // number)]

        def decode(_turn: int) -> None:
            for launch in launches:  # noqa: B023 (run at once)
                launch.decode(tables)
            wait()

        title = f"GPU: cachegen {profile}: decode, {number} chunks a launch"
        note = "one warp a section of 128 channels"
        figures.append(Figure(title, limit.num_bytes, timed(decode), limit, note))
        for launch in launches:
            _check(profile, launch.out.view(number, *record.values.shape), record)
    return figures


def record_figure(
    profile: Profile, record: Record, targets: Sequence[torch.Tensor], limit: Figure
) -> Figure:
    """Whole records, from host memory.

    Raises:
        AssertionError: Other values came back than from the CPU codec.
    """
    decoder = DeviceDecoder(targets[0].device)

    def decode() -> None:
        for target in targets:
            decoder.begin(record.header, record.payload, target.view(-1).view(torch.uint8))

    seconds = timed(_finished(decode))
    for target in targets:
        _check(profile, target[None], record)
    title = f"GPU: cachegen {profile}: decode from host"
    return Figure(title, limit.num_bytes, seconds, limit, "with checks and the copy")


def _check(profile: Profile, found: torch.Tensor, record: Record) -> None:
    for values in found.cpu():
        if not torch.equal(values.view(torch.int16), record.values.view(torch.int16)):
            raise AssertionError(f"{profile}: the kernel read other values than the CPU codec")


def _finished(work: Callable[[], object]) -> Callable[[int], None]:
    def run(_turn: int) -> None:
        work()
        torch.cuda.synchronize()

    return run
