"""`lmcache-demo`: run the demo and print its table."""

from __future__ import annotations

import signal
import tempfile
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from lmcache_demo.blending import Way
from lmcache_demo.cluster import Cluster
from lmcache_demo.processes import DemoError, Processes
from lmcache_demo.report import print_steps
from lmcache_demo.scenario import Scenario, Step
from lmcache_demo.settings import quiet_environment

EXIT_FAULT = 1
EXIT_INTERRUPTED = 130

app = typer.Typer(add_completion=False)


@app.command()
def demo(
    logs: Annotated[
        Path | None, typer.Option(help="Keep the logs of every process in this directory.")
    ] = None,
    redis: Annotated[
        bool, typer.Option(help="Let lookup use Redis where a redis-server is found.")
    ] = True,
) -> None:
    """Start the whole cache on this machine, run engines against it, and show where each prompt's
    KV came from.

    Exits with 1 when any step is not as it should be. Every process ends with the demo, also on
    Ctrl-C.
    """
    console = Console()
    signal.signal(signal.SIGTERM, _interrupt)
    with tempfile.TemporaryDirectory(prefix="lmcache-demo-", ignore_cleanup_errors=True) as scratch:
        directory = Path(scratch) if logs is None else logs
        directory.mkdir(parents=True, exist_ok=True)
        try:
            steps, blended = _run(directory, Path(scratch), redis, console)
        except KeyboardInterrupt:
            console.print("[yellow]interrupted; every process has been ended[/]")
            raise typer.Exit(EXIT_INTERRUPTED) from None
        except DemoError as exc:
            console.print(f"[red]the demo failed:[/] {escape(str(exc))}", highlight=False)
            raise typer.Exit(EXIT_FAULT) from None
    if not print_steps(steps, blended, console):
        raise typer.Exit(EXIT_FAULT)


def _run(
    directory: Path, scratch: Path, redis: bool, console: Console
) -> tuple[list[Step], list[Way]]:
    with (
        Processes(directory, quiet_environment()) as processes,
        console.status("starting") as status,
    ):
        cluster = Cluster(processes, scratch, redis)
        status.update("starting lookup, broker and cache_storage")
        cluster.start_services()
        console.print(f"lookup keeps its index in: [bold]{cluster.index}[/]")

        def say(text: str) -> None:
            console.print(f"[dim]·[/] {text}", highlight=False)
            status.update(text)

        scenario = Scenario(processes, cluster, scratch, say)
        return list(scenario.steps()), scenario.blended


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    app()
