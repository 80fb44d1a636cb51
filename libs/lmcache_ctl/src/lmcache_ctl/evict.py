"""`lmcachectl evict`: free memory, or forget everything."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from lmcache_ctl.asking import Asker, Caller
from lmcache_ctl.errors import UsageError
from lmcache_ctl.options import reaches_services
from lmcache_ctl.output import Columns, Output, OutputFormat, confirm, print_table, show, size_text
from lmcache_ctl.reach import Reach
from lmcache_ctl.services import Kind
from lmcache_ctl.settings import parse_size
from lmcache_ctl.targets import TargetResult, named, parse_target, results_of

KINDS = [Kind.SIDECAR, Kind.STORAGE]


@reaches_services
def evict(
    reach: Reach,
    targets: Annotated[
        list[str],
        typer.Argument(
            metavar="TARGET",
            help="sidecar, storage, or one of them: storage/NAME.",
        ),
    ],
    size: Annotated[
        str | None, typer.Option(help="Memory to free, coldest chunks first, such as 512MiB.")
    ] = None,
    everything: Annotated[
        bool,
        typer.Option(
            "--everything", help="Forget all chunks, on disks too, of the token's tenant."
        ),
    ] = False,
    yes: Annotated[
        bool, typer.Option("--yes", "-y", help="Do not ask before --everything.")
    ] = False,
    output: Output = OutputFormat.TABLE,
) -> None:
    """Free memory of sidecars and cache_storage, or make them forget everything.

    Chunks that were freed from memory stay on disks and elsewhere. Needs the
    role admin. Exits with 1 when a service did not do it.
    """
    if (size is not None) == everything:
        raise UsageError("give --size or --everything, one of them")
    asked = [parse_target(text, KINDS) for text in targets]
    body = None if size is None else {"num_bytes": parse_size(size)}
    what = "clear" if size is None else "evict"

    async def tell(caller: Caller) -> Any:
        return await caller.ask("POST", f"/v1/admin/{what}", body)

    async def work(asker: Asker) -> list[TargetResult]:
        chosen = await named(asker, services, asked)
        if everything and not yes:
            names = ", ".join(f"{one.kind}/{one.name}" for one in chosen)
            confirm(f"Forget all chunks at {names}?")
        return results_of(chosen, await asker.each(chosen, tell))

    with reach.services(*dict.fromkeys(target.kind for target in asked)) as services:
        found = asyncio.run(work(Asker(reach.settings)))
    show(found, output, _print)
    if any(one.problem for one in found):
        raise typer.Exit(1)


def _print(found: Sequence[TargetResult]) -> None:
    rows = [(str(one.kind), one.name, one.problem or _done(one.result)) for one in found]
    print_table("", Columns(("service", "name", "done"), left=3, prose=True), rows)


def _done(result: dict[str, Any]) -> str:
    if "freed_bytes" in result:
        return f"{size_text(result['freed_bytes'])} freed"
    return f"{result.get('num_chunks')} chunks forgotten"
