"""`lmcachectl explain`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lmcache_ctl.cluster.services import Kind
from lmcache_ctl.options import reaches
from lmcache_ctl.output import Output, OutputFormat, show
from lmcache_ctl.reach import Reach


@reaches(Kind.SIDECAR)
def explain(
    reach: Reach,
    chunk_hashes: Annotated[
        list[str] | None, typer.Argument(metavar="HASH", help="Chunk hashes, 64 hex digits each.")
    ] = None,
    tokens: Annotated[
        Path | None,
        typer.Option(
            help=(
                "File with the token ids of a prompt of text, apart by commas or blanks; - for"
                " standard input."
            )
        ),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Only as this model's engines name chunks.")
    ] = None,
    sidecar: Annotated[
        str | None, typer.Option(help="Ask the sidecar of that name; else the first that answers.")
    ] = None,
    output: Output = OutputFormat.TABLE,
) -> None:
    """Show where each chunk of a prompt is, and why it is missing where it is not.

    A sidecar explains on loopback only: run this in its pod, or find it by
    --namespace. Token ids go to it alone, and into no log. Exits with 1 when
    a whole chunk is missing; a rest that fills none does not count.
    """
    if bool(chunk_hashes) == (tokens is not None):
        raise typer.BadParameter("give chunk hashes or --tokens, one of them")
    from lmcache_ctl.explain.token_ids import read_token_ids
    from lmcache_ctl.sidecar.tables import is_rest, print_explanations

    asked = (
        {"chunk_hashes": chunk_hashes} if tokens is None else {"token_ids": read_token_ids(tokens)}
    )
    body = asked | ({} if model is None else {"model": model})
    found = reach.ask_one(
        Kind.SIDECAR, lambda caller: caller.ask("POST", "/v1/explain", body), sidecar
    )
    show(found, output, print_explanations)
    for explanation in found["explanations"]:
        if not all(
            chunk["is_complete"] or is_rest(chunk, explanation["chunk_size"])
            for chunk in explanation["chunks"]
        ):
            raise typer.Exit(1)
