"""Complete names of a cluster in a shell: in bounded time, and without a word where that fails."""

from __future__ import annotations

import contextlib
import io
import threading
from collections.abc import Callable, Sequence
from typing import Any, Final

import msgspec
import typer

from lmcache_ctl.errors import CtlError
from lmcache_ctl.reach import Reach
from lmcache_ctl.services import Kind
from lmcache_ctl.settings import OPTIONS, CtlSettings, context_names
from lmcache_ctl.targets import PEER

LIMIT_S: Final = 1.0
"""Longest wait for a cluster after Tab."""

Complete = Callable[[typer.Context, str], list[str]]


def _completing(find: Callable[[CtlSettings], Sequence[str]], *always: str) -> Complete:
    """Return what completes with these words and the names that are found in time, with the options
    on the command line so far.
    """

    def complete(ctx: typer.Context, incomplete: str) -> list[str]:
        names: list[str] = list(always)
        given: dict[str, Any] = {name: ctx.params.get(name) for name in (*OPTIONS, "config")}

        def work() -> None:
            with contextlib.suppress(CtlError, OSError):
                settings = Reach.of(given).settings
                timeout_s = min(settings.timeout_s, LIMIT_S)
                names.extend(find(msgspec.structs.replace(settings, timeout_s=timeout_s)))

        # A thread can be left behind, whatever it waits for. Warnings of libraries would be shown
        # in the line that is being typed.
        thread = threading.Thread(target=work, daemon=True)
        with contextlib.redirect_stderr(io.StringIO()):
            thread.start()
            thread.join(LIMIT_S)
            return [name for name in list(names) if name.startswith(incomplete)]

    return complete


def _namespaces(settings: CtlSettings) -> Sequence[str]:
    from lmcache_ctl.kube.pods import namespaces_of

    return namespaces_of(settings, tuple(Kind))


def _pods(settings: CtlSettings, kinds: Sequence[str]) -> list[tuple[Kind, str]]:
    from lmcache_ctl.kube.access import KubeApi
    from lmcache_ctl.kube.pods import pods_of, services_in

    if settings.names_urls or not settings.asks_cluster:
        return []
    with KubeApi(settings) as api:
        found = services_in(pods_of(api, settings.release))
    return [(one.kind, one.pod) for one in found if one.kind in kinds]


def targets_of(*kinds: str) -> Complete:
    """Return what completes targets of these kinds, `KIND` or `KIND/NAME`. `peer` has names only:
    those of the pods of the other kinds.
    """

    def find(settings: CtlSettings) -> list[str]:
        found = _pods(settings, kinds)
        peers = [f"{PEER}/{name}" for _, name in found if PEER in kinds]
        return [f"{kind}/{name}" for kind, name in found] + peers

    return _completing(find, *(kind for kind in kinds if kind != PEER))


def _sidecars(settings: CtlSettings) -> list[str]:
    return [name for _, name in _pods(settings, (Kind.SIDECAR,))]


complete_context = _completing(context_names)
complete_namespace = _completing(_namespaces)
complete_sidecar = _completing(_sidecars)
