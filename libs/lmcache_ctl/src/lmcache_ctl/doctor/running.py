"""What running services say: are they there and ready, do they take the token, do versions and
clocks agree.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Final

from lmcache_ctl.cluster.services import HOW_TO_AUTHENTICATE, Kind
from lmcache_ctl.cluster.states import ServiceState, State, token_hint
from lmcache_ctl.doctor.findings import Finding, Level

MAX_CLOCK_SKEW_S: Final = 2.0
MAX_MINORS_APART: Final = 1
_RELEASE = re.compile(r"(\d+)\.(\d+)")


def check_services(states: Sequence[ServiceState]) -> list[Finding]:
    """All checks of this module."""
    found = [
        *(one for state in states for one in _of_one(state)),
        *_tokens(states),
        *_versions(states),
        *_clocks(states),
    ]
    return [*found, *_links(states)]


def _tokens(states: Sequence[ServiceState]) -> Iterator[Finding]:
    how_many, how = token_hint(states)
    if how_many:
        what = "want a token for all but their health: tiers, peers and drains were not checked"
        yield Finding(Level.WARNING, "token", how_many, what, how)


def _of_one(state: ServiceState) -> Iterator[Finding]:
    where = f"{state.kind} {state.name}"
    if state.state in (State.SILENT, State.FOREIGN):
        fix = (
            "start it, correct the address, or look into its log; a NetworkPolicy may also drop"
            " what comes from here"
        )
        yield Finding(Level.ERROR, "reachable", where, f"{state.url}: {state.problem}", fix)
        return
    yield Finding(Level.OK, "reachable", where, f"answers in {state.latency_ms} ms")
    for check in state.checks:
        if check.ok:
            yield Finding(Level.OK, "ready", where, f"{check.name}: {check.detail}")
        else:
            level = (
                Level.WARNING if state.state in (State.DEGRADED, State.DRAINING) else Level.ERROR
            )
            yield Finding(
                level,
                "ready",
                where,
                f"{check.name}: {check.detail}",
                f"see what {check.name} depends on, and the service's log",
            )
    refusal = state.problem if all(check.ok for check in state.checks) else ""
    if refusal and state.state in (State.DEGRADED, State.UNREADY):
        yield Finding(Level.ERROR, "ready", where, refusal, "look into its log")
    elif refusal:
        fix = f"give a token of its auth_tokens_file by {HOW_TO_AUTHENTICATE}"
        yield Finding(Level.ERROR, "token", where, refusal, fix)
    elif state.facts:
        yield Finding(Level.OK, "token", where, "taken")
    if state.kind is Kind.SIDECAR and state.facts.get("registered") == "no":
        fix = (
            "look into its log for what lookup or broker answer; its service_token_file must hold a"
            " token that both know"
        )
        yield Finding(
            Level.WARNING,
            "ready",
            where,
            "lookup and broker do not know it now: no peer finds its chunks",
            fix,
        )


def _versions(states: Sequence[ServiceState]) -> Iterator[Finding]:
    by_version: dict[str, list[str]] = {}
    for state in states:
        if state.version:
            by_version.setdefault(state.version, []).append(f"{state.kind} {state.name}")
    if not by_version:
        return
    if len(by_version) == 1:
        yield Finding(Level.OK, "versions", "all services", next(iter(by_version)))
        return
    told = "; ".join(
        f"{version}: {', '.join(names)}" for version, names in sorted(by_version.items())
    )
    releases = [_release(version) for version in by_version]
    if None in releases or _apart([one for one in releases if one]) > MAX_MINORS_APART:
        fix = (
            "bring all of them within one minor version: only neighbours are tested with one"
            " another"
        )
        yield Finding(Level.ERROR, "versions", "all services", told, fix)
    else:
        yield Finding(
            Level.WARNING,
            "versions",
            "all services",
            told,
            "finish the upgrade: they work together, but only for its time",
        )


def _release(version: str) -> tuple[int, int] | None:
    found = _RELEASE.match(version)
    return None if found is None else (int(found[1]), int(found[2]))


def _apart(releases: Sequence[tuple[int, int]]) -> int:
    """Minor versions between the first and the last; another major one is too far."""
    first, last = min(releases), max(releases)
    return last[1] - first[1] if first[0] == last[0] else MAX_MINORS_APART + 1


def _clocks(states: Sequence[ServiceState]) -> Iterator[Finding]:
    known = [state for state in states if state.clock_skew_s is not None]
    if len(known) < 2:
        return
    # A clock was read at any time while its answer was waited for: only what is beyond that is
    # certain.
    slow, fast = (
        min(known, key=lambda state: _skew(state, 1)),
        max(known, key=lambda state: _skew(state, -1)),
    )
    if _skew(fast, -1) - _skew(slow, 1) > MAX_CLOCK_SKEW_S:
        apart_s = _skew(fast) - _skew(slow)
        what = f"{fast.kind} {fast.name} is {apart_s:.0f} s before {slow.kind} {slow.name}"
        fix = (
            "let NTP or chrony set the clocks of their nodes: tickets and ages are compared across"
            " machines"
        )
        yield Finding(Level.WARNING, "clock", "all services", what, fix)
    else:
        yield Finding(
            Level.OK,
            "clock",
            "all services",
            f"no clocks are seen to be more than {MAX_CLOCK_SKEW_S:g} s apart",
        )


def _skew(state: ServiceState, side: int = 0) -> float:
    """How far its clock is ahead, seconds: as estimated, or at most (1), or at least (-1)."""
    return (state.clock_skew_s or 0.0) + side * (state.latency_ms or 0.0) / 2000


def _links(states: Sequence[ServiceState]) -> Iterator[Finding]:
    """Whether brokers know the sidecars that are there, and one another's peers."""
    brokers = [state for state in states if state.kind is Kind.BROKER and state.facts]
    for broker in brokers:
        where = f"broker {broker.name}"
        known = {link.id for link in broker.links}
        missing = [
            state.name
            for state in states
            if state.kind is Kind.SIDECAR
            and state.facts.get("registered") == "yes"
            and state.name not in known
        ]
        if missing:
            fix = "give several brokers one redis_url, and ask with a token of the peers' tenant"
            yield Finding(Level.WARNING, "peers", where, f"does not know {', '.join(missing)}", fix)
        else:
            yield Finding(Level.OK, "peers", where, f"knows {len(known)} peers")
