"""What services did between two looks at them."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from lmcache_ctl.cluster.states import Drain, Link, ServiceState, State, Tier, Traffic, token_hint


class Rates(msgspec.Struct, frozen=True):
    """One service, in the time between two looks.

    Attributes:
        kind: What it is.
        name: Which one.
        state: How it is now.
        problem: What is wrong with it, "" for nothing.
        requests_per_s: REST requests; None where there is nothing to compare with, as of all
            figures below.
        wanted_per_s: Chunks that were asked for.
        hit_ratio: Share of them that were there; None also where none was asked for.
        in_bytes_per_s: Chunks that were stored.
        out_bytes_per_s: Chunks that were handed out.
        tiers: What it holds now.
        drain: How far a drain is.
    """

    kind: str
    name: str
    state: State
    problem: str
    requests_per_s: float | None
    wanted_per_s: float | None
    hit_ratio: float | None
    in_bytes_per_s: float | None
    out_bytes_per_s: float | None
    tiers: list[Tier]
    drain: Drain | None


class Moment(msgspec.Struct, frozen=True):
    """All services.

    Attributes:
        seconds: Between the two looks.
        services: In the order that they were asked in.
        links: The peers that brokers know, and how many pulls each serves.
        problem: Why services could not be found anew, "" where they were.
        hint: What would show more of them, "" for nothing.
    """

    seconds: float
    services: list[Rates]
    links: list[Link]
    problem: str = ""
    hint: str = ""


def moment(
    before: Sequence[ServiceState], after: Sequence[ServiceState], seconds: float, problem: str = ""
) -> Moment:
    """From two looks.

    Args:
        before: The first.
        after: The second; services may have come and gone meanwhile.
        seconds: Between them.
        problem: Why it is not known whether they have.
    """
    earlier = {(state.kind, state.url): state for state in before}
    rates = [rates_of(earlier.get((state.kind, state.url)), state, seconds) for state in after]
    links = {link.id: link for state in after for link in state.links}
    how_many, how = token_hint(after)
    hint = f"{how_many} want a token for tiers, peers and drains: {how}." if how_many else ""
    return Moment(round(seconds, 3), rates, [links[name] for name in sorted(links)], problem, hint)


def rates_of(before: ServiceState | None, after: ServiceState, seconds: float) -> Rates:
    """One service; one that has come or restarted in between, or was not seen, has nothing to
    compare with.
    """
    is_new = before is None
    before = before or after
    can_compare = (
        not is_new
        and State.SILENT not in (before.state, after.state)
        and not _has_restarted(before.traffic, after.traffic)
    )

    def rate(figure: str) -> float | None:
        apart = getattr(after.traffic, figure) - getattr(before.traffic, figure)
        return round(apart / seconds, 3) if can_compare else None

    wanted = after.traffic.num_wanted - before.traffic.num_wanted
    found = after.traffic.num_found - before.traffic.num_found
    return Rates(
        str(after.kind),
        after.name,
        after.state,
        after.problem,
        rate("num_requests"),
        rate("num_wanted"),
        round(found / wanted, 4) if can_compare and wanted else None,
        rate("in_bytes"),
        rate("out_bytes"),
        after.tiers,
        after.drain,
    )


def _has_restarted(before: Traffic, after: Traffic) -> bool:
    """Counters only rise while a process lives."""
    figures = ("num_requests", "num_wanted", "num_found", "in_bytes", "out_bytes")
    return any(getattr(after, figure) < getattr(before, figure) for figure in figures)
