"""`POST /mutate`."""

from __future__ import annotations

from fastapi import APIRouter, Request
from lmcache_servicekit.auth import ClientPrincipal, GuardedRoute

from lmcache_webhook.dependencies import Parts
from lmcache_webhook.review.schemas import AdmissionAnswer, AdmissionQuestion
from lmcache_webhook.review.service import MAX_BODY_BYTES

router = APIRouter(tags=["admission"], route_class=GuardedRoute)


@router.post("/mutate", summary="What is to be added to a pod", response_model_exclude_none=True)
async def mutate(
    principal: ClientPrincipal, question: AdmissionQuestion, parts: Parts, request: Request
) -> AdmissionAnswer:
    """Answer an AdmissionReview.

    API servers show no token unless they are configured to, so `allow_anonymous` is usual here: the
    answer holds names, no secrets.
    """
    declared = request.headers.get("content-length", "")
    return await parts.reviewer.answer(
        question.request, int(declared) if declared.isdecimal() else MAX_BODY_BYTES
    )
