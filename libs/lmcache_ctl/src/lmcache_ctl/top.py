"""`lmcachectl top`: the current rates of all services."""

from __future__ import annotations

import asyncio
import functools
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Annotated, Final

import msgspec
import typer
from rich.console import Group, RenderableType
from rich.text import Text

from lmcache_ctl.asking import Asker
from lmcache_ctl.errors import CtlError
from lmcache_ctl.options import reaches_all_services
from lmcache_ctl.output import (
    UNKNOWN,
    Columns,
    ListFormat,
    ListOutput,
    console,
    share_text,
    show,
    size_text,
    table_of,
    wrapped,
)
from lmcache_ctl.reach import Reach
from lmcache_ctl.services import Endpoint
from lmcache_ctl.settings import CtlSettings
from lmcache_ctl.states import (
    DrainStatus,
    Link,
    ServiceStatus,
    State,
    Tier,
    look_at,
    name_prefix,
    names_of,
    token_hint,
)

MIN_INTERVAL_S = 0.2
MAX_INTERVAL_S = 3600.0
FIND_EVERY_S: Final = 5.0
"""How often the Kubernetes API is asked for pods at most, however short the interval."""
STYLES = {State.OK: "green", State.DRAINING: "yellow", State.DEGRADED: "yellow"}
BAD = "red"
SERVICES = Columns(
    (
        "namespace",
        "service",
        "name",
        "state",
        "requests/s",
        "chunks/s",
        "hits",
        "in",
        "out",
        "tiers",
    ),
    left=4,
    prose=True,
    spare=("tiers", "chunks/s", "requests/s", "service", "state", "out", "in"),
)
LINKS = Columns(
    ("peer", "kind", "reached at", "zone", "load", "pulls", ""),
    left=4,
    prose=True,
    spare=("zone", "kind", "load", "reached at"),
)


class Rates(msgspec.Struct, frozen=True):
    """One service, in the time between two looks.

    Attributes:
        kind: Its kind.
        name: Which one.
        namespace: Of its pod, "" without a cluster.
        state: Its state now.
        problem: Its fault, "" for none.
        requests_per_s: REST requests; None where there is nothing to compare with, as of all
            figures below.
        wanted_per_s: Requested chunks.
        hit_ratio: Share of them that was found; None also if none was requested.
        in_bytes_per_s: Chunks that were stored.
        out_bytes_per_s: Chunks that were handed out.
        tiers: Its tiers now.
        drain: Progress of a drain.
    """

    kind: str
    name: str
    namespace: str
    state: State
    problem: str
    requests_per_s: float | None
    wanted_per_s: float | None
    hit_ratio: float | None
    in_bytes_per_s: float | None
    out_bytes_per_s: float | None
    tiers: list[Tier]
    drain: DrainStatus | None


class Moment(msgspec.Struct, frozen=True):
    """All services.

    Attributes:
        seconds: Between the two looks.
        services: In the order in which they were asked.
        links: The peers that brokers know, and how many pulls each serves.
        problem: Why the last search for services failed, "" where it did not.
        hint: How to see more of them, "" for nothing.
        name_prefix: What the names of all pods begin with, "" where that differs or is not known.
    """

    seconds: float
    services: list[Rates]
    links: list[Link]
    problem: str = ""
    hint: str = ""
    name_prefix: str = ""


@reaches_all_services
def top(
    reach: Reach,
    interval: Annotated[
        float,
        typer.Option(
            metavar="SECONDS", help="Between two looks.", min=MIN_INTERVAL_S, max=MAX_INTERVAL_S
        ),
    ] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Show one interval and exit.")] = False,
    output: ListOutput = ListFormat.TABLE,
) -> None:
    """Show what all services are doing: rates, tiers, peers and drains.

    The table is refreshed until Ctrl-C; every few seconds services are searched
    again, so that new pods appear. With --once, with another output, or
    where standard output is not a terminal, it shows one interval and ends.
    """
    with reach.finding() as find:
        looking = moments(reach.settings, find, interval)
        if once or output is not ListFormat.TABLE or not sys.stdout.isatty():
            as_table = functools.partial(print_moment, is_wide=output is ListFormat.WIDE)
            found = asyncio.run(_first(looking))
            show(found, output, as_table, lambda found: names_of(found.services))
            return
        try:
            asyncio.run(_live(looking))
        except KeyboardInterrupt:
            return


async def _first(looking: AsyncIterator[Moment]) -> Moment:
    return await anext(looking)


async def _live(looking: AsyncIterator[Moment]) -> None:
    from rich.live import Live

    with Live("looking ...", screen=True, auto_refresh=False) as live:
        async for found in looking:
            live.update(Group(*_screen(found, live.console.width)), refresh=True)


def print_moment(found: Moment, *, is_wide: bool = False) -> None:
    """Print one interval, for people."""
    to = console(is_wide=is_wide)
    to.print(Group(*_screen(found, to.width)), crop=False)


async def moments(
    settings: CtlSettings, find: Callable[[], list[Endpoint]], interval_s: float
) -> AsyncIterator[Moment]:
    """Yield the rates of all services, once per interval, forever.

    Args:
        settings: How they are asked.
        find: Returns the services; called now, and again every few seconds. When it fails later,
            those that were known are looked at.
        interval_s: Seconds between two looks; the first comes after one.

    Raises:
        CtlError: No service is found at the start.
        UsageError: Token or TLS files cannot be read.
    """
    asker = Asker(settings)
    services, found_at, problem = await asyncio.to_thread(find), time.monotonic(), ""
    before, looked_at = await look_at(asker, services), time.monotonic()
    while True:
        await asyncio.sleep(max(0.0, looked_at + interval_s - time.monotonic()))
        if time.monotonic() - found_at >= FIND_EVERY_S:
            try:
                services, problem = await asyncio.to_thread(find), ""
            except CtlError as exc:
                problem = str(exc)
            found_at = time.monotonic()
        now = time.monotonic()
        after = await look_at(asker, services)
        yield moment(before, after, now - looked_at, problem)
        before, looked_at = after, now


def moment(
    before: Sequence[ServiceStatus],
    after: Sequence[ServiceStatus],
    seconds: float,
    problem: str = "",
) -> Moment:
    """Compare two looks.

    Args:
        before: The first.
        after: The second; services may have come and gone meanwhile.
        seconds: Between them.
        problem: Why this is unknown.
    """
    earlier = {(state.kind, state.url): state for state in before}
    rates = [rates_of(earlier.get((state.kind, state.url)), state, seconds) for state in after]
    links = {link.id: link for state in after for link in state.links}
    how_many, how = token_hint(after)
    hint = f"{how_many} require a token for tiers, peers and drains: {how}." if how_many else ""
    return Moment(
        round(seconds, 3),
        rates,
        [links[name] for name in sorted(links)],
        problem,
        hint,
        name_prefix(after),
    )


def rates_of(before: ServiceStatus | None, after: ServiceStatus, seconds: float) -> Rates:
    """Compare two looks at one service; a new, restarted or silent one has nothing to compare
    with.
    """
    old, new = (before or after).traffic, after.traffic
    figures = ("num_requests", "num_wanted", "num_found", "in_bytes", "out_bytes")
    grown = {name: getattr(new, name) - getattr(old, name) for name in figures}
    can_compare = (
        before is not None
        and State.SILENT not in (before.state, after.state)
        and min(grown.values()) >= 0  # counters only rise while a process lives
    )

    def rate(figure: str) -> float | None:
        return round(grown[figure] / seconds, 3) if can_compare else None

    wanted = grown["num_wanted"]
    return Rates(
        str(after.kind),
        after.name,
        after.namespace,
        after.state,
        after.problem,
        rate("num_requests"),
        rate("num_wanted"),
        round(grown["num_found"] / wanted, 4) if can_compare and wanted else None,
        rate("in_bytes"),
        rate("out_bytes"),
        after.tiers,
        after.drain,
    )


def _screen(found: Moment, width: int) -> Iterator[RenderableType]:
    """Yield services with rates and tiers, links between pods, and drains under way."""

    def line(text: str, style: str = "") -> Text:
        return Text(wrapped(text, width), style=style, overflow="ignore")

    yield line(f"{len(found.services)} services, over {found.seconds:.1f} s")
    if found.problem:
        yield line(f"looking for services failed: {found.problem}", BAD)
    prefix, is_one_place = found.name_prefix, len({one.namespace for one in found.services}) < 2
    services = msgspec.structs.replace(SERVICES, left_out=("namespace",) if is_one_place else ())
    yield table_of(services, [_service_row(one, prefix) for one in found.services], width)
    if found.links:
        yield table_of(LINKS, [_link_row(link, prefix) for link in found.links], width)
    if prefix:
        yield line(f"Names without {prefix}, which all pods begin with.")
    for one in found.services:
        if one.drain is not None:
            yield line(f"drain of {one.kind} {one.name}: {one.drain}")
        if one.problem:
            yield line(f"{one.kind} {one.name}: {one.problem}", BAD)
    if found.hint:
        yield line(found.hint)


def _service_row(one: Rates, prefix: str) -> tuple[str | Text, ...]:
    counts = (one.requests_per_s, one.wanted_per_s)
    sizes = (one.in_bytes_per_s, one.out_bytes_per_s)
    return (
        one.namespace,
        one.kind,
        one.name.removeprefix(prefix),
        Text(one.state, style=STYLES.get(one.state, BAD)),
        *(UNKNOWN if per_s is None else f"{per_s:.1f}" for per_s in counts),
        share_text(one.hit_ratio),
        *(UNKNOWN if per_s is None else f"{size_text(int(per_s))}/s" for per_s in sizes),
        ", ".join(
            f"{tier.name} {size_text(tier.used_bytes)}"
            + (f" ({tier.used_bytes / tier.capacity_bytes:.0%})" if tier.capacity_bytes else "")
            for tier in one.tiers
        ),
    )


def _link_row(link: Link, prefix: str) -> tuple[str, ...]:
    words = "draining" if link.draining else ""
    if link.drain is not None and link.drain.state != "serving":
        words = str(link.drain)
    name, at = link.id.removeprefix(prefix), link.distributed_url
    return (name, link.kind, at, link.zone, f"{link.load:.0%}", str(link.num_pulls), words)
