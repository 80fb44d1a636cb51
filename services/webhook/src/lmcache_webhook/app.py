"""The webhook's app."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated

from fastapi import APIRouter, Depends, FastAPI, Query, Request
from lmcache_servicekit.app import create_service_app
from lmcache_servicekit.auth import ClientPrincipal, GuardedRoute
from lmcache_servicekit.state import service_state

from lmcache_webhook.injection.plan import InjectionOptions
from lmcache_webhook.injection.template import check_cpu, read_template
from lmcache_webhook.reviews import (
    MAX_BODY_BYTES,
    AdmissionAnswer,
    AdmissionQuestion,
    Reviewer,
    WebhookCollector,
)
from lmcache_webhook.settings import WebhookSettings

router = APIRouter(tags=["admission"], route_class=GuardedRoute)


async def _reviewer(request: Request) -> Reviewer:
    reviewer = request.app.state.reviewer
    assert isinstance(reviewer, Reviewer)
    return reviewer


@router.post("/mutate", response_model_exclude_none=True)
async def review_pod(
    principal: ClientPrincipal,
    question: AdmissionQuestion,
    reviewer: Annotated[Reviewer, Depends(_reviewer)],
    request: Request,
    timeout: Annotated[
        str | None, Query(max_length=32, description="How long the API server waits; unused.")
    ] = None,
) -> AdmissionAnswer:
    """Review a pod.

    The patch in the answer adds the sidecar to a new pod that asks for one. A pod that asks and
    cannot have one gets an annotation that says why. Every pod is allowed; if the webhook cannot
    decide in time, it is allowed unchanged, with a warning. The call itself changes nothing. API
    servers send no token by default, so `allow_anonymous` is normal here; the answer holds no
    secrets. 413: larger than 1 MiB.
    """
    declared = request.headers.get("content-length", "")
    return await reviewer.answer(
        question.request,
        int(declared) if declared.isdecimal() else MAX_BODY_BYTES,
        "" if request.client is None else request.client.host,
    )


def create_app(settings: WebhookSettings) -> FastAPI:
    """Build the app. Reads the template and the certificate.

    Raises:
        ConfigError: One of them cannot be read or is invalid.
    """
    reviewer = Reviewer(injection_options(settings), settings.max_reviews_per_s)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        service_state(app).registry.register(WebhookCollector(reviewer))
        app.state.reviewer = reviewer
        yield

    return create_service_app(
        settings,
        "lmcache-webhook",
        lifespan=lifespan,
        routers=[router],
        max_body_bytes={"": MAX_BODY_BYTES},
    )


def injection_options(settings: WebhookSettings) -> InjectionOptions:
    """Return the settings' injection options. Reads the template.

    Raises:
        ConfigError: The template cannot be read or is invalid.
    """
    template = read_template(settings.sidecar_template_file)
    check_cpu(settings.sidecar_cpu, template)
    return InjectionOptions(settings, template)
