"""How fast chunks are encoded and decoded, in raw bytes; one thread, two, and a copy of the same
bytes in turn.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import zstandard

from tests.bench.codec_schemes import ZSTD_LEVEL, opened, raw_bytes
from tests.bench.measure import GB, ROUNDS

THREADS = (1, 2)
ZSTD_BLOCKS = 8
"""A zstd frame has no parts that threads could share: the chunk is cut into blocks, a frame
each, the same with any number of threads.
"""


@dataclass(frozen=True)
class Subject:
    """Something that encodes one chunk and decodes it.

    Attributes:
        name: As the tables say it.
        num_threads: How many threads it may use.
        raw_bytes: Bytes that a call goes over.
        encoded_bytes: What they become.
        encode: Does it; what it returns is dropped.
        decode: Undoes it.
    """

    name: str
    num_threads: int
    raw_bytes: int
    encoded_bytes: int
    encode: Callable[[], object]
    decode: Callable[[], object]

    @property
    def ratio(self) -> float:
        """How many times smaller."""
        return self.raw_bytes / self.encoded_bytes


@dataclass(frozen=True)
class Pace:
    """One direction, its rounds in turn with the others'.

    Attributes:
        num_bytes: Raw bytes of a round.
        seconds: Each round.
        copies: A one-thread copy of as many bytes in the same round.
        first: The first subject in the same round: the one with one thread.
    """

    num_bytes: int
    seconds: tuple[float, ...]
    copies: tuple[float, ...]
    first: tuple[float, ...]

    @property
    def rate(self) -> float:
        """Median, GB/s (10^9 raw bytes)."""
        return self.num_bytes / statistics.median(self.seconds) / GB

    @property
    def spread(self) -> tuple[float, float]:
        """Slowest and fastest round, GB/s."""
        return self.num_bytes / max(self.seconds) / GB, self.num_bytes / min(self.seconds) / GB

    @property
    def copy_share(self) -> float:
        """Rate as a share of the copy's, median over the rounds."""
        return statistics.median(
            copy / mine for copy, mine in zip(self.copies, self.seconds, strict=True)
        )

    @property
    def scaling(self) -> float:
        """How many times faster than the first subject, median over the rounds."""
        return statistics.median(
            first / mine for first, mine in zip(self.first, self.seconds, strict=True)
        )


@dataclass(frozen=True)
class SpeedRow:
    """One subject, measured."""

    name: str
    num_threads: int
    ratio: float
    encode: Pace
    decode: Pace


def measure(subjects: Sequence[Subject], rounds: int = ROUNDS) -> list[SpeedRow]:
    """Time both directions of subjects that do the same with other numbers of threads, each round
    in turn with a copy of as many bytes.

    Args:
        subjects: The first is what the others are compared with.
        rounds: How many count; one more is run before.
    """
    num_bytes = subjects[0].raw_bytes
    source = torch.zeros(num_bytes, dtype=torch.uint8).random_()
    target = torch.zeros_like(source)

    def direction(works: Sequence[Callable[[], object]]) -> list[Pace]:
        seconds: list[list[float]] = [[] for _ in (None, *works)]
        for _ in range(rounds + 1):
            for work, of_work in zip((lambda: target.copy_(source), *works), seconds, strict=True):
                begin = time.perf_counter()
                work()
                of_work.append(time.perf_counter() - begin)
        copies, *mine = (tuple(of_work[1:]) for of_work in seconds)
        return [Pace(num_bytes, of_work, copies, mine[0]) for of_work in mine]

    encodes = direction([subject.encode for subject in subjects])
    decodes = direction([subject.decode for subject in subjects])
    return [
        SpeedRow(subject.name, subject.num_threads, subject.ratio, encode, decode)
        for subject, encode, decode in zip(subjects, encodes, decodes, strict=True)
    ]


def measure_profile(name: str, kv: torch.Tensor) -> list[SpeedRow]:
    """A profile of the library on one chunk, from payload to payload, with each number of threads.

    Raises:
        AssertionError: It kept the chunk raw, or numbers of threads give other bytes or values, or
            a lossless one lost something.
    """
    with ExitStack() as stack:
        schemes = [stack.enter_context(opened(name, threads)) for threads in THREADS]
        encoded = schemes[0].encode(kv)
        if encoded is None:
            raise AssertionError(f"{name} kept the chunk raw: there is nothing to time")
        header = schemes[0].header(encoded)
        subjects, outs = [], []
        for scheme, threads in zip(schemes, THREADS, strict=True):
            again = scheme.encode(kv)
            if again is None or again.payload != encoded.payload:
                raise AssertionError(f"{name} encodes to other bytes with {threads} threads")
            outs.append(torch.zeros_like(kv))
            decode = partial(scheme.decode, header, encoded, outs[-1])
            subjects.append(
                Subject(
                    name,
                    threads,
                    kv.nbytes,
                    len(encoded.payload),
                    partial(scheme.encode, kv),
                    decode,
                )
            )
        rows = measure(subjects)
    expected = outs[0] if encoded.lossy else kv
    if not all(torch.equal(out.view(torch.int16), expected.view(torch.int16)) for out in outs):
        raise AssertionError(f"{name} decoded other values than it should")
    return rows


def measure_zstd(kv: torch.Tensor) -> list[SpeedRow]:
    """Zstd on the same bytes, in blocks that threads share.

    Raises:
        AssertionError: Other bytes came back.
    """
    data = raw_bytes(kv)
    size = -(-len(data) // ZSTD_BLOCKS)
    blocks = [data[begin : begin + size] for begin in range(0, len(data), size)]
    frames = [_compress(block) for block in blocks]
    if b"".join(map(_decompress, frames)) != data:
        raise AssertionError("zstd gave other bytes back")
    with ExitStack() as stack:
        subjects = []
        for threads in THREADS:
            pool = stack.enter_context(ThreadPoolExecutor(threads))
            encode, decode = (
                partial(_map, pool, _compress, blocks),
                partial(_map, pool, _decompress, frames),
            )
            subjects.append(
                Subject(
                    f"zstd -{ZSTD_LEVEL}", threads, len(data), sum(map(len, frames)), encode, decode
                )
            )
        return measure(subjects)


def _map(
    pool: ThreadPoolExecutor, work: Callable[[Any], bytes], blocks: Sequence[Any]
) -> list[bytes]:
    return list(pool.map(work, blocks))


def _compress(block: memoryview) -> bytes:
    return zstandard.ZstdCompressor(level=ZSTD_LEVEL).compress(block)


def _decompress(frame: bytes) -> bytes:
    return zstandard.ZstdDecompressor().decompress(frame)
