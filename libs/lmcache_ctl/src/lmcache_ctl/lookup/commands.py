"""The commands of `lmcachectl lookup`."""

from __future__ import annotations

from typing import Annotated

import typer

from lmcache_ctl.options import DEFAULT_LOOKUP_URL, LookupUrl, Tls, TokenFile
from lmcache_ctl.output import Output, OutputFormat, print_json

app = typer.Typer(no_args_is_help=True, help="The lookup service: who holds which chunk, and whose chunks it knows.")

ChunkIds = Annotated[list[str], typer.Argument(metavar="CHUNK_ID", help="Chunk ids, 32 hex digits each, in the order of the prompt.")]


@app.command()
def status(
    tenant: Annotated[str | None, typer.Option(help="Another tenant's figures than the token's; needs the role admin.")] = None,
    url: LookupUrl = DEFAULT_LOOKUP_URL,
    token_file: TokenFile = None,
    tls: Tls = None,
    output: Output = OutputFormat.TABLE,
) -> None:
    """Show where the index is, how much is in it, and which instances hold leases."""
    from lmcache_ctl.lookup.tables import print_status
    from lmcache_ctl.rest import RestService

    service = RestService("lookup service", url, token_file, tls)
    found = {
        "stats": service.ask("GET", "/v1/stats" + ("" if tenant is None else f"?tenant={tenant}")),
        "instances": service.ask("GET", "/v1/instances")["instances"],
    }
    if output is OutputFormat.JSON:
        print_json(found)
    else:
        print_status(found)


@app.command()
def tenants(
    url: LookupUrl = DEFAULT_LOOKUP_URL, token_file: TokenFile = None, tls: Tls = None, output: Output = OutputFormat.TABLE
) -> None:
    """List the tenants whose chunks are, or were, in the index. Needs the role admin."""
    from lmcache_ctl.lookup.pages import all_tenants
    from lmcache_ctl.output import print_text
    from lmcache_ctl.rest import RestService

    found = all_tenants(RestService("lookup service", url, token_file, tls))
    if output is OutputFormat.JSON:
        print_json(found)
    else:
        print_text("\n".join(found) or "no tenant has stored anything")


@app.command()
def locations(
    chunk_id: Annotated[str, typer.Argument(metavar="CHUNK_ID", help="A chunk id, 32 hex digits.")],
    url: LookupUrl = DEFAULT_LOOKUP_URL,
    token_file: TokenFile = None,
    tls: Tls = None,
    output: Output = OutputFormat.TABLE,
) -> None:
    """Show everybody who holds a chunk. Exits with 1 when nobody does."""
    from lmcache_ctl.lookup.tables import print_holders
    from lmcache_ctl.rest import RestService

    found = RestService("lookup service", url, token_file, tls).ask("GET", f"/v1/chunks/{_checked(chunk_id)}/locations")
    if output is OutputFormat.JSON:
        print_json(found)
    else:
        print_holders(found)
    if not found["holders"]:
        raise typer.Exit(1)


@app.command()
def route(
    chunk_ids: ChunkIds,
    url: LookupUrl = DEFAULT_LOOKUP_URL,
    token_file: TokenFile = None,
    tls: Tls = None,
    output: Output = OutputFormat.TABLE,
) -> None:
    """Show how long a prefix of these chunks each instance holds by itself. Exits with 1 when none holds any."""
    from lmcache_ctl.lookup.tables import print_routes
    from lmcache_ctl.rest import RestService

    asked = [_checked(chunk_id) for chunk_id in chunk_ids]
    found = RestService("lookup service", url, token_file, tls).ask("POST", "/v1/route", {"chunk_ids": asked})
    if output is OutputFormat.JSON:
        print_json(found)
    else:
        print_routes(found, len(asked))
    if not found["instances"]:
        raise typer.Exit(1)


def _checked(chunk_id: str) -> str:
    if len(chunk_id) != 32 or set(chunk_id) - set("0123456789abcdef"):
        raise typer.BadParameter(f"{chunk_id!r} is no chunk id: 32 hex digits, in small letters")
    return chunk_id
