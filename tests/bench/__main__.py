"""`make bench`: measure, print, and rewrite docs/benchmarks.md."""

from __future__ import annotations

import platform
import tempfile
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from tests.bench import engines, limits, report, tiers
from tests.bench.measure import Figure

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "benchmarks.md"


def main() -> None:
    """Run everything; takes a few minutes."""
    console = Console()
    torch.set_num_threads(1)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with tempfile.TemporaryDirectory(prefix="lmcache-bench-") as scratch, Progress(*columns, console=console) as progress:
        directory = Path(scratch)
        task = progress.add_task("limits of this machine")
        copy, socket = limits.copy_limit(), limits.socket_limit()
        write, read = limits.file_limits(directory)
        figures: list[Figure] = [copy, socket, write, read]
        for verify_hot in ("always", "never"):
            both = "one copy and one digest of every byte, one after the other"
            notes = (both, both if verify_hot == "always" else "one copy of every byte")
            progress.update(task, description=f"hot tier, verify_hot: {verify_hot}")
            with engines.embedded(verify_hot) as engine:
                figures += engines.measure(engine, f"hot tier, embedded, verify_hot {verify_hot}", copy, notes)
            progress.update(task, description=f"sidecar, verify_hot: {verify_hot}")
            with engines.behind_sidecar(directory, verify_hot) as engine:
                figures += engines.measure(engine, f"hot tier, sidecar, verify_hot {verify_hot}", copy, notes)
        progress.update(task, description="lm:// over loopback")
        figures += tiers.lm_figures(directory, socket)
        progress.update(task, description="disk")
        figures += tiers.disk_figures(directory, (write, read))
    console.print(report.as_table(figures))
    report.rewrite(DOCUMENT, figures, f"{platform.machine()}, {torch.get_num_threads()} torch thread, Python {platform.python_version()}")
    console.print(f"written to {DOCUMENT.relative_to(Path.cwd()) if DOCUMENT.is_relative_to(Path.cwd()) else DOCUMENT}")


if __name__ == "__main__":
    main()
