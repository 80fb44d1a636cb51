"""How far a bench is, on standard error: a bar on a terminal, else a line for each phase."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from lmcache_ctl.bench.report import Step


@contextlib.contextmanager
def progress_of_phases() -> Iterator[Callable[[Step], None]]:
    """What to call with each step, for as long as the block lasts."""
    console = Console(stderr=True, highlight=False, markup=False)
    if not console.is_terminal:
        yield (
            lambda step: (
                console.print(f"{step.phase}: {step.num_calls} calls", soft_wrap=True)
                if step.is_over
                else None
            )
        )
        return
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TextColumn("{task.fields[calls]} calls"),
    )
    with Progress(*columns, console=console) as bars:
        tasks: dict[str, TaskID] = {}

        def tell(step: Step) -> None:
            if step.phase not in tasks:
                tasks[step.phase] = bars.add_task(step.phase, total=1.0, calls=0)
            bars.update(tasks[step.phase], completed=step.share, calls=step.num_calls)

        yield tell
