"""How far a certificate is, on standard error: a bar on a terminal, else nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


@contextlib.contextmanager
def progress_of_prompts(num_prompts: int) -> Iterator[Callable[[int], None]]:
    """What to call with the number of prompts done, for as long as the block lasts."""
    console = Console(stderr=True, highlight=False, markup=False)
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal) as bars:
        task = bars.add_task("prompts", total=num_prompts)
        yield lambda num_done: bars.update(task, completed=num_done)
