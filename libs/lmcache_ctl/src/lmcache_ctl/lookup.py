"""`lmcachectl lookup`: which instance holds which chunk, by the lookup service."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Final
from urllib.parse import quote

import typer

from lmcache_ctl.errors import CtlError
from lmcache_ctl.options import Url, chunk_id
from lmcache_ctl.output import (
    UNKNOWN,
    ListOutput,
    print_table,
    print_text,
    show,
    size_text,
)
from lmcache_ctl.reach import Reach
from lmcache_ctl.services import Kind

MAX_PAGES: Final = 1000


ChunkIds = Annotated[
    list[str],
    typer.Argument(
        metavar="CHUNK_ID",
        parser=chunk_id,
        help="Chunk ids, 32 hex digits each, in the order of the prompt.",
    ),
]


def status(
    ctx: typer.Context,
    tenant: Annotated[
        str | None,
        typer.Option(help="Show this tenant instead of the token's; needs the role admin."),
    ] = None,
    url: Url = None,
    output: ListOutput = "table",
) -> None:
    """Show where the index is, how much is in it, and which instances hold leases."""
    stats = "/v1/stats" + ("" if tenant is None else f"?tenant={quote(tenant, safe='')}")

    reach = Reach(ctx.obj, Kind.LOOKUP, url=url)
    found = {
        "stats": reach.ask("GET", stats),
        "instances": reach.ask("GET", "/v1/instances")["instances"],
    }
    show(found, output, _print_status, _names("instances"))


def _names(field: str) -> Callable[[Mapping[str, Any]], list[str]]:
    """Return what names the instances in a field of an answer: `KIND/NAME`, as commands take it."""
    return lambda found: [f"{one['kind']}/{one['instance']}" for one in found[field]]


def _print_status(found: Mapping[str, Any]) -> None:
    stats = found["stats"]
    away = ", which does not answer" if stats["degraded"] else ""
    print_text(f"index      {stats['index']}{away}")
    print_text(f"chunks     {UNKNOWN if stats['num_chunks'] is None else stats['num_chunks']}")
    rows = [
        (
            one["instance"],
            one["kind"],
            str(one["next_sequence"]),
            f"{one['expires_in_ms'] / 1000:.1f} s",
        )
        for one in found["instances"]
    ]
    print_table(("instance", "kind", "events", "lease"), rows, left=2)


def tenants(ctx: typer.Context, url: Url = None, output: ListOutput = "table") -> None:
    """List the tenants whose chunks are, or were, in the index. Needs the role admin."""
    show(
        _all_tenants(Reach(ctx.obj, Kind.LOOKUP, url=url)),
        output,
        _print_tenants,
        lambda found: found,
    )


def _print_tenants(found: list[str]) -> None:
    print_text("\n".join(found) or "no tenant has stored anything")


def _all_tenants(reach: Reach) -> list[str]:
    names: list[str] = []
    after = ""
    for _ in range(MAX_PAGES):
        page = reach.ask("GET", f"/v1/admin/tenants{after}")
        names += page["tenants"]
        if page["next_after"] is None:
            return names
        after = f"?after={quote(page['next_after'], safe='')}"
    raise CtlError(f"more than {MAX_PAGES} pages of tenants")


def prefix(
    ctx: typer.Context,
    chunk_ids: ChunkIds,
    url: Url = None,
    output: ListOutput = "table",
) -> None:
    """Show the longest prefix of these chunks that is cached, and who holds each. Exits with 1
    when not all are.
    """
    reach = Reach(ctx.obj, Kind.LOOKUP, url=url)
    found = reach.ask("POST", "/v1/lookup", {"chunk_ids": chunk_ids})
    found["chunk_ids"] = chunk_ids
    show(found, output, _print_prefix, lambda found: chunk_ids[: found["num_prefix"]])
    if found["num_prefix"] < len(chunk_ids):
        raise typer.Exit(1)


def _print_prefix(found: Mapping[str, Any]) -> None:
    if _is_known(found):
        asked = found["chunk_ids"]
        print_text(f"The first {found['num_prefix']} of {len(asked)} chunks are cached.")
        rows = [
            (chunk_id, ", ".join(map(_holder_text, holders)))
            for chunk_id, holders in zip(asked, found["holders"], strict=False)
        ]
        if rows:
            print_table(("chunk", "held by"), rows, left=2)


def _holder_text(holder: Mapping[str, Any]) -> str:
    return f"{holder['instance']} ({holder['tier']})"


def locations(
    ctx: typer.Context,
    chunk_id: Annotated[
        str,
        typer.Argument(metavar="CHUNK_ID", parser=chunk_id, help="A chunk id, 32 hex digits."),
    ],
    url: Url = None,
    output: ListOutput = "table",
) -> None:
    """Show all instances that hold a chunk. Exits with 1 when none does."""
    reach = Reach(ctx.obj, Kind.LOOKUP, url=url)
    found = reach.ask("GET", f"/v1/chunks/{chunk_id}/locations")
    show(found, output, _print_holders, _names("holders"))
    if not found["holders"]:
        raise typer.Exit(1)


def _print_holders(found: Mapping[str, Any]) -> None:
    if _is_known(found):
        rows = [
            (one["instance"], one["kind"], one["tier"], size_text(one["size_bytes"]))
            for one in found["holders"]
        ]
        print_table(("instance", "kind", "tier", "size"), rows, left=3)


def route(
    ctx: typer.Context,
    chunk_ids: ChunkIds,
    url: Url = None,
    output: ListOutput = "table",
) -> None:
    """Show how long a prefix of these chunks each instance holds by itself. Exits with 1 when
    none holds any.
    """
    reach = Reach(ctx.obj, Kind.LOOKUP, url=url)
    found = reach.ask("POST", "/v1/route", {"chunk_ids": chunk_ids})

    def print_routes(found: Mapping[str, Any]) -> None:
        if _is_known(found):
            rows = [
                (one["instance"], f"{one['num_prefix']} of {len(chunk_ids)}")
                for one in found["instances"]
            ]
            print_table(("instance", "chunks of the prefix"), rows)

    def names(found: Mapping[str, Any]) -> list[str]:
        return [one["instance"] for one in found["instances"]]

    show(found, output, print_routes, names)
    if not found["instances"]:
        raise typer.Exit(1)


def _is_known(found: Mapping[str, Any]) -> bool:
    if found["degraded"]:
        print_text("The index does not answer: nothing is known.")
    return not found["degraded"]
