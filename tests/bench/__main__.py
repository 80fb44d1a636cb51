"""`make bench`: measure, print, and rewrite docs/benchmarks.md."""

from __future__ import annotations

import argparse
import os
import platform
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from tests.bench import (
    blend,
    blend_time,
    codecs,
    event_cost,
    eviction,
    lookup,
    mlperf,
    peers,
    pictures,
    readme,
    routing,
    scale,
    storage_rest,
    tiers,
    vllm,
    workers,
)
from tests.bench.measure import ROUNDS
from tests.bench.report import Section, rewrite

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "benchmarks.md"
MACHINE = (
    f"Machine: {platform.machine()}, 1 torch thread, Python {platform.python_version()},"
    f" {os.cpu_count()} cores."
)
WITH_ROUNDS = f"{MACHINE} Medians of {ROUNDS} rounds."


@dataclass(frozen=True)
class Found:
    """What a part of the bench has found.

    Attributes:
        machine: First paragraph of its section.
        sections: Its tables.
        remarks: Sentences below them.
        plot: File below docs/, its text for those who do not see it, and its SVG.
        is_whole: Whether all of the section was measured; otherwise nothing is written.
    """

    machine: str
    sections: Sequence[Section]
    remarks: Sequence[str] = ()
    plot: tuple[str, str, str] | None = None
    is_whole: bool = True


class Bench:
    """Runs parts of the bench, each with a method of its name, and shows which is running."""

    def __init__(self, progress: Progress, directory: Path, options: argparse.Namespace) -> None:
        self._progress = progress
        self._task = progress.add_task("")
        self._directory = directory
        self._options = options

    def _run(self, name: str, work: Callable[[], Any]) -> Any:
        self._progress.update(self._task, description=name)
        return work()

    def bench(self) -> Found:
        return Found(WITH_ROUNDS, tiers.measure(self._run, self._directory))

    def codecs(self) -> Found:
        sections, remarks, svg = codecs.measure(self._run)
        plot = ("codec-break-even.svg", "Gain over raw bytes by bandwidth of the link", svg)
        return Found(WITH_ROUNDS, sections, remarks, plot)

    def lookup(self) -> Found:
        sections = self._run("lookup index in Redis", lookup.measure_index)
        return Found(f"{MACHINE} Medians of {lookup.NUM_ROUNDS} rounds.", sections)

    def lookup_rest(self) -> Found:
        measure = lookup.measure_rest
        return Found(MACHINE, self._run("lookups over REST", lambda: measure(self._directory)))

    def storage_rest(self) -> Found:
        return Found(WITH_ROUNDS, [storage_rest.measure(self._run, self._directory)])

    def scale(self) -> Found:
        sections, remark = scale.measure(self._run, self._directory)
        return Found(MACHINE, sections, [remark])

    def workers(self) -> Found:
        section, remark = workers.measure(self._run, self._directory)
        return Found(MACHINE, [section], [remark])

    def blend_quality(self) -> Found:
        sections, remarks, svg = blend.measure(self._run)
        plot = ("blend-quality.svg", "Gap closed by share of tokens recomputed", svg)
        return Found(MACHINE, sections, remarks, plot)

    def blend_time(self) -> Found:
        section, remark = blend_time.measure(self._run)
        return Found(MACHINE.replace("1 torch thread, ", ""), [section], [remark])

    def hit_ratio(self) -> Found:
        return Found("Simulated: nothing is timed.", [eviction.by_size(self._run)])

    def routing(self) -> Found:
        return Found("Simulated: nothing is timed.", *routing.measure(self._run))

    def event_cost(self) -> Found:
        section, remark = event_cost.measure(self._run)
        return Found(MACHINE, [section], [remark])

    def vllm(self) -> Found:
        sections, remark = vllm.measure(self._run)
        machine = vllm.described(MACHINE)
        return Found(machine, sections, [remark])

    def mlperf(self) -> Found:
        section, remark = mlperf.measure(self._run, self._directory)
        return Found(MACHINE, [section], [remark])

    def peers(self) -> Found:
        rows, mib = self._options.rows, self._options.mib
        section, remark = peers.measure(self._run, self._directory, rows, mib)
        is_whole = not rows and mib == peers.FULL_MIB
        return Found(MACHINE, [section], [remark], is_whole=is_whole)


PARTS = {"tiers": Bench.bench, "codecs": Bench.codecs, "lookup": Bench.lookup}
BY_NAME = {
    "blend_quality": Bench.blend_quality,
    "blend_time": Bench.blend_time,
    "event_cost": Bench.event_cost,
    "hit_ratio": Bench.hit_ratio,
    "lookup_rest": Bench.lookup_rest,
    "mlperf": Bench.mlperf,
    "peers": Bench.peers,
    "routing": Bench.routing,
    "scale": Bench.scale,
    "storage_rest": Bench.storage_rest,
    "vllm": Bench.vllm,
    "workers": Bench.workers,
}
"""Parts that are measured only by name: they take long, or need more than `make bench` has
installed.
"""


def show(console: Console, part: str, found: Found) -> None:
    """Print what a part has found, and write it to docs/benchmarks.md and what follows from it."""
    blocks = [*(section.as_markdown() for section in found.sections), *found.remarks]
    # One line a row, however narrow the terminal is.
    console.print(*blocks, sep="\n\n", soft_wrap=True, markup=False, highlight=False)
    if not found.is_whole:
        return
    if found.plot is not None:
        name, text, svg = found.plot
        DOCUMENT.with_name(name).write_text(svg, encoding="utf-8")
        blocks.append(f"![{text}]({name})")
    name = (PARTS | BY_NAME)[part].__name__.replace("_", "-")
    rewrite(DOCUMENT, name, found.machine, blocks)
    pictures.rewrite(DOCUMENT)
    readme.rewrite(DOCUMENT)
    console.print(f"written to {DOCUMENT}")


def main() -> None:
    """Run everything, or one part; takes a few minutes."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=__doc__)
    parser.add_argument(
        "part",
        nargs="?",
        choices=[*PARTS, *BY_NAME],
        help=f"measure this alone (default: {' and '.join(PARTS)})",
    )
    parser.add_argument(
        "--mib",
        type=int,
        default=peers.FULL_MIB,
        choices=(64, 128, 256, 512),
        help="of peers: KV of a prompt; only the table of %(default)s is written",
    )
    parser.add_argument(
        "--rows",
        nargs="+",
        default=(),
        choices=peers.ROWS,
        help="of peers: measure these alone, and write nothing",
    )
    options = parser.parse_args()
    console = Console()
    torch.set_num_threads(1)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with (
        tempfile.TemporaryDirectory(prefix="lmcache-bench-") as scratch,
        Progress(*columns, console=console) as progress,
    ):
        bench = Bench(progress, Path(scratch), options)
        for part in PARTS if options.part is None else (options.part,):
            try:
                found = (PARTS | BY_NAME)[part](bench)
            except (peers.PeerMissingError, vllm.VLLMMissingError) as exc:
                raise SystemExit(str(exc)) from exc
            show(console, part, found)


if __name__ == "__main__":
    main()
