"""Find the services that options, environment and settings file name, and ask them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeVar

import msgspec

from lmcache_ctl.asking import Asker, Caller, ServiceRefusedError
from lmcache_ctl.errors import CtlError, UsageError
from lmcache_ctl.services import Endpoint, Kind, services_of
from lmcache_ctl.settings import CtlSettings, load_settings
from lmcache_ctl.targets import Target, named

if TYPE_CHECKING:
    from lmcache_ctl.kube.pods import PodWays

T = TypeVar("T")
URLS: Final = tuple(f"{kind}_urls" for kind in Kind)
"""The options that are addresses."""


class Reach:
    """The services that a command reaches.

    Args:
        settings: Where they are and how they are asked.
        all_namespaces: Whether to look for them in all namespaces of the cluster.
        takes_given_token: Whether the token in the settings may be sent to pods.
    """

    def __init__(
        self, settings: CtlSettings, all_namespaces: bool = False, takes_given_token: bool = True
    ) -> None:
        self.settings = settings
        self.all_namespaces = all_namespaces
        self._takes_given_token = takes_given_token
        self._is_in_cluster = settings.asks_cluster or all_namespaces

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> Reach:
        """Read settings from a command line's options; `config` among them names the settings file.

        Raises:
            UsageError: Something is wrong with options, environment or file.
        """
        given = dict(options)
        config, everywhere = given.pop("config", None), given.pop("all_namespaces", None)
        settings = load_settings(given, config)
        if everywhere and any(given.get(name) for name in ("namespace", *URLS)):
            raise UsageError("-A looks in all namespaces: leave out --namespace and addresses")
        return cls(settings, bool(everywhere))

    @property
    def hint(self) -> str:
        """Return advice for when nothing answers and no place was named; "" where one was."""
        if self.settings.names_urls or self._is_in_cluster:
            return ""
        return (
            "nothing answers at the default ports of this machine: name services with --…-url, or"
            " those of a cluster by --kubeconfig"
        )

    def places(self, *kinds: Kind) -> list[Reach]:
        """Return a `Reach` for each namespace in which `-A` finds services of these kinds (without
        any: of all kinds); without `-A` only this one.

        Raises:
            CtlError: There is none, or the cluster cannot be asked.
        """
        if not self.all_namespaces:
            return [self]
        from lmcache_ctl.kube.pods import namespaces_of

        nowhere_else = dict.fromkeys(URLS, ())
        return [
            # Any account that may create a pod may give it our label.
            Reach(
                msgspec.structs.replace(self.settings, namespace=name, **nowhere_else),
                takes_given_token=False,
            )
            for name in namespaces_of(self.settings, kinds or tuple(Kind))
        ]

    @contextlib.contextmanager
    def services(self, *kinds: Kind) -> Iterator[list[Endpoint]]:
        """Yield all services of these kinds (without any: of all kinds).

        Raises:
            CtlError: None is named, or the cluster cannot be asked for them.
        """
        with self.finding(*kinds) as find:
            yield find()

    @contextlib.contextmanager
    def finding(self, *kinds: Kind) -> Iterator[Callable[[], list[Endpoint]]]:
        """Yield a function that finds these services anew at each call: pods and addresses come and
        go.

        The function raises as `services` does.
        """
        settings = self.settings
        wanted = kinds or tuple(Kind)
        order = list(Kind)
        with contextlib.ExitStack() as open_ways:
            in_cluster: list[PodWays] = []
            if self._is_in_cluster:
                from lmcache_ctl.kube.pods import PodWays

                in_cluster = [
                    open_ways.enter_context(
                        PodWays(place.settings, wanted, takes_given_token=place._takes_given_token)
                    )
                    for place in self.places(*wanted)
                ]
            calls_here = settings.names_urls or not self._is_in_cluster

            def find() -> list[Endpoint]:
                found = services_of(settings) if calls_here else []
                found += [service for ways in in_cluster for service in ways.find()]
                found = [service for service in found if service.kind in wanted]
                if not found:
                    raise _nothing_named(kinds, in_cluster)
                return sorted(
                    found, key=lambda one: (one.namespace, order.index(one.kind), one.name)
                )

            yield find

    def ask(self, kind: Kind, method: str, path: str, body: Any = None) -> dict[str, Any]:
        """Return the JSON of the first service of that kind that answers. Raises as `ask_one`."""
        answer = self.ask_one(kind, lambda caller: caller.ask(method, path, body))
        if not isinstance(answer, dict):
            raise CtlError(
                f"a {kind} answered something else than an object to {path}: is it of another"
                " version?"
            )
        return answer

    def ask_one(
        self, kind: Kind, question: Callable[[Caller], Awaitable[T]], name: str | None = None
    ) -> T:
        """Ask one service of that kind: the first that answers.

        Args:
            kind: Of what kind.
            question: Called with a `Caller`.
            name: Ask the one of that instance, pod, or host and port instead.

        Raises:
            CtlError: None answers; the text is the last one's.
        """
        asker = Asker(self.settings)
        with self.services(kind) as services:
            if name is not None:
                services = asyncio.run(named(asker, services, [Target(kind, name)]))
            return self.first_answer(asker, services, question)[1]

    def first_answer(
        self,
        asker: Asker,
        services: Sequence[Endpoint],
        question: Callable[[Caller], Awaitable[T]],
    ) -> tuple[Endpoint, T]:
        """Put a question to these services in turn; return the first that answers, and its answer.

        Raises:
            CtlError: None answers; the text is the last one's.
        """
        for last, service in enumerate(services, 1):
            try:
                return service, asyncio.run(asker.one(service, question))
            except ServiceRefusedError as exc:
                raise CtlError(f"{service.url}: {exc}") from exc
            except CtlError as exc:
                if last == len(services):
                    hint = self.hint
                    more = f"; {hint}" if hint else ""
                    raise CtlError(f"no answer from {service.url}: {exc}{more}") from exc
        raise AssertionError("one of them was the last")


def _nothing_named(kinds: Sequence[Kind], in_cluster: Sequence[PodWays]) -> CtlError:
    options = " or ".join(f"--{kind}-url" for kind in kinds or Kind)
    if in_cluster:
        return CtlError(f"{in_cluster[0].nothing_found()}, or {options}")
    what = " or ".join(kinds) or "service"
    return CtlError(f"no {what} is named: give {options}, or --namespace for a cluster")
