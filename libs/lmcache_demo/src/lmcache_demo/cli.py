"""`lmcache-demo`: run the demo and print its table."""

from __future__ import annotations

import signal
import tempfile
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from lmcache_demo.cluster import Cluster
from lmcache_demo.processes import DemoError, Processes
from lmcache_demo.scenario import Step, run_steps
from lmcache_demo.settings import quiet_environment

MIB = 1 << 20
MILLISECONDS = 1000
EXIT_FAULT = 1
EXIT_INTERRUPTED = 130

app = typer.Typer(add_completion=False)


@app.command()
def demo(
    logs: Annotated[Path | None, typer.Option(help="Keep the logs of every process in this directory.")] = None,
    redis: Annotated[bool, typer.Option(help="Let lookup use Redis where a redis-server is found.")] = True,
) -> None:
    """Start the whole cache on this machine, run four engines against it, and show where each prompt's KV came from.

    Exits with 1 when any step is not as it should be. Every process ends with the demo, also on Ctrl-C.
    """
    console = Console()
    signal.signal(signal.SIGTERM, _interrupt)
    with tempfile.TemporaryDirectory(prefix="lmcache-demo-", ignore_cleanup_errors=True) as scratch:
        directory = Path(scratch) if logs is None else logs
        directory.mkdir(parents=True, exist_ok=True)
        try:
            steps = _run(directory, Path(scratch), redis, console)
        except KeyboardInterrupt:
            console.print("[yellow]interrupted; every process has been ended[/]")
            raise typer.Exit(EXIT_INTERRUPTED) from None
        except DemoError as exc:
            console.print(f"[red]the demo failed:[/] {escape(str(exc))}", highlight=False)
            raise typer.Exit(EXIT_FAULT) from None
    console.print(_table(steps))
    faults = [f"{step.title}: {fault}" for step in steps for fault in step.faults]
    for fault in faults:
        console.print(f"[red]NOT AS SAID[/] {escape(fault)}", highlight=False)
    if faults:
        raise typer.Exit(EXIT_FAULT)
    console.print("[dim]prompt, reused: tokens · MiB: + into the engine, - out of it · TTFT: ms to the first token[/]")
    console.print("Every answer equals the one without a cache, token for token. No process is left.")


def _run(directory: Path, scratch: Path, redis: bool, console: Console) -> list[Step]:
    with Processes(directory, quiet_environment()) as processes, console.status("starting") as status:
        cluster = Cluster(processes, scratch, redis)
        status.update("starting lookup, broker and cache_storage")
        cluster.start_services()
        console.print(f"lookup keeps its index in: [bold]{cluster.index}[/]")

        def say(text: str) -> None:
            console.print(f"[dim]·[/] {text}", highlight=False)
            status.update(text)

        return list(run_steps(processes, cluster, say))


def _table(steps: list[Step]) -> Table:
    table = Table(title="A prompt's KV, computed once", title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("engine, step", no_wrap=True)
    for heading in ("prompt", "reused", "from", "MiB", "TTFT", "no cache", "equal"):
        table.add_column(heading, justify="left" if heading == "from" else "right", no_wrap=True)
    for step in steps:
        answer, reference = step.answer, step.reference
        table.add_row(
            step.title,
            str(answer.num_prompt_tokens),
            str(answer.num_reused_tokens),
            step.place,
            _moved(answer.retrieved_bytes, answer.stored_bytes),
            f"{answer.time_to_first_token_s * MILLISECONDS:.0f}",
            f"{reference.time_to_first_token_s * MILLISECONDS:.0f}",
            "yes" if step.tokens_equal else "NO",
        )
    return table


def _moved(retrieved: int, stored: int) -> str:
    parts = [f"+{retrieved / MIB:.0f}"] if retrieved else []
    parts += [f"-{stored / MIB:.0f}"] if stored else []
    return " ".join(parts) or "0"


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    app()
