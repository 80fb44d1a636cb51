"""What `kubectl` shows to the creator of a pod that gets no sidecar."""

from __future__ import annotations

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
    """Its own release may inject it; if there is none, its annotation says why not."""
    response = await answered(plain(), "elsewhere", OWN)
    assert response.patch is not None
    assert response.warnings is None


async def test_a_release_with_further_tenants_warns_by_its_name() -> None:
    """A namespace of its tenants may be misspelt."""
    response = await answered(plain(), "elsewhere", OWN, TEAM)
    assert response.patch is not None
    [warning] = response.warnings or [""]
    assert warning.startswith(
        "lmcache: not injected: the webhook of cache knows no tenant for the namespace elsewhere: "
    )


async def test_a_pod_of_the_releases_namespace_is_warned_of() -> None:
    [warning] = (await answered(pod(container(), hostNetwork=True), "cache", OWN)).warnings or [""]
    assert warning.startswith("lmcache: not injected: ")
