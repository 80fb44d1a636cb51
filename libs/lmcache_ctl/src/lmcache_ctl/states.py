"""Read the state of services: health, tiers and counters."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from enum import StrEnum
from http import HTTPStatus
from typing import Any, Final

import msgspec

from lmcache_ctl.asking import Caller, ForeignError, HttpAnswer, ServiceRefusedError, foreign
from lmcache_ctl.errors import CtlError
from lmcache_ctl.reach import Reach
from lmcache_ctl.services import DISTRIBUTIONS, HOW_TO_AUTHENTICATE, Endpoint, Kind

BUILD_INFO: Final = "lmcache_build_info"
HTTP_REQUESTS_TOTAL: Final = "lmcache_http_requests_total"
HALF_A_SECOND: Final = 0.5
"""Added to a service's clock, which its header truncates to whole seconds."""
PATHS: Final = {
    Kind.LOOKUP: ("/v1/stats", "/v1/instances"),
    Kind.BROKER: ("/v1/stats", "/v1/peers"),
    Kind.STORAGE: ("/v1/stats",),
    Kind.SIDECAR: ("/v1/status", "/v1/tiers", "/v1/clients"),
}
WANTS_TOKEN: Final = frozenset({HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN})
CALLERS_FAULT: Final = WANTS_TOKEN | {HTTPStatus.TOO_MANY_REQUESTS}
"""Refusals that say nothing about the service's own health."""


class State(StrEnum):
    """State of a service."""

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
    """A tier's contents; 0 for figures that it does not report."""

    name: str
    num_chunks: int = 0
    used_bytes: int = 0
    capacity_bytes: int = 0


class DrainStatus(msgspec.Struct, frozen=True):
    """Progress of a drain; `total` is the sum of the four fields after it."""

    state: str
    total: int
    handed_over: int
    already_elsewhere: int
    failed: int
    left: int

    def __str__(self) -> str:
        done = self.handed_over + self.already_elsewhere + self.failed
        failed = f", {self.failed} failed" if self.failed else ""
        return f"{self.state}, {done} of {self.total} chunks{failed}"


class Traffic(msgspec.Struct, frozen=True):
    """Counters of a service since its start.

    Attributes:
        num_requests: REST requests.
        num_wanted: Requested chunks.
        num_found: Requested chunks that were found.
        in_bytes: Chunks that were stored.
        out_bytes: Chunks that were handed out.
        found_by_tier: `num_found` by the tier that had them, where it is known.
        missed_by_reason: Chunks that were not found, by reason.
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
        """Share of the requested chunks that was found; None before the first request."""
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
    drain: DrainStatus | None = None


class ServiceStatus(msgspec.Struct, frozen=True):
    """One service.

    Attributes:
        name: Its pod, its instance id, or host and port.
        url: Where it was asked.
        version: Of its build, "" if not known.
        latency_ms: Of its readiness, milliseconds.
        clock_skew_s: How far its clock is ahead of this machine's, to about one second; None if it
            does not report its time.
        problem: A sentence that describes its fault, or why it cannot be asked; "" for none.
        checks: Its dependencies.
        drain: Progress of a drain; None without one.
        facts: A few words particular to its kind.
        links: The peers that a broker knows.
        needs_token: Whether it reported only its health, because no token was sent.
        token_hint: Why the token of its release is not known, to end a sentence; "" where it is,
            or where one was shown.
        namespace: Of its pod; "" where it was found without a cluster.
        name_prefix: What the names of its release's pods begin with; "" where that is not known.
        roles: Of a sidecar's vLLM engines: model -> each `kv_role`.
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
    drain: DrainStatus | None = None
    facts: dict[str, str] = {}
    links: list[Link] = []
    needs_token: bool = False
    token_hint: str = ""
    namespace: str = ""
    name_prefix: str = ""
    roles: dict[str, list[str]] = {}

    @property
    def is_well(self) -> bool:
        """Whether the service works."""
        return self.state in (State.OK, State.DRAINING)


def name_prefix(states: Sequence[ServiceStatus]) -> str:
    """Return the common prefix of all pods' names; "" if they are of several releases."""
    prefixes = {state.name_prefix for state in states} - {""}
    return prefixes.pop() if len(prefixes) == 1 else ""


def token_hint(states: Sequence[ServiceStatus]) -> tuple[str, str]:
    """Return how many services reported only their health because no token was sent, and how to
    give one.

    Both are "" where none did.
    """
    silent = [state for state in states if state.needs_token]
    if not silent:
        return "", ""
    where = "".join(sorted({state.token_hint for state in silent}))
    return (
        f"{len(silent)} of {len(states)} services",
        f"give one with {HOW_TO_AUTHENTICATE}{where}",
    )


class Metrics:
    """The samples of one `/metrics`.

    Args:
        text: Prometheus' text format.

    Raises:
        CtlError: It is none.
    """

    def __init__(self, text: str) -> None:
        from prometheus_client.parser import text_string_to_metric_families

        self._samples: dict[str, list[tuple[Mapping[str, str], float]]] = {}
        try:
            for family in text_string_to_metric_families(text):
                for sample in family.samples:
                    self._samples.setdefault(sample.name, []).append((sample.labels, sample.value))
        except ValueError as exc:
            raise CtlError(f"its /metrics is not in Prometheus' text format: {exc}") from exc

    def of(self, name: str) -> list[tuple[Mapping[str, str], float]]:
        """Return labels and value of each sample of that name."""
        return self._samples.get(name, [])

    def total(self, name: str) -> int:
        """Return the sum of all samples of that name; 0 without any."""
        return int(sum(value for _, value in self.of(name)))

    def by(self, name: str, label: str) -> dict[str, int]:
        """Return the sums by the value of a label, without those that are 0."""
        sums: dict[str, float] = {}
        for labels, value in self.of(name):
            sums[labels.get(label, "")] = sums.get(labels.get(label, ""), 0.0) + value
        return {key: int(value) for key, value in sums.items() if value}


def look_at(reach: Reach, services: Sequence[Endpoint]) -> list[ServiceStatus]:
    """Return the state of each service; not answering is also a state."""
    seen = reach.each(services, _look)
    return [
        ServiceStatus(
            service.kind,
            service.name,
            service.url,
            State.FOREIGN if isinstance(one, ForeignError) else State.SILENT,
            problem=str(one),
            namespace=service.namespace,
            name_prefix=service.name_prefix,
        )
        if isinstance(one, CtlError)
        else one
        for service, one in zip(services, seen, strict=True)
    ]


async def _look(caller: Caller) -> ServiceStatus:
    service = caller.service
    ready = await caller.get("/readyz")
    if ready.status not in (HTTPStatus.OK, HTTPStatus.SERVICE_UNAVAILABLE):
        if ready.status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            raise caller.refusal(ready)
        raise foreign("it does not know /readyz")
    asked_at = time.time() - ready.seconds / 2
    answer = await caller.get("/metrics")
    if answer.status != HTTPStatus.OK:
        raise foreign("it does not know /metrics")
    metrics = Metrics(answer.body.decode("utf-8", errors="replace"))
    build = next((labels for labels, _ in metrics.of(BUILD_INFO)), {})
    distribution, version = build.get("service", ""), build.get("version", "")
    if distribution != DISTRIBUTIONS[service.kind]:
        what = f"it is {distribution}" if distribution else "it is not a service of this cache"
        raise ForeignError(f"{what}: ask for a {service.kind} elsewhere")
    told, refusal = await _told(caller)
    needs_token = refusal is not None and not service.token and refusal.status in WANTS_TOKEN
    # its health is public, so a missing token is not its fault
    problem = "" if refusal is None or needs_token else str(refusal)
    state, checks = _readiness(ready)
    try:
        drain = msgspec.convert(told.get("drain"), DrainStatus | None)
        if drain is not None and drain.state == "serving":
            drain = None
        if told.get("draining") or drain is not None:
            state = State.DRAINING
        elif (failed := [check for check in checks if not check.ok]) and not problem:
            problem = f"{failed[0].name}: {failed[0].detail}"
        if (
            refusal is not None
            and refusal.status not in CALLERS_FAULT
            and state is not State.UNREADY
        ):
            state = State.DEGRADED
        skew_s = None if ready.clock_s is None else ready.clock_s + HALF_A_SECOND - asked_at
        tiers = [one | {"name": name} for name, one in (told.get("tiers") or {}).items()]
        return ServiceStatus(
            service.kind,
            str(told.get("instance") or service.name),
            service.url,
            state,
            version,
            round(ready.seconds * 1000, 1),
            None if skew_s is None else round(skew_s, 1),
            problem,
            checks,
            msgspec.convert(tiers, list[Tier]),
            _traffic(service.kind, metrics),
            drain,
            _facts(service.kind, told),
            msgspec.convert(told.get("peers") or [], list[Link]),
            needs_token,
            service.token_hint if needs_token else "",
            service.namespace,
            service.name_prefix,
            _roles(told.get("clients") or []),
        )
    except (msgspec.ValidationError, AttributeError, TypeError, KeyError) as exc:
        raise CtlError(
            f"what it says of itself cannot be read here; is it of another version ({version})?"
            f" {exc}"
        ) from exc


async def _told(caller: Caller) -> tuple[dict[str, Any], ServiceRefusedError | None]:
    """Return all answers that need a token, merged, and the refusal that ended them, if any."""
    told: dict[str, Any] = {}
    for path in PATHS[caller.service.kind]:
        try:
            answer = await caller.ask("GET", path)
        except ServiceRefusedError as exc:
            return told, exc
        if isinstance(answer, dict):
            told |= answer
    return told, None


def _readiness(answer: HttpAnswer) -> tuple[State, list[Check]]:
    report = answer.json()
    if not isinstance(report, dict) or report.get("status") not in ("ok", "degraded", "unready"):
        raise foreign("its /readyz is not ours")
    checks = (report.get("checks") or {}).items()
    return State(report["status"]), [
        Check(name, bool(one.get("ok")), str(one.get("detail", ""))) for name, one in checks
    ]


def _facts(kind: Kind, told: Mapping[str, Any]) -> dict[str, str]:
    """Return the figures that matter most to people."""
    if not told:
        return {}
    if kind is Kind.LOOKUP:
        chunks = told.get("num_chunks")
        return {
            "index": str(told.get("index")),
            "chunks": "unknown" if chunks is None else str(chunks),
            "leases": str(len(told.get("instances") or [])),
        }
    if kind is Kind.BROKER:
        return {name: str(told.get(f"num_{name}")) for name in ("peers", "pulls", "waiting")}
    if kind is Kind.STORAGE:
        replicas = told.get("replicas")
        return {
            "connections": str(told.get("num_connections")),
            "replicas": "none" if replicas is None else str(len(replicas)),
        }
    registered = {True: "yes", False: "no", None: "no peers configured"}[told.get("registered")]
    facts = {"engines": str(told.get("num_clients")), "registered": registered}
    models = sorted({str(client.get("model")) for client in told.get("clients") or []})
    return facts | ({"models": ", ".join(models)} if models else {})


def _roles(clients: Sequence[Mapping[str, Any]]) -> dict[str, list[str]]:
    said = sorted({(str(one.get("model")), str(one.get("role") or "")) for one in clients})
    roles: dict[str, list[str]] = {}
    for model, role in said:
        if role:
            roles.setdefault(model, []).append(role)
    return roles


def _traffic(kind: Kind, metrics: Metrics) -> Traffic:
    requests = metrics.total(HTTP_REQUESTS_TOTAL)
    if kind is Kind.LOOKUP:
        wanted, found = (
            metrics.total(f"lmcache_lookup_{name}_chunks_total") for name in ("requested", "found")
        )
        return Traffic(requests, wanted, found)
    if kind is Kind.BROKER:
        assigned, unassigned = (
            metrics.total(f"lmcache_broker_{name}_chunks_total")
            for name in ("assigned", "unassigned")
        )
        return Traffic(requests, assigned + unassigned, assigned)
    out = "served" if kind is Kind.STORAGE else "loaded"
    by_tier = metrics.by(f"lmcache_{kind}_{out}_chunks_total", "tier")
    missed = metrics.by(f"lmcache_{kind}_missed_chunks_total", "reason")
    found = sum(by_tier.values())
    wanted = (
        found + sum(missed.values())
        if kind is Kind.STORAGE
        else metrics.total("lmcache_sidecar_requested_chunks_total")
    )
    in_bytes, out_bytes = (
        metrics.total(f"lmcache_{kind}_{name}_bytes_total") for name in ("stored", out)
    )
    return Traffic(requests, wanted, found, in_bytes, out_bytes, by_tier, missed)
