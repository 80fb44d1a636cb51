"""Strangers who reach the webhook do not keep the API server's pods from their sidecars."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import httpx
import pytest
import uvicorn
from lmcache_core.errors import CapacityError
from lmcache_servicekit.http_protocol import BoundedHttpProtocol
from lmcache_webhook import reviews as service
from lmcache_webhook.app import create_app
from lmcache_webhook.injection.injector import PodReview, review_pod
from lmcache_webhook.injection.plan import InjectionOptions
from lmcache_webhook.reviews import MAX_BODY_BYTES, Reviewer
from lmcache_webhook.settings import WebhookSettings
from lmcache_webhook.turns import LEAST_COST, FairTurns

from tests.fixtures.pods import plain
from tests.fixtures.reviews import asked
from tests.fixtures.wire import until

API_SERVER, STRANGER, OTHER = "127.0.0.1", "127.0.0.2", "127.0.0.3"
LARGE = MAX_BODY_BYTES * 9 // 10


class Reviews:
    """What is reviewed, in order; the first review lasts until it may end.

    Attributes:
        namespaces: Of the reviews that have begun.
        num_asked: Reviews that were asked for and have been queued or refused.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.namespaces: list[str] = []
        self.num_asked = 0
        self.go_on = threading.Event()
        answer = Reviewer.answer

        def slow(options: InjectionOptions, document: dict[str, Any], namespace: str) -> PodReview:
            self.namespaces.append(namespace)
            assert self.go_on.wait(60)
            return review_pod(options, document, namespace)

        async def counted(*given: Any) -> Any:
            self.num_asked += 1
            return await answer(*given)

        monkeypatch.setattr(service, "review_pod", slow)
        monkeypatch.setattr(service, "REVIEW_TIMEOUT_S", 60.0)
        monkeypatch.setattr(Reviewer, "answer", counted)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Reviews:
    return Reviews(monkeypatch)


@asynccontextmanager
async def serving(settings: WebhookSettings) -> AsyncIterator[int]:
    config = uvicorn.Config(
        create_app(settings), http=BoundedHttpProtocol, port=0, ws="none", log_config=None
    )
    server = uvicorn.Server(config)
    server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign]
    running = asyncio.create_task(server.serve())
    await until(lambda: server.started)
    try:
        yield server.servers[0].sockets[0].getsockname()[1]
    finally:
        server.should_exit = True
        await running


def body(namespace: str, num_bytes: int = 0) -> bytes:
    review = {
        "apiVersion": "admission.k8s.io/v1",
        "kind": "AdmissionReview",
        "request": {
            "uid": "u",
            "kind": {"group": "", "version": "v1", "kind": "Pod"},
            "namespace": namespace,
            "operation": "CREATE",
            "object": plain(),
        },
    }
    text = json.dumps(review).encode()
    return text + b" " * (num_bytes - len(text))


async def test_api_servers_pods_do_not_wait_for_large_reviews_of_others(
    webhook_settings: WebhookSettings, held: Reviews
) -> None:
    async with serving(webhook_settings) as port, AsyncExitStack() as stack:
        callers = {
            address: await stack.enter_async_context(
                httpx.AsyncClient(
                    transport=httpx.AsyncHTTPTransport(local_address=address),
                    base_url=f"http://127.0.0.1:{port}",
                    headers={"content-type": "application/json"},
                    timeout=90,
                )
            )
            for address in (API_SERVER, STRANGER, OTHER)
        }
        asked: list[asyncio.Task[httpx.Response]] = []

        async def ask(address: str, namespace: str, num_bytes: int = 0) -> None:
            """Return once it waits, or is refused."""
            post = callers[address].post("/mutate", content=body(namespace, num_bytes))
            asked.append(asyncio.create_task(post))
            await until(lambda: held.num_asked == len(asked))

        for namespace in ("first", "lab", "lab", "lab", "lab"):
            await ask(STRANGER, namespace, LARGE)
        await ask(OTHER, "other", LARGE)
        for _ in range(5):
            await ask(API_SERVER, "team-a")
        held.go_on.set()
        answers = [(await each).json()["response"] for each in asked]
    assert held.namespaces == ["first", *["team-a"] * 5, "other", "lab", "lab"]
    assert all("patch" in answer for answer in answers[-5:])
    # The bodies that may wait are shared, too: of the one with most, the last ones go.
    refused = [place for place, answer in enumerate(answers) if "too many large" in str(answer)]
    assert refused == [3, 4]


async def test_rate_is_shared_by_callers(options: InjectionOptions) -> None:
    reviewer = Reviewer(options, 1e-6)
    for _ in range(3):
        await reviewer.answer(asked(plain()), caller=STRANGER)
    assert (await reviewer.answer(asked(plain()), caller=API_SERVER)).response.patch
    assert reviewer.counts == {"injected": 2, "throttled": 2}


async def test_turn_that_is_given_up_goes_to_the_next_and_takes_no_room() -> None:
    turns = FairTurns(3 * LEAST_COST)
    async with turns.turn("a", LEAST_COST):
        waiting = asyncio.create_task(taken(turns, "b", 2 * LEAST_COST))
        await asyncio.sleep(0)
        with pytest.raises(CapacityError):
            await taken(turns, "b", LEAST_COST)
        waiting.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await waiting
        other = asyncio.create_task(taken(turns, "b", 2 * LEAST_COST))
        await asyncio.sleep(0)
    async with asyncio.timeout(60):
        await other
        await taken(turns, "c", 3 * LEAST_COST)


async def taken(turns: FairTurns, caller: str, num_bytes: int) -> None:
    async with turns.turn(caller, num_bytes):
        pass
