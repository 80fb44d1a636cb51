"""`lmcachectl top`."""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from lmcache_ctl.options import reaches_services
from lmcache_ctl.output import Output, OutputFormat, show
from lmcache_ctl.reach import Reach

if TYPE_CHECKING:
    from collections.abc import Callable

    from lmcache_ctl.cluster.services import Service
    from lmcache_ctl.top.rates import Moment

    Find = Callable[[], list[Service]]

MIN_INTERVAL_S = 0.2
MAX_INTERVAL_S = 3600.0


@reaches_services
def top(
    reach: Reach,
    interval: Annotated[
        float,
        typer.Option(
            metavar="SECONDS", help="Between two looks.", min=MIN_INTERVAL_S, max=MAX_INTERVAL_S
        ),
    ] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Show one interval and end.")] = False,
    output: Output = OutputFormat.TABLE,
) -> None:
    """Show what all services do just now: rates, tiers, peers and drains.

    The table is refreshed until Ctrl-C; every few seconds services are looked
    for anew, so that pods which come later are seen. With --once, with JSON or YAML, or
    where standard output is no terminal, it shows one interval and ends.
    """
    with reach.finding() as find:
        if once or output is not OutputFormat.TABLE or not sys.stdout.isatty():
            show(asyncio.run(_first(reach, find, interval)), output, print_moment)
            return
        try:
            asyncio.run(_live(reach, find, interval))
        except KeyboardInterrupt:
            return


async def _first(reach: Reach, find: Find, interval_s: float) -> Moment:
    from lmcache_ctl.top.watching import moments

    async for found in moments(reach.settings, find, interval_s):
        return found
    raise AssertionError("there is always another moment")


async def _live(reach: Reach, find: Find, interval_s: float) -> None:
    from rich.live import Live

    from lmcache_ctl.top.screen import screen_of
    from lmcache_ctl.top.watching import moments

    with Live("looking ...", screen=True, auto_refresh=False) as live:
        async for found in moments(reach.settings, find, interval_s):
            live.update(screen_of(found, live.console.width), refresh=True)


def print_moment(found: Moment) -> None:
    """One interval, for people."""
    from lmcache_ctl.output import console
    from lmcache_ctl.top.screen import screen_of

    to = console()
    to.print(screen_of(found, to.width), crop=False)
