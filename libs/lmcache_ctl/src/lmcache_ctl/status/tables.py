"""What `lmcachectl status` prints for people."""

from __future__ import annotations

from collections.abc import Iterator

from lmcache_ctl.cluster.states import Drain, ServiceState, token_hint
from lmcache_ctl.output import UNKNOWN, Columns, print_table, print_text, share_text, size_text
from lmcache_ctl.status.overview import Overview, Totals


def print_overview(found: Overview) -> None:
    """A line for each service, what their tiers hold, and what is wrong."""
    print_text("\n".join(_total_lines(found.totals)))
    rows = [
        (
            str(one.kind),
            one.name,
            str(one.state),
            one.version or UNKNOWN,
            _latency(one),
            share_text(one.traffic.hit_ratio),
            _facts(one),
        )
        for one in found.services
    ]
    headings = ("service", "name", "state", "version", "answers in", "hits", "more")
    print_table(
        "",
        Columns(headings, left=4, prose=True, spare=("answers in", "version", "more", "service")),
        rows,
    )
    tiers = [
        (
            str(one.kind),
            one.name,
            tier.name,
            str(tier.num_chunks),
            size_text(tier.used_bytes),
            size_text(tier.capacity_bytes),
        )
        for one in found.services
        for tier in one.tiers
    ]
    if tiers:
        of_tiers = ("service", "name", "tier", "chunks", "used", "of")
        print_table("", Columns(of_tiers, left=3, spare=("chunks", "service", "of")), tiers)
    for one in found.services:
        if one.problem:
            print_text(f"{one.kind} {one.name}: {one.problem}")
    how_many, how = token_hint(found.services)
    if how_many:
        print_text(f"{how_many} want a token for tiers, peers and drains: {how}.")


def _total_lines(totals: Totals) -> Iterator[str]:
    versions = ", ".join(
        f"{version} ({number}x)" for version, number in sorted(totals.versions.items())
    )
    yield f"services   {totals.num_well} of {totals.num_services} are well"
    yield f"versions   {versions or UNKNOWN}"
    by_tier = ", ".join(
        f"{tier} {share_text(share)}" for tier, share in totals.hit_ratio_by_tier.items()
    )
    yield f"hits       {share_text(totals.hit_ratio)} of the chunks that engines wanted" + (
        f": {by_tier}" if by_tier else ""
    )


def _latency(one: ServiceState) -> str:
    return UNKNOWN if one.latency_ms is None else f"{one.latency_ms:.1f} ms"


def _facts(one: ServiceState) -> str:
    words = [f"{name} {value}" for name, value in one.facts.items()]
    return "; ".join(
        [*words, f"drain: {drain_text(one.drain)}"] if one.drain is not None else words
    )


def drain_text(drain: Drain) -> str:
    """How far a drain is, in one line."""
    done = drain.handed_over + drain.already_elsewhere + drain.failed
    failed = f", {drain.failed} failed" if drain.failed else ""
    return f"{drain.state}, {done} of {drain.total} chunks{failed}"
