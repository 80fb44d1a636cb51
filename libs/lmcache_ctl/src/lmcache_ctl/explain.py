"""`lmcachectl explain`: where the chunks of a prompt are, and why they are missing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from http import HTTPStatus
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from lmcache_ctl.asking import Caller, ServiceRefusedError
from lmcache_ctl.errors import CtlError, UsageError
from lmcache_ctl.options import Url, chunk_hash, web_address
from lmcache_ctl.output import (
    UNKNOWN,
    Output,
    print_table,
    print_text,
    show,
    size_text,
)
from lmcache_ctl.prompts import (
    EXPLAIN_PATH,
    read_messages,
    read_prompt,
    read_token_ids,
    tokenize,
    vllm_at,
)
from lmcache_ctl.reach import Reach
from lmcache_ctl.services import Endpoint, Kind
from lmcache_ctl.targets import Target, named

NEVER_STORED: Final = "never_stored"
_SLOW: Final = "a slower tier did not answer in time: lmcachectl status shows which"
_CODEC: Final = (
    "it is stored in an encoding that this sidecar does not take: give all sidecars the same"
    " remote_serde, disk_serde and peer_serde"
)
_DAMAGED: Final = "its record is damaged and not served: lmcachectl doctor looks at the disk"
_OTHER_KV: Final = (
    "what is stored under its name has another KV layout: use one model revision and dtype"
)
CAUSES: Final = {
    "evicted": (
        "it was stored and then evicted for lack of room: raise arena_gb, or add a disk or a"
        " storage tier"
    ),
    "expired": "it was older than chunk_ttl_s: raise that, or leave it out",
    "no_memory": "memory had no room for it: raise arena_gb",
    "promised": "an engine is storing it now: ask again",
    "encoding": _CODEC,
    "profile": _CODEC,
    "corrupt": _DAMAGED,
    "quarantined": _DAMAGED,
    "layout": _OTHER_KV,
    "identity": _OTHER_KV,
    **dict.fromkeys(("deadline", "unavailable", "breaker_open", "unknown"), _SLOW),
}
"""What a reason for a missing chunk comes from, and the fix."""


def explain(
    ctx: typer.Context,
    chunk_hashes: Annotated[
        list[str] | None,
        typer.Argument(metavar="HASH", parser=chunk_hash, help="Chunk hashes, 64 hex digits each."),
    ] = None,
    prompt: Annotated[
        Path | None,
        typer.Option(help="File with a prompt of text, as /v1/completions takes it; - for stdin."),
    ] = None,
    messages: Annotated[
        Path | None,
        typer.Option(help="File with chat messages, or a whole chat request, as JSON."),
    ] = None,
    request: Annotated[
        str | None,
        typer.Option(metavar="ID", help="vLLM's id of a recent request, or a part of it."),
    ] = None,
    tokens: Annotated[
        Path | None,
        typer.Option(help="File with the token ids of a prompt, separated by commas or blanks."),
    ] = None,
    vllm_url: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            parser=web_address,
            help="vLLM, which tokenizes; else port 8000 of the sidecar's pod or this machine.",
        ),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Only as this model's engines name chunks.")
    ] = None,
    sidecar: Annotated[
        str | None,
        typer.Option(
            help="Ask the sidecar of that name; else the first that answers.",
        ),
    ] = None,
    url: Url = None,
    output: Output = "table",
) -> None:
    """Show where each chunk of a prompt is, or why it is missing.

    A sidecar explains on loopback only: run this in its pod, or find it by
    --namespace. Text goes to vLLM and token ids to the sidecar, and into no
    log. --request shows what a request found at its lookup. Exits with
    1 when a whole chunk is missing; a rest that fills none does not count.
    """
    subjects = (chunk_hashes or None, prompt, messages, request, tokens)
    if sum(one is not None for one in subjects) != 1:
        raise UsageError(
            "give chunk hashes or --tokens, --prompt, --messages or --request: one of them"
        )
    if vllm_url is not None and prompt is None and messages is None:
        raise UsageError("--vllm-url tokenizes text: give it with --prompt or --messages")
    question = None if prompt is None else read_prompt(prompt)
    question = question if messages is None else read_messages(messages)
    body: dict[str, Any] = {} if model is None else {"model": model}
    if chunk_hashes:
        body["chunk_hashes"] = chunk_hashes
    elif tokens is not None:
        body["token_ids"] = read_token_ids(tokens)

    reach = Reach(ctx.obj, Kind.SIDECAR, url=url)
    with reach.services() as services:
        if sidecar is not None:
            services = named(reach, services, [Target(Kind.SIDECAR, sidecar)])
        found: dict[str, Any]
        if request is not None:
            one, lookup = _remembered(reach, services, request)
            found = {"lookup": lookup, **_explained(reach, one, lookup)}
        else:
            if question is not None:
                with vllm_at(reach.settings, vllm_url, services[0].pod) as vllm:
                    body["token_ids"] = tokenize(reach.settings, vllm, question)
            _, found = reach.first_answer(
                services, lambda caller: caller.ask("POST", EXPLAIN_PATH, body)
            )
    show(found, output, _print_explanations)
    if not _is_whole(found):
        raise typer.Exit(1)


def _is_whole(found: Mapping[str, Any]) -> bool:
    if (lookup := found.get("lookup")) is not None:
        return bool(lookup["num_found"] >= lookup["num_chunks"])
    return all(not _missing(one) for one in found["explanations"])


def _remembered(
    reach: Reach, services: Sequence[Endpoint], request_id: str
) -> tuple[Endpoint, dict[str, Any]]:
    """Return the sidecar that remembers the latest lookup of a request, and that lookup.

    Raises:
        CtlError: None remembers one, or none answers.
    """

    async def question(caller: Caller) -> Any:
        from urllib.parse import quote

        path = f"/v1/admin/lookups?request_id={quote(request_id, safe='')}"
        return (await caller.ask("GET", path))["lookup"]

    answers = list(zip(services, reach.each(services, question), strict=True))
    known = [
        (service, lookup)
        for service, lookup in answers
        if not isinstance(lookup, CtlError) and lookup is not None
    ]
    if known:
        return min(known, key=lambda one: float(one[1]["age_s"]))
    problems = [
        f"{service.name}: {answer}" for service, answer in answers if isinstance(answer, CtlError)
    ]
    raise CtlError(
        f"no sidecar remembers a lookup of {request_id!r}: each keeps the last 1,000 of one"
        " hour until it restarts, by vLLM's request ids, such as chatcmpl-…"
        + "".join(f"; {problem}" for problem in problems)
    )


def _explained(reach: Reach, service: Endpoint, lookup: Mapping[str, Any]) -> dict[str, Any]:
    """Return where the first chunks of a lookup are now: as many as the sidecar explains at once.
    If it explains none, `problem` says why.
    """

    async def question(caller: Caller) -> Any:
        hashes = lookup["chunk_hashes"]
        while True:
            body = {"chunk_hashes": hashes, "model": lookup["model_name"]}
            try:
                return await caller.ask("POST", EXPLAIN_PATH, body)
            except ServiceRefusedError as exc:
                if exc.status != HTTPStatus.BAD_REQUEST or len(hashes) < 2:
                    raise
            hashes = hashes[: len(hashes) // 2]  # with many ranks and groups only a few fit

    try:
        return dict(reach.first_answer([service], question)[1])
    except CtlError as exc:
        return {"explanations": [], "num_not_explained": 0, "problem": str(exc)}


def _print_explanations(found: Mapping[str, Any]) -> None:
    """Print a table for each way in which engines name KV, a line for each chunk of each rank; then
    the cause of what is missing.
    """
    lookup = found.get("lookup")
    for one in found["explanations"]:
        size = one["chunk_size"]
        now = " now" if lookup is not None else ""
        title = (
            f"{one['model_name']} ({one['fmt']}), chunks of {size} tokens: the first"
            f" {one['num_prefix']} are complete{now}"
        )
        rows = [
            tuple(_state_cells(chunk, state, of_rest=_is_rest(chunk, size), tokens=tokens))
            for number, chunk in enumerate(one["chunks"])
            for tokens in [f"{number * size}-{number * size + size}" if lookup is not None else ""]
            for state in chunk["states"]
        ]
        print_text(title)
        print_table(("tokens", "rank", "where it is", "size", "age"), rows, left=3)
        if lookup is None:
            print_text(_cause_now(one))
        elif len(one["chunks"]) < lookup["num_chunks"]:
            print_text(
                f"These are the first {len(one['chunks'])} of {lookup['num_chunks']} chunks."
            )
    if "problem" in found:
        print_text(f"Where its chunks are now is not known: {found['problem']}")
    if lookup is not None:
        size = found["explanations"][0]["chunk_size"] if found["explanations"] else 0
        print_text(_cause_then(lookup, size))
    if found["num_not_explained"]:
        print_text(
            f"{found['num_not_explained']} further ways to name them are left out: name a --model."
        )


def _missing(explanation: Mapping[str, Any]) -> list[tuple[int, Mapping[str, Any]]]:
    """Return number and view of each whole chunk that is missing."""
    return [
        (number, chunk)
        for number, chunk in enumerate(explanation["chunks"])
        if not chunk["is_complete"] and not _is_rest(chunk, explanation["chunk_size"])
    ]


def _cause_now(explanation: Mapping[str, Any]) -> str:
    """Return a sentence on the first chunk that is missing now."""
    size, chunks = explanation["chunk_size"], explanation["chunks"]
    missing = _missing(explanation)
    num_whole = sum(not _is_rest(chunk, size) for chunk in chunks)
    if not num_whole:
        return f"The prompt fills no chunk of {size} tokens: nothing of it is cached."
    if not missing:
        return f"All {num_whole} whole chunks are cached."
    number, chunk = missing[0]
    if chunk["start"] is None:  # hashes by themselves are in no order
        number, size = 0, 0
    reasons = [state["missing"] for state in chunk["states"] if state["missing"]]
    if len(reasons) < len(chunk["states"]) and NEVER_STORED in reasons:
        return (
            f"{_place(number, size)} is stored by only some ranks or groups of layers: look into"
            " the log of the worker that stores none."
        )
    known = next((reason for reason in reasons if reason != NEVER_STORED), NEVER_STORED)
    return cause_of(number, size, known)


def _cause_then(lookup: Mapping[str, Any], size: int) -> str:
    """Return what a request found, and a sentence on the first chunk that it missed."""
    by_tier = ", ".join(f"{num} in {tier}" for tier, num in lookup["found"].items())
    found, wanted = lookup["num_found"], lookup["num_chunks"]
    told = (
        f"The request found {found} of {wanted} chunks{f' ({by_tier})' if by_tier else ''},"
        f" {lookup['age_s']:.0f} s ago."
    )
    if lookup["source"] is not None and lookup["settled_s"] is not None:
        told += (
            f" It expected them of {lookup['source'] or 'any instance'}: {lookup['num_at_once']}"
            f" were here at once, {found - lookup['num_at_once']} came within"
            f" {lookup['settled_s']:.3f} s."
        )
    if found >= wanted:
        return told
    if not lookup["is_final"]:
        return f"{told} Slower tiers were still being read: {_SLOW}."
    return f"{told} {cause_of(found, size, lookup['missing'] or 'unknown')}"


def cause_of(number: int, size: int, reason: str) -> str:
    """Return one sentence on the first missing chunk: the cause, and the fix.

    Args:
        number: Of the chunk in its prompt.
        size: Tokens in a chunk; 0 if its position in the prompt is unknown.
    """
    if reason != NEVER_STORED:
        return f"{_place(number, size)} is missing: {CAUSES.get(reason, reason)}."
    if not size:
        return "The chunk was never stored here: is it of another model, LoRA adapter or tenant?"
    if not number:
        return (
            f"The first {size} tokens differ from everything stored: does the prompt begin with a"
            " date or an id, or is it for another LoRA adapter, salt or tenant?"
        )
    return (
        f"What is stored agrees with the prompt up to token {number * size} and differs after it:"
        " does a date, an id or a retrieved text stand there that could stand at the end?"
    )


def _place(number: int, size: int) -> str:
    return f"The chunk from token {number * size} on" if size else "A chunk"


def _is_rest(chunk: Mapping[str, Any], chunk_size: int) -> bool:
    """Return whether a chunk is the end of a prompt that fills no chunk."""
    return chunk["start"] is not None and chunk["end"] - chunk["start"] < chunk_size


def _state_cells(
    chunk: Mapping[str, Any], state: Mapping[str, Any], *, of_rest: bool, tokens: str
) -> Iterator[str]:
    if chunk["start"] is not None:
        tokens = f"{chunk['start']}-{chunk['end']}"
    yield tokens or f"{chunk['chunk_hash'][:16]}..."
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
    tier = place["tier"]
    return f"{tier} ({', '.join(words)})" if words else tier
