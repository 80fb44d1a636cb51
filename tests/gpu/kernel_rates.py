"""The kernels alone, each held against a copy of the same bytes in the device's memory. A kernel
that does not give what its reference or the CPU codec gives is not reported.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from lmcache_core.blend.selection import RECOMPUTED_TAIL_TOKENS, share_of
from lmcache_core.record import RecordHeader
from lmcache_core.serde.blob import Reader
from lmcache_core.serde.chunk_codec import Profile
from lmcache_core.serde.codec import CACHEGEN_SERDE
from lmcache_core.serde.device import DeviceDecoder, device_tables
from lmcache_core.serde.plane_layout import PlaneLayout
from lmcache_core.serde.quantised_blob import read_quantised
from lmcache_core.serde.tables import bell_curves
from lmcache_kernels.blend_select import (
    blend_deviation,
    blend_deviation_reference,
    blend_select,
    blend_select_reference,
)
from lmcache_kernels.cachegen_decode import cachegen_decode
from lmcache_kernels.codec_shape import CodecShape, EncodedPlanes
from lmcache_kernels.pages import Pages
from lmcache_kernels.rope_rotate import Rotation, rope_rotate, rope_rotate_reference

from tests.bench.chunk_codec import opened, synthetic_kv
from tests.bench.measure import Figure, timed
from tests.fixtures.paged_cases import paged_gather, paged_scatter
from tests.gpu.report import Report, WrongBytes


@dataclass(frozen=True)
class Sizes:
    """How much is measured.

    Attributes:
        layers: Of a prompt's KV.
        tokens: Of a prompt.
        heads: Of a layer, each with 128 values.
        chunks: Encoded chunks of a round: more than a GPU's caches hold.
        chunk_tokens: Of each.
        per_launch: Chunks that are decoded by one launch.
        batches: Requests, and tokens of each, among which blending selects.
        calls: Selections of a round: one alone is shorter than the wait for it.
    """

    layers: int
    tokens: int
    heads: int
    chunks: int
    chunk_tokens: int
    per_launch: tuple[int, ...]
    batches: tuple[tuple[int, int], ...]
    calls: int


SIZES = Sizes(32, 4096, 8, 8, 256, (1, 2, 8), ((1, 4096), (16, 8192)), 100)
HEAD_SIZE, BLOCK_SIZE = 128, 16
SPREAD = 8
"""Pages over those of the prompt, so that a round does not read what the last one left in caches.
"""
DOCUMENT_TOKENS = 512
RATIO = 0.15
"""Share of the tokens that are selected: the default of `blend_recompute_ratio`."""
THETA = 10_000.0


def run(report: Report, sizes: Sizes = SIZES) -> None:
    """Measure every kernel.

    Raises:
        WrongBytes: One gives something else than it should.
    """
    for part in (paged, codec, blend):
        for figure in part(report, sizes):
            report.figure(figure)


def _launched(report: Report, work: Callable[[], object]) -> Callable[[int], None]:
    """Return work to be timed, which ends when the device has done it."""

    def run(turn: int) -> None:
        work()
        report.wait()

    return run


def _require(is_right: bool, what: str) -> None:
    if not is_right:
        raise WrongBytes(f"{what}: other values than the reference's")


# --- Pages ----------------------------------------------------------------------------------------


def paged(report: Report, sizes: Sizes) -> Iterator[Figure]:
    """Gather and scatter, one launch for all layers; with the check of the slots and the launch."""
    num_blocks = sizes.tokens // BLOCK_SIZE
    shape = (2, SPREAD * num_blocks, BLOCK_SIZE, sizes.heads, HEAD_SIZE)
    source, target = (
        [
            torch.zeros(shape, dtype=torch.bfloat16, device=report.device)
            for _ in range(sizes.layers)
        ]
        for _ in range(2)
    )
    for layer in source:
        layer.view(torch.int16).random_()
    blocks = torch.randperm(SPREAD * num_blocks)[:num_blocks]
    slots = (blocks[:, None] * BLOCK_SIZE + torch.arange(BLOCK_SIZE)).flatten()
    from_pages, to_pages = (
        Pages.of([layer[0] for layer in layers], [layer[1] for layer in layers])
        for layers in (source, target)
    )
    blob = torch.zeros(
        (2, sizes.layers, sizes.tokens, sizes.heads * HEAD_SIZE),
        dtype=torch.bfloat16,
        device=report.device,
    )
    limit = _limit(report, "prompt", blob)
    yield limit
    for name, work in (
        ("paged gather", lambda: paged_gather(from_pages, slots, blob)),
        ("paged scatter", lambda: paged_scatter(to_pages, slots, blob)),
    ):
        yield Figure(f"GPU: {name}", blob.nbytes, timed(_launched(report, work)), limit)
    for one, other in zip(source, target, strict=True):
        mine, theirs = (pages.flatten(1, 2)[:, slots.to(pages.device)] for pages in (one, other))
        _require(torch.equal(mine.view(torch.int16), theirs.view(torch.int16)), "paged copies")


def _limit(report: Report, what: str, tensor: torch.Tensor) -> Figure:
    copied = torch.zeros_like(tensor)
    seconds = timed(_launched(report, lambda: copied.copy_(tensor)))
    return Figure(f"limit: device copy of a {what}", tensor.nbytes, seconds)


# --- Encoded chunks -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Record:
    """A chunk, encoded by the CPU codec.

    Attributes:
        payload: One blob.
        values: What the CPU codec decodes, bf16 `[2, layers, tokens, channels]`.
    """

    header: RecordHeader
    payload: memoryview
    values: torch.Tensor

    @classmethod
    def of(cls, profile: Profile, kv: torch.Tensor) -> Record:
        """Encode and decode a chunk on the CPU."""
        name = CACHEGEN_SERDE if profile is Profile.STANDARD else f"{CACHEGEN_SERDE}:{profile}"
        with opened(name, 0) as scheme:
            encoded = scheme.encode(kv)
            assert encoded is not None
            values = torch.empty_like(kv)
            scheme.decode(scheme.header(encoded), encoded, values)
            return cls(scheme.header(encoded), encoded.payload, values)

    def launch(self, report: Report, number: int) -> tuple[Callable[[], None], torch.Tensor]:
        """Return what decodes so many copies of the chunk by one launch, without waiting for it,
        and where their values go.
        """
        sides, layers, tokens, channels = self.values.shape
        cut = PlaneLayout(sides * layers, tokens, channels)
        reader = Reader(self.payload)
        blob = read_quantised(reader, reader.head(), cut, bell_curves().levels)
        parts = (blob.shifts, blob.shapes, blob.lengths.reshape(-1), blob.words)
        *parts, scales = (
            torch.from_numpy(np.concatenate([part] * number)).to(report.device)
            for part in (*parts, blob.scales.view("i4"))
        )
        shape = CodecShape(number * cut.planes, cut.tokens, cut.channels, cut.group, cut.section)
        out = torch.zeros(shape.sizes, dtype=torch.bfloat16, device=report.device)
        tables = device_tables(bell_curves(), torch.device(report.device))
        levels, planes = blob.levels * number, EncodedPlanes(*parts)

        def decode() -> None:
            cachegen_decode(planes, scales, levels, shape, tables, out, blob.by_token)

        return decode, out

    def require_equal(self, profile: Profile, found: torch.Tensor) -> None:
        """Compare decoded chunks with what the CPU codec decodes."""
        for values in found.cpu().view(-1, *self.values.shape):
            is_same = torch.equal(values.view(torch.int16), self.values.view(torch.int16))
            _require(is_same, f"cachegen {profile}")


def codec(report: Report, sizes: Sizes) -> Iterator[Figure]:
    """Decoding of every profile."""
    kv = synthetic_kv(sizes.chunk_tokens, sizes.layers, sizes.heads * HEAD_SIZE)
    limit = _limit(report, "round of chunks", torch.stack([kv] * sizes.chunks).to(report.device))
    yield limit
    for profile in Profile:
        record = Record.of(profile, kv)
        yield from _launches(report, sizes, profile, record, limit)
        if not report.is_dry:
            yield _from_host(report, sizes, profile, record, limit)


def _launches(
    report: Report, sizes: Sizes, profile: Profile, record: Record, limit: Figure
) -> Iterator[Figure]:
    """The kernel alone, on words that are on the device, by the number of chunks in a launch."""
    for number in sizes.per_launch:
        launches = [record.launch(report, number) for _ in range(sizes.chunks // number)]
        seconds = timed(_launched(report, lambda: [decode() for decode, _ in launches]))  # noqa: B023 (run at once)
        for _, out in launches:
            record.require_equal(profile, out)
        title = f"GPU: cachegen {profile}: decode, {number} chunks a launch"
        yield Figure(title, limit.num_bytes, seconds, limit)


def _from_host(
    report: Report, sizes: Sizes, profile: Profile, record: Record, limit: Figure
) -> Figure:
    """Whole records from host memory, with checks and the copy."""
    decoder = DeviceDecoder(torch.device(report.device))
    targets = [torch.zeros_like(record.values, device=report.device) for _ in range(sizes.chunks)]

    def decode() -> None:
        for target in targets:
            decoder.begin(record.header, record.payload, target.view(-1).view(torch.uint8))

    seconds = timed(_launched(report, decode))
    for target in targets:
        record.require_equal(profile, target)
    return Figure(f"GPU: cachegen {profile}: decode from host", limit.num_bytes, seconds, limit)


# --- Blending -------------------------------------------------------------------------------------


def blend(report: Report, sizes: Sizes) -> Iterator[Figure]:
    """Rotation, deviation and selection."""
    yield from _rotations(report, sizes)
    for num_requests, num_tokens in sizes.batches:
        yield from _selections(report, sizes, num_requests, num_tokens)


def _rotations(report: Report, sizes: Sizes) -> Iterator[Figure]:
    """K of a prompt rotated and V compared, layer by layer, in turn with plain torch; a copy moves
    as many bytes.
    """
    layers = [
        torch.randn(sizes.tokens, sizes.heads, HEAD_SIZE, device=report.device).bfloat16()
        for _ in range(sizes.layers)
    ]
    targets = [torch.zeros_like(k) for k in layers]
    positions = torch.arange(sizes.tokens, device=report.device)
    halves = torch.arange(0, HEAD_SIZE, 2, device=report.device) / HEAD_SIZE
    angles = positions[:, None] * THETA**-halves
    table = torch.cat([angles.cos(), angles.sin()], 1)
    rotation = Rotation(positions % DOCUMENT_TOKENS, positions, table, table)
    is_valid = positions < sizes.tokens - DOCUMENT_TOKENS // 2  # the last document was not cached
    expected = torch.zeros_like(layers[0])
    rope_rotate_reference(layers[0], rotation, expected)
    _require(torch.equal(rope_rotate(layers[0], rotation), expected), "rope_rotate")
    sides = layers[0].flatten(1), layers[0].roll(1, 0).flatten(1), is_valid
    is_close = torch.allclose(blend_deviation(*sides), blend_deviation_reference(*sides), 1e-5, 0)
    _require(is_close, "blend_deviation")
    limit = _limit(report, "prompt's K", torch.stack(layers))
    yield limit
    for name, rotate, deviate in (
        ("", rope_rotate, blend_deviation),
        (", in plain torch", rope_rotate_reference, blend_deviation_reference),
    ):

        def rotate_all() -> None:
            for k, target in zip(layers, targets, strict=True):
                rotate(k, rotation, target)  # noqa: B023 (run at once)

        def deviate_all() -> None:
            for v, other in zip(layers, targets, strict=True):
                deviate(v.flatten(1), other.flatten(1), is_valid)  # noqa: B023

        for what, work in (("rope_rotate", rotate_all), ("blend_deviation", deviate_all)):
            seconds = timed(_launched(report, work))
            yield Figure(f"GPU: {what}{name}", limit.num_bytes, seconds, limit)


def _selections(
    report: Report, sizes: Sizes, num_requests: int, num_tokens: int
) -> Iterator[Figure]:
    """The most deviating tokens of requests of one length, in turn with torch.topk."""
    orders = [torch.randperm(num_tokens, device=report.device) for _ in range(num_requests)]
    deviation = torch.stack(orders).float()
    is_valid = torch.ones_like(deviation, dtype=torch.bool)
    count = share_of(num_tokens, RATIO)
    starts = range(0, (num_requests + 1) * num_tokens, num_tokens)

    def select_by(kernel: Callable[..., torch.Tensor]) -> torch.Tensor:
        counts = [count] * num_requests
        tail = RECOMPUTED_TAIL_TOKENS
        flat = kernel(deviation.flatten(), is_valid.flatten(), starts, counts, tail)
        return flat.view_as(is_valid)

    def select_by_topk() -> torch.Tensor:
        selected = torch.zeros_like(is_valid)
        selected[:, -RECOMPUTED_TAIL_TOKENS:] = True
        candidates = deviation[:, :-RECOMPUTED_TAIL_TOKENS]
        return selected.scatter_(1, candidates.topk(count, 1, sorted=False).indices, True)

    def select() -> torch.Tensor:
        return select_by(blend_select)

    chosen = select()
    _require(torch.equal(chosen, select_by(blend_select_reference)), "blend_select")
    _require(torch.equal(chosen, select_by_topk()), "blend_select, torch.topk")
    limit = None
    for what, work in (("torch.topk and a mask", select_by_topk), ("GPU: blend_select", select)):
        seconds = timed(_launched(report, lambda: [work() for _ in range(sizes.calls)]))  # noqa: B023
        microseconds = statistics.median(seconds) / sizes.calls * 1e6
        title = f"{what}, {num_requests} x {num_tokens:,} tokens, {microseconds:.1f} µs a call"
        limit = Figure(title, sizes.calls * deviation.nbytes, seconds, limit)
        yield limit
