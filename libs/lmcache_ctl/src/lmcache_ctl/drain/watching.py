"""Begins drains, and asks how far they are until they are done."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final

import msgspec

from lmcache_ctl.cluster.asking import Asker, Caller
from lmcache_ctl.cluster.services import Kind, Service
from lmcache_ctl.cluster.states import Drain
from lmcache_ctl.cluster.targets import Target, named, parse_target
from lmcache_ctl.errors import CtlError, UsageError

PEER: Final = "peer"
POLL_S: Final = 0.25
MAX_UNANSWERED: Final = 3
"""In a row; then the service is taken to have ended."""
DONE: Final = "done"
BEGIN: Final = {Kind.SIDECAR: "/v1/drain?wait=false", Kind.STORAGE: "/v1/admin/drain?wait=false"}
LOOK: Final = {Kind.SIDECAR: "/v1/status", Kind.STORAGE: "/v1/stats"}


class DrainTarget(msgspec.Struct, frozen=True):
    """Whom to drain.

    Attributes:
        asked: Whom to ask for it: the service, or the broker.
        name: Its instance; None: all of that kind.
    """

    asked: Kind
    name: str | None


class DrainJob(msgspec.Struct, frozen=True):
    """What is to be done: whom to drain, how long to watch (seconds), and whether to."""

    targets: list[DrainTarget]
    within_s: float
    wait: bool


class DrainOutcome(msgspec.Struct, frozen=True):
    """How far one is.

    Attributes:
        kind: `sidecar`, `storage` or `peer`.
        name: Which instance.
        drain: Its figures; None where it has told none.
        problem: What went wrong, "" for nothing.
    """

    kind: str
    name: str
    drain: Drain | None = None
    problem: str = ""

    @property
    def is_complete(self) -> bool:
        """Whether it is done, and nothing is left or was not taken."""
        return (
            not self.problem
            and self.drain is not None
            and self.drain.state == DONE
            and not (self.drain.left or self.drain.failed)
        )


Tell = Callable[[DrainOutcome], None]


def parse_drain_target(text: str) -> DrainTarget:
    """Read `sidecar[/NAME]`, `storage[/NAME]` or `peer/NAME`.

    Raises:
        UsageError: It is none of these.
    """
    kind, _, name = text.partition("/")
    if kind == PEER:
        if not name:
            raise UsageError(f"{text!r}: name one, peer/NAME")
        return DrainTarget(Kind.BROKER, name)
    target = parse_target(text, (Kind.SIDECAR, Kind.STORAGE))
    return DrainTarget(target.kind, target.name)


async def meant_by(asker: Asker, services: Sequence[Service], job: DrainJob) -> list[Service]:
    """Return the services that are to be asked: those to drain, and a broker for the peers.

    Args:
        asker: How they are asked.
        services: That there are.
        job: What is to be done.

    Raises:
        CtlError: A target means none of the services.
    """
    direct = [
        Target(target.asked, target.name)
        for target in job.targets
        if target.asked is not Kind.BROKER
    ]
    chosen = await named(asker, services, direct) if direct else []
    peers = any(target.asked is Kind.BROKER for target in job.targets)
    return chosen + (
        [await _first_alive(asker, [one for one in services if one.kind is Kind.BROKER])]
        if peers
        else []
    )


async def drain_all(
    asker: Asker, chosen: Sequence[Service], job: DrainJob, tell: Tell
) -> list[DrainOutcome]:
    """Drain all of them, at once.

    Args:
        asker: How they are asked.
        chosen: What `meant_by` has returned.
        job: What is to be done.
        tell: Called whenever one of them is farther.
    """
    direct = [service for service in chosen if service.kind is not Kind.BROKER]
    drains: list[Awaitable[DrainOutcome]] = [
        _Watch(asker, service, job, tell).run() for service in direct
    ]
    peers = [
        target.name
        for target in job.targets
        if target.asked is Kind.BROKER and target.name is not None
    ]
    for broker in (service for service in chosen if service.kind is Kind.BROKER):
        drains += [_Watch(asker, broker, job, tell, peer).run() for peer in peers]
    return list(await asyncio.gather(*drains))


async def _first_alive(asker: Asker, brokers: Sequence[Service]) -> Service:
    """Any broker will do; where none answers, the first one's error tells why."""
    answers = await asker.each(brokers, lambda caller: caller.get("/healthz"))
    alive = [
        broker
        for broker, answer in zip(brokers, answers, strict=True)
        if not isinstance(answer, CtlError)
    ]
    return (alive or list(brokers))[0]


class _Watch:
    """One drain. With `peer`, that peer's, through the broker."""

    def __init__(
        self, asker: Asker, service: Service, job: DrainJob, tell: Tell, peer: str | None = None
    ) -> None:
        self._asker = asker
        self._service = service
        self._job = job
        self._tell = tell
        self._begin = BEGIN[service.kind] if peer is None else f"/v1/peers/{peer}:drain"
        self._look = LOOK[service.kind] if peer is None else f"/v1/peers/{peer}"
        self._last = DrainOutcome(
            str(service.kind) if peer is None else PEER, service.name if peer is None else peer
        )

    async def run(self) -> DrainOutcome:
        try:
            self._take(await self._ask("POST", self._begin))
        except CtlError as exc:
            return self._ended(str(exc))
        if not self._job.wait:
            return self._last
        try:
            async with asyncio.timeout(self._job.within_s):
                return await self._watched()
        except TimeoutError:
            return self._ended(
                f"not done within {self._job.within_s:g} s: it goes on by itself; look again with"
                " lmcachectl status"
            )

    async def _watched(self) -> DrainOutcome:
        unanswered = 0
        while self._last.drain is None or self._last.drain.state != DONE:
            await asyncio.sleep(POLL_S)
            try:
                self._take(await self._ask("GET", self._look))
                unanswered = 0
            except CtlError as exc:
                unanswered += 1
                if unanswered == MAX_UNANSWERED:
                    return self._ended(f"it has ended, or cannot be asked any more: {exc}")
        return self._last

    async def _ask(self, method: str, path: str) -> dict[str, Any]:
        async def question(caller: Caller) -> dict[str, Any]:
            answer: dict[str, Any] = await caller.ask(method, path)
            return answer

        return await self._asker.one(self._service, question)

    def _take(self, answer: dict[str, Any]) -> None:
        told = answer.get("drain")
        now = msgspec.structs.replace(
            self._last, drain=None if told is None else msgspec.convert(told, Drain)
        )
        if now != self._last:
            self._last = now
            self._tell(now)

    def _ended(self, problem: str) -> DrainOutcome:
        return msgspec.structs.replace(self._last, problem=problem)
