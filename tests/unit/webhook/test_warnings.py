"""What `kubectl` shows to the creator of a pod that gets no sidecar."""

from __future__ import annotations

import pytest
from lmcache_webhook.app import injection_options
from lmcache_webhook.reviews import (
    AdmissionRequest,
    AdmissionResponse,
    GroupVersionKind,
    Reviewer,
)
from lmcache_webhook.settings import TenantEntry, WebhookSettings

from tests.fixtures.pods import Pod, container, plain, pod

OWN: dict[str, object] = {"name": "default", "namespaces": ["cache"]}
TEAM: dict[str, object] = {"name": "a", "namespaces": ["team-a"]}


async def answered(document: Pod, namespace: str, *tenants: dict[str, object]) -> AdmissionResponse:
    settings = WebhookSettings(
        sidecar_image="s:1",
        payload_image="p:1",
        tenants=[TenantEntry.model_validate(one) for one in tenants],
    )
    request = AdmissionRequest(
        uid="u",
        kind=GroupVersionKind(version="v1", kind="Pod"),
        namespace=namespace,
        object=document,
    )
    return (await Reviewer(injection_options(settings), 1000).answer(request)).response


async def test_a_pod_of_another_release_is_not_warned_of() -> None:
    """Its own webhook injects it before or after; without one, its annotation says why not."""
    response = await answered(plain(), "elsewhere", OWN)
    assert response.patch is not None
    assert response.warnings is None


async def test_a_release_with_further_tenants_warns_by_its_name() -> None:
    """It may be meant: one of its tenants' namespaces is perhaps misspelt."""
    response = await answered(plain(), "elsewhere", OWN, TEAM)
    assert response.patch is not None
    [warning] = response.warnings or [""]
    assert warning.startswith(
        "lmcache: not injected: the webhook of cache knows no tenant for the namespace elsewhere: "
    )


@pytest.mark.parametrize(
    "document",
    [
        pod(container(), hostNetwork=True),
        pod(container(image="vllm/vllm-openai:v0.11.0")),
        pod(container(), annotations={"lmcache.io/tenant": "other"}),
    ],
)
async def test_a_pod_of_ones_own_namespace_is_warned_of(document: Pod) -> None:
    [warning] = (await answered(document, "cache", OWN)).warnings or [""]
    assert warning.startswith("lmcache: not injected: ")
