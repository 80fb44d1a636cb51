"""`lmcachectl drain`."""

from __future__ import annotations

import asyncio
from typing import Annotated

import typer

from lmcache_ctl.cluster.services import Kind
from lmcache_ctl.options import reaches_services
from lmcache_ctl.output import Output, OutputFormat, show
from lmcache_ctl.reach import Reach

KINDS = (Kind.SIDECAR, Kind.STORAGE)
DEFAULT_WITHIN_S = 120.0


@reaches_services
def drain(
    reach: Reach,
    targets: Annotated[
        list[str], typer.Argument(metavar="TARGET", help="sidecar/NAME or storage/NAME; peer/NAME asks through the broker.")
    ],
    within: Annotated[float, typer.Option(metavar="SECONDS", help="Watch for so long at most.", min=0.1, max=86400)] = DEFAULT_WITHIN_S,
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="Watch until it is done, or only begin it.")] = True,
    output: Output = OutputFormat.TABLE,
) -> None:
    """Drain services: they take nothing new, and hand over what only they hold.

    They go on serving, and stay drained until they are restarted. Progress
    goes to standard error. Needs the role admin. Exits with 1 when chunks are
    left, were not taken, or it is not done in time.
    """
    from lmcache_ctl.cluster.asking import Asker
    from lmcache_ctl.drain.progress import progress_lines
    from lmcache_ctl.drain.tables import print_drains
    from lmcache_ctl.drain.watching import DrainJob, drain_all, parse_drain_target

    job = DrainJob([parse_drain_target(text) for text in targets], within, wait)
    kinds = dict.fromkeys(target.asked for target in job.targets)
    with reach.services(*kinds) as services, progress_lines() as tell:
        found = asyncio.run(drain_all(Asker(reach.settings), services, job, tell))
    show(found, output, print_drains)
    if not all(one.is_complete or (not wait and not one.problem) for one in found):
        raise typer.Exit(1)
