"""`lmcachectl drain`: make services hand over what only they hold, and watch them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final
from urllib.parse import quote

import msgspec
import typer

from lmcache_ctl.asking import Asker, Caller, run_all
from lmcache_ctl.errors import CtlError, UsageError
from lmcache_ctl.output import (
    UNKNOWN,
    Output,
    Tell,
    confirm,
    print_table,
    print_text,
    show,
    steps,
)
from lmcache_ctl.reach import Reach
from lmcache_ctl.services import Endpoint, Kind, names_of
from lmcache_ctl.states import DrainStatus
from lmcache_ctl.targets import (
    PEER,
    STATUS_PATHS,
    Target,
    Targets,
    ask_targets,
    named,
    parse_target,
    print_results,
)

DEFAULT_WITHIN_S = 120.0
POLL_S: Final = 0.25
MAX_UNANSWERED: Final = 3
"""In a row, after which the service counts as ended."""
DONE: Final = "done"
CANCELLED: Final = "the drain was cancelled"
DRAIN_PATH: Final = "/v1/admin/drain?wait=false"
UNDRAIN_PATH: Final = "/v1/admin/undrain"
FIGURES: Final = ("total", "handed_over", "already_elsewhere", "failed", "left")


class DrainOutcome(msgspec.Struct, frozen=True):
    """How far a drain is.

    Attributes:
        kind: `sidecar`, `storage` or `peer`.
        drain: Its figures; None if it reported none.
        problem: The failure, "" for none.
    """

    kind: str
    name: str
    drain: DrainStatus | None = None
    problem: str = ""


def _parse(text: str) -> Target:
    """Read `sidecar[/NAME]`, `storage[/NAME]` or `peer/NAME`, which is asked of a broker."""
    kind, _, name = text.partition("/")
    if kind != PEER:
        return parse_target(text)
    if not name:
        raise UsageError(f"{text!r}: name one, peer/NAME")
    return Target(Kind.BROKER, name)


def drain(
    ctx: typer.Context,
    targets: Annotated[
        list[Target],
        typer.Argument(
            metavar="TARGET",
            parser=_parse,
            help="sidecar/NAME or storage/NAME, or all of a kind; peer/NAME goes by the broker.",
        ),
    ],
    within: Annotated[
        float,
        typer.Option(metavar="SECONDS", help="Longest time to watch.", min=0.1, max=86400),
    ] = DEFAULT_WITHIN_S,
    wait: Annotated[
        bool, typer.Option("--wait/--no-wait", help="Watch until it is done, or only begin it.")
    ] = True,
    yes: Annotated[
        bool,
        typer.Option("--yes", "-y", help="Do not ask before all of a kind are drained at once."),
    ] = False,
    output: Output = "table",
) -> None:
    """Drain services: they take nothing new, and hand over what only they hold.

    They keep serving, and stay drained until undrain or a restart; it asks
    before it drains all of a kind at once. Progress goes to standard error.
    Needs the role admin. Exits with 1 when chunks are left or were refused, or
    the drain is not done in time.
    """
    within_s = within if wait else None
    reach = Reach(ctx.obj, *dict.fromkeys(target.kind for target in targets))
    with reach.services() as services:
        chosen = _meant(reach, services, targets)
        if not yes and any(target.name is None for target in targets):
            names = ", ".join(names_of(service for service, peer in chosen if peer is None))
            confirm(f"Drain {names} at once? Each takes nothing new until undrain or a restart.")
        with steps() as tell:
            found = run_all(
                _drained(reach.asker, service, within_s, tell, peer) for service, peer in chosen
            )
    show(found, output, print_drains)
    if not all(_is_complete(one) or (not wait and not one.problem) for one in found):
        raise typer.Exit(1)


def undrain(ctx: typer.Context, targets: Targets, output: Output = "table") -> None:
    """Cancel drains: services take chunks and pulls again.

    Chunks that were handed over stay there, pins are gone. Needs the role
    admin. Exits with 1 when a service did not do it, such as one that ends.
    """
    found = ask_targets(ctx.obj, targets, _undrained)
    show(found, output, lambda found: print_results(found, "state", _takes))
    if any(one.problem for one in found):
        raise typer.Exit(1)


async def _undrained(caller: Caller) -> dict[str, Any]:
    before = await caller.ask("GET", STATUS_PATHS[caller.service.kind])
    after = await caller.ask("POST", UNDRAIN_PATH)
    if after["draining"]:
        raise CtlError("another drain has begun: see lmcachectl status")
    return {**after, "was_draining": before["draining"]}


def _takes(result: Mapping[str, Any]) -> str:
    return "takes chunks" if result["was_draining"] else "was not draining"


def _is_complete(one: DrainOutcome) -> bool:
    if one.problem or one.drain is None:
        return False
    return one.drain.state == DONE and not (one.drain.left or one.drain.failed)


def _meant(
    reach: Reach, services: Sequence[Endpoint], wanted: Sequence[Target]
) -> list[tuple[Endpoint, str | None]]:
    """Return the services to ask; with each broker, the peer to ask it for.

    Raises:
        CtlError: A target matches no service.
    """
    targets = [target for target in wanted if target.kind is not Kind.BROKER]
    direct = named(reach, services, targets) if targets else []
    brokers = [one for one in services if one.kind is Kind.BROKER]
    answers = reach.each(brokers, lambda caller: caller.get("/healthz"))
    # Any broker that answers will do; where none does, the first one's error tells why.
    alive = [
        broker
        for broker, answer in zip(brokers, answers, strict=True)
        if not isinstance(answer, CtlError)
    ]
    peers = [target.name for target in wanted if target.kind is Kind.BROKER]
    return [*((one, None) for one in direct), *(((alive or brokers)[0], one) for one in peers)]


async def _drained(
    asker: Asker, service: Endpoint, within_s: float | None, tell: Tell, peer: str | None = None
) -> DrainOutcome:
    """Begin a drain, and watch it for `within_s` (None: not at all); a broker begins a peer's."""
    if peer is None:
        begin, look = DRAIN_PATH, STATUS_PATHS[service.kind]
        outcome = DrainOutcome(str(service.kind), service.name)
    else:
        named = quote(peer, safe="")
        begin, look = f"/v1/admin/peers/{named}:drain", f"/v1/peers/{named}"
        outcome = DrainOutcome(PEER, peer)
    name = f"{outcome.kind} {outcome.name}"

    async def ask(method: str, path: str) -> bool:
        """Update the outcome; return whether the service is draining."""
        nonlocal outcome
        answer: Any = await asker.one(service, lambda caller: caller.ask(method, path))
        now = msgspec.convert(answer.get("drain"), DrainStatus | None)
        if now is not None and now != outcome.drain:
            done = now.total - now.left
            tell(name, done if now.total else 1, max(now.total, 1), str(now))
        outcome = msgspec.structs.replace(outcome, drain=now)
        return bool(answer.get("draining"))

    async def watch() -> str:
        """Return the problem that ended the drain, or "" if it completed."""
        num_unanswered = 0
        while outcome.drain is None or outcome.drain.state != DONE:
            await asyncio.sleep(POLL_S)
            try:
                if not await ask("GET", look):
                    return CANCELLED
                num_unanswered = 0
            except CtlError as exc:
                num_unanswered += 1
                if num_unanswered == MAX_UNANSWERED:
                    return f"it has ended, or cannot be asked any more: {exc}"
        return ""

    problem = ""
    try:
        await ask("POST", begin)
        if within_s is not None:
            async with asyncio.timeout(within_s):
                problem = await watch()
    except CtlError as exc:
        problem = str(exc)
    except TimeoutError:
        problem = (
            f"not done within {within_s:g} s: it continues by itself; look again with"
            " lmcachectl status"
        )
    return msgspec.structs.replace(outcome, problem=problem)


def print_drains(found: Sequence[DrainOutcome]) -> None:
    """Print a line for each drain, and what went wrong."""
    rows = [
        (
            one.kind,
            one.name,
            UNKNOWN if one.drain is None else one.drain.state,
            *(UNKNOWN if one.drain is None else str(getattr(one.drain, name)) for name in FIGURES),
        )
        for one in found
    ]
    spare = ("elsewhere already", "handed over", "chunks", "service")
    figures = ("chunks", "handed over", "elsewhere already", "failed", "left")
    print_table(("service", "name", "state", *figures), rows, left=3, spare=spare)
    for one in found:
        if one.problem:
            print_text(f"{one.kind} {one.name}: {one.problem}")
