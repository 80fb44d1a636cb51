"""`lmcachectl status`, the whole cluster at a glance, and `lmcachectl version`."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Sequence
from importlib import metadata
from typing import Annotated

import msgspec
import typer

from lmcache_ctl.options import Everywhere
from lmcache_ctl.output import (
    UNKNOWN,
    ListOutput,
    print_table,
    print_text,
    share_text,
    show,
    size_text,
)
from lmcache_ctl.reach import Reach
from lmcache_ctl.services import Kind, names_of
from lmcache_ctl.states import ServiceStatus, look_at, name_prefix, token_hint


class Totals(msgspec.Struct, frozen=True):
    """Totals of all services.

    Attributes:
        num_services: Services that were asked.
        num_well: Services that work.
        versions: Running versions, and how many services run each.
        hit_ratio: Share of the chunks requested by engines that sidecars had or fetched; None
            before the first request.
        hit_ratio_by_tier: The same share, by the tier that had them.
        used_bytes: What each tier holds, over all services of a kind: `<kind>/<tier>`.
        capacity_bytes: What it may hold.
    """

    num_services: int
    num_well: int
    versions: dict[str, int]
    hit_ratio: float | None
    hit_ratio_by_tier: dict[str, float]
    used_bytes: dict[str, int]
    capacity_bytes: dict[str, int]


class ClusterStatus(msgspec.Struct, frozen=True):
    """A cluster."""

    totals: Totals
    services: list[ServiceStatus]


def status(
    ctx: typer.Context, everywhere: Everywhere = False, output: ListOutput = "table"
) -> None:
    """Show all services: health, versions, what their tiers hold, and the hit ratio.

    Every replica is asked, all at once. Health, versions and hits need no
    token; the contents of tiers, peers and drains do. Exits with 1 when a
    service does not answer, is not ready, or refuses the token.
    """
    reach = Reach(ctx.obj, everywhere=everywhere)
    with reach.services() as services:
        found = summed(look_at(reach, services))
    as_table = functools.partial(print_status, is_wide=output == "wide")
    show(found, output, as_table, lambda found: names_of(found.services))
    if not any(one.version for one in found.services) and (hint := reach.hint):  # none of ours
        typer.echo(f"lmcachectl: {hint}", err=True)
    if not all(service.is_well and not service.problem for service in found.services):
        raise typer.Exit(1)


def summed(states: Sequence[ServiceStatus]) -> ClusterStatus:
    """Return these services and their totals."""
    sidecars = [state for state in states if state.kind is Kind.SIDECAR]
    wanted = sum(state.traffic.num_wanted for state in sidecars)
    by_tier, used, capacity = Counter[str](), Counter[str](), Counter[str]()
    for state in sidecars:
        by_tier.update(state.traffic.found_by_tier)
    for state in states:
        used.update({f"{state.kind}/{tier.name}": tier.used_bytes for tier in state.tiers})
        capacity.update({f"{state.kind}/{tier.name}": tier.capacity_bytes for tier in state.tiers})
    found = sum(state.traffic.num_found for state in sidecars)
    totals = Totals(
        len(states),
        sum(state.is_well for state in states),
        dict(Counter(state.version for state in states if state.version)),
        round(found / wanted, 4) if wanted else None,
        {tier: round(num / wanted, 4) for tier, num in sorted(by_tier.items()) if wanted},
        dict(used),
        dict(capacity),
    )
    return ClusterStatus(totals, list(states))


def print_status(found: ClusterStatus, *, is_wide: bool = False) -> None:
    """Print a line for each service, what their tiers hold, and what is wrong."""
    totals, prefix = found.totals, name_prefix(found.services)
    in_several = _in_several(found.services)
    versions = (f"{version} ({number}x)" for version, number in sorted(totals.versions.items()))
    shares = totals.hit_ratio_by_tier.items()
    by_tier = ", ".join(f"{tier} {share_text(share)}" for tier, share in shares)
    print_text(
        f"services   {totals.num_well} of {totals.num_services} are healthy\n"
        f"versions   {', '.join(versions) or UNKNOWN}\n"
        f"hits       {share_text(totals.hit_ratio)} of the chunks that engines wanted"
        + (f": {by_tier}" if by_tier else "")
    )
    rows = [
        (
            one.namespace if in_several else "",
            str(one.kind),
            one.name.removeprefix(prefix),
            str(one.state),
            one.version or UNKNOWN,
            UNKNOWN if one.latency_ms is None else f"{one.latency_ms:.1f} ms",
            share_text(one.traffic.hit_ratio),
            "; ".join(
                [f"{name} {value}" for name, value in one.facts.items()]
                + ([f"drain: {one.drain}"] if one.drain is not None else [])
            ),
        )
        for one in found.services
    ]
    headings = ("namespace", "service", "name", "state", "version", "answers in", "hits", "more")
    spare = ["answers in", "version", "more", "service"]
    print_table(headings, rows, left=5, prose=True, spare=spare, is_wide=is_wide)
    tiers = [
        (
            one.namespace if in_several else "",
            str(one.kind),
            one.name.removeprefix(prefix),
            tier.name,
            str(tier.num_chunks),
            size_text(tier.used_bytes),
            size_text(tier.capacity_bytes),
        )
        for one in found.services
        for tier in one.tiers
    ]
    if tiers:
        of_tiers = ("namespace", "service", "name", "tier", "chunks", "used", "of")
        spare = ["chunks", "service", "of"]
        print_table(of_tiers, tiers, left=4, spare=spare, is_wide=is_wide)
    if prefix:
        print_text(f"Names without {prefix}, which all pods begin with.")
    for one in found.services:
        if one.problem:
            print_text(f"{one.kind} {one.name}: {one.problem}")
    how_many, how = token_hint(found.services)
    if how_many:
        print_text(f"{how_many} require a token for tiers, peers and drains: {how}.")


def _in_several(services: Sequence[ServiceStatus | ServiceVersion]) -> bool:
    """Return whether these are services of several namespaces, which are shown only then."""
    return len({one.namespace for one in services}) > 1


class ServiceVersion(msgspec.Struct, frozen=True):
    """One service; `version` is "" where it does not say, and `problem` why."""

    namespace: str
    kind: str
    name: str
    version: str
    problem: str


class Versions(msgspec.Struct, frozen=True):
    """The version of this command line, and those of services."""

    client: str
    services: list[ServiceVersion]


def own_version() -> str:
    """Return the version of this command line."""
    return metadata.version("lmcache-ctl")


def version(
    ctx: typer.Context,
    everywhere: Everywhere = False,
    client: Annotated[bool, typer.Option("--client", help="Ask no service.")] = False,
    output: ListOutput = "table",
) -> None:
    """Show the version of lmcachectl, and that of each service. Needs no token.

    A service that does not answer is shown; the exit status is 1 if none of them does.
    """
    states: list[ServiceStatus] = []
    if not client:
        reach = Reach(ctx.obj, everywhere=everywhere)
        with reach.services() as services:
            states = look_at(reach, services)
    found = [
        ServiceVersion(
            one.namespace, one.kind, one.name, one.version, "" if one.version else one.problem
        )
        for one in states
    ]
    versions = Versions(own_version(), found)
    show(versions, output, _print_versions, lambda found: names_of(found.services))
    if found and not any(one.version for one in found):
        raise typer.Exit(1)


def _print_versions(found: Versions) -> None:
    print_text(f"lmcachectl {found.client}")
    in_several = _in_several(found.services)
    if found.services:
        rows = [
            (one.namespace if in_several else "", one.kind, one.name, one.version or one.problem)
            for one in found.services
        ]
        headings = ("namespace", "service", "name", "version")
        print_table(headings, rows, left=3, prose=True)
