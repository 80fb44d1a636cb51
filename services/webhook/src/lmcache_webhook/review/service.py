"""Answers reviews."""

from __future__ import annotations

import base64
import json
import logging
from collections import Counter
from typing import Final

from lmcache_core.security import RateLimiter

from lmcache_webhook.injection.injector import Outcome, review_pod
from lmcache_webhook.injection.options import InjectionOptions
from lmcache_webhook.review.schemas import AdmissionAnswer, AdmissionRequest, AdmissionResponse

logger = logging.getLogger(__name__)

THROTTLED: Final = "throttled"
VERDICTS: Final = ("injected", "declined", "unchanged", "unreadable", THROTTLED)
MAX_WARNING_CHARS: Final = 250
"""Kubernetes cuts longer ones off."""
_EVERYBODY: Final = "api-server"


class Reviewer:
    """Answers reviews; it has no memory but its counts, so any replica may be asked, once or twice, dry run or not.

    Args:
        options: What is injected.
        max_per_s: Reviews in a second; beyond, pods are let through as they are.

    Attributes:
        counts: Reviews so far, by verdict.
    """

    def __init__(self, options: InjectionOptions, max_per_s: float) -> None:
        self._options = options
        self._limiter = RateLimiter(max_per_s)
        self.counts: Counter[str] = Counter()

    def answer(self, request: AdmissionRequest) -> AdmissionAnswer:
        """Answer one review. Raises nothing, and never says no."""
        if request.kind.kind != "Pod" or request.kind.group != "" or request.operation != "CREATE" or request.object is None:
            return self._pass_on(request, "unchanged", "")
        if self._limiter.wait_s(_EVERYBODY) > 0:
            return self._pass_on(request, THROTTLED, "lmcache: not injected: the webhook is asked more often than max_reviews_per_s allows")
        outcome = review_pod(self._options, request.object, request.namespace)
        self._tell(request, outcome)
        if not outcome.operations:
            return self._pass_on(request, outcome.verdict, outcome.reason)
        self.counts[outcome.verdict] += 1
        patch = base64.b64encode(json.dumps(outcome.operations).encode()).decode()
        warnings = [f"lmcache: {outcome.reason}"[:MAX_WARNING_CHARS]] if outcome.verdict == "declined" else None
        return AdmissionAnswer(response=AdmissionResponse(uid=request.uid, patchType="JSONPatch", patch=patch, warnings=warnings))

    def _pass_on(self, request: AdmissionRequest, verdict: str, warning: str) -> AdmissionAnswer:
        self.counts[verdict] += 1
        warnings = [warning[:MAX_WARNING_CHARS]] if warning else None
        return AdmissionAnswer(response=AdmissionResponse(uid=request.uid, warnings=warnings))

    def _tell(self, request: AdmissionRequest, outcome: Outcome) -> None:
        if outcome.reason:
            logger.info("a pod of the namespace %s: %s%s", request.namespace, outcome.reason, " (dry run)" if request.dryRun else "")
