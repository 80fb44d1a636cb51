"""Options that commands share, and the decorators that give them to a command.

A command takes the result of each group of options as one parameter, such as a `Reach`; the options
themselves are added to its signature, which typer reads.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Final, get_type_hints

import typer

from lmcache_ctl.reach import Reach

Command = Callable[..., None]

_WHERE, _HOW = "Where services are", "How they are asked"
_CALLED: Final = {
    "lookup": "lookup service",
    "broker": "broker",
    "storage": "cache_storage",
    "sidecar": "sidecar",
}


def _option(kind: Any, panel: str, text: str, *names: str, **more: Any) -> Any:
    return Annotated[kind | None, typer.Option(*names, help=text, rich_help_panel=panel, **more)]


def _url(kind: str, *names: str, hidden: bool = False) -> Any:
    text = f"REST address of a {_CALLED[kind]}; may be given several times."
    names = (*names, f"--{kind}-url")
    return _option(list[str], _WHERE, text, *names, metavar="URL", hidden=hidden)


_OPTIONS: Final[dict[str, Any]] = {
    "namespace": _option(
        str,
        _WHERE,
        "Find pods there, through the Kubernetes API.",
        "--namespace",
        "-n",
    ),
    "release": _option(str, _WHERE, "Only this Helm release's pods.", "--release"),
    "context": _option(str, _WHERE, "Context of the kubeconfig.", "--context"),
    "kubeconfig": _option(
        Path, _WHERE, "Kubeconfig; by default as kubectl finds it.", "--kubeconfig"
    ),
    "config": _option(
        Path, _HOW, "File with any of these options; else LMCACHE_CTL_CONFIG.", "--config"
    ),
    "token_file": _option(Path, _HOW, "File with the token to show.", "--token-file"),
    "tls": _option(
        str,
        _HOW,
        "For https: authorities to trust, client certificate and its key (PEM).",
        "--tls",
        metavar="CA[,CERT[,KEY]]",
    ),
    "tls_name": _option(str, _HOW, "What certificates name, where not the host.", "--tls-name"),
    "timeout_s": _option(
        float, _HOW, "Longest wait for one service (5).", "--timeout", metavar="SECONDS"
    ),
}


def takes(**groups: Callable[..., Any]) -> Callable[[Command], Command]:
    """Give a command options in groups; it is called with the object built from each group.

    Args:
        groups: By parameter of the command, the callable (such as a data class) that builds the
            group. Its parameters are annotated as typer reads them.
    """

    def decorate(command: Command) -> Command:
        options = {name: _parameters_of(make) for name, make in groups.items()}
        own = [one for one in _parameters_of(command) if one.name not in groups]

        @functools.wraps(command)
        def run(**given: Any) -> None:
            made = {
                name: make(**{one.name: given.pop(one.name) for one in options[name]})
                for name, make in groups.items()
            }
            command(**made, **given)

        parameters = [*own, *(one for group in options.values() for one in group)]
        run.__dict__.pop("__wrapped__")  # typer reads the signature below, not that of the command
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {one.name: one.annotation for one in parameters}
        return run

    return decorate


def _parameters_of(made_by: Callable[..., Any]) -> list[inspect.Parameter]:
    hints = get_type_hints(made_by, include_extras=True)
    return [
        one.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=hints.get(one.name))
        for one in inspect.signature(made_by).parameters.values()
    ]


def _reach_by(options: dict[str, Any]) -> Callable[..., Reach]:
    """Return what makes a `Reach` of these options, by name."""

    def make(**chosen: Any) -> Reach:
        return Reach.of(chosen)

    make.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None) for name in options]
    )
    make.__annotations__ = options
    return make


_ANY: Final = {f"{kind}_urls": _url(kind) for kind in _CALLED} | _OPTIONS
_EVERYWHERE: Final = _option(bool, _WHERE, "Find pods in all namespaces.", "--all-namespaces", "-A")

reaches_services = takes(reach=_reach_by(_ANY))
"""Gives a command the options that name services of any kind, as its parameter `reach`."""
reaches_all_services = takes(reach=_reach_by({"all_namespaces": _EVERYWHERE, **_ANY}))
"""The same with `-A`, for commands that only look."""


def reaches(kind: str) -> Callable[[Command], Command]:
    """Give a command the options that name services of one kind, whose address is just `--url`.

    It also accepts the options of the other kinds and ignores them, so that all commands can be
    given the same options.
    """
    urls = {
        f"{other}_urls": _url(other, "--url") if other == kind else _url(other, hidden=True)
        for other in _CALLED
    }
    return takes(reach=_reach_by(_OPTIONS | urls))
