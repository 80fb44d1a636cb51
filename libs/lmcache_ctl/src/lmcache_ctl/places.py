"""Ask each place that a command is pointed at, and show the answers: one namespace, or with `-A`
all that have a service to ask.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Final, Generic, NamedTuple, TypeVar

import msgspec
import typer

from lmcache_ctl.errors import CtlError, UsageError
from lmcache_ctl.output import ListFormat, OutputFormat, plain, print_text, show
from lmcache_ctl.reach import Reach
from lmcache_ctl.services import Kind

MAX_PLACES_AT_ONCE: Final = 8

T = TypeVar("T")


class View(NamedTuple, Generic[T]):
    """How an answer is shown, and judged.

    Attributes:
        output: The format.
        as_table: Prints the table of one answer.
        is_found: Returns whether an answer has what was looked for; None: nothing was.
        names: Returns the names of what an answer lists, for a `ListFormat`.
    """

    output: OutputFormat | ListFormat
    as_table: Callable[[T], None]
    is_found: Callable[[T], bool] | None = None
    names: Callable[[T], Iterable[str]] | None = None


class PlaceAnswer(msgspec.Struct, frozen=True):
    """The answer of one namespace; `found` is None where there is none, and `problem` says why."""

    namespace: str
    found: Any
    problem: str = ""


def show_places(reach: Reach, kind: Kind, ask: Callable[[Reach], T], view: View[T]) -> None:
    """Ask the place that a command is pointed at, and show its answer; with `-A` ask each namespace
    that has a service of that kind.

    Raises:
        CtlError: Without `-A`: it gives no answer.
        typer.Exit: With 1, where what was looked for was found nowhere, or, without such a thing, a
            namespace gives no answer.
    """
    if not reach.all_namespaces:
        found = ask(reach)
        show(found, view.output, view.as_table, view.names)
        if view.is_found is not None and not view.is_found(found):
            raise typer.Exit(1)
        return
    places = reach.places(kind)
    with ThreadPoolExecutor(MAX_PLACES_AT_ONCE) as pool:
        answers = list(pool.map(partial(_answer, ask), places))

    def as_tables(answers: Sequence[PlaceAnswer]) -> None:
        for one in answers:
            print_text(f"namespace {one.namespace}{f': {one.problem}' if one.problem else ''}")
            if not one.problem:
                view.as_table(one.found)

    def all_names(answers: Sequence[PlaceAnswer]) -> Iterator[str]:
        for one in answers:
            if one.problem:
                typer.echo(f"lmcachectl: namespace {one.namespace}: {plain(one.problem)}", err=True)
            elif view.names is not None:
                yield from view.names(one.found)

    show(answers, view.output, as_tables, all_names)
    heard = [one.found for one in answers if not one.problem]
    if view.is_found is None:
        is_well = len(heard) == len(answers)
    else:
        is_well = any(map(view.is_found, heard))
    if not is_well:
        raise typer.Exit(1)


def _answer(ask: Callable[[Reach], Any], place: Reach) -> PlaceAnswer:
    namespace = str(place.settings.namespace)
    try:
        return PlaceAnswer(namespace, ask(place))
    except UsageError:
        raise
    except CtlError as exc:
        return PlaceAnswer(namespace, None, str(exc))
