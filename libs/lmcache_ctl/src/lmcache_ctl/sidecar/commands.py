"""The commands of `lmcachectl sidecar`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lmcache_ctl.options import DEFAULT_SIDECAR_URL, SidecarUrl, Tls, TokenFile
from lmcache_ctl.output import Output, OutputFormat, print_json

app = typer.Typer(no_args_is_help=True, help="A running sidecar: how it is, where chunks are and why they are missing.")


@app.command()
def status(
    url: SidecarUrl = DEFAULT_SIDECAR_URL, token_file: TokenFile = None, tls: Tls = None, output: Output = OutputFormat.TABLE
) -> None:
    """Show how a sidecar is: its memory, its tiers, who is connected, and how far a drain is."""
    from lmcache_ctl.sidecar.rest import Sidecar
    from lmcache_ctl.sidecar.tables import print_status

    sidecar = Sidecar(url, token_file, tls)
    found = {name: sidecar.ask("GET", f"/v1/{name}") for name in ("status", "tiers", "clients")}
    if output is OutputFormat.JSON:
        print_json(found)
    else:
        print_status(found)


@app.command()
def explain(
    chunk_hashes: Annotated[list[str] | None, typer.Argument(metavar="HASH", help="Chunk hashes, 64 hex digits each.")] = None,
    tokens: Annotated[
        Path | None, typer.Option(help="File with the token ids of a prompt of text, apart by commas or blanks; - for standard input.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Only as this model's engines name chunks.")] = None,
    url: SidecarUrl = DEFAULT_SIDECAR_URL,
    token_file: TokenFile = None,
    tls: Tls = None,
    output: Output = OutputFormat.TABLE,
) -> None:
    """Show where each chunk of a prompt is, and why it is missing where it is not.

    A sidecar explains on loopback only: run this in its pod. Token ids go to
    it alone, and into no log. Exits with 1 when a whole chunk is missing; a
    rest that fills none does not count.
    """
    if bool(chunk_hashes) == (tokens is not None):
        raise typer.BadParameter("give chunk hashes or --tokens, one of them")
    from lmcache_ctl.sidecar.rest import Sidecar, read_token_ids
    from lmcache_ctl.sidecar.tables import is_rest, print_explanations

    asked = {"chunk_hashes": chunk_hashes} if tokens is None else {"token_ids": read_token_ids(tokens)}
    found = Sidecar(url, token_file, tls).ask("POST", "/v1/explain", asked | ({} if model is None else {"model": model}))
    if output is OutputFormat.JSON:
        print_json(found)
    else:
        print_explanations(found)
    for explanation in found["explanations"]:
        if not all(chunk["is_complete"] or is_rest(chunk, explanation["chunk_size"]) for chunk in explanation["chunks"]):
            raise typer.Exit(1)
