"""`lmcachectl pin`: keep chunks in memory for a while."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from lmcache_ctl.asking import Caller
from lmcache_ctl.errors import CtlError, UsageError
from lmcache_ctl.options import chunk_hash
from lmcache_ctl.output import (
    Output,
    print_table,
    print_text,
    show,
    size_text,
)
from lmcache_ctl.prompts import EXPLAIN_PATH, read_token_ids
from lmcache_ctl.services import Kind
from lmcache_ctl.targets import TargetResult, ask_targets, parse_target, print_results

DEFAULT_TTL_S = 600.0
SHOWN_DIGITS = 16


def pin(
    ctx: typer.Context,
    chunks: Annotated[
        list[str] | None,
        typer.Argument(metavar="CHUNK", help="Chunk hashes; at cache_storage keys."),
    ] = None,
    tokens: Annotated[
        Path | None,
        typer.Option(help="File with the token ids of a prompt instead; - for standard input."),
    ] = None,
    at: Annotated[
        str,
        typer.Option(
            metavar="TARGET",
            help="sidecar, storage, or one of them: sidecar/NAME.",
        ),
    ] = "sidecar",
    ttl: Annotated[
        float, typer.Option(metavar="SECONDS", help="For how long; 0 removes the pins.", min=0)
    ] = DEFAULT_TTL_S,
    output: Output = "table",
) -> None:
    """Keep chunks in memory for a while, for instance a system prompt before a rush.

    Without chunks: list what is pinned. With --tokens sidecars name the
    chunks (see explain). Needs the role admin. Exits with 1 when a
    chunk is pinned nowhere, or a service did not answer.
    """
    target = parse_target(at)
    if chunks and tokens is not None:
        raise UsageError("give chunks or --tokens, one of them")
    if tokens is not None and target.kind is not Kind.SIDECAR:
        raise UsageError(
            f"--tokens goes to sidecars, which know how engines name chunks; not to {target}"
        )
    token_ids = None if tokens is None else read_token_ids(tokens)
    if target.kind is Kind.SIDECAR:
        chunks = [chunk_hash(one) for one in chunks or ()]

    found = ask_targets(ctx.obj, [target], lambda caller: _pin_at(caller, chunks, token_ids, ttl))
    show(found, output, print_pins)
    if any(one.problem for one in found) or _pinned_nowhere(found):
        raise typer.Exit(1)


async def _pin_at(
    caller: Caller, chunks: list[str] | None, token_ids: list[int] | None, ttl_s: float
) -> Any:
    """Pin these chunks, or those of a prompt, at one service; without chunks, list its pins."""
    is_storage = caller.service.kind is Kind.STORAGE
    field = "keys" if is_storage else "chunk_hashes"
    if token_ids is not None:
        told = await caller.ask("POST", EXPLAIN_PATH, {"token_ids": token_ids})
        whole = (
            chunk
            for one in told["explanations"]
            for chunk in one["chunks"]
            if chunk["end"] - chunk["start"] == one["chunk_size"]
        )
        chunks = list(dict.fromkeys(chunk["chunk_hash"] for chunk in whole))
        if not chunks:
            raise CtlError("the prompt fills no chunk: there is nothing to pin")
    if not chunks:
        return await caller.ask("GET", "/v1/admin/pins")
    if not ttl_s:
        return await caller.ask("POST", "/v1/admin/unpin", {field: chunks})
    return await caller.ask("POST", "/v1/admin/pin", {field: chunks, "ttl_s": ttl_s})


def _pinned_nowhere(found: Sequence[TargetResult]) -> bool:
    """Return whether a chunk that should be pinned is pinned at no service."""
    missing = [
        {str(one.get("key") or one.get("chunk_hash")) for one in each.result["not_pinned"]}
        for each in found
        if "not_pinned" in each.result
    ]
    return bool(missing) and bool(set.intersection(*missing))


def print_pins(found: Sequence[TargetResult]) -> None:
    """Print what each service pins, what it does not, and why."""
    print_results(found, "pins", _done)
    kept = [
        (
            one.name,
            _shown(pin),
            str(pin.get("model_name") or pin.get("tenant")),
            size_text(pin["num_bytes"]),
            f"{pin['expires_in_s']:.0f} s",
        )
        for one in found
        for pin in one.result.get("pins", [])
    ]
    if kept:
        print_table(("name", "chunk", "of", "size", "seconds left"), kept, left=3)
    for one in found:
        for missing in one.result.get("not_pinned", []):
            print_text(f"{one.name}: {_shown(missing)} is not pinned: {missing['reason']}")


def _done(result: Mapping[str, Any]) -> str:
    if "num_unpinned" in result:
        return f"{result['num_unpinned']} let go"
    held = f"{size_text(result['pinned_bytes'])} of {size_text(result['max_pinned_bytes'])} pinned"
    return f"{result['num_pinned']} of these, {held}" if "num_pinned" in result else held


def _shown(chunk: dict[str, object]) -> str:
    name = str(chunk.get("key") or chunk.get("chunk_hash"))
    return name if len(name) <= SHOWN_DIGITS else name[:SHOWN_DIGITS] + "..."
