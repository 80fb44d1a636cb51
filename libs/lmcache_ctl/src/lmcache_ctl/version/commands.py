"""`lmcachectl version`."""

from __future__ import annotations

import asyncio
from importlib import metadata
from typing import Annotated

import msgspec
import typer

from lmcache_ctl.options import reaches_services
from lmcache_ctl.output import Columns, Output, OutputFormat, print_table, print_text, show
from lmcache_ctl.reach import Reach


class ServiceVersion(msgspec.Struct, frozen=True):
    """One service; `version` is "" where it does not say, and `problem` why."""

    kind: str
    name: str
    version: str
    problem: str


class Versions(msgspec.Struct, frozen=True):
    """The version of this command line, and those of services."""

    client: str
    services: list[ServiceVersion]


def own_version() -> str:
    """Return the version of this command line."""
    return metadata.version("lmcache-ctl")


@reaches_services
def version(
    reach: Reach,
    client: Annotated[bool, typer.Option("--client", help="Ask no service.")] = False,
    output: Output = OutputFormat.TABLE,
) -> None:
    """Show the version of lmcachectl, and that of each service. Needs no token.

    A service that does not answer is told; it is not counted as a failure.
    """
    from lmcache_ctl.cluster.asking import Asker
    from lmcache_ctl.cluster.looking import look_at

    services: list[ServiceVersion] = []
    if not client:
        with reach.services() as found:
            states = asyncio.run(look_at(Asker(reach.settings), found))
        services = [
            ServiceVersion(one.kind, one.name, one.version, "" if one.version else one.problem)
            for one in states
        ]
    show(Versions(own_version(), services), output, _print)


def _print(found: Versions) -> None:
    print_text(f"lmcachectl {found.client}")
    if found.services:
        rows = [(one.kind, one.name, one.version or one.problem) for one in found.services]
        print_table("", Columns(("service", "name", "version"), left=2, prose=True), rows)
