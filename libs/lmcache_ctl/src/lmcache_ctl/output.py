"""Print findings: JSON or YAML for programs, tables for people."""

from __future__ import annotations

import contextlib
import re
import shutil
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import StrEnum
from typing import Annotated, Final, TypeVar

import msgspec
import typer
from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.table import Table
from rich.text import Text

from lmcache_ctl.errors import CtlError

KIB = 1 << 10
UNKNOWN = "-"
UNLIMITED_COLUMNS: Final = 10_000
MIN_PROSE_COLUMNS: Final = 16
_STEERING = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\ud800-\udfff]")

T = TypeVar("T")


class OutputFormat(StrEnum):
    """What `-o` takes."""

    TABLE = "table"
    JSON = "json"
    YAML = "yaml"


class ListFormat(StrEnum):
    """What `-o` takes where things with names are listed."""

    TABLE = "table"
    WIDE = "wide"
    NAME = "name"
    JSON = "json"
    YAML = "yaml"


Output = Annotated[
    OutputFormat,
    typer.Option("--output", "-o", help="A table for people; JSON or YAML for programs."),
]
ListOutput = Annotated[
    ListFormat,
    typer.Option(
        "--output",
        "-o",
        help=(
            "A table for people, wide with all its columns on any terminal; names, one a line;"
            " JSON or YAML for programs."
        ),
    ),
]


def show(
    value: T,
    output: OutputFormat | ListFormat,
    as_table: Callable[[T], None],
    names: Callable[[T], Iterable[str]] | None = None,
) -> None:
    """Print the findings of a command: structs, lists, dicts.

    Args:
        names: Returns the names of what is listed, for a `ListFormat`.
    """
    if output in (OutputFormat.JSON, ListFormat.JSON):
        typer.echo(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())
    elif output is ListFormat.NAME:
        assert names is not None, "a command that takes -o name has names"
        for name in names(value):
            typer.echo(plain(name))
    elif output in (OutputFormat.YAML, ListFormat.YAML):
        import yaml

        plain_value = msgspec.to_builtins(value, str_keys=True)
        text = yaml.safe_dump(plain_value, sort_keys=False, allow_unicode=True, width=1000)
        typer.echo(text, nl=False)
    else:
        as_table(value)


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


Cell = str | Text


class Columns(msgspec.Struct, frozen=True):
    """How the columns of a table are set.

    Attributes:
        headings: One for each column.
        left: This many columns from the first are flush left; the others, numbers, are flush right.
        prose: Whether the last column holds sentences: flush left, on as many lines as they need.
        left_out: Headings of the columns that are not shown.
        spare: Headings of the columns that a narrow terminal omits, in this order. Cells are never
            cut.
    """

    headings: Sequence[str]
    left: int = 1
    prose: bool = False
    spare: Sequence[str] = ()
    left_out: Sequence[str] = ()


def table_of(columns: Columns, rows: Sequence[Sequence[Cell]], width: int) -> Table:
    """Return a table that fits into `width`, or a wider one if leaving out spare columns fails."""
    num_columns = len(columns.headings)
    widths = [
        max(cell_len(heading), *(cell_len(str(row[number])) for row in rows), 0)
        for number, heading in enumerate(columns.headings)
    ]
    if columns.prose:  # it is wrapped between words
        words = [cell_len(word) for row in rows for word in str(row[-1]).split()]
        widths[-1] = min(widths[-1], max(MIN_PROSE_COLUMNS, *words, 0))
    kept = [n for n in range(num_columns) if columns.headings[n] not in columns.left_out]
    for heading in columns.spare:
        if _table_width(widths[number] for number in kept) > width:
            kept.remove(columns.headings.index(heading))
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for number in kept:
        is_prose = columns.prose and number == num_columns - 1
        is_left = number < columns.left or is_prose
        table.add_column(
            columns.headings[number],
            justify="left" if is_left else "right",
            no_wrap=not is_prose,
            overflow="fold",
            min_width=widths[number],
        )
    for row in rows:
        cells = (row[number] for number in kept)
        table.add_row(*(Text(plain(cell)) if isinstance(cell, str) else cell for cell in cells))
    needed = _table_width(widths[number] for number in kept)
    table.width = needed if needed > width else None  # or rich would cut every cell to make it fit
    return table


def _table_width(widths: Iterable[int]) -> int:
    """Return the width with the blanks between columns and around them."""
    found = list(widths)
    return sum(found) + 2 * len(found) + 1


def print_table(
    title: str, columns: Columns, rows: Sequence[Sequence[Cell]], *, is_wide: bool = False
) -> None:
    """Print a table; nothing in its cells is markup.

    Args:
        title: Above it, "" for none.
        rows: A cell for each column.
        is_wide: Whether it has all columns, and each row is one line, on a narrow terminal too.
    """
    if title:
        print_text(title)
    to = console(is_wide=is_wide)
    to.print(table_of(columns, rows, to.width), crop=False)


def size_text(num_bytes: int) -> str:
    """Return a number of bytes in the unit that suits it, for example `1.5 MiB`."""
    size, units = float(num_bytes), ["B", "KiB", "MiB", "GiB", "TiB"]
    while size >= KIB and len(units) > 1:
        size /= KIB
        del units[0]
    return f"{size:.0f} {units[0]}" if units[0] == "B" else f"{size:.1f} {units[0]}"


def share_text(share: float | None) -> str:
    """Return a share of one in percent."""
    return UNKNOWN if share is None else f"{100 * share:.1f}%"
