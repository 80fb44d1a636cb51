"""The commands of `lmcachectl sidecar`."""

from __future__ import annotations

import typer

from lmcache_ctl.cluster.services import Kind
from lmcache_ctl.examples import examples_of
from lmcache_ctl.explain.commands import explain
from lmcache_ctl.options import reaches
from lmcache_ctl.output import Output, OutputFormat, show
from lmcache_ctl.reach import Reach

app = typer.Typer(
    no_args_is_help=True,
    help="A running sidecar: how it is, where chunks are and why they are missing.",
)
app.command(epilog=examples_of("sidecar explain"))(explain)


@app.command(epilog=examples_of("sidecar status"))
@reaches(Kind.SIDECAR)
def status(reach: Reach, output: Output = OutputFormat.TABLE) -> None:
    """Show how a sidecar is: its memory, its tiers, who is connected, and how far a drain is."""
    from lmcache_ctl.sidecar.tables import print_status

    found = {
        name: reach.ask(Kind.SIDECAR, "GET", f"/v1/{name}")
        for name in ("status", "tiers", "clients")
    }
    show(found, output, print_status)
