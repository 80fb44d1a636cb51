"""`POST /mutate`."""

from __future__ import annotations

from fastapi import APIRouter

from lmcache_webhook.dependencies import Parts
from lmcache_webhook.review.schemas import AdmissionAnswer, AdmissionQuestion

router = APIRouter(tags=["admission"])


@router.post("/mutate", summary="What is to be added to a pod", response_model_exclude_none=True)
async def mutate(question: AdmissionQuestion, parts: Parts) -> AdmissionAnswer:
    """Answer an AdmissionReview. It needs no token: API servers have none to show, and the answer holds names, no secrets."""
    return parts.reviewer.answer(question.request)
