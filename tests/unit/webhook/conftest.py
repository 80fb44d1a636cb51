"""Injection as an installation with tokens and TLS configures it."""

from __future__ import annotations

import pytest
from lmcache_webhook import reviews
from lmcache_webhook.app import injection_options
from lmcache_webhook.injection.plan import InjectionOptions
from lmcache_webhook.settings import WebhookSettings


@pytest.fixture(scope="session")
def webhook_settings() -> WebhookSettings:
    return WebhookSettings(
        sidecar_image="registry.example.com/lmcache-sidecar:0.1.0",
        payload_image="registry.example.com/lmcache-payload@sha256:" + "0" * 64,
        sidecar_options={
            "lookup_url": "https://cache-lookup.inference.svc:8081",
            "broker_url": "https://cache-broker.inference.svc:8082",
            "remote_url": "lm+tls://cache-storage-headless.inference.svc:65432",
            "log_format": "json",
            "arena_recover": True,
            "drain_timeout_s": 15,
        },
        tenants=[
            {
                "name": "a",
                "namespaces": ["team-a"],
                "credentials_secret": "cred",
                "keys_secret": "keys",
                "tls_secret": "tls",
            },
            {
                "name": "b",
                "namespaces": ["team-a", "team-b"],
                "credentials_secret": "cred-b",
                "keys_secret": "keys-b",
            },
            {"name": "open", "namespaces": ["lab"]},
        ],
        arena_gb=4,
        max_arena_gb=64,
        max_disk_gb=100,
    )


@pytest.fixture(scope="session")
def options(webhook_settings: WebhookSettings) -> InjectionOptions:
    return injection_options(webhook_settings)


@pytest.fixture(autouse=True)
def _unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine may stop for longer than a review takes."""
    monkeypatch.setattr(reviews, "REVIEW_TIMEOUT_S", 60.0)
