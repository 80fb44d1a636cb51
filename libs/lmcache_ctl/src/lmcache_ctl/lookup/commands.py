"""The commands of `lmcachectl lookup`."""

from __future__ import annotations

from typing import Annotated

import typer

from lmcache_ctl.cluster.services import Kind
from lmcache_ctl.examples import examples_of
from lmcache_ctl.options import reaches
from lmcache_ctl.output import Output, OutputFormat, show
from lmcache_ctl.reach import Reach

app = typer.Typer(
    no_args_is_help=True,
    help="The lookup service: who holds which chunk, and whose chunks it knows.",
)

ChunkIds = Annotated[
    list[str],
    typer.Argument(
        metavar="CHUNK_ID", help="Chunk ids, 32 hex digits each, in the order of the prompt."
    ),
]


@app.command(epilog=examples_of("lookup status"))
@reaches(Kind.LOOKUP)
def status(
    reach: Reach,
    tenant: Annotated[
        str | None,
        typer.Option(help="Another tenant's figures than the token's; needs the role admin."),
    ] = None,
    output: Output = OutputFormat.TABLE,
) -> None:
    """Show where the index is, how much is in it, and which instances hold leases."""
    from lmcache_ctl.lookup.tables import print_status

    found = {
        "stats": reach.ask(
            Kind.LOOKUP, "GET", "/v1/stats" + ("" if tenant is None else f"?tenant={tenant}")
        ),
        "instances": reach.ask(Kind.LOOKUP, "GET", "/v1/instances")["instances"],
    }
    show(found, output, print_status)


@app.command(epilog=examples_of("lookup tenants"))
@reaches(Kind.LOOKUP)
def tenants(reach: Reach, output: Output = OutputFormat.TABLE) -> None:
    """List the tenants whose chunks are, or were, in the index. Needs the role admin."""
    from lmcache_ctl.lookup.pages import all_tenants
    from lmcache_ctl.output import print_text

    show(
        all_tenants(reach),
        output,
        lambda found: print_text("\n".join(found) or "no tenant has stored anything"),
    )


@app.command(epilog=examples_of("lookup prefix"))
@reaches(Kind.LOOKUP)
def prefix(reach: Reach, chunk_ids: ChunkIds, output: Output = OutputFormat.TABLE) -> None:
    """Show the longest prefix of these chunks that is cached, and who holds each. Exits with 1
    when not all are.
    """
    from lmcache_ctl.lookup.tables import print_prefix

    asked = [_checked(chunk_id) for chunk_id in chunk_ids]
    found = reach.ask(Kind.LOOKUP, "POST", "/v1/lookup", {"chunk_ids": asked}) | {
        "chunk_ids": asked
    }
    show(found, output, print_prefix)
    if found["num_prefix"] < len(asked):
        raise typer.Exit(1)


@app.command(epilog=examples_of("lookup locations"))
@reaches(Kind.LOOKUP)
def locations(
    reach: Reach,
    chunk_id: Annotated[str, typer.Argument(metavar="CHUNK_ID", help="A chunk id, 32 hex digits.")],
    output: Output = OutputFormat.TABLE,
) -> None:
    """Show everybody who holds a chunk. Exits with 1 when nobody does."""
    from lmcache_ctl.lookup.tables import print_holders

    found = reach.ask(Kind.LOOKUP, "GET", f"/v1/chunks/{_checked(chunk_id)}/locations")
    show(found, output, print_holders)
    if not found["holders"]:
        raise typer.Exit(1)


@app.command(epilog=examples_of("lookup route"))
@reaches(Kind.LOOKUP)
def route(reach: Reach, chunk_ids: ChunkIds, output: Output = OutputFormat.TABLE) -> None:
    """Show how long a prefix of these chunks each instance holds by itself. Exits with 1 when
    none holds any.
    """
    from lmcache_ctl.lookup.tables import print_routes

    asked = [_checked(chunk_id) for chunk_id in chunk_ids]
    found = reach.ask(Kind.LOOKUP, "POST", "/v1/route", {"chunk_ids": asked})
    show(found, output, lambda one: print_routes(one, len(asked)))
    if not found["instances"]:
        raise typer.Exit(1)


def _checked(chunk_id: str) -> str:
    if len(chunk_id) != 32 or set(chunk_id) - set("0123456789abcdef"):
        raise typer.BadParameter(f"{chunk_id!r} is no chunk id: 32 hex digits, in small letters")
    return chunk_id
