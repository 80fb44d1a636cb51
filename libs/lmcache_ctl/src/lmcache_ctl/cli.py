"""The root of `lmcachectl`: its commands, and how a failure ends."""

from __future__ import annotations

import errno
import sys
from collections.abc import Callable, Sequence
from typing import Annotated, Final

import typer
from lmcache_core.errors import LMCacheError

from lmcache_ctl import lookup, sidecar
from lmcache_ctl.bench.command import bench
from lmcache_ctl.certify import commands as certify
from lmcache_ctl.codec import commands as codec
from lmcache_ctl.doctor.command import doctor
from lmcache_ctl.drain import drain
from lmcache_ctl.errors import CtlError, UsageError
from lmcache_ctl.evict import evict
from lmcache_ctl.output import plain
from lmcache_ctl.pin import pin
from lmcache_ctl.status import own_version, status, version
from lmcache_ctl.top import top

EXIT_FAILURE = 1
EXIT_USAGE = 2
EXTRAS: Final = {
    **dict.fromkeys(("numpy", "numba", "llvmlite"), "codec"),
    **dict.fromkeys(("torch", "transformers", "tokenizers", "safetensors"), "model"),
}
"""What brings packages that only some commands need."""
CANNOT_PRINT: Final = frozenset({errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EFBIG})
"""Errors of writing to standard output; a reader that has gone is none of them."""
_CHUNK_ID = "00112233445566778899aabbccddeeff"
COMMANDS: Final[dict[str, tuple[Callable[..., None], tuple[str, ...]]]] = {
    "status": (
        status,
        (
            "status --lookup-url http://lookup:8081 --storage-url http://storage:8080",
            "status -n lmcache -o json",
        ),
    ),
    "top": (top, ("top -n lmcache", "top --once --interval 10 -o json")),
    "explain": (
        sidecar.explain,
        ("explain --tokens ids.txt", "explain -n lmcache --tokens - < ids.txt"),
    ),
    "evict": (
        evict,
        ("evict sidecar --size 512MiB", "evict storage/lmcache-storage-0 --everything --yes"),
    ),
    "pin": (pin, ("pin --tokens ids.txt --ttl 3600", "pin --at storage/lmcache-storage-0")),
    "drain": (
        drain,
        ("drain storage/lmcache-storage-0 --within 300", "drain peer/pod-a --no-wait"),
    ),
    "bench": (
        bench,
        (
            "bench lm://storage:65432 --seconds 5 --token-file token",
            "bench lookup -n lmcache",
            "bench lm/lmcache-storage-0 -n lmcache --size 1MiB",
        ),
    ),
    "doctor": (
        doctor,
        ("doctor -n lmcache --strict", "doctor --check-config sidecar=sidecar.yaml -o json"),
    ),
    "version": (version, ("version -n lmcache", "version --client")),
    "certify codec": (
        certify.codec,
        ("certify codec --profile lossless", "certify codec --kv kv.safetensors --max-error 0.1"),
    ),
    "certify blend": (
        certify.blend,
        (
            "certify blend --model ./llama --separator ' # # ' --certificates"
            " /etc/lmcache/certificates",
            "certify blend --model ./llama --separator ' # # ' --text held-out.txt --prompts 200",
        ),
    ),
    "codec stats": (codec.stats, ("codec stats --url http://127.0.0.1:8083",)),
    "codec inspect": (codec.inspect, ("codec inspect /var/lib/lmcache",)),
    "codec measure": (codec.measure, ("codec measure --profile lossless --kv kv.safetensors",)),
    "lookup status": (lookup.status, ("lookup status --url http://lookup:8081",)),
    "lookup tenants": (lookup.tenants, ("lookup tenants -n lmcache --token-file admin-token",)),
    "lookup prefix": (lookup.prefix, (f"lookup prefix {_CHUNK_ID}",)),
    "lookup locations": (lookup.locations, (f"lookup locations {_CHUNK_ID} -o json",)),
    "lookup route": (lookup.route, (f"lookup route {_CHUNK_ID}",)),
    "sidecar explain": (sidecar.explain, ("sidecar explain --tokens ids.txt",)),
    "sidecar status": (sidecar.status, ("sidecar status --url http://127.0.0.1:8083",)),
}
"""What each command runs, and examples of how it is called."""
GROUPS: Final = {
    "certify": "Gates that something must pass before it is used: exit code 1 when it does not.",
    "codec": "How KV is encoded on its way to disks, services and peers.",
    "lookup": "The lookup service: who holds which chunk, and whose chunks it knows.",
    "sidecar": "A running sidecar: how it is, where chunks are and why they are missing.",
}


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


def _app() -> typer.Typer:
    names = {"help_option_names": ["-h", "--help"]}
    root = typer.Typer(name="lmcachectl", no_args_is_help=True, context_settings=names)
    root.callback()(_root)
    groups = {"": root}
    for group, text in GROUPS.items():
        groups[group] = typer.Typer(no_args_is_help=True, help=text)
        root.add_typer(groups[group], name=group)
    for words, (command, examples) in COMMANDS.items():
        group, _, name = words.rpartition(" ")
        # an empty line keeps each example on a line of its own
        epilog = "\n\n".join(("Examples:", *(f"lmcachectl {example}" for example in examples)))
        groups[group].command(name, epilog=epilog)(command)
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
    except ModuleNotFoundError as exc:
        package = (exc.name or "").partition(".")[0]
        if package not in EXTRAS:
            raise
        extra = f"lmcache-ctl[{EXTRAS[package]}]"
        typer.echo(f"lmcachectl: this needs the package {package!r}: install {extra}", err=True)
        sys.exit(EXIT_USAGE)
    except OSError as exc:
        if exc.errno not in CANNOT_PRINT:
            raise
        sys.stdout = None  # what is left in it cannot be written at the end either
        typer.echo(f"lmcachectl: cannot print: {exc.strerror}", err=True)
        sys.exit(EXIT_FAILURE)
