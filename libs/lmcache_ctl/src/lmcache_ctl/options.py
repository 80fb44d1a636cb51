"""Options that commands share, the variables that stand for them, and what they are parsed into.

`cli.py` gives `SharedOptions` to each command that takes a `typer.Context`, whose `obj` is then a
`CtlSettings`. Options of a few commands are types of their parameters: `Url`, `Everywhere`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from lmcache_core.config.options import did_you_mean, shown

from lmcache_ctl.errors import UsageError

PREFIX: Final = "LMCACHE_CTL_"
TOKEN_VARIABLE: Final = f"{PREFIX}TOKEN"
"""The token itself; no option, since process lists would show it."""
DEFAULT_TIMEOUT_S: Final = 5.0
MAX_TIMEOUT_S: Final = 600.0
WHERE, HOW = "Where services are", "How they are asked"
_TOKEN = re.compile(r"[!-~]{1,4096}")


def process_variable(name: str) -> str:
    """Return an environment variable, "" if it is not set."""
    return os.environ.get(name, "")


def web_address(url: str) -> str:
    """Return an address that an option gives, if it can be one."""
    if not url.startswith(("http://", "https://")):
        raise typer.BadParameter(f"{shown(url)}: an address begins with http:// or https://")
    return url


def chunk_id(text: str) -> str:
    """Return a chunk's id, if this can be one."""
    return _hex_digits(text, "chunk id", 32)


def chunk_hash(text: str) -> str:
    """Return a chunk's hash, by which a sidecar knows it, if this can be one."""
    return _hex_digits(text, "chunk hash", 64)


def _hex_digits(text: str, kind: str, length: int) -> str:
    if len(text) != length or set(text) - set("0123456789abcdef"):
        raise typer.BadParameter(f"{text!r} is not a {kind}: {length} lowercase hex digits")
    return text


def _addresses(urls: list[str] | None) -> list[str]:
    """Return the addresses of options, or of a variable, which has commas between them."""
    return [web_address(part) for url in urls or () for part in url.replace(",", " ").split()]


def _seconds(text: str | float) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= MAX_TIMEOUT_S:
        raise typer.BadParameter(f"{text}: must be a number above 0, at most {MAX_TIMEOUT_S:g}")
    return seconds


def _option(panel: str, variable: str, text: str, *names: str, **more: Any) -> Any:
    """Return an option for which `LMCACHE_CTL_<variable>` stands, too."""
    return typer.Option(
        *names, envvar=f"{PREFIX}{variable}", help=text, rich_help_panel=panel, **more
    )


def _address(kind: str, called: str) -> Any:
    text = f"REST address of a {called}; may be given several times."
    return _option(
        WHERE,
        f"{kind.upper()}_URLS",
        text,
        f"--{kind}-url",
        metavar="URL",
        callback=_addresses,
    )


@dataclass(frozen=True)
class SharedOptions:
    """Where services are and how they are asked; typer reads the options from the fields.

    An address whose name resolves to several addresses stands for all of them. Without a kubeconfig
    the cluster is found as kubectl finds it, else by the pod's own account.
    """

    lookup_urls: Annotated[list[str] | None, _address("lookup", "lookup service")] = None
    broker_urls: Annotated[list[str] | None, _address("broker", "broker")] = None
    storage_urls: Annotated[list[str] | None, _address("storage", "cache_storage")] = None
    sidecar_urls: Annotated[list[str] | None, _address("sidecar", "sidecar")] = None
    namespace: Annotated[
        str | None,
        _option(
            WHERE,
            "NAMESPACE",
            "Find pods there, through the Kubernetes API.",
            "--namespace",
            "-n",
        ),
    ] = None
    release: Annotated[str | None, _option(WHERE, "RELEASE", "Only this Helm release's pods.")] = (
        None
    )
    context: Annotated[str | None, _option(WHERE, "CONTEXT", "Context of the kubeconfig.")] = None
    kubeconfig: Annotated[
        Path | None, _option(WHERE, "KUBECONFIG", "Kubeconfig; by default as kubectl finds it.")
    ] = None
    token_file: Annotated[
        Path | None, _option(HOW, "TOKEN_FILE", "File with the token to show.")
    ] = None
    tls: Annotated[
        str | None,
        _option(
            HOW,
            "TLS",
            "For https: authorities to trust, client certificate and its key (PEM).",
            metavar="CA[,CERT[,KEY]]",
        ),
    ] = None
    tls_name: Annotated[
        str | None, _option(HOW, "TLS_NAME", "What certificates name, where not the host.")
    ] = None
    timeout_s: Annotated[
        float,
        _option(
            HOW,
            "TIMEOUT_S",
            "Longest wait for one service, all requests together.",
            "--timeout",
            metavar="SECONDS",
            parser=_seconds,
        ),
    ] = DEFAULT_TIMEOUT_S


@dataclass(frozen=True)
class CtlSettings(SharedOptions):
    """The shared options, and what is none of them.

    Attributes:
        token: The token to show, instead of `token_file`; None for none.
        token_hint: Why the caller's is not among these settings, to end a sentence.
        from_environment: The names of the fields whose values variables gave.
    """

    token: str | None = None
    token_hint: str = ""
    from_environment: frozenset[str] = frozenset()

    @property
    def names_urls(self) -> bool:
        """Whether any address is given."""
        return bool(self.lookup_urls or self.broker_urls or self.storage_urls or self.sidecar_urls)

    @property
    def names_cluster(self) -> bool:
        """Whether options say to find services through the Kubernetes API."""
        named = (self.kubeconfig, self.context, self.namespace, self.release)
        return any(value is not None for value in named)


Url = Annotated[
    list[str] | None,
    typer.Option(
        metavar="URL",
        callback=_addresses,
        help="REST address of the only kind of service that this asks, as its option below.",
        rich_help_panel=WHERE,
    ),
]
Everywhere = Annotated[
    bool,
    typer.Option(
        "--all-namespaces", "-A", help="Find pods in all namespaces.", rich_help_panel=WHERE
    ),
]

_parser = typer.Typer(add_completion=False)
_parser.command()(SharedOptions)
SHARED: Final = typer.main.get_command(_parser)
"""`SharedOptions` as typer parses them: `params`, and `callback`, which takes their values."""
VARIABLES: Final = {*(str(option.envvar) for option in SHARED.params), TOKEN_VARIABLE}


def settings_of(ctx: typer.Context) -> CtlSettings:
    """Take the shared options from a command's parameters, and the token from its variable.

    Raises:
        UsageError: A variable is unknown, or holds no token; the text does not show it.
    """
    for name, text in os.environ.items():
        if name.startswith(PREFIX) and name not in VARIABLES and text:
            raise UsageError(f"{name} sets nothing{did_you_mean(name, sorted(VARIABLES))}")
    given: Mapping[str, Any] = {str(one.name): ctx.params.pop(one.name) for one in SHARED.params}
    sources = {name: ctx.get_parameter_source(name) for name in given}
    from_environment = frozenset(
        name for name, source in sources.items() if source and source.name == "ENVIRONMENT"
    )
    token = process_variable(TOKEN_VARIABLE).strip()  # one that was read from a file ends a line
    if process_variable(TOKEN_VARIABLE) and not _TOKEN.fullmatch(token):
        raise UsageError(f"{TOKEN_VARIABLE} must be visible ASCII characters without blanks")
    if token and "token_file" in from_environment:
        raise UsageError(
            f"{TOKEN_VARIABLE} and LMCACHE_CTL_TOKEN_FILE are both set: set one of them"
        )
    assert SHARED.callback is not None
    options: SharedOptions = SHARED.callback(**given)
    own_token = token if token and options.token_file is None else None
    return CtlSettings(**vars(options), token=own_token, from_environment=from_environment)
