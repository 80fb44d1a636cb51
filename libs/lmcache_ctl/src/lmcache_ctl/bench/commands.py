"""`lmcachectl bench`."""

from __future__ import annotations

import asyncio
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from lmcache_ctl.errors import CtlError, UsageError
from lmcache_ctl.options import reaches_services
from lmcache_ctl.output import Output, OutputFormat, show
from lmcache_ctl.reach import Reach

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lmcache_ctl.cluster.services import Service

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
        ),
    ] = None,
    seconds: Annotated[
        float, typer.Option(help="For how long, all together.", min=0.5, max=MAX_SECONDS)
    ] = 10.0,
    size: Annotated[str, typer.Option(help="Of one chunk.")] = "4MiB",
    total: Annotated[
        str,
        typer.Option(
            help="Of all chunks: what is stored and fetched again, or the prefix that is looked up."
        ),
    ] = "256MiB",
    concurrency: Annotated[
        int, typer.Option(help="Calls at once.", min=1, max=MAX_CONCURRENCY)
    ] = 4,
    output: Output = OutputFormat.TABLE,
) -> None:
    """Measure a cache_storage or a lookup service: latency, throughput, and what the way there
    takes by itself.

    Of a cache_storage (also by URL: lm://host:port, http(s)://host:port)
    chunks are stored and fetched, four in a call; of a lookup service a prefix
    is asked for that it was told of before. All of it has names of its own, in
    the tenant of the token, and is removed at the end; it takes room from
    others: give it a token of a tenant of its own. Without a target: a
    cache_storage. Progress goes to standard error. Exits with 1 when a call
    failed, nothing came back as it was stored, or something was left.
    """
    from lmcache_ctl.bench.lookup_load import run_lookup_load
    from lmcache_ctl.bench.progress import progress_of_phases
    from lmcache_ctl.bench.report import Load, num_chunks_of
    from lmcache_ctl.bench.storage_load import run_storage_load
    from lmcache_ctl.bench.tables import print_report
    from lmcache_ctl.sizes import parse_size

    chunk_bytes = parse_size(size)
    num_chunks = num_chunks_of(chunk_bytes, parse_size(total))
    with chosen_service(reach, target) as service, progress_of_phases() as tell:
        if service.kind == "lookup":
            load = Load(
                "lookup",
                service.url,
                seconds,
                min(num_chunks, MAX_PREFIX),
                0,
                concurrency,
                min(num_chunks, MAX_PREFIX),
            )
            report = asyncio.run(run_lookup_load(reach.settings, service, load, tell))
        else:
            load = Load(
                "storage",
                service.url,
                seconds,
                num_chunks,
                chunk_bytes,
                concurrency,
                CHUNKS_IN_A_CALL,
            )
            report = asyncio.run(run_storage_load(reach.settings, service, load, tell))
    show(report, output, print_report)
    if not report.is_well:
        raise typer.Exit(1)


@contextmanager
def chosen_service(reach: Reach, target: str | None) -> Iterator[Service]:
    """The service that is meant, for as long as the block lasts.

    Raises:
        UsageError: It is none that can be measured.
        CtlError: It is not there, or cannot be reached.
    """
    from lmcache_ctl.bench.report import SCHEMES
    from lmcache_ctl.cluster.asking import Asker
    from lmcache_ctl.cluster.services import Kind, Service
    from lmcache_ctl.cluster.targets import named, parse_target

    settings = reach.settings
    if target is None and not settings.names_urls and not settings.names_cluster:
        raise UsageError(
            "name what to measure: lmcachectl bench lm://host:port, or storage or lookup with"
            " --…-url or --namespace"
        )
    if target is not None and "://" in target:
        if not target.startswith(SCHEMES):
            raise UsageError(
                f"{target!r} is no cache_storage: its URL begins with one of {', '.join(SCHEMES)}"
            )
        yield Service(
            Kind.STORAGE, target.partition("://")[2], target.rstrip("/"), settings.tls_name
        )
        return
    kind, separator, name = (target or Kind.STORAGE).partition("/")
    if kind == LM:
        asked = parse_target(f"{Kind.STORAGE}{separator}{name}", (Kind.STORAGE,))
        if settings.names_urls or not settings.names_cluster:
            raise UsageError(
                "lm finds pods of cache_storage in a cluster (--namespace); elsewhere write the"
                " address, lm://host:port"
            )
    else:
        asked = parse_target(f"{kind}{separator}{name}", (Kind.STORAGE, Kind.LOOKUP))
    with reach.lm_services() if kind == LM else reach.services(asked.kind) as found:
        if asked.name is None or kind != LM:
            chosen = (
                found if asked.name is None else asyncio.run(named(Asker(settings), found, [asked]))
            )
        else:
            chosen = [one for one in found if one.name == asked.name]
        if not chosen:
            raise CtlError(
                f"{target} is not there: there is"
                f" {', '.join(f'{kind}/{one.name}' for one in found)}"
            )
        usable = [one for one in chosen if not one.problem]
        if not usable:
            raise CtlError(f"{chosen[0].kind} {chosen[0].name}: {chosen[0].problem}")
        yield usable[0]
