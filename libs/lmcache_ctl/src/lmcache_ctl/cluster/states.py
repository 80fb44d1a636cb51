"""How services are, in a form that all commands share."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

import msgspec

from lmcache_ctl.cluster.services import HOW_TO_AUTHENTICATE, Kind, whose_token


class State(StrEnum):
    """How a service is."""

    OK = "ok"
    DEGRADED = "degraded"
    DRAINING = "draining"
    UNREADY = "unready"
    SILENT = "no answer"
    FOREIGN = "not ours"


class Check(msgspec.Struct, frozen=True):
    """One dependency of a service, as its `/readyz` tells it."""

    name: str
    ok: bool
    detail: str


class Tier(msgspec.Struct, frozen=True):
    """What a tier holds; 0 for what it does not say."""

    name: str
    num_chunks: int
    used_bytes: int
    capacity_bytes: int


class Drain(msgspec.Struct, frozen=True):
    """How far a service is on its way to its end; `total` is the sum of the four behind it."""

    state: str
    total: int
    handed_over: int
    already_elsewhere: int
    failed: int
    left: int


class Traffic(msgspec.Struct, frozen=True):
    """What a service has counted since its start.

    Attributes:
        num_requests: REST requests.
        num_wanted: Chunks that were asked for.
        num_found: Those that were there.
        in_bytes: Chunks that were stored.
        out_bytes: Chunks that were handed out.
        found_by_tier: `num_found` by the tier that had them, where it is known.
        missed_by_reason: Chunks that were not there, by the reason.
    """

    num_requests: int = 0
    num_wanted: int = 0
    num_found: int = 0
    in_bytes: int = 0
    out_bytes: int = 0
    found_by_tier: dict[str, int] = {}
    missed_by_reason: dict[str, int] = {}

    @property
    def hit_ratio(self) -> float | None:
        """Found of wanted; None before anything was wanted."""
        return self.num_found / self.num_wanted if self.num_wanted else None


class Link(msgspec.Struct, frozen=True):
    """A peer, as a broker knows it."""

    id: str
    kind: str
    distributed_url: str
    zone: str
    node: str
    load: float
    draining: bool
    num_pulls: int
    drain: Drain | None = None


class ServiceState(msgspec.Struct, frozen=True):
    """One service.

    Attributes:
        kind: What it is.
        name: Its pod, its instance id, or host and port.
        url: Where it was asked.
        state: How it is.
        version: Of its build, "" if not known.
        latency_ms: Of its readiness, milliseconds.
        clock_skew_s: How far its clock is before this machine's, seconds, to about one; None where
            it does not say.
        problem: What is wrong with it, or with asking it, in a sentence; "" for nothing.
        checks: What it depends on.
        tiers: What it holds.
        traffic: What it has done.
        drain: How far a drain is; None where there is none.
        facts: A few words on what is particular to its kind.
        links: The peers that a broker knows.
        needs_token: Whether it told its health only, since it was shown no token.
        token_secret: The Secret with the token of its release, where that is known and none was
            shown; else "".
    """

    kind: Kind
    name: str
    url: str
    state: State
    version: str = ""
    latency_ms: float | None = None
    clock_skew_s: float | None = None
    problem: str = ""
    checks: list[Check] = []
    tiers: list[Tier] = []
    traffic: Traffic = Traffic()
    drain: Drain | None = None
    facts: dict[str, str] = {}
    links: list[Link] = []
    needs_token: bool = False
    token_secret: str = ""

    @property
    def is_well(self) -> bool:
        """Whether it does its work."""
        return self.state in (State.OK, State.DRAINING)


def token_hint(states: Sequence[ServiceState]) -> tuple[str, str]:
    """Return how many services told only their health for want of a token, and how to give one;
    "" where none did.
    """
    silent = [state for state in states if state.needs_token]
    if not silent:
        return "", ""
    secrets = sorted({state.token_secret for state in silent} - {""})
    return (
        f"{len(silent)} of {len(states)} services",
        f"give one by {HOW_TO_AUTHENTICATE}{whose_token(', '.join(secrets))}",
    )
