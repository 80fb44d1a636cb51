"""`lmcachectl evict`."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from lmcache_ctl.cluster.services import Kind
from lmcache_ctl.errors import UsageError
from lmcache_ctl.options import reaches_services
from lmcache_ctl.output import Columns, Output, OutputFormat, confirm, print_table, show, size_text
from lmcache_ctl.reach import Reach

KINDS = (Kind.SIDECAR, Kind.STORAGE)
Targets = Annotated[
    list[str],
    typer.Argument(metavar="TARGET", help="sidecar, storage, or one of them: storage/NAME."),
]


@reaches_services
def evict(
    reach: Reach,
    targets: Targets,
    size: Annotated[
        str | None, typer.Option(help="Free so much memory, coldest chunks first, such as 512MiB.")
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
    role admin. Exits with 1 when one of the services did not do it.
    """
    from lmcache_ctl.cluster.asking import Asker
    from lmcache_ctl.cluster.targets import Outcome, named, parse_target, tell_each
    from lmcache_ctl.sizes import parse_size

    if (size is not None) == everything:
        raise UsageError("give --size or --everything, one of them")
    asked = [parse_target(text, KINDS) for text in targets]
    body: Any = None if size is None else {"num_bytes": parse_size(size)}
    what = "clear" if size is None else "evict"
    paths = {Kind.SIDECAR: (f"/v1/{what}", body), Kind.STORAGE: (f"/v1/admin/{what}", body)}

    async def work(asker: Asker) -> list[Outcome]:
        chosen = await named(asker, services, asked)
        if everything and not yes:
            confirm(
                f"Forget all chunks at {', '.join(f'{one.kind}/{one.name}' for one in chosen)}?"
            )
        return await tell_each(asker, chosen, paths)

    with reach.services(*dict.fromkeys(target.kind for target in asked)) as services:
        found = asyncio.run(work(Asker(reach.settings)))
    show(found, output, _print)
    if any(one.problem for one in found):
        raise typer.Exit(1)


def _print(found: Sequence[Any]) -> None:
    rows = [(str(one.kind), one.name, one.problem or _done(one.result)) for one in found]
    print_table("", Columns(("service", "name", "done"), left=3, prose=True), rows)


def _done(result: dict[str, Any]) -> str:
    return (
        f"{size_text(result['freed_bytes'])} freed"
        if "freed_bytes" in result
        else f"{result.get('num_chunks')} chunks forgotten"
    )
