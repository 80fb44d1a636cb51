"""The root of `lmcachectl`: groups of commands, and how a failure ends."""

from __future__ import annotations

import errno
import sys
from collections.abc import Sequence
from typing import Annotated, Final

import typer
from lmcache_core.errors import LMCacheError

from lmcache_ctl.bench.commands import bench
from lmcache_ctl.certify.commands import app as certify
from lmcache_ctl.codec.commands import app as codec
from lmcache_ctl.doctor.commands import doctor
from lmcache_ctl.drain.commands import drain
from lmcache_ctl.errors import CtlError, UsageError
from lmcache_ctl.evict.commands import evict
from lmcache_ctl.examples import examples_of
from lmcache_ctl.explain.commands import explain
from lmcache_ctl.lookup.commands import app as lookup
from lmcache_ctl.output import plain
from lmcache_ctl.pin.commands import pin
from lmcache_ctl.sidecar.commands import app as sidecar
from lmcache_ctl.status.commands import status
from lmcache_ctl.top.commands import top
from lmcache_ctl.version.commands import own_version, version

EXIT_FAILURE = 1
EXIT_USAGE = 2
EXTRAS: Final = {
    **dict.fromkeys(("numpy", "numba", "llvmlite"), "codec"),
    **dict.fromkeys(("torch", "transformers", "tokenizers", "safetensors"), "model"),
}
"""What brings packages that only some commands need."""
CANNOT_PRINT: Final = frozenset({errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EFBIG})
"""What writing to standard output may end in, other than a reader that has gone, which is
nobody's fault.
"""

app = typer.Typer(
    name="lmcachectl",
    no_args_is_help=True,
    help="The command line of the shared KV cache.",
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (status, top, explain, evict, pin, drain, bench, doctor, version):
    app.command(epilog=examples_of(command.__name__))(command)
app.add_typer(certify, name="certify")
app.add_typer(codec, name="codec")
app.add_typer(lookup, name="lookup")
app.add_typer(sidecar, name="sidecar")


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"lmcachectl {own_version()}")
        raise typer.Exit


@app.callback()
def root(
    _version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_show_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
) -> None:
    """The command line of the shared KV cache.

    Exit code 0: done. 1: it failed, or found something damaged. 2: it was called wrongly.
    """


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command line; None: the process's own.

    Raises:
        SystemExit: Always, with the exit code.
    """
    try:
        app(arguments, prog_name="lmcachectl")
    except UsageError as exc:
        typer.echo(f"lmcachectl: {plain(str(exc))}", err=True)
        sys.exit(EXIT_USAGE)
    except (CtlError, LMCacheError) as exc:
        typer.echo(f"lmcachectl: {plain(str(exc))}", err=True)
        sys.exit(EXIT_FAILURE)
    except ModuleNotFoundError as exc:
        package = (exc.name or "").partition(".")[0]
        if package not in EXTRAS:
            raise
        typer.echo(
            f"lmcachectl: this needs the package {package!r}: install"
            f" lmcache-ctl[{EXTRAS[package]}]",
            err=True,
        )
        sys.exit(EXIT_USAGE)
    except OSError as exc:
        if exc.errno not in CANNOT_PRINT:
            raise
        sys.stdout = None  # what is left in it cannot be written at the end either
        typer.echo(f"lmcachectl: cannot print: {exc.strerror}", err=True)
        sys.exit(EXIT_FAILURE)
