"""Reviews: what the creator of a pod is shown, and that one that does not end costs no other pod
anything.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
from lmcache_webhook import reviews as service
from lmcache_webhook.app import injection_options
from lmcache_webhook.injection.injector import PodReview, review_pod
from lmcache_webhook.injection.plan import InjectionOptions
from lmcache_webhook.reviews import (
    MAX_UNFINISHED,
    AdmissionAnswer,
    AdmissionResponse,
    Reviewer,
)
from lmcache_webhook.settings import TenantEntry, WebhookSettings

from tests.fixtures.pods import Pod, container, plain, pod
from tests.fixtures.reviews import asked

HUNG = "hung"


@pytest.fixture
def hang(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Reviews of pods in the namespace `hung` compute until the event is set."""
    end = threading.Event()

    def slow(options: InjectionOptions, document: dict[str, Any], namespace: str) -> PodReview:
        while namespace == HUNG and not end.is_set():
            pass  # as a loop in Python that does not end
        return review_pod(options, document, namespace)

    monkeypatch.setattr(service, "review_pod", slow)
    monkeypatch.setattr(service, "REVIEW_TIMEOUT_S", 0.05)
    yield end
    end.set()
    for thread in reviews():
        thread.join(60)


def reviews() -> list[threading.Thread]:
    """The threads of reviews that are still running."""
    return [thread for thread in threading.enumerate() if thread.name == "lmcache-review"]


def refusal(answer: AdmissionAnswer) -> str:
    assert answer.response.patch is None
    [warning] = answer.response.warnings or [""]
    return warning


async def test_review_out_of_time_is_answered_and_the_next_one_is_done(
    hang: threading.Event, options: InjectionOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    reviewer = Reviewer(options, 1000)
    assert (
        refusal(await reviewer.answer(asked(plain(), HUNG)))
        == "lmcache: not injected: the review could not be finished within 0.05 s"
    )
    monkeypatch.setattr(service, "REVIEW_TIMEOUT_S", 60.0)
    assert (await reviewer.answer(asked(plain()))).response.patch
    assert reviewer.counts == {"unfinished": 1, "injected": 1}


async def test_threads_that_do_not_end_are_bounded(
    hang: threading.Event, options: InjectionOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    reviewer = Reviewer(options, 1000)
    for _ in range(MAX_UNFINISHED + 3):
        assert "could not be finished" in refusal(await reviewer.answer(asked(plain(), HUNG)))
    assert len(reviews()) == MAX_UNFINISHED
    assert all(thread.daemon for thread in reviews()), "they would keep the process alive"
    hang.set()
    for thread in reviews():
        thread.join(60)
    monkeypatch.setattr(service, "REVIEW_TIMEOUT_S", 60.0)
    assert (await reviewer.answer(asked(plain()))).response.patch


OWN: dict[str, object] = {"name": "default", "namespaces": ["cache"]}
TEAM: dict[str, object] = {"name": "a", "namespaces": ["team-a"]}


async def answered(document: Pod, namespace: str, *tenants: dict[str, object]) -> AdmissionResponse:
    settings = WebhookSettings(
        sidecar_image="s:1",
        payload_image="p:1",
        tenants=[TenantEntry.model_validate(one) for one in tenants],
    )
    reviewer = Reviewer(injection_options(settings), 1000)
    return (await reviewer.answer(asked(document, namespace))).response


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
