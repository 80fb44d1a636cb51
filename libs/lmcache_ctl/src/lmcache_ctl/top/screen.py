"""What `lmcachectl top` shows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from lmcache_ctl.cluster.states import Link, State, Tier
from lmcache_ctl.output import UNKNOWN, plain, share_text, size_text
from lmcache_ctl.status.tables import drain_text
from lmcache_ctl.top.rates import Moment, Rates

STYLES = {State.OK: "green", State.DRAINING: "yellow", State.DEGRADED: "yellow"}
BAD = "red"


def screen_of(found: Moment) -> RenderableType:
    """Services with rates and tiers, the links between pods, and drains underway."""
    return Group(*_parts(found))


def _parts(found: Moment) -> Iterator[RenderableType]:
    yield Text(f"{len(found.services)} services, over {found.seconds:.1f} s")
    if found.problem:
        yield Text(plain(f"services were not looked for anew: {found.problem}"), style=BAD)
    yield _services(found.services)
    if found.links:
        yield _links(found.links)
    for one in found.services:
        if one.drain is not None:
            yield Text(plain(f"drain of {one.kind} {one.name}: {drain_text(one.drain)}"))
        if one.problem:
            yield Text(plain(f"{one.kind} {one.name}: {one.problem}"), style=BAD)


def _services(services: Sequence[Rates]) -> Table:
    table = _table(("service", "name", "state"), ("requests/s", "chunks/s", "hits", "in", "out"), ("tiers",))
    for one in services:
        table.add_row(
            one.kind,
            Text(plain(one.name)),
            Text(one.state, style=STYLES.get(one.state, BAD)),
            _rate(one.requests_per_s),
            _rate(one.wanted_per_s),
            share_text(one.hit_ratio),
            _bytes_rate(one.in_bytes_per_s),
            _bytes_rate(one.out_bytes_per_s),
            Text(plain(", ".join(_tier(tier) for tier in one.tiers))),
        )
    return table


def _links(links: Sequence[Link]) -> Table:
    table = _table(("peer", "kind", "reached at", "zone"), ("load", "pulls"), ("",))
    for link in links:
        words = "draining" if link.draining else ""
        if link.drain is not None and link.drain.state != "serving":
            words = drain_text(link.drain)
        texts = [Text(plain(text)) for text in (link.id, link.kind, link.distributed_url, link.zone)]
        table.add_row(*texts, f"{link.load:.0%}", str(link.num_pulls), Text(plain(words)))
    return table


def _table(left: Sequence[str], right: Sequence[str], prose: Sequence[str]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for heading in left:
        table.add_column(heading, no_wrap=True, overflow="ellipsis")
    for heading in right:
        table.add_column(heading, justify="right", no_wrap=True)
    for heading in prose:
        table.add_column(heading, overflow="fold")
    return table


def _tier(tier: Tier) -> str:
    share = f" ({tier.used_bytes / tier.capacity_bytes:.0%})" if tier.capacity_bytes else ""
    return f"{tier.name} {size_text(tier.used_bytes)}{share}"


def _rate(per_s: float | None) -> str:
    return UNKNOWN if per_s is None else f"{per_s:.1f}"


def _bytes_rate(per_s: float | None) -> str:
    return UNKNOWN if per_s is None else f"{size_text(int(per_s))}/s"
