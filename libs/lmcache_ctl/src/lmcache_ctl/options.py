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

_URL = "REST address of a {}; may be given several times."
_CALLED: Final = {
    "lookup": "lookup service",
    "broker": "broker",
    "storage": "cache_storage",
    "sidecar": "sidecar",
}
_WHERE = "Where services are"
_HOW = "How they are asked"


def _url(kind: str) -> Any:
    help_text = _URL.format(_CALLED[kind])
    return Annotated[
        list[str] | None,
        typer.Option(f"--{kind}-url", metavar="URL", help=help_text, rich_help_panel=_WHERE),
    ]


_OPTIONS: Final[dict[str, Any]] = {
    "lookup_urls": _url("lookup"),
    "broker_urls": _url("broker"),
    "storage_urls": _url("storage"),
    "sidecar_urls": _url("sidecar"),
    "namespace": Annotated[
        str | None,
        typer.Option(
            "--namespace",
            "-n",
            help="Find pods there, through the Kubernetes API.",
            rich_help_panel=_WHERE,
        ),
    ],
    "release": Annotated[
        str | None,
        typer.Option("--release", help="Only this Helm release's pods.", rich_help_panel=_WHERE),
    ],
    "context": Annotated[
        str | None,
        typer.Option("--context", help="Context of the kubeconfig.", rich_help_panel=_WHERE),
    ],
    "kubeconfig": Annotated[
        Path | None,
        typer.Option(
            "--kubeconfig",
            help="Kubeconfig; by default as kubectl finds it.",
            rich_help_panel=_WHERE,
        ),
    ],
    "config": Annotated[
        Path | None,
        typer.Option(
            "--config",
            help="File with any of these options; else LMCACHE_CTL_CONFIG.",
            rich_help_panel=_HOW,
        ),
    ],
    "token_file": Annotated[
        Path | None,
        typer.Option("--token-file", help="File with the token to show.", rich_help_panel=_HOW),
    ],
    "tls": Annotated[
        str | None,
        typer.Option(
            "--tls",
            metavar="CA[,CERT[,KEY]]",
            help="For https: authorities to trust; certificate to show, and its key (PEM).",
            rich_help_panel=_HOW,
        ),
    ],
    "tls_name": Annotated[
        str | None,
        typer.Option(
            "--tls-name", help="What certificates name, where not the host.", rich_help_panel=_HOW
        ),
    ],
    "timeout_s": Annotated[
        float | None,
        typer.Option(
            "--timeout",
            metavar="SECONDS",
            help="Longest wait for one service (5).",
            rich_help_panel=_HOW,
        ),
    ],
}
_PLACES: Final = frozenset(f"{kind}_urls" for kind in _CALLED)

Command = Callable[..., None]


def reaches_services(command: Command) -> Command:
    """Give a command the options that name services of any kind."""
    return _with_options(command, dict(_OPTIONS))


def reaches(kind: str) -> Callable[[Command], Command]:
    """Give a command the options that name services of one kind, whose address is just `--url`.

    It takes those of the other kinds too, and passes them over, so that all commands may be given
    the same ones.
    """
    options = {name: annotation for name, annotation in _OPTIONS.items() if name not in _PLACES}
    for other in _CALLED:
        names, is_hidden = (("--url",), False) if other == kind else ((), True)
        option = typer.Option(
            *names,
            f"--{other}-url",
            metavar="URL",
            help=_URL.format(_CALLED[other]),
            rich_help_panel=_WHERE,
            hidden=is_hidden,
        )
        options[f"{other}_urls"] = Annotated[list[str] | None, option]
    return lambda command: _with_options(command, options)


def _with_options(command: Command, options: dict[str, Any]) -> Command:
    own = list(inspect.signature(command, eval_str=True).parameters.values())[1:]

    @functools.wraps(command)
    def run(**given: Any) -> None:
        from lmcache_ctl.reach import Reach

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
