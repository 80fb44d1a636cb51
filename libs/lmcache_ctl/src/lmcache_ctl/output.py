"""Print findings: JSON or YAML for programs, tables for people."""

from __future__ import annotations

import contextlib
import re
import shutil
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Annotated, Any, Final, Literal, TypeVar

import msgspec
import typer
from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.table import Table
from rich.text import Text

from lmcache_ctl.errors import CtlError

UNITS: Final = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
UNKNOWN = "-"
UNLIMITED_COLUMNS: Final = 10_000
MIN_PROSE_COLUMNS: Final = 16
_STEERING = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\ud800-\udfff]")

T = TypeVar("T")


Output = Annotated[
    Literal["table", "json", "yaml"],
    typer.Option("--output", "-o", help="A table for people; JSON or YAML for programs."),
]
ListOutput = Annotated[
    Literal["table", "wide", "name", "json", "yaml"],
    typer.Option(
        "--output",
        "-o",
        help=(
            "A table for people, wide with all its columns on any terminal; names, one a line;"
            " JSON or YAML for programs."
        ),
    ),
]
"""For commands that list things with names."""


def show(
    value: T,
    output: str,
    as_table: Callable[[T], None],
    names: Callable[[T], Iterable[str]] = lambda _: (),
) -> None:
    """Print the findings of a command: structs, lists, dicts.

    Args:
        output: An `Output`, or a `ListOutput`.
        names: Returns the names of what is listed, for a `ListOutput`.
    """
    if output == "json":
        typer.echo(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())
    elif output == "name":
        for name in names(value):
            typer.echo(plain(name))
    elif output == "yaml":
        typer.echo(yaml_text(value), nl=False)
    else:
        as_table(value)


def yaml_text(value: Any) -> str:
    """Return structs, lists and dicts as YAML."""
    import yaml

    plain_value = msgspec.to_builtins(value, str_keys=True)
    return yaml.safe_dump(plain_value, sort_keys=False, allow_unicode=True, width=1000)


def plain(text: str) -> str:
    """Return text that is safe on a terminal: control characters, and halves of characters as in
    names of files that are not UTF-8, become question marks.
    """
    return _STEERING.sub("?", text)


def console(*, is_wide: bool = False) -> Console:
    """Return a console on standard output, as wide as its terminal; a pipe never wraps a line, and
    a wide one is not narrower than what is printed.
    """
    width = shutil.get_terminal_size((UNLIMITED_COLUMNS, 24)).columns
    width = UNLIMITED_COLUMNS if is_wide else width
    return Console(highlight=False, markup=False, width=width)


def print_text(text: str) -> None:
    """Print plain text, wrapped between words to the terminal; nothing in it is markup."""
    to = console()
    to.print(wrapped(text, to.width), soft_wrap=True)


def wrapped(text: str, width: int) -> str:
    """Return text broken only between words; rich would break a long name in two."""
    lines = plain(text).split("\n")
    return "\n".join(
        textwrap.fill(line, width, break_long_words=False, break_on_hyphens=False) for line in lines
    )


def confirm(question: str) -> None:
    """Ask on standard error before something that cannot be undone.

    Raises:
        CtlError: The answer is not yes, or there is no answer.
    """
    try:
        typer.confirm(question, abort=True, err=True)
    except typer.Abort as exc:
        raise CtlError("nothing was done: answer y, or give --yes") from exc


Tell = Callable[[str, float, float, str], None]
"""Takes the name of a step, how much of how much is done, and a note."""


@contextlib.contextmanager
def steps() -> Iterator[Tell]:
    """Yield what shows steps on standard error: bars with notes on a terminal, else lines."""
    to = Console(stderr=True, highlight=False, markup=False)
    columns = (TextColumn("{task.description}", markup=False), BarColumn())
    bars = Progress(*columns, TextColumn("{task.fields[note]}"), console=to)
    tasks: dict[str, TaskID] = {}

    def tell(name: str, done: float, total: float, note: str) -> None:
        if not to.is_terminal:
            to.print(f"{name}: {note}", soft_wrap=True)
            return
        if name not in tasks:
            tasks[name] = bars.add_task(name, note="")
        bars.update(tasks[name], completed=done, total=total, note=note)

    with bars if to.is_terminal else contextlib.nullcontext():
        yield tell


def print_table(
    headings: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    left: int = 1,
    prose: bool = False,
    spare: Sequence[str] = (),
    is_wide: bool = False,
) -> None:
    """Print a table; nothing in its cells is markup. A column of empty cells is left out.

    Args:
        headings: One for each column.
        rows: A cell for each column.
        left: This many columns from the first are flush left; the others, numbers, are flush right.
        prose: Whether the last column holds sentences: flush left, on as many lines as they need.
        spare: Headings of the columns that a narrow terminal omits, in this order. Cells are never
            cut: where that is not enough, the table is wider than the terminal.
        is_wide: Whether it has all columns, and each row is one line, on a narrow terminal too.
    """
    to = console(is_wide=is_wide)
    columns = [[str(row[number]) for row in rows] for number in range(len(headings))]
    widths = [
        max(cell_len(heading), *map(cell_len, cells), 0)
        for heading, cells in zip(headings, columns, strict=True)
    ]
    last = len(headings) - 1
    if prose:  # it is wrapped between words
        words = [cell_len(word) for cell in columns[last] for word in cell.split()]
        widths[last] = min(widths[last], max(MIN_PROSE_COLUMNS, *words, 0))
    kept = [number for number, cells in enumerate(columns) if not cells or any(cells)]

    def needed() -> int:
        """Return the width with the blanks between columns and around them."""
        return sum(widths[number] + 2 for number in kept) + 1

    for heading in spare:
        if needed() > to.width:
            kept.remove(headings.index(heading))
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for number in kept:
        is_prose = prose and number == last
        table.add_column(
            headings[number],
            justify="left" if number < left or is_prose else "right",
            no_wrap=not is_prose,
            overflow="fold",
            min_width=widths[number],
        )
    for row in rows:
        table.add_row(*(Text(plain(row[number])) for number in kept))
    table.width = needed() if needed() > to.width else None  # or rich would cut every cell
    to.print(table, crop=False)


def size_text(num_bytes: int) -> str:
    """Return a number of bytes in the unit that suits it, for example `1.5 MiB`."""
    unit = next((unit for unit in reversed(UNITS) if num_bytes >= UNITS[unit]), "B")
    size = num_bytes / UNITS[unit]
    return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"


def share_text(share: float | None) -> str:
    """Return a share of one in percent."""
    return UNKNOWN if share is None else f"{100 * share:.1f}%"
