"""`lmcachectl drain`."""

from __future__ import annotations

import asyncio
from typing import Annotated

import typer

from lmcache_ctl.cluster.services import Kind
from lmcache_ctl.options import reaches_services
from lmcache_ctl.output import Output, OutputFormat, confirm, show
from lmcache_ctl.reach import Reach

KINDS = (Kind.SIDECAR, Kind.STORAGE)
DEFAULT_WITHIN_S = 120.0


@reaches_services
def drain(
    reach: Reach,
    targets: Annotated[
        list[str],
        typer.Argument(
            metavar="TARGET",
            help="sidecar/NAME or storage/NAME, or all of a kind; peer/NAME goes by the broker.",
        ),
    ],
    within: Annotated[
        float,
        typer.Option(metavar="SECONDS", help="Watch for so long at most.", min=0.1, max=86400),
    ] = DEFAULT_WITHIN_S,
    wait: Annotated[
        bool, typer.Option("--wait/--no-wait", help="Watch until it is done, or only begin it.")
    ] = True,
    yes: Annotated[
        bool,
        typer.Option("--yes", "-y", help="Do not ask before all of a kind are drained at once."),
    ] = False,
    output: Output = OutputFormat.TABLE,
) -> None:
    """Drain services: they take nothing new, and hand over what only they hold.

    They go on serving, and stay drained until they are restarted; so it asks
    before it drains all of a kind at once. Progress goes to standard error.
    Needs the role admin. Exits with 1 when chunks are left, were not taken, or
    it is not done in time.
    """
    from lmcache_ctl.cluster.asking import Asker
    from lmcache_ctl.drain.progress import progress_lines
    from lmcache_ctl.drain.tables import print_drains
    from lmcache_ctl.drain.watching import DrainJob, drain_all, meant_by, parse_drain_target

    job = DrainJob([parse_drain_target(text) for text in targets], within, wait)
    kinds = dict.fromkeys(target.asked for target in job.targets)
    with reach.services(*kinds) as services:
        asker = Asker(reach.settings)
        chosen = asyncio.run(meant_by(asker, services, job))
        if not yes and any(target.name is None for target in job.targets):
            names = ", ".join(
                f"{one.kind}/{one.name}" for one in chosen if one.kind is not Kind.BROKER
            )
            confirm(f"Drain {names} at once? Each takes nothing new until it is restarted.")
        with progress_lines() as tell:
            found = asyncio.run(drain_all(asker, chosen, job, tell))
    show(found, output, print_drains)
    if not all(one.is_complete or (not wait and not one.problem) for one in found):
        raise typer.Exit(1)
