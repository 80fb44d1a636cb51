"""What routes ask for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Request

from lmcache_webhook.review.service import Reviewer


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
