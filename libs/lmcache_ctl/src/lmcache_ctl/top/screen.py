"""What `lmcachectl top` shows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from lmcache_ctl.cluster.states import Link, State, Tier
from lmcache_ctl.output import UNKNOWN, Columns, share_text, size_text, table_of, wrapped
from lmcache_ctl.status.tables import drain_text
from lmcache_ctl.top.rates import Moment, Rates

STYLES = {State.OK: "green", State.DRAINING: "yellow", State.DEGRADED: "yellow"}
BAD = "red"
SERVICES = Columns(
    ("service", "name", "state", "requests/s", "chunks/s", "hits", "in", "out", "tiers"),
    left=3,
    prose=True,
    spare=("tiers", "chunks/s", "requests/s", "service", "state", "out", "in"),
)
LINKS = Columns(
    ("peer", "kind", "reached at", "zone", "load", "pulls", ""),
    left=4,
    prose=True,
    spare=("zone", "kind", "load", "reached at"),
)


def screen_of(found: Moment, width: int) -> RenderableType:
    """Services with rates and tiers, the links between pods, and drains underway, for a terminal
    of that width.
    """
    return Group(*_parts(found, width))


def _parts(found: Moment, width: int) -> Iterator[RenderableType]:
    def line(text: str, style: str = "") -> Text:
        return Text(wrapped(text, width), style=style, overflow="ignore")

    yield line(f"{len(found.services)} services, over {found.seconds:.1f} s")
    if found.problem:
        yield line(f"looking for services failed: {found.problem}", BAD)
    yield _services(found.services, width)
    if found.links:
        yield _links(found.links, width)
    for one in found.services:
        if one.drain is not None:
            yield line(f"drain of {one.kind} {one.name}: {drain_text(one.drain)}")
        if one.problem:
            yield line(f"{one.kind} {one.name}: {one.problem}", BAD)
    if found.hint:
        yield line(found.hint)


def _services(services: Sequence[Rates], width: int) -> Table:
    rows = [
        (
            one.kind,
            one.name,
            Text(one.state, style=STYLES.get(one.state, BAD)),
            _rate(one.requests_per_s),
            _rate(one.wanted_per_s),
            share_text(one.hit_ratio),
            _bytes_rate(one.in_bytes_per_s),
            _bytes_rate(one.out_bytes_per_s),
            ", ".join(_tier(tier) for tier in one.tiers),
        )
        for one in services
    ]
    return table_of(SERVICES, rows, width)


def _links(links: Sequence[Link], width: int) -> Table:
    rows = []
    for link in links:
        words = "draining" if link.draining else ""
        if link.drain is not None and link.drain.state != "serving":
            words = drain_text(link.drain)
        rows.append(
            (
                link.id,
                link.kind,
                link.distributed_url,
                link.zone,
                f"{link.load:.0%}",
                str(link.num_pulls),
                words,
            )
        )
    return table_of(LINKS, rows, width)


def _tier(tier: Tier) -> str:
    share = f" ({tier.used_bytes / tier.capacity_bytes:.0%})" if tier.capacity_bytes else ""
    return f"{tier.name} {size_text(tier.used_bytes)}{share}"


def _rate(per_s: float | None) -> str:
    return UNKNOWN if per_s is None else f"{per_s:.1f}"


def _bytes_rate(per_s: float | None) -> str:
    return UNKNOWN if per_s is None else f"{size_text(int(per_s))}/s"
