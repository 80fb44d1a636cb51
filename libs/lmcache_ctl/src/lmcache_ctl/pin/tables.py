"""What `lmcachectl pin` prints for people."""

from __future__ import annotations

from collections.abc import Sequence

from lmcache_ctl.cluster.targets import Outcome
from lmcache_ctl.output import Columns, print_table, print_text, size_text

SHOWN_DIGITS = 16


def print_pins(found: Sequence[Outcome]) -> None:
    """What each service keeps, what it does not, and why."""
    rows = [(str(one.kind), one.name, one.problem or _done(one)) for one in found]
    print_table("", Columns(("service", "name", "pins"), left=3, prose=True), rows)
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
        print_table("", Columns(("name", "chunk", "of", "size", "seconds left"), left=3), kept)
    for one in found:
        for missing in one.result.get("not_pinned", []):
            print_text(f"{one.name}: {_shown(missing)} is not pinned: {missing['reason']}")


def _done(one: Outcome) -> str:
    result = one.result
    if "num_unpinned" in result:
        return f"{result['num_unpinned']} let go"
    held = f"{size_text(result['pinned_bytes'])} of {size_text(result['max_pinned_bytes'])} pinned"
    return f"{result['num_pinned']} of these, {held}" if "num_pinned" in result else held


def _shown(chunk: dict[str, object]) -> str:
    name = str(chunk.get("key") or chunk.get("chunk_hash"))
    return name if len(name) <= SHOWN_DIGITS else name[:SHOWN_DIGITS] + "..."
