"""`lmcachectl bench`."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer

from lmcache_ctl.asking import Asker
from lmcache_ctl.bench.report import SCHEMES, BenchLoad, num_chunks_of, print_report
from lmcache_ctl.completion import targets_of
from lmcache_ctl.errors import CtlError, UsageError
from lmcache_ctl.options import reaches_services
from lmcache_ctl.output import Output, OutputFormat, show, steps
from lmcache_ctl.reach import Reach
from lmcache_ctl.services import Endpoint, Kind
from lmcache_ctl.settings import parse_size
from lmcache_ctl.targets import named, parse_target

MAX_SECONDS = 600.0
MAX_CONCURRENCY = 256
CHUNKS_IN_A_CALL = 4
MAX_PREFIX = 2048
"""Chunks of a prefix that is looked up: those of one batch of events."""
LM = "lm"


@reaches_services
def bench(
    reach: Reach,
    target: Annotated[
        str | None,
        typer.Argument(
            metavar="TARGET",
            help=(
                "storage, lookup, lm (pods of cache_storage by lm://), one of these (storage/NAME),"
                " or a URL."
            ),
            autocompletion=targets_of(Kind.STORAGE, Kind.LOOKUP),
        ),
    ] = None,
    seconds: Annotated[
        float, typer.Option(help="Total duration in seconds.", min=0.5, max=MAX_SECONDS)
    ] = 10.0,
    size: Annotated[str, typer.Option(help="Size of one chunk.")] = "4MiB",
    total: Annotated[
        str,
        typer.Option(
            help="Size of all chunks: those stored and fetched, or the prefix that is looked up."
        ),
    ] = "256MiB",
    concurrency: Annotated[
        int, typer.Option(help="Calls at once.", min=1, max=MAX_CONCURRENCY)
    ] = 4,
    output: Output = OutputFormat.TABLE,
) -> None:
    """Measure a cache_storage or a lookup service: latency, throughput, and the share of the
    network.

    At a cache_storage (also by URL: lm://host:port, http(s)://host:port) it
    stores and fetches chunks, four in a call; at a lookup service it announces
    a prefix and looks it up. All chunks have unique names in the tenant of the
    token and are removed at the end. They displace others: use the token of a
    separate tenant. Without a target: a cache_storage. Progress goes to
    standard error. Exits with 1 when a call failed, nothing came back as it
    was stored, or something was left.
    """
    from lmcache_ctl.bench.lookup_load import run_lookup_load
    from lmcache_ctl.bench.storage_load import run_storage_load

    num_bytes = parse_size(size)
    num_chunks = num_chunks_of(num_bytes, parse_size(total))
    with _chosen_service(reach, target) as service, steps() as tell:
        kind, run, batch = "storage", run_storage_load, CHUNKS_IN_A_CALL
        if service.kind is Kind.LOOKUP:
            num_chunks, num_bytes = min(num_chunks, MAX_PREFIX), 0
            kind, run, batch = "lookup", run_lookup_load, num_chunks
        load = BenchLoad(kind, service.url, seconds, num_chunks, num_bytes, concurrency, batch)
        report = asyncio.run(run(reach.settings, service, load, tell))
    show(report, output, print_report)
    if not report.is_well:
        raise typer.Exit(1)


@contextmanager
def _chosen_service(reach: Reach, target: str | None) -> Iterator[Endpoint]:
    """Yield the service to measure.

    Raises:
        UsageError: The target is not a service that can be measured.
        CtlError: It is not there, or cannot be reached.
    """
    settings = reach.settings
    if target is None and not settings.names_urls and not settings.asks_cluster:
        raise UsageError(
            "name what to measure: lmcachectl bench lm://host:port, or storage or lookup with"
            " --…-url or --namespace"
        )
    if target is not None and "://" in target:
        if not target.startswith(SCHEMES):
            raise UsageError(
                f"{target!r} is not a cache_storage: its URL begins with one of"
                f" {', '.join(SCHEMES)}"
            )
        name = target.partition("://")[2]
        yield Endpoint(Kind.STORAGE, name, target.rstrip("/"), settings.tls_name)
        return
    kind, separator, name = (target or Kind.STORAGE).partition("/")
    is_lm = kind == LM
    if is_lm:
        asked = parse_target(f"{Kind.STORAGE}{separator}{name}", (Kind.STORAGE,))
        if settings.names_urls or not settings.asks_cluster:
            raise UsageError(
                "lm finds pods of cache_storage in a cluster (--namespace); elsewhere write the"
                " address, lm://host:port"
            )
    else:
        asked = parse_target(f"{kind}{separator}{name}", (Kind.STORAGE, Kind.LOOKUP))
    with reach.lm_services() if is_lm else reach.services(asked.kind) as found:
        chosen = found
        if asked.name is not None and is_lm:
            chosen = [one for one in found if one.name == asked.name]
        elif asked.name is not None:
            chosen = asyncio.run(named(Asker(settings), found, [asked]))
        if not chosen:
            there = ", ".join(f"{kind}/{one.name}" for one in found)
            raise CtlError(f"{target} is not there: there is {there}")
        usable = [one for one in chosen if not one.problem]
        if not usable:
            raise CtlError(f"{chosen[0].kind} {chosen[0].name}: {chosen[0].problem}")
        yield usable[0]
