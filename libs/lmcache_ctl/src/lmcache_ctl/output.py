"""How commands print: JSON or YAML for programs, tables for people."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Annotated, Any, TypeVar

import msgspec
import typer
from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table

KIB = 1 << 10
GB = 10**9
MICRO = 1e-6
UNKNOWN = "-"
_STEERING = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]")

T = TypeVar("T")


class OutputFormat(StrEnum):
    """What `-o` takes."""

    TABLE = "table"
    JSON = "json"
    YAML = "yaml"


Output = Annotated[OutputFormat, typer.Option("--output", "-o", help="A table for people; JSON or YAML for programs.")]


def show(value: T, output: OutputFormat, as_table: Callable[[T], None]) -> None:
    """Print what a command has found.

    Args:
        value: Structs, lists, dicts.
        output: How.
        as_table: Prints it for people.
    """
    if output is OutputFormat.JSON:
        print_json(value)
    elif output is OutputFormat.YAML:
        print_yaml(value)
    else:
        as_table(value)


def print_json(value: Any) -> None:
    """Print structs, lists and dicts as indented JSON."""
    typer.echo(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())


def print_yaml(value: Any) -> None:
    """Print structs, lists and dicts as YAML, in their own order."""
    import yaml

    typer.echo(yaml.safe_dump(msgspec.to_builtins(value, str_keys=True), sort_keys=False, allow_unicode=True, width=1000), nl=False)


def plain(text: str) -> str:
    """Text of a service, a file or a cluster that may be shown on a terminal: what would steer it is a question mark."""
    return _STEERING.sub("?", text)


def print_text(text: str) -> None:
    """Print plain text, wrapped to the terminal; nothing in it is markup."""
    Console(highlight=False, markup=False).print(plain(text))


def print_table(title: str, headings: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1, prose: bool = False) -> None:
    """Print a table.

    Args:
        title: Above it, "" for none.
        headings: One for each column.
        rows: Their cells; nothing in them is markup.
        left: So many columns are flush left, the others, numbers, flush right.
        prose: Whether the last column holds sentences: flush left, and as many lines as they need.
    """
    if title:
        print_text(title)
    console = Console(highlight=False)
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    widths = [max(cell_len(line) for line in (headings[number], *(row[number] for row in rows))) + 2 for number in range(left)]
    is_narrow = sum(widths) > console.width // 2
    for number, heading in enumerate(headings):
        is_prose = prose and number == len(headings) - 1
        is_left = number < left or is_prose
        table.add_column(
            heading, justify="left" if is_left else "right", no_wrap=number < left and not is_prose and not is_narrow, overflow="fold"
        )
    for row in rows:
        table.add_row(*(plain(cell).replace("[", r"\[") for cell in row))
    console.print(table)


def size_text(num_bytes: int) -> str:
    """A number of bytes in the unit that suits it, for example `1.5 MiB`."""
    size, units = float(num_bytes), ["B", "KiB", "MiB", "GiB", "TiB"]
    while size >= KIB and len(units) > 1:
        size /= KIB
        del units[0]
    return f"{size:.0f} {units[0]}" if units[0] == "B" else f"{size:.1f} {units[0]}"


def ratio_text(ratio: float | None) -> str:
    """How many times smaller, for example `4.14x`."""
    return UNKNOWN if ratio is None else f"{ratio:.2f}x"


def speed_text(bytes_per_s: float | None) -> str:
    """Gigabytes (10^9 bytes) a second, two digits."""
    return UNKNOWN if bytes_per_s is None else f"{bytes_per_s / GB:.2f}"


def error_text(error: float | None) -> str:
    """A relative error in percent."""
    return UNKNOWN if error is None else f"{100 * error:.2f}%"


def share_text(share: float | None) -> str:
    """A share of one in percent."""
    return UNKNOWN if share is None else f"{100 * share:.1f}%"


def count_text(number: float) -> str:
    """A number of things, with thousands apart."""
    return f"{number:,.0f}"
