"""Asks a service how it is."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, Final, TypeVar

import httpx
import msgspec

from lmcache_ctl.cluster.asking import Answer, Asker, Caller, ForeignError, RefusedError
from lmcache_ctl.cluster.figures import Figures
from lmcache_ctl.cluster.services import DISTRIBUTIONS, Kind, Service
from lmcache_ctl.cluster.states import Check, Drain, Link, ServiceState, State, Tier, Traffic
from lmcache_ctl.errors import CtlError

HTTP_REQUESTS_TOTAL: Final = "lmcache_http_requests_total"
HALF_A_SECOND: Final = 0.5
"""What a service says of its clock is cut to whole seconds."""
PATHS: Final = {
    Kind.LOOKUP: ("/v1/stats", "/v1/instances"),
    Kind.BROKER: ("/v1/stats", "/v1/peers"),
    Kind.STORAGE: ("/v1/stats",),
    Kind.SIDECAR: ("/v1/status", "/v1/tiers", "/v1/clients"),
}
WANTS_TOKEN: Final = frozenset({httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN})
CALLERS_FAULT: Final = WANTS_TOKEN | {httpx.codes.TOO_MANY_REQUESTS}
"""Refusals that say nothing about the service's own health."""
T = TypeVar("T")


async def look_at(asker: Asker, services: list[Service]) -> list[ServiceState]:
    """How each of them is; a service that does not answer is a state, too."""
    seen = await asker.each(services, _look)
    return [
        _unseen(service, one) if isinstance(one, CtlError) else one
        for service, one in zip(services, seen, strict=True)
    ]


def _unseen(service: Service, error: CtlError) -> ServiceState:
    state = State.FOREIGN if isinstance(error, ForeignError) else State.SILENT
    return ServiceState(service.kind, service.name, service.url, state, problem=str(error))


async def _look(caller: Caller) -> ServiceState:
    service = caller.service
    ready = await caller.get("/readyz")
    if (
        ready.status >= httpx.codes.INTERNAL_SERVER_ERROR
        and ready.status != httpx.codes.SERVICE_UNAVAILABLE
    ):
        raise caller.refusal(ready)
    if ready.status not in (httpx.codes.OK, httpx.codes.SERVICE_UNAVAILABLE):
        raise ForeignError(
            "something else listens there: it does not know /readyz; correct the address"
        )
    asked_at = time.time() - ready.seconds / 2
    figures = await _figures(caller)
    distribution, version = figures.build
    if distribution != DISTRIBUTIONS[service.kind]:
        what = f"it is {distribution}" if distribution else "it is no service of this cache"
        raise ForeignError(f"{what}: ask for a {service.kind} elsewhere")
    told, refusal = await _told(caller)
    needs_token = refusal is not None and not caller.has_token and refusal.status in WANTS_TOKEN
    # Its health it tells to anyone, so a missing token is nothing that is wrong with it.
    problem = "" if refusal is None or needs_token else str(refusal)
    state, checks = _readiness(ready)
    drain = _drain(told)
    if told.get("draining") or (drain is not None and drain.state != "serving"):
        state = State.DRAINING
    if refusal is not None and refusal.status not in CALLERS_FAULT and state is not State.UNREADY:
        state = State.DEGRADED
    try:
        return ServiceState(
            service.kind,
            str(told.get("instance") or service.name),
            service.url,
            state,
            version,
            round(ready.seconds * 1000, 1),
            None if ready.clock_s is None else round(ready.clock_s + HALF_A_SECOND - asked_at, 1),
            problem or _first_failed(checks, state),
            checks,
            _tiers(told.get("tiers") or {}),
            traffic_of(service.kind, figures),
            drain if drain is not None and drain.state != "serving" else None,
            _facts(service.kind, told),
            _links(told.get("peers") or []),
            needs_token,
            service.token_secret if needs_token else "",
        )
    except (msgspec.ValidationError, AttributeError, TypeError, KeyError) as exc:
        raise CtlError(
            f"what it says of itself cannot be read here; is it of another version ({version})?"
            f" {exc}"
        ) from exc


async def _figures(caller: Caller) -> Figures:
    answer = await caller.get("/metrics")
    if answer.status != httpx.codes.OK:
        raise ForeignError(
            "something else listens there: it does not know /metrics; correct the address"
        )
    return Figures.read(answer.body.decode("utf-8", errors="replace"))


async def _told(caller: Caller) -> tuple[dict[str, Any], RefusedError | None]:
    """All that needs a token, in one; and the refusal that ended it, if any."""
    told: dict[str, Any] = {}
    for path in PATHS[caller.service.kind]:
        try:
            answer = await caller.ask("GET", path)
        except RefusedError as exc:
            return told, exc
        if isinstance(answer, dict):
            told |= answer
    return told, None


def _readiness(answer: Answer) -> tuple[State, list[Check]]:
    report = answer.json()
    if not isinstance(report, dict) or report.get("status") not in ("ok", "degraded", "unready"):
        raise ForeignError(
            "something else listens there: its /readyz is not ours; correct the address"
        )
    checks = [
        Check(name, bool(one.get("ok")), str(one.get("detail", "")))
        for name, one in (report.get("checks") or {}).items()
    ]
    return State(report["status"]), checks


def _first_failed(checks: list[Check], state: State) -> str:
    """A service that drains is unready for a reason that is told elsewhere."""
    failed = [check for check in checks if not check.ok]
    return f"{failed[0].name}: {failed[0].detail}" if failed and state is not State.DRAINING else ""


def _drain(told: Mapping[str, Any]) -> Drain | None:
    found = told.get("drain")
    return None if found is None else _read(found, Drain)


def _read(value: Any, kind: type[T]) -> T:
    """What a service of a later version adds is passed over."""
    return msgspec.convert(value, kind)


def _tiers(tiers: Mapping[str, Mapping[str, int]]) -> list[Tier]:
    return [
        Tier(
            name,
            int(one.get("num_chunks", 0)),
            int(one.get("used_bytes", 0)),
            int(one.get("capacity_bytes", 0)),
        )
        for name, one in tiers.items()
    ]


def _links(peers: list[Any]) -> list[Link]:
    return [_read(peer, Link) for peer in peers]


def _facts(kind: Kind, told: Mapping[str, Any]) -> dict[str, str]:
    """What people ask first of a service of that kind."""
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
        return {
            "peers": str(told.get("num_peers")),
            "pulls": str(told.get("num_pulls")),
            "waiting": str(told.get("num_waiting")),
        }
    if kind is Kind.STORAGE:
        replicas = told.get("replicas")
        return {
            "connections": str(told.get("num_connections")),
            "replicas": "none" if replicas is None else str(len(replicas)),
        }
    registered = {True: "yes", False: "no", None: "no peers configured"}[told.get("registered")]
    models = sorted({str(client.get("model")) for client in told.get("clients") or []})
    return {"engines": str(told.get("num_clients")), "registered": registered} | (
        {"models": ", ".join(models)} if models else {}
    )


def traffic_of(kind: Kind, figures: Figures) -> Traffic:
    """What a service of that kind has counted."""
    requests = int(figures.total(HTTP_REQUESTS_TOTAL))
    if kind is Kind.LOOKUP:
        wanted, found = (
            int(figures.total(f"lmcache_lookup_{name}_chunks_total"))
            for name in ("requested", "found")
        )
        return Traffic(requests, wanted, found)
    if kind is Kind.BROKER:
        assigned, unassigned = (
            int(figures.total(f"lmcache_broker_{name}_chunks_total"))
            for name in ("assigned", "unassigned")
        )
        return Traffic(requests, assigned + unassigned, assigned)
    prefix, out = (
        ("lmcache_storage_", "served") if kind is Kind.STORAGE else ("lmcache_sidecar_", "loaded")
    )
    by_tier = _whole(figures.by(f"{prefix}{out}_chunks_total", "tier"))
    missed = _whole(figures.by(f"{prefix}missed_chunks_total", "reason"))
    found = sum(by_tier.values())
    wanted = (
        found + sum(missed.values())
        if kind is Kind.STORAGE
        else int(figures.total(f"{prefix}requested_chunks_total"))
    )
    in_bytes, out_bytes = (
        int(figures.total(f"{prefix}{name}_bytes_total")) for name in ("stored", out)
    )
    return Traffic(requests, wanted, found, in_bytes, out_bytes, by_tier, missed)


def _whole(sums: Mapping[str, float]) -> dict[str, int]:
    return {name: int(value) for name, value in sums.items() if value}
