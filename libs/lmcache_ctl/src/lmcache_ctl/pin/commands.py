"""`lmcachectl pin`."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lmcache_ctl.cluster.services import Kind
from lmcache_ctl.errors import UsageError
from lmcache_ctl.options import reaches_services
from lmcache_ctl.output import Output, OutputFormat, show
from lmcache_ctl.reach import Reach

if TYPE_CHECKING:
    from lmcache_ctl.cluster.asking import Asker
    from lmcache_ctl.cluster.targets import Outcome

KINDS = (Kind.SIDECAR, Kind.STORAGE)
DEFAULT_TTL_S = 600.0


@reaches_services
def pin(
    reach: Reach,
    chunks: Annotated[
        list[str] | None,
        typer.Argument(metavar="CHUNK", help="Chunk hashes; at cache_storage keys."),
    ] = None,
    tokens: Annotated[
        Path | None,
        typer.Option(help="File with the token ids of a prompt instead; - for standard input."),
    ] = None,
    at: Annotated[
        str, typer.Option(metavar="TARGET", help="sidecar, storage, or one of them: sidecar/NAME.")
    ] = "sidecar",
    ttl: Annotated[
        float, typer.Option(metavar="SECONDS", help="For how long; 0 lets go of them.", min=0)
    ] = DEFAULT_TTL_S,
    output: Output = OutputFormat.TABLE,
) -> None:
    """Keep chunks in memory for a while, for instance a system prompt before a rush.

    Without chunks: list what is pinned. With --tokens sidecars say what the
    chunks are called (see explain). Needs the role admin. Exits with 1 when a
    chunk is pinned nowhere, or a service did not answer.
    """
    from lmcache_ctl.cluster.asking import Asker
    from lmcache_ctl.cluster.targets import parse_target
    from lmcache_ctl.explain.token_ids import read_token_ids
    from lmcache_ctl.pin.pinning import PinJob, pinned_nowhere, run_pin_job
    from lmcache_ctl.pin.tables import print_pins

    target = parse_target(at, KINDS)
    if chunks and tokens is not None:
        raise UsageError("give chunks or --tokens, one of them")
    if tokens is not None and target.kind is not Kind.SIDECAR:
        raise UsageError(
            f"--tokens goes to sidecars, which know how engines name chunks; not to {target}"
        )
    job = PinJob(target, chunks or [], None if tokens is None else read_token_ids(tokens), ttl)

    def work(asker: Asker) -> list[Outcome]:
        return asyncio.run(run_pin_job(asker, services, job))

    with reach.services(target.kind) as services:
        found = work(Asker(reach.settings))
    show(found, output, print_pins)
    if any(one.problem for one in found) or pinned_nowhere(found):
        raise typer.Exit(1)
