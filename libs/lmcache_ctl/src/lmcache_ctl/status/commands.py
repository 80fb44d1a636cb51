"""`lmcachectl status`."""

from __future__ import annotations

import typer

from lmcache_ctl.options import reaches_services
from lmcache_ctl.output import Output, OutputFormat, show
from lmcache_ctl.reach import Reach


@reaches_services
def status(reach: Reach, output: Output = OutputFormat.TABLE) -> None:
    """Show all services: health, versions, what their tiers hold, and the hit ratio.

    Every replica is asked by itself, all at once. Health, versions and hits
    need no token; what tiers hold, peers and drains do. Exits with 1 when one
    is not well: it does not answer, is not ready, or refuses the token.
    """
    from lmcache_ctl.status.overview import overview
    from lmcache_ctl.status.tables import print_overview

    with reach.services() as services:
        found = overview(reach.settings, services)
    show(found, output, print_overview)
    if reach.hint and not any(one.version for one in found.services):  # none of ours has answered
        typer.echo(f"lmcachectl: {reach.hint}", err=True)
    if not found.is_well:
        raise typer.Exit(1)
