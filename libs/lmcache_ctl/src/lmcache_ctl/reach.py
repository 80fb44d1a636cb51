"""Find the services that options, environment and settings file name, and ask them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any, Final, TypeVar

import msgspec

from lmcache_ctl.asking import Asker, Caller, ServiceRefusedError
from lmcache_ctl.errors import CtlError, UsageError
from lmcache_ctl.services import Endpoint, Kind, services_of
from lmcache_ctl.settings import CtlSettings, load_settings

T = TypeVar("T")
URLS: Final = tuple(f"{kind}_urls" for kind in Kind)
"""The options that are addresses."""


class Reach:
    """The services that a command reaches.

    Args:
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
        wanted, order = kinds or tuple(Kind), list(Kind)
        calls_here = self.settings.names_urls or not self._is_in_cluster
        found = services_of(self.settings) if calls_here else []
        with contextlib.ExitStack() as ways:
            nowhere = ""
            if self._is_in_cluster:
                from lmcache_ctl.kube.pods import PodWays

                for place in self.places(*wanted):
                    takes_token = place._takes_given_token
                    pods = PodWays(place.settings, wanted, takes_given_token=takes_token)
                    found += ways.enter_context(pods).find()
                    nowhere = nowhere or pods.nothing_found()
            found = [service for service in found if service.kind in wanted]
            if not found:
                raise _nothing_named(kinds, nowhere)
            yield sorted(found, key=lambda one: (one.namespace, order.index(one.kind), one.name))

    def ask(self, kind: Kind, method: str, path: str, body: Any = None) -> dict[str, Any]:
        """Return the JSON of the first service of that kind that answers.

        Raises:
            CtlError: None answers, or it answers something else; the text is the last one's.
        """
        with self.services(kind) as services:
            _, answer = self.first_answer(
                Asker(self.settings), services, lambda caller: caller.ask(method, path, body)
            )
        if not isinstance(answer, dict):
            raise CtlError(
                f"a {kind} answered something else than an object to {path}: is it of another"
                " version?"
            )
        return answer

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


def _nothing_named(kinds: Sequence[Kind], nowhere: str) -> CtlError:
    options = " or ".join(f"--{kind}-url" for kind in kinds or Kind)
    if nowhere:
        return CtlError(f"{nowhere}, or {options}; lmcachectl status -A looks everywhere")
    what = " or ".join(kinds) or "service"
    return CtlError(f"no {what} is named: give {options}, or --namespace for a cluster")
