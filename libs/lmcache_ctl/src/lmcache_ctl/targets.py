"""Choose the services that a command acts on: `sidecar`, `storage/NAME`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec

from lmcache_ctl.asking import Asker, Caller
from lmcache_ctl.errors import CtlError, UsageError
from lmcache_ctl.services import Endpoint, Kind

OWN_NAME: Final = {Kind.SIDECAR: "/v1/status", Kind.STORAGE: "/v1/stats"}
"""Where a service says which instance it is."""
PEER: Final = "peer"
"""A kind of targets that only a broker is asked for."""


class Target(msgspec.Struct, frozen=True):
    """A parsed `KIND[/NAME]`.

    Attributes:
        name: Instance id, pod, or host and port; None: all of that kind.
    """

    kind: Kind
    name: str | None

    def __str__(self) -> str:
        return self.kind if self.name is None else f"{self.kind}/{self.name}"


class TargetResult(msgspec.Struct, frozen=True):
    """The answer of a service.

    Attributes:
        name: Its instance.
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
        UsageError: It names none of these kinds.
    """
    kind, has_name, name = text.partition("/")
    if kind not in kinds or (has_name and not name):
        raise UsageError(
            f"{text!r} names no service: write {' or '.join(kinds)}, and append /NAME for a"
            " single one"
        )
    return Target(Kind(kind), name or None)


async def named(
    asker: Asker, services: Sequence[Endpoint], targets: Sequence[Target]
) -> list[Endpoint]:
    """Return the services that the targets match, under the names of their instances.

    A service that does not answer keeps its address as its name.

    Raises:
        CtlError: A target matches no service.
    """
    kinds = {target.kind for target in targets}
    wanted = [service for service in services if service.kind in kinds]
    names = await asker.each(wanted, _own_name)
    known = [
        (service, msgspec.structs.replace(service, name=name) if isinstance(name, str) else service)
        for service, name in zip(wanted, names, strict=True)
    ]

    def means(target: Target, service: Endpoint, own: Endpoint) -> bool:
        short = own.name.removeprefix(own.name_prefix)  # as status shows it
        return target.kind is service.kind and target.name in (None, service.name, own.name, short)

    for target in targets:
        if not any(means(target, *one) for one in known):
            there = ", ".join(f"{own.kind}/{own.name}" for _, own in known) or "none of that kind"
            raise CtlError(f"{target} is not there: there is {there}")
    return [one[1] for one in known if any(means(target, *one) for target in targets)]


async def _own_name(caller: Caller) -> str:
    path = OWN_NAME.get(caller.service.kind)
    if path is None:
        return caller.service.name
    return str((await caller.ask("GET", path))["instance"])


def results_of(
    services: Sequence[Endpoint], answers: Sequence[dict[str, Any] | CtlError]
) -> list[TargetResult]:
    """Return what each service answered, or why it did not."""
    return [
        TargetResult(service.kind, service.name, problem=str(one))
        if isinstance(one, CtlError)
        else TargetResult(service.kind, service.name, one)
        for service, one in zip(services, answers, strict=True)
    ]
