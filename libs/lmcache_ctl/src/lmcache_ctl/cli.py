"""The root of `lmcachectl`: its commands, and exit codes of failures."""

from __future__ import annotations

import errno
import inspect
import sys
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Final

import typer
from lmcache_core._typing import override
from lmcache_core.errors import LMCacheError
from typer.core import TyperCommand, TyperGroup

from lmcache_ctl import lookup
from lmcache_ctl.dashboard import dashboard
from lmcache_ctl.doctor.command import doctor
from lmcache_ctl.drain import drain, undrain
from lmcache_ctl.errors import CtlError, UsageError
from lmcache_ctl.evict import evict
from lmcache_ctl.explain import explain
from lmcache_ctl.migrate import migrate
from lmcache_ctl.options import SHARED, settings_of
from lmcache_ctl.output import plain
from lmcache_ctl.pin import pin
from lmcache_ctl.status import own_version, status, version

EXIT_FAILURE = 1
EXIT_USAGE = 2
CANNOT_PRINT: Final = frozenset({errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EFBIG})
"""Errors of writing to standard output, not counting a reader that has closed it."""
COMMANDS: Final[dict[str, Callable[..., None]]] = {
    "status": status,
    "dashboard": dashboard,
    "explain": explain,
    "evict": evict,
    "pin": pin,
    "drain": drain,
    "undrain": undrain,
    "doctor": doctor,
    "migrate": migrate,
    "version": version,
    "lookup status": lookup.status,
    "lookup tenants": lookup.tenants,
    "lookup prefix": lookup.prefix,
    "lookup locations": lookup.locations,
    "lookup route": lookup.route,
}
EXAMPLES: Final = """\
status --lookup-url http://lookup:8081 --storage-url http://storage:8080
status -n lmcache -o json
dashboard -n lmcache
dashboard -n lmcache --no-browser
explain -n lmcache --prompt prompt.txt
explain -n lmcache --messages chat.json
explain -n lmcache --request chatcmpl-0123
explain --tokens ids.txt
explain -n lmcache --tokens - < ids.txt
evict sidecar --size 512MiB
evict storage/lmcache-storage-0 --everything --yes
pin --tokens ids.txt --ttl 3600
pin --at storage/lmcache-storage-0
drain storage/lmcache-storage-0 --within 300
drain peer/pod-a --no-wait
undrain storage/lmcache-storage-0
doctor -n lmcache --strict
doctor --check-config sidecar=sidecar.yaml -o json
migrate lmcache.yaml
version -n lmcache
version --client
lookup status --url http://lookup:8081
lookup tenants -n lmcache --token-file admin-token
lookup prefix 00112233445566778899aabbccddeeff
lookup locations 00112233445566778899aabbccddeeff -o json
lookup route 00112233445566778899aabbccddeeff
""".splitlines()
"""Shown in the help of the command that each begins with."""
GROUPS: Final = {
    "lookup": "The lookup service: who holds which chunk, and whose chunks it knows.",
}


def examples_of(words: str) -> list[str]:
    """Return the examples of a command, such as `lookup route`."""
    return [example for example in EXAMPLES if example.startswith(f"{words} ")]


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"lmcachectl {own_version()}")
        raise typer.Exit


def _root(
    _version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_show_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
) -> None:
    """The command line of the shared KV cache."""


def _without_values(parameters: list[Any]) -> list[Any]:
    """Show no type for switches in the help: they take no value."""
    for one in parameters:
        if getattr(one, "is_flag", False):
            one.metavar = ""
    return parameters


class _Command(TyperCommand):
    """A command; one that takes a `typer.Context` has the shared options too."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        assert self.callback is not None
        self._shares = "ctx" in inspect.signature(self.callback).parameters
        if self._shares:
            self.params = [*self.params, *SHARED.params]

    @override
    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except typer.BadParameter as exc:  # of pydantic, which puts this before typer's sentence
            exc.message = exc.message.removeprefix("Value error, ")
            raise

    @override
    def invoke(self, ctx: Any) -> Any:
        if self._shares:
            ctx.obj = settings_of(ctx)
        return super().invoke(ctx)

    @override
    def get_params(self, ctx: Any) -> list[Any]:
        return _without_values(super().get_params(ctx))


class _Group(TyperGroup):
    @override
    def get_params(self, ctx: Any) -> list[Any]:
        return _without_values(super().get_params(ctx))


def _app() -> typer.Typer:
    names = {"help_option_names": ["-h", "--help"]}
    root = typer.Typer(cls=_Group, name="lmcachectl", no_args_is_help=True, context_settings=names)
    root.callback()(_root)
    groups = {"": root}
    for group, text in GROUPS.items():
        groups[group] = typer.Typer(cls=_Group, no_args_is_help=True, help=text)
        root.add_typer(groups[group], name=group)
    for words, command in COMMANDS.items():
        group, _, name = words.rpartition(" ")
        shown = [f"lmcachectl {example}" for example in examples_of(words)]
        # an empty line keeps each example on a line of its own
        epilog = "\n\n".join(("Examples:", *shown))
        groups[group].command(name, cls=_Command, epilog=epilog)(command)
    return root


app = _app()


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command line; None: the process's own.

    Raises:
        SystemExit: Always, with the exit code.
    """
    try:
        app(arguments, prog_name="lmcachectl")
    except (CtlError, LMCacheError) as exc:
        typer.echo(f"lmcachectl: {plain(str(exc))}", err=True)
        sys.exit(EXIT_USAGE if isinstance(exc, UsageError) else EXIT_FAILURE)
    except OSError as exc:
        if exc.errno not in CANNOT_PRINT:
            raise
        sys.stdout = None  # its buffer cannot be flushed at exit either
        typer.echo(f"lmcachectl: cannot print: {exc.strerror}", err=True)
        sys.exit(EXIT_FAILURE)
