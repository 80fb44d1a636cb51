"""`lmcachectl bench`."""

from __future__ import annotations

import asyncio
from typing import Annotated

import typer

from lmcache_ctl.errors import UsageError
from lmcache_ctl.options import reaches_services
from lmcache_ctl.output import Output, OutputFormat, show
from lmcache_ctl.reach import Reach

MAX_SECONDS = 600.0
MAX_CONCURRENCY = 256
CHUNKS_IN_A_CALL = 4


@reaches_services
def bench(
    reach: Reach,
    target: Annotated[
        str | None, typer.Argument(metavar="URL", help="cache_storage: lm://host:port or http(s)://…; else the first --storage-url.")
    ] = None,
    seconds: Annotated[float, typer.Option(help="For how long, all together.", min=0.5, max=MAX_SECONDS)] = 10.0,
    size: Annotated[str, typer.Option(help="Of one chunk.")] = "4MiB",
    total: Annotated[str, typer.Option(help="Of all chunks: what is stored, and fetched again.")] = "256MiB",
    concurrency: Annotated[int, typer.Option(help="Calls at once.", min=1, max=MAX_CONCURRENCY)] = 4,
    output: Output = OutputFormat.TABLE,
) -> None:
    """Store and fetch chunks at a cache_storage, and tell latency and throughput.

    Calls store or fetch four chunks each. They are named after a model of their own, in the tenant of the
    token, and are removed at the end. They take room from others: run it with
    a token of a tenant of its own. Exits with 1 when a call failed, nothing
    came back as it was stored, or chunks could not be removed.
    """
    from lmcache_ctl.bench.load import run_load
    from lmcache_ctl.bench.report import Load, checked_load
    from lmcache_ctl.bench.tables import print_report
    from lmcache_ctl.sizes import parse_size

    settings = reach.settings
    url = target or next(iter(settings.storage_urls), None)
    if url is None:
        raise UsageError(
            "name a cache_storage: lmcachectl bench lm://host:port (in Kubernetes from a pod, where its service can be reached)"
        )
    load = checked_load(Load(url, seconds, parse_size(size), parse_size(total), concurrency, CHUNKS_IN_A_CALL))
    report = asyncio.run(run_load(settings, load))
    show(report, output, print_report)
    if not report.is_well:
        raise typer.Exit(1)
