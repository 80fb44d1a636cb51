"""`lmcachectl doctor`."""

from __future__ import annotations

import asyncio
from typing import Annotated

import msgspec
import typer

from lmcache_ctl.asking import Asker
from lmcache_ctl.doctor.findings import Finding, Subject, diagnosis_of, print_diagnosis
from lmcache_ctl.errors import CtlError
from lmcache_ctl.options import reaches_all_services
from lmcache_ctl.output import Output, OutputFormat, show
from lmcache_ctl.reach import Reach
from lmcache_ctl.states import look_at


@reaches_all_services
def doctor(
    reach: Reach,
    check_config: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KIND=FILE",
            help=(
                "A service's settings file, checked as the service would; may be given several"
                " times."
            ),
        ),
    ] = None,
    strict: Annotated[
        bool, typer.Option("--strict", help="Exit with 1 also for warnings.")
    ] = False,
    output: Output = OutputFormat.TABLE,
) -> None:
    """Say what is wrong, and what to do about it.

    Looks at services (there, ready, token, certificates, versions, clocks),
    at settings files and what they need of this machine (files, shared
    memory, disk, limits, addresses, Redis), and at a release's objects in Kubernetes.
    With settings files alone no service is asked. Exits with 1 for errors.
    """
    from lmcache_ctl.doctor.addresses import check_addresses
    from lmcache_ctl.doctor.configuration import check_files, parse_config_file
    from lmcache_ctl.doctor.machine import check_machine
    from lmcache_ctl.doctor.redis_server import check_redis

    settings = reach.settings
    findings, loaded = check_files([parse_config_file(text) for text in check_config or []])
    findings += [
        *check_machine(loaded),
        *check_addresses(loaded, settings.timeout_s),
        *check_redis(loaded, settings.timeout_s),
    ]
    asks_cluster = reach.all_namespaces or settings.names_cluster
    asks_cluster = asks_cluster or (settings.asks_cluster and not check_config)
    if settings.names_urls or asks_cluster or not check_config:
        findings += _of_places(reach, asks_cluster)
    found = diagnosis_of(findings)
    show(found, output, print_diagnosis)
    if found.num_errors or (strict and found.num_warnings):
        raise typer.Exit(1)


def _of_places(reach: Reach, asks_cluster: bool) -> list[Finding]:
    """Check each namespace by itself: releases need not be of one version."""
    from lmcache_ctl.doctor.objects import check_objects

    try:
        places = reach.places()
    except CtlError as exc:
        return [Subject("kubernetes", "all namespaces").error(str(exc), "see docs/ctl.md, -A")]
    found = []
    for place in places:
        own = check_objects(place.settings) if asks_cluster else []
        own += _of_services(place)
        if reach.all_namespaces:
            prefix = f"namespace {place.settings.namespace}, "
            own = [msgspec.structs.replace(one, where=prefix + one.where) for one in own]
        found += own
    return found


def _of_services(reach: Reach) -> list[Finding]:
    from lmcache_ctl.doctor.certificates import check_certificates
    from lmcache_ctl.doctor.running import check_services

    try:
        with reach.services() as services:
            states = asyncio.run(look_at(Asker(reach.settings), services))
            if not any(one.version for one in states) and (hint := reach.hint):  # none of ours
                raise CtlError(hint)
            certificates = asyncio.run(check_certificates(reach.settings, services))
            return [*check_services(states), *certificates]
    except CtlError as exc:
        subject = Subject("reachable", "services")
        return [subject.error(str(exc), "name them with --…-url or --namespace")]
