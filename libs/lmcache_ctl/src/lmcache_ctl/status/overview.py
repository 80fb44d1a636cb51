"""What all services together come to."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence

import msgspec

from lmcache_ctl.cluster.asking import Asker
from lmcache_ctl.cluster.looking import look_at
from lmcache_ctl.cluster.services import Kind, Service
from lmcache_ctl.cluster.states import ServiceState
from lmcache_ctl.settings import CtlSettings


class Totals(msgspec.Struct, frozen=True):
    """All services together.

    Attributes:
        num_services: That were asked.
        num_well: That do their work.
        versions: Versions that run, and how many of each.
        hit_ratio: Share of the chunks that engines wanted and sidecars had, or got from elsewhere;
            None before the first.
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


class Overview(msgspec.Struct, frozen=True):
    """A cluster."""

    totals: Totals
    services: list[ServiceState]

    @property
    def is_well(self) -> bool:
        """Whether all of it is, and nothing was refused."""
        return all(service.is_well and not service.problem for service in self.services)


def overview(settings: CtlSettings, services: list[Service]) -> Overview:
    """Ask all of them, at once.

    Raises:
        UsageError: Token or TLS files cannot be read.
    """
    return summed(asyncio.run(look_at(Asker(settings), services)))


def summed(states: Sequence[ServiceState]) -> Overview:
    """These services, and what they come to."""
    sidecars = [state for state in states if state.kind is Kind.SIDECAR]
    wanted = sum(state.traffic.num_wanted for state in sidecars)
    by_tier: Counter[str] = Counter()
    used: Counter[str] = Counter()
    capacity: Counter[str] = Counter()
    for state in sidecars:
        by_tier.update(state.traffic.found_by_tier)
    for state in states:
        used.update({f"{state.kind}/{tier.name}": tier.used_bytes for tier in state.tiers})
        capacity.update({f"{state.kind}/{tier.name}": tier.capacity_bytes for tier in state.tiers})
    return Overview(
        Totals(
            len(states),
            sum(state.is_well for state in states),
            dict(Counter(state.version for state in states if state.version)),
            (
                round(sum(state.traffic.num_found for state in sidecars) / wanted, 4)
                if wanted
                else None
            ),
            (
                {tier: round(num / wanted, 4) for tier, num in sorted(by_tier.items())}
                if wanted
                else {}
            ),
            dict(used),
            dict(capacity),
        ),
        list(states),
    )
