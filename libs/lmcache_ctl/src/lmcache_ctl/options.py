"""Options that commands share, and the decorators that give them to a command.

A command takes what they come to as its first parameter, a `Reach`; the options themselves are
added to its signature, which typer reads.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Final

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
        str, _WHERE, "Find pods there, through the Kubernetes API.", "--namespace", "-n"
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
        "For https: authorities to trust; certificate to show, and its key (PEM).",
        "--tls",
        metavar="CA[,CERT[,KEY]]",
    ),
    "tls_name": _option(str, _HOW, "What certificates name, where not the host.", "--tls-name"),
    "timeout_s": _option(
        float, _HOW, "Longest wait for one service (5).", "--timeout", metavar="SECONDS"
    ),
}


def reaches_services(command: Command) -> Command:
    """Give a command the options that name services of any kind."""
    return _with_options(command, {f"{kind}_urls": _url(kind) for kind in _CALLED} | _OPTIONS)


def reaches(kind: str) -> Callable[[Command], Command]:
    """Give a command the options that name services of one kind, whose address is just `--url`.

    It takes those of the other kinds too, and passes them over, so that all commands may be given
    the same ones.
    """
    urls = {
        f"{other}_urls": _url(other, "--url") if other == kind else _url(other, hidden=True)
        for other in _CALLED
    }
    return lambda command: _with_options(command, _OPTIONS | urls)


def _with_options(command: Command, options: dict[str, Any]) -> Command:
    own = list(inspect.signature(command, eval_str=True).parameters.values())[1:]

    @functools.wraps(command)
    def run(**given: Any) -> None:
        chosen = {name: given.pop(name) for name in options}
        command(Reach.of(chosen), **given)

    shared = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=kind)
        for name, kind in options.items()
    ]
    parameters = [one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in own]
    run.__dict__.pop("__wrapped__")  # typer reads the signature below, not that of the command
    run.__signature__ = inspect.Signature([*parameters, *shared])  # type: ignore[attr-defined]
    run.__annotations__ = {one.name: one.annotation for one in (*parameters, *shared)}
    return run
