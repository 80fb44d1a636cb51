"""Services that a command is to change something at: `sidecar`, `storage/lmcache-storage-0`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec

from lmcache_ctl.cluster.asking import Asker, Caller
from lmcache_ctl.cluster.services import Kind, Service
from lmcache_ctl.errors import CtlError, UsageError

OWN_NAME: Final = {Kind.SIDECAR: "/v1/status", Kind.STORAGE: "/v1/stats"}
"""Where a service says which instance it is."""


class Target(msgspec.Struct, frozen=True):
    """What a person wrote.

    Attributes:
        kind: Of the services that are meant.
        name: Instance id, pod, or host and port; None: all of that kind.
    """

    kind: Kind
    name: str | None

    def __str__(self) -> str:
        """As it was written."""
        return self.kind if self.name is None else f"{self.kind}/{self.name}"


class Outcome(msgspec.Struct, frozen=True):
    """What a service answered.

    Attributes:
        kind: What it is.
        name: Which instance.
        result: Its answer; empty where it gave none.
        problem: Why it gave none, "" if it did.
    """

    kind: Kind
    name: str
    result: dict[str, Any] = {}
    problem: str = ""


def parse_target(text: str, kinds: Sequence[Kind]) -> Target:
    """Read `KIND[/NAME]`.

    Raises:
        UsageError: It is none of these kinds.
    """
    kind, has_name, name = text.partition("/")
    if kind not in kinds or (has_name and not name):
        raise UsageError(
            f"{text!r} names no service: write {' or '.join(kinds)}, and /NAME behind it for a"
            " single one"
        )
    return Target(Kind(kind), name or None)


async def named(
    asker: Asker, services: Sequence[Service], targets: Sequence[Target]
) -> list[Service]:
    """The services that the targets mean, under the names of their instances; one that does not
    answer keeps its address as its name.

    Raises:
        CtlError: One of the targets means none of them.
    """
    wanted = [
        service for service in services if any(target.kind is service.kind for target in targets)
    ]
    names = await asker.each(wanted, _own_name)
    known = [
        (service, msgspec.structs.replace(service, name=name) if isinstance(name, str) else service)
        for service, name in zip(wanted, names, strict=True)
    ]
    for target in targets:
        if not any(_means(target, service, own) for service, own in known):
            there = ", ".join(f"{own.kind}/{own.name}" for _, own in known) or "none of that kind"
            raise CtlError(f"{target} is not there: there is {there}")
    return [
        own for service, own in known if any(_means(target, service, own) for target in targets)
    ]


def _means(target: Target, service: Service, own: Service) -> bool:
    return target.kind is service.kind and target.name in (None, service.name, own.name)


async def _own_name(caller: Caller) -> str:
    path = OWN_NAME.get(caller.service.kind)
    if path is None:
        return caller.service.name
    return str((await caller.ask("GET", path))["instance"])


async def tell_each(
    asker: Asker, services: Sequence[Service], what: dict[Kind, tuple[str, Any]]
) -> list[Outcome]:
    """POST to each of them, and what came of it.

    Args:
        asker: How.
        services: Whom.
        what: Path and body, by kind.
    """

    async def tell(caller: Caller) -> dict[str, Any]:
        path, body = what[caller.service.kind]
        answer: dict[str, Any] = await caller.ask("POST", path, body)
        return answer

    told = await asker.each(services, tell)
    return [
        (
            Outcome(service.kind, service.name, problem=str(one))
            if isinstance(one, CtlError)
            else Outcome(service.kind, service.name, one)
        )
        for service, one in zip(services, told, strict=True)
    ]
