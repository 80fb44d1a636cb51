"""How far drains are, on standard error: bars on a terminal, else a line for each step."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn

from lmcache_ctl.drain.watching import DrainOutcome
from lmcache_ctl.status.tables import drain_text


@contextlib.contextmanager
def progress_lines() -> Iterator[Callable[[DrainOutcome], None]]:
    """What to call with each step, for as long as the block lasts."""
    console = Console(stderr=True, highlight=False, markup=False)
    if not console.is_terminal:
        yield (
            lambda one: (
                None
                if one.drain is None
                else console.print(
                    f"{one.kind} {one.name}: {drain_text(one.drain)}", soft_wrap=True
                )
            )
        )
        return
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[state]}"),
    )
    with Progress(*columns, console=console) as bars:
        tasks: dict[tuple[str, str], TaskID] = {}

        def tell(one: DrainOutcome) -> None:
            if one.drain is None:
                return
            name = (one.kind, one.name)
            if name not in tasks:
                tasks[name] = bars.add_task(f"{one.kind} {one.name}", state="")
            done = one.drain.total - one.drain.left
            bars.update(
                tasks[name],
                total=max(one.drain.total, 1),
                completed=done if one.drain.total else 1,
                state=one.drain.state,
            )

        yield tell
