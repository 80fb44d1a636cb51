"""Everything that will be done to the cluster, made from a seed before the run begins."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

SIDECARS = tuple(f"sidecar-{i}" for i in range(4))
STORAGES = ("storage-0", "storage-1")
LOOKUPS = ("lookup-0", "lookup-1")
BROKERS = ("broker-0", "broker-1")
SERVICES = (*SIDECARS, *STORAGES, *LOOKUPS, *BROKERS)
LINKS = (*SIDECARS, *STORAGES, "lookup", "broker", "redis")
"""Sidecars and storages: lm://. Lookup and broker: REST of both replicas. A link may have the
name of a process.
"""
CHECKED_LINKS = LINKS[:-1]
"""Whose bytes may be changed: Redis' own protocol has no checksum, and TCP's is what it relies
on.
"""
RESTART_S = 8.0
"""Room that the plan leaves for a start."""


@dataclass(frozen=True)
class Kind:
    """A kind of fault.

    Attributes:
        weight: How often, among all kinds.
        targets: One of which it is done to.
        lasts_s: Shortest and longest.
        room_s: That its target is left in peace for afterwards.
        domain: Faults of one domain never overlap at one target.
    """

    weight: int
    targets: Sequence[str]
    lasts_s: tuple[float, float]
    room_s: float
    domain: str


KINDS = {
    "kill": Kind(5, (*SERVICES, "redis"), (0.2, 3.0), RESTART_S, "process"),
    "stop": Kind(5, (*SERVICES, "redis"), (0.3, 4.0), 1.0, "process"),
    "flush": Kind(2, ("redis",), (0.0, 0.0), 1.0, "process"),
    "full": Kind(3, (*SIDECARS, *STORAGES), (3.0, 12.0), 1.0, "process"),
    "cut": Kind(5, LINKS, (0.0, 0.0), 1.0, "link"),
    "delay": Kind(4, LINKS, (1.0, 6.0), 1.0, "link"),
    "freeze": Kind(4, LINKS, (0.5, 4.0), 1.0, "link"),
    "corrupt": Kind(6, CHECKED_LINKS, (2.0, 8.0), 1.0, "link"),
}
DELAYS_S = (0.01, 0.3)
FLIPS = (0.05, 0.5)
"""Share of the pieces that pass in which one bit is turned."""


@dataclass(frozen=True)
class Fault:
    """One thing that is done.

    Attributes:
        at_s: When, from the beginning of the faults.
        kind: Key of `KINDS`.
        target: A process or a link.
        lasts_s: Until it is undone; a process that is killed is started again then.
        amount: Seconds of a delay; share of pieces that are changed; else 0.
    """

    at_s: float
    kind: str
    target: str
    lasts_s: float
    amount: float = 0.0

    def __str__(self) -> str:
        amount = f" {self.amount:.3f}" if self.amount else ""
        lasts = f" for {self.lasts_s:.1f} s" if self.lasts_s else ""
        return f"{self.at_s:7.2f} s {self.kind} {self.target}{amount}{lasts}"


def make_plan(seed: int, seconds: float, pace_s: float) -> list[Fault]:
    """Faults that overlap, but never two of one domain at one target. The same arguments give the
    same plan.

    Args:
        seed: Whatever.
        seconds: All faults but restarts are over by then.
        pace_s: Mean time from the beginning of one to that of the next.

    Returns:
        In order of time.
    """
    dice = random.Random(seed)
    busy_until_s: dict[tuple[str, str], float] = {}
    plan = []
    now_s = dice.uniform(0.0, pace_s)
    while now_s < seconds:
        name = dice.choices(list(KINDS), [kind.weight for kind in KINDS.values()])[0]
        kind = KINDS[name]
        target, lasts_s = dice.choice(kind.targets), dice.uniform(*kind.lasts_s)
        amount = (
            dice.uniform(*DELAYS_S)
            if name == "delay"
            else dice.uniform(*FLIPS)
            if name == "corrupt"
            else 0.0
        )
        end_s = now_s + lasts_s
        if busy_until_s.get((kind.domain, target), 0.0) <= now_s and end_s <= seconds:
            plan.append(Fault(round(now_s, 2), name, target, round(lasts_s, 2), round(amount, 3)))
            busy_until_s[kind.domain, target] = end_s + kind.room_s
        now_s += dice.uniform(0.5 * pace_s, 1.5 * pace_s)
    return plan
