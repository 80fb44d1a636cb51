"""What the commands of `lmcachectl sidecar` print for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lmcache_ctl.output import UNKNOWN, Columns, print_table, print_text, size_text


def print_status(found: Mapping[str, Any]) -> None:
    """How a sidecar is, its tiers, and its clients."""
    status = found["status"]
    drain = status["drain"]
    lines = (
        (
            "sidecar",
            (
                f"{status['instance']} {status['version']}, up {status['uptime_s']:.0f} s,"
                f" {status['distributed_url']}"
            ),
        ),
        ("registered", "yes" if status["registered"] else "no"),
        ("memory", f"{size_text(status['arena_bytes'])}, verified {status['verify_hot']}"),
        (
            "in use",
            (
                f"{size_text(status['reserved_bytes'])} being filled,"
                f" {size_text(status['held_bytes'])} held by engines"
            ),
        ),
        ("pinned", size_text(status["pinned_bytes"])),
        ("pending", f"{size_text(status['pending_bytes'])} for slower tiers"),
        (
            "drain",
            drain["state"] + ("" if drain["state"] == "serving" else f": {_drain_text(drain)}"),
        ),
    )
    for name, value in lines:
        print_text(f"{name:<11}{value}")
    tiers = found["tiers"]["tiers"].items()
    rows = [
        (
            name,
            str(tier["num_chunks"]),
            size_text(tier["used_bytes"]),
            size_text(tier["capacity_bytes"]),
        )
        for name, tier in tiers
    ]
    print_table("", Columns(("tier", "chunks", "used", "of")), rows)
    clients = [
        (
            one["client"],
            one["model"],
            f"{one['rank']} of {one['world_size']}",
            str(one["pid"]),
            size_text(one["pinned_bytes"]),
        )
        for one in found["clients"]["clients"]
    ]
    if clients:
        print_table("", Columns(("client", "model", "rank", "pid", "pinned"), left=2), clients)


def _drain_text(drain: Mapping[str, int]) -> str:
    names = ("handed_over", "already_elsewhere", "failed", "left")
    return f"{drain['total']} chunks, " + ", ".join(
        f"{drain[name]} {name.replace('_', ' ')}" for name in names
    )


def print_explanations(found: Mapping[str, Any]) -> None:
    """A table for each way in which engines name KV, with a line for each chunk of each rank and
    group.
    """
    for one in found["explanations"]:
        title = (
            f"{one['model_name']} ({one['fmt']}), chunks of {one['chunk_size']} tokens: the first"
            f" {one['num_prefix']} are complete"
        )
        size = one["chunk_size"]
        rows = [
            (_tokens_text(chunk), *_state_cells(state, is_rest(chunk, size)))
            for chunk in one["chunks"]
            for state in chunk["states"]
        ]
        print_table(title, Columns(("tokens", "rank", "where it is", "size", "age"), left=3), rows)
    if found["num_not_explained"]:
        print_text(
            f"{found['num_not_explained']} further ways to name them are left out: name a --model."
        )


def is_rest(chunk: Mapping[str, Any], chunk_size: int) -> bool:
    """Whether it is the end of a prompt that fills no chunk."""
    return chunk["start"] is not None and chunk["end"] - chunk["start"] < chunk_size


def _tokens_text(chunk: Mapping[str, Any]) -> str:
    return (
        f"{chunk['start']}-{chunk['end']}"
        if chunk["start"] is not None
        else f"{chunk['chunk_hash'][:16]}..."
    )


def _state_cells(state: Mapping[str, Any], of_rest: bool) -> tuple[str, str, str, str]:
    rank = f"{state['rank']} {state['group']}".strip()
    where = ", ".join(_place_text(place) for place in state["places"])
    missing = f"MISSING: {state['missing']}" if state["missing"] else ""
    missing += " (a rest: vLLM stores whole chunks)" if missing and of_rest else ""
    cells = "; ".join(
        text for text in (where, missing, "pinned" if state["is_pinned"] else "") if text
    )
    return rank, cells, *_size_and_age(state["places"])


def _place_text(place: Mapping[str, Any]) -> str:
    words = [" ".join(place["peers"])] if place["peers"] else []
    words += [place["state"]] if place["state"] != "present" else []
    words += ["lossy"] if place["lossy"] else []
    words += [f"held {place['num_holders']}x"] if place["num_holders"] else []
    return f"{place['tier']} ({', '.join(words)})" if words else str(place["tier"])


def _size_and_age(places: Sequence[Mapping[str, Any]]) -> tuple[str, str]:
    place = places[0] if places else {"num_bytes": None, "age_s": None}
    size = UNKNOWN if place["num_bytes"] is None else size_text(place["num_bytes"])
    return size, UNKNOWN if place["age_s"] is None else f"{place['age_s']:.0f} s"
