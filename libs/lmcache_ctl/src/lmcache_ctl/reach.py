"""What a command reaches: the services that its options, the environment and the settings file
name.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from lmcache_ctl.cluster.services import Kind, Service, services_of
from lmcache_ctl.errors import CtlError
from lmcache_ctl.settings import CtlSettings, load_settings

if TYPE_CHECKING:
    from lmcache_ctl.cluster.asking import Caller

T = TypeVar("T")


class Reach:
    """See the module.

    Args:
        settings: What they say.
    """

    def __init__(self, settings: CtlSettings) -> None:
        self.settings = settings

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> Reach:
        """From the options of a command line; `config` among them names the settings file.

        Raises:
            UsageError: Something is wrong with options, environment or file.
        """
        given = dict(options)
        config: Path | None = given.pop("config", None)
        return cls(load_settings(given, config))

    @property
    def hint(self) -> str:
        """What to tell where nothing answers and no place was named; "" where one was."""
        if self.settings.names_urls or self.settings.names_cluster:
            return ""
        return (
            "nothing answers at the default ports of this machine: name services by --…-url, or"
            " those of a cluster by -n NAMESPACE"
        )

    @contextlib.contextmanager
    def services(self, *kinds: Kind) -> Iterator[list[Service]]:
        """All services of these kinds (without any: of all kinds), for as long as the block lasts.

        Raises:
            CtlError: None is named, or the cluster cannot be asked for them.
        """
        with self.finding(*kinds) as find:
            yield find()

    @contextlib.contextmanager
    def finding(self, *kinds: Kind) -> Iterator[Callable[[], list[Service]]]:
        """What finds these services anew whenever it is called: pods come and go, and so do the
        addresses of a name. It raises as above.
        """
        settings = self.settings
        wanted = kinds or tuple(Kind)
        with contextlib.ExitStack() as open_ways:
            in_cluster: Callable[[], list[Service]] | None = None
            if settings.names_cluster:
                from lmcache_ctl.kube.pods import PodWays

                in_cluster = open_ways.enter_context(PodWays(settings, wanted)).find

            def find() -> list[Service]:
                found = services_of(settings) if settings.names_urls or in_cluster is None else []
                found += in_cluster() if in_cluster is not None else []
                found = [service for service in found if service.kind in wanted]
                if not found:
                    raise CtlError(f"{_none_of(kinds)}: {_how_to_name(settings, kinds)}")
                return sorted(
                    found, key=lambda service: (list(Kind).index(service.kind), service.name)
                )

            yield find

    @contextlib.contextmanager
    def lm_services(self) -> Iterator[list[Service]]:
        """The pods of cache_storage by lm://, each behind a port on loopback. Raises as above."""
        from lmcache_ctl.kube.pods import LM_PORT_NAME, PodWays

        with PodWays(self.settings, (Kind.STORAGE,), LM_PORT_NAME) as ways:
            found = ways.find()
            if not found:
                raise CtlError(
                    f"{_none_of((Kind.STORAGE,))}: {_how_to_name(self.settings, (Kind.STORAGE,))}"
                )
            yield found

    def ask(self, kind: Kind, method: str, path: str, body: Any = None) -> dict[str, Any]:
        """The JSON of the first service of that kind that answers. Raises as `ask_one`."""
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
        """Put a question to one service of that kind: the one of that name, else the first that
        answers.

        Args:
            kind: Of what kind.
            question: Called with a `Caller`.
            name: Instance, pod, or host and port.

        Raises:
            CtlError: None answers; the text is the last one's.
        """
        from lmcache_ctl.cluster.asking import Asker, RefusedError
        from lmcache_ctl.cluster.targets import Target, named

        asker = Asker(self.settings)
        with self.services(kind) as services:
            chosen = (
                services
                if name is None
                else asyncio.run(named(asker, services, [Target(kind, name)]))
            )
            for last, service in enumerate(chosen, 1):
                try:
                    return asyncio.run(asker.one(service, question))
                except RefusedError as exc:
                    raise CtlError(f"{service.url}: {exc}") from exc
                except CtlError as exc:
                    if last == len(chosen):
                        more = f"; {self.hint}" if self.hint else ""
                        raise CtlError(f"no answer from {service.url}: {exc}{more}") from exc
        raise AssertionError("one of them was the last")


def _none_of(kinds: tuple[Kind, ...]) -> str:
    return f"no {' or '.join(kinds)} is named" if kinds else "no service is named"


def _how_to_name(settings: CtlSettings, kinds: tuple[Kind, ...]) -> str:
    options = " or ".join(f"--{kind}-url" for kind in kinds or Kind)
    if settings.names_cluster:
        return (
            "no running pod of the release matches; is --namespace"
            f" {settings.namespace or '(the context own)'} right? Or give {options}"
        )
    return f"give {options}, or --namespace for a cluster"
