"""Find the services that options, environment and cluster name, and ask them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Final, TypeVar

from lmcache_core.errors import ConfigError

from lmcache_ctl.asking import Asker, Caller, ServiceRefusedError
from lmcache_ctl.errors import CtlError, UsageError
from lmcache_ctl.kube.access import asks_cluster
from lmcache_ctl.options import CtlSettings
from lmcache_ctl.services import Endpoint, Kind, services_of

T = TypeVar("T")
URLS: Final = tuple(f"{kind}_urls" for kind in Kind)
"""The options that are addresses."""


class Reach:
    """The services that a command reaches.

    Args:
        kinds: Of the services; none: all kinds.
        url: Addresses of the only kind, in place of those in the settings.
        everywhere: Find pods in all namespaces.

    Raises:
        UsageError: Options contradict each other, or the file of the token or of TLS cannot be
            read.
    """

    def __init__(
        self,
        settings: CtlSettings,
        *kinds: Kind,
        url: Sequence[str] | None = None,
        everywhere: bool = False,
    ) -> None:
        if url:
            given: dict[str, Any] = {f"{kinds[0]}_urls": url}
            others = settings.from_environment - given.keys()
            settings = replace(settings, **given, from_environment=others)
        named = {name for name in ("namespace", *URLS) if getattr(settings, name)}
        if everywhere and named - settings.from_environment:
            raise UsageError("-A looks in all namespaces: leave out --namespace and addresses")
        self.settings = replace(settings, token=_token_of(settings), token_file=None)
        self.kinds = kinds or tuple(Kind)
        self.everywhere = everywhere
        self.asker = Asker(settings)
        self._is_in_cluster = everywhere or asks_cluster(settings)

    @property
    def hint(self) -> str:
        """Return advice for when nothing answers and no place was named; "" where one was."""
        if self.settings.names_urls or self._is_in_cluster:
            return ""
        return (
            "nothing answers at the default ports of this machine: name services with --…-url, or"
            " those of a cluster by --kubeconfig"
        )

    def namespaces(self) -> list[CtlSettings]:
        """Return the settings for each namespace in which `-A` finds these services.

        Raises:
            CtlError: There is none, or the cluster cannot be asked.
        """
        from lmcache_ctl.kube.pods import namespaces_of

        # Any account that may create a pod may give it our label: none is sent the caller's token.
        nowhere_else: dict[str, Any] = dict.fromkeys(URLS)
        hint = "; -A does not send it: name the --namespace"
        return [
            replace(self.settings, **nowhere_else, namespace=name, token=None, token_hint=hint)
            for name in namespaces_of(self.settings, self.kinds)
        ]

    @contextlib.contextmanager
    def services(self) -> Iterator[list[Endpoint]]:
        """Yield all these services.

        Raises:
            CtlError: None is named, or the cluster cannot be asked for them.
        """
        order = list(Kind)
        calls_here = self.settings.names_urls or not self._is_in_cluster
        found = services_of(self.settings) if calls_here else []
        with contextlib.ExitStack() as ways:
            nowhere = ""
            if self._is_in_cluster:
                from lmcache_ctl.kube.pods import PodWays

                for place in self.namespaces() if self.everywhere else [self.settings]:
                    pods = ways.enter_context(PodWays(place, self.kinds))
                    found += pods.find()
                    nowhere = nowhere or pods.nothing_found()
            found = [service for service in found if service.kind in self.kinds]
            if not found:
                raise self._nothing_named(nowhere)
            yield sorted(found, key=lambda one: (one.namespace, order.index(one.kind), one.name))

    def ask(self, method: str, path: str, body: Any = None) -> dict[str, Any]:
        """Return the JSON of the first service that answers.

        Raises:
            CtlError: None answers, or it answers something else; the text is the last one's.
        """
        with self.services() as services:
            _, answer = self.first_answer(services, lambda caller: caller.ask(method, path, body))
        if not isinstance(answer, dict):
            raise CtlError(
                f"a {self.kinds[0]} answered something else than an object to {path}: is it of"
                " another version?"
            )
        return answer

    def each(
        self, services: Sequence[Endpoint], question: Callable[[Caller], Awaitable[T]]
    ) -> list[T | CtlError]:
        """Put a question to all these services at once; return answers and errors in order."""
        return asyncio.run(self.asker.each(services, question))

    def first_answer(
        self, services: Sequence[Endpoint], question: Callable[[Caller], Awaitable[T]]
    ) -> tuple[Endpoint, T]:
        """Put a question to these services in turn; return the first that answers, and its answer.

        Raises:
            CtlError: None answers; the text is the last one's.
        """
        for last, service in enumerate(services, 1):
            try:
                return service, asyncio.run(self.asker.one(service, question))
            except ServiceRefusedError as exc:
                raise CtlError(f"{service.url}: {exc}") from exc
            except CtlError as exc:
                if last == len(services):
                    hint = self.hint
                    more = f"; {hint}" if hint else ""
                    raise CtlError(f"no answer from {service.url}: {exc}{more}") from exc
        raise AssertionError("one of them was the last")

    def _nothing_named(self, nowhere: str) -> CtlError:
        options = " or ".join(f"--{kind}-url" for kind in self.kinds)
        if nowhere:
            return CtlError(f"{nowhere}, or {options}; lmcachectl status -A looks everywhere")
        what = " or ".join(self.kinds)
        return CtlError(f"no {what} is named: give {options}, or --namespace for a cluster")


def _token_of(settings: CtlSettings) -> str | None:
    """Return the token that the caller gives, or None.

    Raises:
        UsageError: The token file cannot be read or holds no token.
    """
    if settings.token_file is None:
        return settings.token
    from lmcache_core.security import TokenFile

    try:
        return TokenFile(settings.token_file, "token-file").text
    except ConfigError as exc:
        raise UsageError(str(exc)) from exc
