"""`make bench`: measure, print, and rewrite docs/benchmarks.md."""

from __future__ import annotations

import argparse
import os
import platform
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import torch
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from tests.bench import (
    allocation,
    blend_device,
    blend_part,
    blend_speed,
    codec_device,
    codec_part,
    disk,
    engines,
    identity,
    limits,
    lm_tier,
    lookup_index,
    lookup_rest,
    paged,
    peers,
    questions,
    readme,
    redis_tier,
    report,
    scale,
    small_chunks,
    storage_rest,
    tier_calls,
    vllm_part,
    workers,
)
from tests.bench.measure import ROUNDS, Figure

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "benchmarks.md"
PLOT = DOCUMENT.with_name("codec-break-even.svg")
BLEND_PLOT = DOCUMENT.with_name("blend-quality.svg")
DIGESTED_STORE = "one copy of every byte; the digest follows it in another thread"
CHECKED_LOAD = "one copy of every byte, and the digest right behind it"
COPY_NOTES = {
    "always": (DIGESTED_STORE, CHECKED_LOAD),
    "never": ("one copy of every byte", "one copy of every byte"),
}
T = TypeVar("T")


class Bench:
    """Runs one part after the other and says which."""

    def __init__(
        self,
        progress: Progress,
        directory: Path,
        mib: int = peers.FULL_MIB,
        rows: Sequence[str] = (),
    ) -> None:
        self._progress = progress
        self._task = progress.add_task("")
        self.directory = directory
        self.mib = mib
        self.rows = rows

    def run(self, name: str, work: Callable[[], T]) -> T:
        """One part."""
        self._progress.update(self._task, description=name)
        return work()

    def host_memory(self) -> list[Figure]:
        """The memory tier, contiguous and paged, embedded and behind a sidecar."""
        copy = limits.copy_work()
        figures = [self.run("limits of this machine", lambda: limits.copy_limit(copy))]
        for verify_hot, notes in COPY_NOTES.items():
            with engines.embedded(verify_hot) as engine:
                name = f"memory tier, embedded, verify_hot {verify_hot}"
                figures += self.run(name, lambda: engines.measure(engine, name, copy, notes))  # noqa: B023 (run at once)
            with engines.behind_sidecar(self.directory, verify_hot) as engine:
                name = f"memory tier, sidecar, verify_hot {verify_hot}"
                figures += self.run(
                    name,
                    lambda: engines.measure(engine, name, copy, (DIGESTED_STORE, notes[1])),  # noqa: B023
                )
        gathers = self.run("paged gather and scatter", paged.kernel_figures)
        figures += gathers
        for verify_hot in COPY_NOTES:
            figures += self.run(
                f"paged, embedded, verify_hot {verify_hot}",
                lambda: paged.engine_figures(verify_hot, gathers[0]),  # noqa: B023
            )
        return figures

    def slower_tiers(self) -> list[Figure]:
        """Disk, lm:// and Redis."""
        socket = self.run("raw socket", limits.socket_limit)
        return [
            *self.run("disk", lambda: disk.disk_figures(self.directory)),
            socket,
            *self.run("lm:// over loopback", lambda: lm_tier.lm_figures(self.directory, socket)),
            *self.run("Redis over loopback", redis_tier.redis_figures),
        ]


def sections(bench: Bench) -> Sequence[report.Section]:
    """Everything that is timed."""
    prompt = "4,096 tokens, Llama-3.1-8B shape, bf16: 512 MiB"
    found = [
        report.rates(f"Host memory: {prompt}", bench.host_memory()),
        report.rates(f"Slower tiers: {prompt}", bench.slower_tiers()),
        report.naming(bench.run("hashes, keys, lookups", identity.identity_rows)),
        report.answers(
            bench.run("lookup and stage", lambda: questions.answer_times(bench.directory))
        ),
        report.chunk_costs(bench.run("small chunks", small_chunks.chunk_costs)),
    ]
    measured = (
        ("GPU", paged.gpu_figures),
        ("GPU, codec", codec_device.gpu_figures),
        ("GPU, blending", blend_device.gpu_figures),
    )
    gpu = [figure for name, figures in measured for figure in bench.run(name, figures)]
    return [*found, report.rates("GPU", gpu)] if gpu else found


def with_rounds(machine: str) -> str:
    """The first paragraph of a section whose parts have `ROUNDS` rounds."""
    return f"Machine: {machine}. Medians of {ROUNDS} rounds."


def measure_tiers(bench: Bench, console: Console, machine: str) -> None:
    """The tiers and all that is not a codec."""
    timed = sections(bench)
    allocations = report.allocations(bench.run("allocations", allocation.allocation_rows))
    for section in [*timed, allocations]:  # allocations: terminal only
        section.show(console)
    report.rewrite(
        DOCUMENT, "bench", with_rounds(machine), [section.as_markdown() for section in timed]
    )


def measure_codecs(bench: Bench, console: Console, machine: str) -> None:
    """The codecs."""
    found = codec_part.measure(bench.run)
    for section in found.sections:
        section.show(console)
    for line in found.remarks:
        console.print(line)
    PLOT.write_text(found.plot, encoding="utf-8")
    picture = f"![Gain over raw bytes by bandwidth of the link]({PLOT.name})"
    report.rewrite(
        DOCUMENT,
        "codecs",
        with_rounds(machine),
        [*(section.as_markdown() for section in found.sections), *found.remarks, picture],
    )


def measure_vllm(bench: Bench, console: Console, machine: str) -> None:
    """The connector in a real vLLM."""
    try:
        found = vllm_part.measure(bench.run)
    except vllm_part.VLLMMissingError as exc:
        raise SystemExit(str(exc)) from exc
    for section in found.sections:
        section.show(console)
    console.print(found.remark)
    report.rewrite(
        DOCUMENT,
        "vllm",
        vllm_part.described(machine),
        [*(section.as_markdown() for section in found.sections), found.remark],
    )
    readme.rewrite(DOCUMENT)


def measure_tier(bench: Bench, console: Console, machine: str) -> None:
    """The tier in vLLM's scheduler; for the terminal alone."""
    console.print(machine)
    bench.run("LMCacheTier", lambda: tier_calls.measure(bench.directory)).show(console)


def measure_lookup(bench: Bench, console: Console, machine: str) -> None:
    """The lookup index in Redis."""
    found = bench.run("lookup index in Redis", lookup_index.measure)
    for section in found:
        section.show(console)
    described = f"Machine: {machine}. Medians of {lookup_index.NUM_ROUNDS} rounds."
    report.rewrite(DOCUMENT, "lookup", described, [section.as_markdown() for section in found])


def measure_lookup_rest(bench: Bench, console: Console, machine: str) -> None:
    """The lookup service over REST."""
    found = lookup_rest.measure(bench.run, bench.directory)
    for section in found:
        section.show(console)
    report.rewrite(
        DOCUMENT,
        "lookup-rest",
        f"Machine: {machine}.",
        [section.as_markdown() for section in found[:-1]],  # processor time: terminal only
    )


def measure_storage_rest(bench: Bench, console: Console, machine: str) -> None:
    """cache_storage over REST, beside lm://."""
    found = storage_rest.measure(bench.run, bench.directory)
    for section in found:
        section.show(console)
    report.rewrite(
        DOCUMENT, "storage-rest", with_rounds(machine), [section.as_markdown() for section in found]
    )


def measure_peers(bench: Bench, console: Console, machine: str) -> None:
    """Our engine, LMCache's and vLLM's, in turn."""
    try:
        section, remark = peers.measure(bench.run, bench.directory, bench.rows, bench.mib)
    except peers.PeerMissingError as exc:
        raise SystemExit(str(exc)) from exc
    # One line a row, however narrow the terminal is
    console.print(section.as_markdown(), remark, sep="\n\n", soft_wrap=True, markup=False)
    if bench.rows or bench.mib != peers.FULL_MIB:
        return  # the document has the whole table
    report.rewrite(DOCUMENT, "peers", f"Machine: {machine}.", [section.as_markdown(), remark])
    readme.rewrite(DOCUMENT)


def measure_scale(bench: Bench, console: Console, machine: str) -> None:
    """Many processes, many chunks, and idle services."""
    sections, remark = scale.measure(bench.run, bench.directory)
    for section in sections:
        section.show(console)
    console.print(remark)
    tables = [section.as_markdown() for section in sections]
    report.rewrite(DOCUMENT, "scale", f"Machine: {machine}.", [*tables, remark])


def measure_workers(bench: Bench, console: Console, machine: str) -> None:
    """Eight workers and their sidecar."""
    section, remark = workers.measure(bench.run, bench.directory)
    section.show(console)
    console.print(remark)
    report.rewrite(DOCUMENT, "workers", f"Machine: {machine}.", [section.as_markdown(), remark])


def measure_blend_quality(bench: Bench, console: Console, machine: str) -> None:
    """What blending costs answers."""
    found = blend_part.measure(bench.run)
    for section in found.sections:
        section.show(console)
    for line in found.remarks:
        console.print(line)
    BLEND_PLOT.write_text(found.plot, encoding="utf-8")
    picture = f"![Gap closed by share of tokens recomputed]({BLEND_PLOT.name})"
    tables = [section.as_markdown() for section in found.sections]
    report.rewrite(
        DOCUMENT, "blend-quality", f"Machine: {machine}.", [*tables, *found.remarks, picture]
    )


def measure_blend_time(bench: Bench, console: Console, machine: str) -> None:
    """What blending saves."""
    found = blend_speed.measure(bench.run)
    for section in found.sections:
        section.show(console)
    console.print(found.remark)
    first_tokens, _ = found.sections  # why that dtype was taken is for the terminal
    report.rewrite(
        DOCUMENT,
        "blend-time",
        f"Machine: {machine.replace('1 torch thread, ', '')}.",
        [first_tokens.as_markdown(), found.remark],
    )


PARTS = {"tiers": measure_tiers, "codecs": measure_codecs, "lookup": measure_lookup}
BY_NAME = {
    "blend_quality": measure_blend_quality,
    "blend_time": measure_blend_time,
    "lookup_rest": measure_lookup_rest,
    "peers": measure_peers,
    "scale": measure_scale,
    "storage_rest": measure_storage_rest,
    "tier": measure_tier,
    "vllm": measure_vllm,
    "workers": measure_workers,
}
"""Parts that are measured only when they are asked for: they take long, or need more than `make
bench` has installed.
"""


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
    arguments = parser.parse_args()
    part = arguments.part
    console = Console()
    torch.set_num_threads(1)
    machine = (
        f"{platform.machine()}, {torch.get_num_threads()} torch thread, Python"
        f" {platform.python_version()}, {os.cpu_count()} cores"
    )
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with (
        tempfile.TemporaryDirectory(prefix="lmcache-bench-") as scratch,
        Progress(*columns, console=console) as progress,
    ):
        bench = Bench(progress, Path(scratch), arguments.mib, arguments.rows)
        for name in PARTS if part is None else (part,):
            (PARTS | BY_NAME)[name](bench, console, machine)
    if part != "tier" and not arguments.rows and arguments.mib == peers.FULL_MIB:
        is_near = DOCUMENT.is_relative_to(Path.cwd())
        console.print(f"written to {DOCUMENT.relative_to(Path.cwd()) if is_near else DOCUMENT}")


if __name__ == "__main__":
    main()
