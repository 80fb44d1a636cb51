"""`make bench`: measure, print, and rewrite docs/benchmarks.md."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from functools import partial
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
from tests.bench.measure import Run
from tests.bench.report import Findings, rewrite

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "benchmarks.md"

Part = Callable[[Run, Path], Findings]
PARTS: dict[str, Part] = {
    "tiers": tiers.measure,
    "codecs": lambda run, _: codecs.measure(run),
    "lookup": lambda run, _: run("lookup index in Redis", lookup.measure_index),
}
BY_NAME: dict[str, Part] = {
    "blend_quality": lambda run, _: blend.measure(run),
    "blend_time": lambda run, _: blend_time.measure(run),
    "event_cost": lambda run, _: event_cost.measure(run),
    "hit_ratio": lambda run, _: eviction.by_size(run),
    "lookup_rest": lambda run, place: run("lookups over REST", partial(lookup.measure_rest, place)),
    "mlperf": mlperf.measure,
    "peers": peers.measure,
    "routing": lambda run, _: routing.measure(run),
    "scale": scale.measure,
    "storage_rest": storage_rest.measure,
    "vllm": lambda run, _: vllm.measure(run),
    "workers": workers.measure,
}
"""Parts that are measured only by name: they take long, or need more than `make bench` has
installed.
"""


def show(console: Console, part: str, found: Findings) -> None:
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
    name = "bench" if part == "tiers" else part.replace("_", "-")
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
        task = progress.add_task("")

        def run(name: str, work: Callable[[], Any]) -> Any:
            progress.update(task, description=name)
            return work()

        chosen = partial(peers.measure, parts=options.rows, mib=options.mib)
        measures: dict[str, Part] = PARTS | BY_NAME | {"peers": chosen}
        for part in PARTS if options.part is None else (options.part,):
            try:
                found = measures[part](run, Path(scratch))
            except (peers.PeerMissingError, vllm.VLLMMissingError) as exc:
                raise SystemExit(str(exc)) from exc
            show(console, part, found)


if __name__ == "__main__":
    main()
