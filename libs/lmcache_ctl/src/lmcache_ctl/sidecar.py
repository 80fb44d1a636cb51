"""`lmcachectl sidecar`, one running sidecar, and `lmcachectl explain`: why a prompt misses."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from lmcache_ctl.errors import UsageError
from lmcache_ctl.options import reaches
from lmcache_ctl.output import (
    UNKNOWN,
    Columns,
    Output,
    OutputFormat,
    print_table,
    print_text,
    show,
    size_text,
)
from lmcache_ctl.reach import Reach
from lmcache_ctl.services import Kind

STANDARD_INPUT = Path("-")
_SEPARATORS = re.compile(r"[\s,]+")


@reaches(Kind.SIDECAR)
def status(reach: Reach, output: Output = OutputFormat.TABLE) -> None:
    """Show how a sidecar is: its memory, its tiers, who is connected, and how far a drain is."""
    names = ("status", "tiers", "clients")
    found = {name: reach.ask(Kind.SIDECAR, "GET", f"/v1/{name}") for name in names}
    show(found, output, _print_status)


def _print_status(found: Mapping[str, Any]) -> None:
    status, drain = found["status"], found["status"]["drain"]
    figures = ("arena", "reserved", "held", "pinned", "pending")
    arena, reserved, held, pinned, pending = (size_text(status[f"{one}_bytes"]) for one in figures)
    drained = (
        ""
        if drain["state"] == "serving"
        else f": {drain['total']} chunks, "
        + ", ".join(
            f"{drain[name]} {name.replace('_', ' ')}"
            for name in ("handed_over", "already_elsewhere", "failed", "left")
        )
    )
    lines = {
        "sidecar": (
            f"{status['instance']} {status['version']}, up {status['uptime_s']:.0f} s,"
            f" {status['distributed_url']}"
        ),
        "registered": "yes" if status["registered"] else "no",
        "memory": f"{arena}, verified {status['verify_hot']}",
        "in use": f"{reserved} being filled, {held} held by engines",
        "pinned": pinned,
        "pending": f"{pending} for slower tiers",
        "drain": drain["state"] + drained,
    }
    for name, value in lines.items():
        print_text(f"{name:<11}{value}")
    rows = [
        (
            name,
            str(tier["num_chunks"]),
            size_text(tier["used_bytes"]),
            size_text(tier["capacity_bytes"]),
        )
        for name, tier in found["tiers"]["tiers"].items()
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
    body: dict[str, Any] = (
        {"chunk_hashes": chunk_hashes} if tokens is None else {"token_ids": read_token_ids(tokens)}
    )
    if model is not None:
        body["model"] = model
    found = reach.ask_one(
        Kind.SIDECAR, lambda caller: caller.ask("POST", "/v1/admin/explain", body), sidecar
    )
    show(found, output, _print_explanations)
    for one in found["explanations"]:
        for chunk in one["chunks"]:
            if not chunk["is_complete"] and not _is_rest(chunk, one["chunk_size"]):
                raise typer.Exit(1)


def read_token_ids(path: Path) -> list[int]:
    """Read token ids: a JSON list, or numbers apart by commas or blanks.

    Args:
        path: A file, or `-` for standard input.

    Raises:
        UsageError: It cannot be read, is empty or holds something else; what that is, is not
            repeated.
    """
    try:
        text = sys.stdin.read() if path == STANDARD_INPUT else path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        why = getattr(exc, "strerror", None) or "it is no text"
        raise UsageError(f"cannot read {path}: {why}") from exc
    inside = text.strip().removeprefix("[").removesuffix("]").strip()
    if not inside:
        raise UsageError(f"{path} is empty: write token ids as numbers, apart by commas or blanks")
    words = _SEPARATORS.split(inside)
    if not all(word.isascii() and word.isdigit() for word in words):
        raise UsageError(
            f"{path} holds something else than token ids: write numbers apart by commas or blanks"
        )
    return [int(word) for word in words]


def _print_explanations(found: Mapping[str, Any]) -> None:
    """Print a table for each way in which engines name KV, a line for each chunk of each rank."""
    for one in found["explanations"]:
        title = (
            f"{one['model_name']} ({one['fmt']}), chunks of {one['chunk_size']} tokens: the first"
            f" {one['num_prefix']} are complete"
        )
        rows = [
            tuple(_state_cells(chunk, state, _is_rest(chunk, one["chunk_size"])))
            for chunk in one["chunks"]
            for state in chunk["states"]
        ]
        print_table(title, Columns(("tokens", "rank", "where it is", "size", "age"), left=3), rows)
    if found["num_not_explained"]:
        print_text(
            f"{found['num_not_explained']} further ways to name them are left out: name a --model."
        )


def _is_rest(chunk: Mapping[str, Any], chunk_size: int) -> bool:
    """Return whether a chunk is the end of a prompt that fills no chunk."""
    return chunk["start"] is not None and chunk["end"] - chunk["start"] < chunk_size


def _state_cells(
    chunk: Mapping[str, Any], state: Mapping[str, Any], of_rest: bool
) -> Iterator[str]:
    is_named = chunk["start"] is None
    yield f"{chunk['chunk_hash'][:16]}..." if is_named else f"{chunk['start']}-{chunk['end']}"
    yield f"{state['rank']} {state['group']}".strip()
    missing = f"MISSING: {state['missing']}" if state["missing"] else ""
    missing += " (a rest: vLLM stores whole chunks)" if missing and of_rest else ""
    places = ", ".join(_place_text(place) for place in state["places"])
    yield "; ".join(filter(None, (places, missing, "pinned" if state["is_pinned"] else "")))
    place = state["places"][0] if state["places"] else {"num_bytes": None, "age_s": None}
    yield UNKNOWN if place["num_bytes"] is None else size_text(place["num_bytes"])
    yield UNKNOWN if place["age_s"] is None else f"{place['age_s']:.0f} s"


def _place_text(place: Mapping[str, Any]) -> str:
    words = [" ".join(place["peers"])] if place["peers"] else []
    words += [place["state"]] if place["state"] != "present" else []
    words += ["lossy"] if place["lossy"] else []
    words += [f"held {place['num_holders']}x"] if place["num_holders"] else []
    return f"{place['tier']} ({', '.join(words)})" if words else str(place["tier"])
