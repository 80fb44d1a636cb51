"""`POST /mutate`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from fastapi import APIRouter, Depends, Request
from lmcache_servicekit.auth import ClientPrincipal, GuardedRoute

from lmcache_webhook.admission import AdmissionAnswer, AdmissionQuestion
from lmcache_webhook.reviews import MAX_BODY_BYTES, Reviewer


@dataclass(frozen=True, slots=True)
class WebhookParts:
    """The parts of one webhook; they live as long as its app."""

    reviewer: Reviewer


async def webhook_parts(request: Request) -> WebhookParts:
    """The running webhook."""
    parts = request.app.state.webhook
    assert isinstance(parts, WebhookParts)
    return parts


Parts = Annotated[WebhookParts, Depends(webhook_parts)]


router = APIRouter(tags=["admission"], route_class=GuardedRoute)


@router.post("/mutate", summary="Review a pod", response_model_exclude_none=True)
async def mutate(
    principal: ClientPrincipal, question: AdmissionQuestion, parts: Parts, request: Request
) -> AdmissionAnswer:
    """Answer an AdmissionReview.

    API servers send no token by default, so `allow_anonymous` is usual here; the answer holds no
    secrets.
    """
    declared = request.headers.get("content-length", "")
    return await parts.reviewer.answer(
        question.request, int(declared) if declared.isdecimal() else MAX_BODY_BYTES
    )
