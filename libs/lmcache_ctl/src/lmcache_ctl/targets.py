"""Choose the services that a command acts on, `sidecar` or `storage/NAME`, and ask each of them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Annotated, Any, Final

import msgspec
import typer

from lmcache_ctl.asking import Caller
from lmcache_ctl.errors import CtlError, UsageError
from lmcache_ctl.options import CtlSettings
from lmcache_ctl.output import print_table
from lmcache_ctl.reach import Reach
from lmcache_ctl.services import Endpoint, Kind, names_of

STATUS_PATHS: Final = {Kind.SIDECAR: "/v1/status", Kind.STORAGE: "/v1/stats"}
"""Where a service that can be a target says which instance it is, and whether it drains."""
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


def parse_target(text: str) -> Target:
    """Read `KIND[/NAME]`.

    Raises:
        UsageError: It names no sidecar and no cache_storage.
    """
    kind, has_name, name = text.partition("/")
    if kind not in STATUS_PATHS or (has_name and not name):
        raise UsageError(
            f"{text!r} names no service: write {' or '.join(STATUS_PATHS)}, and append /NAME for a"
            " single one"
        )
    return Target(Kind(kind), name or None)


Targets = Annotated[
    list[Target],
    typer.Argument(
        metavar="TARGET",
        parser=parse_target,
        help="sidecar, storage, or one of them: storage/NAME.",
    ),
]


def ask_targets(
    settings: CtlSettings,
    targets: Sequence[Target],
    question: Callable[[Caller], Awaitable[Any]],
    before: Callable[[Sequence[Endpoint]], None] | None = None,
) -> list[TargetResult]:
    """Return what each service that the targets match answers, or why it does not.

    Args:
        before: Called with the services before any is asked; may raise.

    Raises:
        CtlError: A target matches no service.
    """
    reach = Reach(settings, *dict.fromkeys(target.kind for target in targets))
    with reach.services() as services:
        chosen = named(reach, services, targets)
        if before is not None:
            before(chosen)
        answers = reach.each(chosen, question)
    return [
        TargetResult(service.kind, service.name, problem=str(one))
        if isinstance(one, CtlError)
        else TargetResult(service.kind, service.name, one)
        for service, one in zip(chosen, answers, strict=True)
    ]


def print_results(
    found: Sequence[TargetResult], heading: str, text: Callable[[Mapping[str, Any]], str]
) -> None:
    """Print a line for each service: the text of its result, or its problem."""
    rows = [(str(one.kind), one.name, one.problem or text(one.result)) for one in found]
    print_table(("service", "name", heading), rows, left=3, prose=True)


def named(reach: Reach, services: Sequence[Endpoint], targets: Sequence[Target]) -> list[Endpoint]:
    """Return the services that the targets match, under the names of their instances.

    A service that does not answer keeps its address as its name.

    Raises:
        CtlError: A target matches no service.
    """
    kinds = {target.kind for target in targets}
    wanted = [service for service in services if service.kind in kinds]
    names = reach.each(wanted, _own_name)
    known = [
        (service, msgspec.structs.replace(service, name=name) if isinstance(name, str) else service)
        for service, name in zip(wanted, names, strict=True)
    ]

    def means(target: Target, service: Endpoint, own: Endpoint) -> bool:
        short = own.name.removeprefix(own.name_prefix)  # as status shows it
        return target.kind is service.kind and target.name in (None, service.name, own.name, short)

    for target in targets:
        if not any(means(target, *one) for one in known):
            there = ", ".join(names_of(own for _, own in known)) or "none of that kind"
            raise CtlError(f"{target} is not there: there is {there}")
    return [one[1] for one in known if any(means(target, *one) for target in targets)]


async def _own_name(caller: Caller) -> str:
    return str((await caller.ask("GET", STATUS_PATHS[caller.service.kind]))["instance"])
