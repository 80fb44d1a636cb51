"""What the commands of `lmcachectl lookup` print for people."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lmcache_ctl.output import UNKNOWN, Columns, print_table, print_text, size_text

DEGRADED = "The index does not answer: nothing is known."


def print_status(found: Mapping[str, Any]) -> None:
    """The index, and a line for each lease."""
    stats = found["stats"]
    print_text(
        f"index      {stats['index']}{', which does not answer' if stats['degraded'] else ''}"
    )
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
    print_table("", Columns(("instance", "kind", "events", "lease"), left=2), rows)


def print_holders(found: Mapping[str, Any]) -> None:
    """A line for each holder of a chunk."""
    if found["degraded"]:
        print_text(DEGRADED)
        return
    rows = [
        (one["instance"], one["kind"], one["tier"], size_text(one["size_bytes"]))
        for one in found["holders"]
    ]
    print_table("", Columns(("instance", "kind", "tier", "size"), left=3), rows)


def print_routes(found: Mapping[str, Any], num_asked: int) -> None:
    """A line for each instance, longest prefix first."""
    if found["degraded"]:
        print_text(DEGRADED)
        return
    rows = [(one["instance"], f"{one['num_prefix']} of {num_asked}") for one in found["instances"]]
    print_table("", Columns(("instance", "chunks of the prefix")), rows)


def print_prefix(found: Mapping[str, Any]) -> None:
    """How many chunks from the first on are cached, and a line for each of those with its
    holders.
    """
    if found["degraded"]:
        print_text(DEGRADED)
        return
    print_text(f"The first {found['num_prefix']} of {len(found['chunk_ids'])} chunks are cached.")
    rows = [
        (chunk_id, ", ".join(f"{one['instance']} ({one['tier']})" for one in holders))
        for chunk_id, holders in zip(found["chunk_ids"], found["holders"], strict=False)
    ]
    if rows:
        print_table("", Columns(("chunk", "held by"), left=2), rows)
