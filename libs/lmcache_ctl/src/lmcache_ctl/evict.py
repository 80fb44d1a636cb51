"""`lmcachectl evict`: free memory, or forget everything."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer

from lmcache_ctl.asking import Caller
from lmcache_ctl.errors import UsageError
from lmcache_ctl.output import UNITS, Output, confirm, show, size_text
from lmcache_ctl.services import Endpoint, names_of
from lmcache_ctl.targets import Targets, ask_targets, print_results

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)")


def parse_size(text: str) -> int:
    """Return the bytes of a size such as `512MiB`.

    Raises:
        UsageError: It is not such a number, or less than one byte.
    """
    found = _SIZE.fullmatch(text.strip())
    size = int(float(found[1]) * UNITS.get(found[2] or "B", 0)) if found is not None else 0
    if not size:
        raise UsageError(
            f"{text!r} is not a size: write a number and one of {', '.join(UNITS)}, such as 512MiB"
        )
    return size


def evict(
    ctx: typer.Context,
    targets: Targets,
    size: Annotated[
        int | None,
        typer.Option(
            metavar="SIZE",
            parser=parse_size,
            help="Memory to free, coldest chunks first, such as 512MiB.",
        ),
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
    output: Output = "table",
) -> None:
    """Free memory of sidecars and cache_storage, or make them forget everything.

    Chunks that were freed from memory stay on disks and elsewhere. Needs the
    role admin. Exits with 1 when a service did not do it.
    """
    if (size is not None) == everything:
        raise UsageError("give --size or --everything, one of them")
    body = None if size is None else {"num_bytes": size}
    what = "clear" if size is None else "evict"

    def ask_first(chosen: Sequence[Endpoint]) -> None:
        if everything and not yes:
            confirm(f"Forget all chunks at {', '.join(names_of(chosen))}?")

    async def tell(caller: Caller) -> Any:
        return await caller.ask("POST", f"/v1/admin/{what}", body)

    found = ask_targets(ctx.obj, targets, tell, ask_first)
    show(found, output, lambda found: print_results(found, "done", _done))
    if any(one.problem for one in found):
        raise typer.Exit(1)


def _done(result: Mapping[str, Any]) -> str:
    if "freed_bytes" in result:
        return f"{size_text(result['freed_bytes'])} freed"
    return f"{result.get('num_chunks')} chunks forgotten"
