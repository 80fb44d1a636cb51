"""The part of the bench about codecs: quality, sizes, speed, break-even. Every codec of the
library is measured.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
from lmcache_core.serde import CODEC_NAMES

from tests.bench import codec_plot, codec_report, codec_torchac
from tests.bench.codec_model import Reader
from tests.bench.codec_neighbours import Neighbours
from tests.bench.codec_quality import QualityBench
from tests.bench.codec_schemes import BASELINES, RAW_NAME, Scheme, opened
from tests.bench.codec_sizes import SizeRow, size_rows
from tests.bench.codec_speed import THREADS, SpeedRow, measure_profile, measure_zstd
from tests.bench.codec_synthetic import synthetic_kv
from tests.bench.report import Section

PROFILE_NOTE = "payload, and what the record's head grows by"
NUM_SIZED_WINDOWS = 8
Run = Callable[[str, Callable[[], Any]], Any]


@dataclass(frozen=True)
class CodecPart:
    """What was measured.

    Attributes:
        sections: Its tables.
        plot: The break-even as SVG.
        remarks: Why a yardstick is missing, and what else the machine did.
    """

    sections: Sequence[Section]
    plot: str
    remarks: tuple[str, ...]


def on_the_model(
    run: Run, schemes: Sequence[Scheme]
) -> tuple[Section, list[SizeRow], torch.Tensor]:
    """Quality of each scheme, sizes on the model's own KV, and one chunk of it."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        reader = Reader.shipped()
        windows = run("codecs: KV of the model", lambda: reader.windows(pool))
        bench = run("codecs: what the model expects", lambda: QualityBench(reader, windows, pool))
        rows = [
            run(f"codecs: quality, {scheme.name}", lambda: bench.measure(scheme))  # noqa: B023
            for scheme in schemes
        ]
        first = torch.arange(len(windows.ids))[
            :: max(1, len(windows.ids) // NUM_SIZED_WINDOWS)
        ].tolist()
        chunks = [windows.chunks(window)[0] for window in first]
        sized = [scheme for scheme in schemes if scheme.name != RAW_NAME]
        sizes = run("codecs: sizes", lambda: size_rows("shipped model", chunks, sized))
    quality = codec_report.quality(rows, {scheme.name: scheme.note for scheme in schemes})
    return quality, sizes, chunks[0]


def speeds(run: Run, kv: torch.Tensor) -> tuple[list[SpeedRow], list[SpeedRow], tuple[str, ...]]:
    """Speeds of everything, those of the yardsticks, and which of these could not be had and
    why.
    """
    yardsticks, absent = [], []
    for build in codec_torchac.BUILDS:
        try:
            coder = run(f"codecs: compiling {build.name}", lambda: codec_torchac.compiled(build))  # noqa: B023 (run at once)
        except (ImportError, RuntimeError) as exc:
            absent.append(f"{build.name}: not measured, {str(exc).splitlines()[0]}.")
            continue
        yardsticks.append(
            run(
                f"codecs: {build.name}",
                lambda: codec_torchac.measure_torchac(kv, build.name, coder),  # noqa: B023
            )
        )
    rows = run("codecs: speed, zstd", lambda: measure_zstd(kv))
    for profile in CODEC_NAMES:
        rows += run(f"codecs: speed, {profile}", lambda: measure_profile(profile, kv))  # noqa: B023
    return [*rows, *yardsticks], yardsticks, tuple(absent)


def measure(run: Run) -> CodecPart:
    """Measure everything; torch is to have one thread.

    Args:
        run: Given a name and work, says the name, does the work, and returns what it returns.
    """
    kv = synthetic_kv()
    with ExitStack() as stack:
        codecs = [
            (profile, stack.enter_context(opened(profile, max(THREADS)))) for profile in CODEC_NAMES
        ]
        schemes = [*BASELINES, *(Scheme(profile, codec, PROFILE_NOTE) for profile, codec in codecs)]
        quality, sizes, small = on_the_model(run, schemes)
        sized = [scheme for scheme in schemes if scheme.name != RAW_NAME]
        sizes += run("codecs: sizes, synthetic", lambda: size_rows("synthetic", [kv], sized))
    with Neighbours() as others:
        rows, yardsticks, absent = speeds(run, kv)
        of_small = [
            replace(row, name=f"{profile}, {small.nbytes / 1e6:.2f} MB chunk of the model")
            for profile in CODEC_NAMES
            for row in run(f"codecs: small, {profile}", lambda: measure_profile(profile, small))  # noqa: B023
            if row.num_threads == 1
        ]
    remark = (
        f"While speeds were taken, other processes kept {others.cores:.2f} of {os.cpu_count()}"
        " cores busy."
    )
    # One curve each: what has threads, with all of them; of the yardsticks the faster.
    best = [row for row in rows if row.num_threads == max(THREADS)] + yardsticks[-1:]
    sections = (
        quality,
        codec_report.sizes(sizes),
        codec_report.speeds([*rows, *of_small], yardsticks),
        codec_report.break_evens(rows),
    )
    title = f"Loading KV over a link, encoded and raw; {max(THREADS)} threads (torchac: one)"
    return CodecPart(sections, codec_plot.draw(best, title), (*absent, remark))
