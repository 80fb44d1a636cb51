"""`lmcachectl doctor`."""

from __future__ import annotations

import asyncio
from typing import Annotated

import msgspec
import typer

from lmcache_ctl.doctor.findings import Finding, Subject, diagnosis_of, print_diagnosis
from lmcache_ctl.errors import CtlError, UsageError
from lmcache_ctl.kube.access import asks_cluster
from lmcache_ctl.options import CtlSettings, Everywhere
from lmcache_ctl.output import Output, show
from lmcache_ctl.reach import Reach
from lmcache_ctl.states import look_at


def doctor(
    ctx: typer.Context,
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
    everywhere: Everywhere = False,
    output: Output = "table",
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

    settings: CtlSettings = ctx.obj
    findings, loaded = check_files([parse_config_file(text) for text in check_config or []])
    findings += [
        *check_machine(loaded),
        *check_addresses(loaded, settings.timeout_s),
        *check_redis(loaded, settings.timeout_s),
    ]
    in_cluster = everywhere or settings.names_cluster
    in_cluster = in_cluster or (asks_cluster(settings) and not check_config)
    if settings.names_urls or in_cluster or not check_config:
        findings += _of_places(settings, everywhere=everywhere, in_cluster=in_cluster)
    found = diagnosis_of(findings)
    show(found, output, print_diagnosis)
    if found.num_errors or (strict and found.num_warnings):
        raise typer.Exit(1)


def _of_places(settings: CtlSettings, *, everywhere: bool, in_cluster: bool) -> list[Finding]:
    """Check each namespace by itself: releases need not be of one version."""
    from lmcache_ctl.doctor.objects import check_objects

    if not everywhere:
        return [*(check_objects(settings) if in_cluster else ()), *_of_services(settings)]
    try:
        places = Reach(settings, everywhere=True).namespaces()
    except UsageError:
        raise
    except CtlError as exc:
        return [Subject("kubernetes", "all namespaces").error(str(exc), "see docs/ctl.md, -A")]
    return [
        msgspec.structs.replace(one, where=f"namespace {place.namespace}, {one.where}")
        for place in places
        for one in (*check_objects(place), *_of_services(place))
    ]


def _of_services(settings: CtlSettings) -> list[Finding]:
    from lmcache_ctl.doctor.certificates import check_certificates
    from lmcache_ctl.doctor.running import check_services

    try:
        reach = Reach(settings)
        with reach.services() as services:
            states = look_at(reach, services)
            if not any(one.version for one in states) and (hint := reach.hint):  # none of ours
                raise CtlError(hint)
            certificates = asyncio.run(check_certificates(settings, services))
            return [*check_services(states), *certificates]
    except CtlError as exc:
        subject = Subject("reachable", "services")
        return [subject.error(str(exc), "name them with --…-url or --namespace")]
