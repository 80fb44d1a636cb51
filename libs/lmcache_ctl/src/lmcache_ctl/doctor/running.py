"""Check running services: reachable, ready, token accepted, versions and clocks in agreement."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Final

from lmcache_core.names import PEER_TIER, STORAGE_TIER

from lmcache_ctl.doctor.findings import Finding, Subject
from lmcache_ctl.services import HOW_TO_AUTHENTICATE, Kind
from lmcache_ctl.states import ServiceStatus, State, token_hint

MAX_CLOCK_SKEW_S: Final = 2.0
MAX_MINORS_APART: Final = 1
DECODES: Final = "kv_consumer"
COMPUTE_PROMPTS: Final = frozenset({"kv_producer", "kv_both"})
ONE_TIER: Final = "give all of them one lookup_url and one broker_url, or one remote_url"
_RELEASE = re.compile(r"(\d+)\.(\d+)")


def check_services(states: Sequence[ServiceStatus]) -> list[Finding]:
    """Check each service, and what they report about one another."""
    found = [one for state in states for one in _of_one(state)]
    how_many, how = token_hint(states)
    if how_many:
        what = "require a token for all but their health: tiers, peers and drains were not checked"
        found.append(Subject("token", how_many).warning(what, how))
    checks = (_versions, _clocks, _links, _hand_overs)
    return [*found, *(one for check in checks for one in check(states))]


def _of_one(state: ServiceStatus) -> Iterator[Finding]:
    where = f"{state.kind} {state.name}"
    reachable, ready, token = (Subject(check, where) for check in ("reachable", "ready", "token"))
    if state.state in (State.SILENT, State.FOREIGN):
        fix = (
            "start it, correct the address, or look into its log; a NetworkPolicy may also drop"
            " what comes from here"
        )
        yield reachable.error(f"{state.url}: {state.problem}", fix)
        return
    yield reachable.ok(f"answers in {state.latency_ms} ms")
    is_harmless = state.state in (State.DEGRADED, State.DRAINING)
    for check in state.checks:
        what = f"{check.name}: {check.detail}"
        if check.ok:
            yield ready.ok(what)
        else:
            fix = f"see what {check.name} depends on, and the service's log"
            yield ready.warning(what, fix) if is_harmless else ready.error(what, fix)
    refusal = state.problem if all(check.ok for check in state.checks) else ""
    if refusal and state.state in (State.DEGRADED, State.UNREADY):
        yield ready.error(refusal, "look into its log")
    elif refusal:
        fix = f"give a token of its auth_tokens_file with {HOW_TO_AUTHENTICATE}"
        yield token.error(refusal, fix)
    elif state.facts:
        yield token.ok("taken")
    if state.kind is Kind.SIDECAR and state.facts.get("registered") == "no":
        what = "lookup and broker do not know it now: no peer finds its chunks"
        fix = (
            "look into its log for what lookup or broker answer; its service_token_file must hold a"
            " token that both know"
        )
        yield ready.warning(what, fix)


def _versions(states: Sequence[ServiceStatus]) -> Iterator[Finding]:
    subject = Subject("versions", "all services")
    by_version: dict[str, list[str]] = {}
    for state in states:
        if state.version:
            by_version.setdefault(state.version, []).append(f"{state.kind} {state.name}")
    if not by_version:
        return
    if len(by_version) == 1:
        yield subject.ok(next(iter(by_version)))
        return
    named = (f"{version}: {', '.join(names)}" for version, names in sorted(by_version.items()))
    told = "; ".join(named)
    releases = [_RELEASE.match(version) for version in by_version]
    majors = {int(found[1]) for found in releases if found is not None}
    minors = [int(found[2]) for found in releases if found is not None]
    if None in releases or len(majors) > 1 or max(minors) - min(minors) > MAX_MINORS_APART:
        fix = (
            "bring all of them within one minor version: only neighbours are tested with one"
            " another"
        )
        yield subject.error(told, fix)
    else:
        fix = "finish the upgrade: they work together, but only for its time"
        yield subject.warning(told, fix)


def _clocks(states: Sequence[ServiceStatus]) -> Iterator[Finding]:
    subject = Subject("clock", "all services")
    known = [state for state in states if state.clock_skew_s is not None]
    if len(known) < 2:
        return
    # The service read its clock at some time during the request: only a larger difference is
    # certain.
    slow = min(known, key=lambda state: _skew(state, 1))
    fast = max(known, key=lambda state: _skew(state, -1))
    if _skew(fast, -1) - _skew(slow, 1) > MAX_CLOCK_SKEW_S:
        apart_s = _skew(fast) - _skew(slow)
        what = f"{fast.kind} {fast.name} is {apart_s:.0f} s before {slow.kind} {slow.name}"
        fix = (
            "let NTP or chrony set the clocks of their nodes: tickets and ages are compared across"
            " machines"
        )
        yield subject.warning(what, fix)
    else:
        yield subject.ok(f"no clocks are seen to be more than {MAX_CLOCK_SKEW_S:g} s apart")


def _skew(state: ServiceStatus, side: int = 0) -> float:
    """Return how far its clock is ahead, seconds: estimated, or at most (1), or at least (-1)."""
    return (state.clock_skew_s or 0.0) + side * (state.latency_ms or 0.0) / 2000


def _links(states: Sequence[ServiceStatus]) -> Iterator[Finding]:
    """Check that brokers know all running sidecars, and one another's peers."""
    registered = [
        state.name
        for state in states
        if state.kind is Kind.SIDECAR and state.facts.get("registered") == "yes"
    ]
    for broker in (state for state in states if state.kind is Kind.BROKER and state.facts):
        subject = Subject("peers", f"broker {broker.name}")
        known = {link.id for link in broker.links}
        missing = [name for name in registered if name not in known]
        if missing:
            fix = "give several brokers one redis_url, and ask with a token of the peers' tenant"
            yield subject.warning(f"does not know {', '.join(missing)}", fix)
        else:
            yield subject.ok(f"knows {len(known)} peers")


def _hand_overs(states: Sequence[ServiceStatus]) -> Iterator[Finding]:
    """Check that engines that only decode reach what others compute of their prompts: through
    their own sidecar, peers, or a remote tier.
    """
    sidecars = [state for state in states if state.kind is Kind.SIDECAR]
    brokers = [state for state in states if state.kind is Kind.BROKER and state.facts]
    known = [{link.id for link in broker.links} for broker in brokers]
    for sidecar in sidecars:
        subject = Subject("hand-over", f"sidecar {sidecar.name}")
        for model in (model for model, roles in sidecar.roles.items() if DECODES in roles):
            others = [one for one in sidecars if COMPUTE_PROMPTS & {*one.roles.get(model, ())}]
            apart = [one.name for one in others if not _share_a_tier(sidecar, one, known)]
            what, names = f"engines here decode {model}", ", ".join(apart)
            if others and not apart:
                yield subject.ok(what)
            elif apart and len(apart) == len(others):
                what += f" and compute every prompt themselves: no tier in common with {names}"
                yield subject.warning(what, ONE_TIER)
            elif apart:
                what += f" and find nothing of what {names} computes: no tier in common"
                fix = f"{ONE_TIER}, or let the router send both requests to engines of one sidecar"
                yield subject.warning(what, fix)


def _share_a_tier(one: ServiceStatus, other: ServiceStatus, known: Sequence[set[str]]) -> bool:
    """Return whether one finds what the other stores, as far as can be seen: remote tiers are taken
    for the same one.

    Args:
        known: The peers of each broker.
    """
    shared = {tier.name for tier in one.tiers} & {tier.name for tier in other.tiers}
    if one is other or STORAGE_TIER in shared:
        return True
    is_met = not known or any({one.name, other.name} <= peers for peers in known)
    return PEER_TIER in shared and is_met
