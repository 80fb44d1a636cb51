"""The webhook's app."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI
from lmcache_servicekit.app import BodyBounds, create_service_app
from lmcache_servicekit.state import service_state

from lmcache_webhook.injection.plan import InjectionOptions, Tenant
from lmcache_webhook.injection.template import check_cpu, read_template
from lmcache_webhook.reviews import MAX_BODY_BYTES, Reviewer, WebhookCollector
from lmcache_webhook.routes import WebhookParts, router
from lmcache_webhook.settings import WebhookSettings


def create_app(settings: WebhookSettings) -> FastAPI:
    """Build the app. Reads the template and the certificate.

    Raises:
        ConfigError: One of them cannot be read or is wrong.
    """
    reviewer = Reviewer(injection_options(settings), settings.max_reviews_per_s)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        service_state(app).registry.register(WebhookCollector(reviewer))
        app.state.webhook = WebhookParts(reviewer)
        yield

    return create_service_app(
        settings,
        "lmcache-webhook",
        lifespan=lifespan,
        routers=[router],
        bodies=BodyBounds(MAX_BODY_BYTES),
    )


def injection_options(settings: WebhookSettings) -> InjectionOptions:
    """What the settings say about injection. Reads the template.

    Raises:
        ConfigError: It cannot be read or is wrong.
    """
    template = read_template(settings.sidecar_template_file)
    check_cpu(settings.sidecar_cpu, template)
    return InjectionOptions(
        sidecar_image=settings.sidecar_image,
        payload_image=settings.payload_image,
        image_pull_policy=settings.image_pull_policy,
        sidecar_template=template,
        sidecar_options={name: _text(value) for name, value in settings.sidecar_options.items()},
        arena_gb=settings.arena_gb,
        max_arena_gb=settings.max_arena_gb,
        disk_gb=settings.disk_gb,
        max_disk_gb=settings.max_disk_gb,
        memory_overhead_mb=settings.memory_overhead_mb,
        payload_resources=dict(settings.payload_resources.items()),
        sidecar_cpu=settings.sidecar_cpu,
        run_as_user=settings.run_as_user,
        kubernetes_service=settings.kubernetes_service,
        kubernetes_namespace=settings.kubernetes_namespace,
        tenants=tuple(
            Tenant(
                one.name,
                frozenset(one.namespaces),
                one.credentials_secret,
                one.keys_secret,
                one.tls_secret,
            )
            for one in settings.tenants
        ),
    )


def _text(value: str | bool | int | float) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
