"""`POST /mutate`."""

from __future__ import annotations

from fastapi import APIRouter
from lmcache_servicekit.auth import ClientPrincipal, GuardedRoute

from lmcache_webhook.dependencies import Parts
from lmcache_webhook.review.schemas import AdmissionAnswer, AdmissionQuestion

router = APIRouter(tags=["admission"], route_class=GuardedRoute)


@router.post("/mutate", summary="What is to be added to a pod", response_model_exclude_none=True)
async def mutate(principal: ClientPrincipal, question: AdmissionQuestion, parts: Parts) -> AdmissionAnswer:
    """Answer an AdmissionReview.

    API servers show no token unless they are configured to, so `allow_anonymous` is usual here: the answer holds names, no secrets.
    """
    return await parts.reviewer.answer(question.request)
