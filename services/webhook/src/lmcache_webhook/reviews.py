"""Answers AdmissionReviews, version `admission.k8s.io/v1`. The models have only the members that
are read or written, under Kubernetes' names.
"""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any, Final, Literal

from lmcache_core.errors import CapacityError
from lmcache_core.security import RateLimiter
from lmcache_servicekit.bodies import ApiModel
from prometheus_client.metrics_core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector
from pydantic import ConfigDict, Field

from lmcache_webhook.injection.injector import PodReview, review_pod
from lmcache_webhook.injection.plan import InjectionOptions
from lmcache_webhook.turns import FairTurns

logger = logging.getLogger(__name__)

API_VERSION: Literal["admission.k8s.io/v1"] = "admission.k8s.io/v1"
MAX_UID_CHARS = 128
MAX_NAMESPACE_CHARS = 63

THROTTLED: Final = "throttled"
UNFINISHED: Final = "unfinished"
VERDICTS: Final = ("injected", "declined", "unchanged", "unreadable", THROTTLED, UNFINISHED)
REVIEW_TIMEOUT_S: Final = 2.0
"""Less than the API server waits (`webhook.timeoutSeconds` of the chart, 5 s)."""
MAX_UNFINISHED: Final = 4
"""Reviews out of time whose threads may still run; beyond, no other is begun."""
# Pods have a few KiB, rarely a hundred. API servers accept requests of 3 MiB, but the worst pod of
# that size takes over REVIEW_TIMEOUT_S of CPU time, and 70 MiB of the container's 256; at 1 MiB it
# takes half the time and 24 MiB. A larger review is answered 413: the pod starts unchanged.
MAX_BODY_BYTES: Final = 1 << 20
MAX_WAITING_BYTES: Final = 4 << 20
"""Bodies of all reviews that wait for their turn: parsed, up to 24 times as large."""
MAX_WARNING_CHARS: Final = 250
"""Kubernetes cuts longer ones off."""


class GroupVersionKind(ApiModel):
    """Kind of an object."""

    group: str = ""
    """API group; empty for Kubernetes' core, which pods belong to."""
    version: str
    """Version of the group, for example `v1`."""
    kind: str
    """`Pod`; others pass unchanged."""


class AdmissionRequest(ApiModel):
    """The operation under review. Further members are ignored."""

    model_config = ConfigDict(extra="ignore")

    uid: str = Field(min_length=1, max_length=MAX_UID_CHARS)
    """Id of the review, repeated in the answer."""
    kind: GroupVersionKind
    """Kind of `object`."""
    namespace: str = Field(default="", max_length=MAX_NAMESPACE_CHARS)
    """Namespace of the pod; its own may still be missing in `object`."""
    operation: str = "CREATE"
    """`CREATE`; others pass unchanged."""
    dryRun: bool | None = None
    """Whether the pod is not going to be stored; the answer is the same. null: it is."""
    object: dict[str, Any] | None = None
    """The pod; null, as in a deletion: nothing to change."""


class AdmissionQuestion(ApiModel):
    """A review, as the API server sends it. Further members are ignored."""

    model_config = ConfigDict(extra="ignore")

    apiVersion: Literal["admission.k8s.io/v1"]
    """The only version that is read."""
    kind: Literal["AdmissionReview"]
    """The only kind that is read."""
    request: AdmissionRequest
    """What is reviewed."""


class AdmissionResponse(ApiModel):
    """The result for one pod. Members without a value are absent."""

    uid: str
    """Id of the review that this answers."""
    allowed: Literal[True] = True
    """Always true: a pod that cannot have a sidecar runs without one."""
    patchType: Literal["JSONPatch"] | None = None
    """Form of `patch`; absent without one."""
    patch: str | None = None
    """Changes to the pod as a JSON patch (RFC 6902) in base64; absent if it stays unchanged."""
    warnings: list[str] | None = None
    """Why the pod gets no sidecar, or not as asked, for `kubectl` to show."""


class AdmissionAnswer(ApiModel):
    """The answer to a review."""

    apiVersion: Literal["admission.k8s.io/v1"] = API_VERSION
    """The version of the review."""
    kind: Literal["AdmissionReview"] = "AdmissionReview"
    """Kind of this object."""
    response: AdmissionResponse
    """The result."""


class Reviewer:
    """Answers reviews. Its only state is its counts, so any replica may be asked, repeatedly, dry
    run or not.

    Each review runs in its own thread, one at a time: it is pure Python, so two would only compete
    for the interpreter. Callers share the turns, the room for waiting bodies and the rate, since
    anyone who reaches the port may ask. A thread that runs out of time cannot be stopped; it is
    abandoned, and as a daemon does not keep the process alive.

    Args:
        max_per_s: Reviews per second of each caller; further pods pass unchanged.

    Attributes:
        counts: Reviews so far, by verdict.
    """

    def __init__(self, options: InjectionOptions, max_per_s: float) -> None:
        self._options = options
        self._limiter = RateLimiter(max_per_s)
        self._turns = FairTurns(MAX_WAITING_BYTES)
        self._unfinished: set[threading.Thread] = set()
        self.counts: Counter[str] = Counter()

    async def answer(
        self, request: AdmissionRequest, num_bytes: int = 0, caller: str = ""
    ) -> AdmissionAnswer:
        """Answer one review within `REVIEW_TIMEOUT_S`. Always allow the pod.

        Args:
            num_bytes: Length of its body.
            caller: Address of the caller.
        """
        if (
            request.kind.kind != "Pod"
            or request.kind.group != ""
            or request.operation != "CREATE"
            or request.object is None
        ):
            return self._pass_on(request, "unchanged", "")
        if self._limiter.wait_s(caller) > 0:
            return self._pass_on(
                request,
                THROTTLED,
                "lmcache: not injected: the webhook is asked more often than max_reviews_per_s"
                " allows",
            )
        try:
            async with asyncio.timeout(REVIEW_TIMEOUT_S), self._turns.turn(caller, num_bytes):
                outcome, patch = await self._in_thread(request)
        except CapacityError:
            return self._pass_on(
                request,
                THROTTLED,
                "lmcache: not injected: too many large reviews wait at the webhook",
            )
        except TimeoutError:
            logger.warning(
                "review not finished in time: namespace=%s limit_s=%g",
                request.namespace,
                REVIEW_TIMEOUT_S,
            )
            return self._pass_on(
                request,
                UNFINISHED,
                "lmcache: not injected: the review could not be finished within"
                f" {REVIEW_TIMEOUT_S:g} s",
            )
        self._tell(request, outcome)
        if not outcome.operations:
            return self._pass_on(request, outcome.verdict, outcome.reason)
        self.counts[outcome.verdict] += 1
        warnings = (
            [f"lmcache: {outcome.reason}"[:MAX_WARNING_CHARS]]
            if outcome.verdict == "declined" and outcome.is_warned_of
            else None
        )
        return AdmissionAnswer(
            response=AdmissionResponse(
                uid=request.uid, patchType="JSONPatch", patch=patch, warnings=warnings
            )
        )

    async def _in_thread(self, request: AdmissionRequest) -> tuple[PodReview, str]:
        """Return the result for the pod, and the patch as the API server expects it.

        Raises:
            TimeoutError: Too many earlier reviews are still running.
        """
        self._unfinished = {thread for thread in self._unfinished if thread.is_alive()}
        if len(self._unfinished) >= MAX_UNFINISHED:
            raise TimeoutError
        decided: Future[tuple[PodReview, str]] = Future()
        decided.set_running_or_notify_cancel()

        def run() -> None:
            try:
                decided.set_result(self._decide(request))
            except BaseException as exc:
                decided.set_exception(exc)
                raise

        thread = threading.Thread(target=run, name="lmcache-review", daemon=True)
        thread.start()
        try:
            return await asyncio.wrap_future(decided)
        except asyncio.CancelledError:
            self._unfinished.add(thread)
            raise

    def _decide(self, request: AdmissionRequest) -> tuple[PodReview, str]:
        assert request.object is not None
        try:
            outcome = review_pod(self._options, request.object, request.namespace)
            return outcome, base64.b64encode(json.dumps(outcome.operations).encode()).decode()
        except RecursionError:
            return (
                PodReview(
                    "unreadable",
                    reason="this is not a pod that the webhook can read: it is nested too deeply",
                ),
                "",
            )

    def _pass_on(self, request: AdmissionRequest, verdict: str, warning: str) -> AdmissionAnswer:
        self.counts[verdict] += 1
        warnings = [warning[:MAX_WARNING_CHARS]] if warning else None
        return AdmissionAnswer(response=AdmissionResponse(uid=request.uid, warnings=warnings))

    def _tell(self, request: AdmissionRequest, outcome: PodReview) -> None:
        if outcome.reason:
            logger.info(
                "pod reviewed: namespace=%s outcome=%s dry_run=%s",
                request.namespace,
                outcome.reason,
                bool(request.dryRun),
            )


REVIEWS_TOTAL: Final = "lmcache_webhook_reviews_total"
LABEL_VERDICT: Final = "verdict"


class WebhookCollector(Collector):
    """Reads the figures when Prometheus asks."""

    def __init__(self, reviewer: Reviewer) -> None:
        self._reviewer = reviewer

    def collect(self) -> Iterator[Metric]:
        """Yield every metric of the webhook."""
        reviews = CounterMetricFamily(
            REVIEWS_TOTAL,
            "Reviewed pods, by outcome.",
            labels=[LABEL_VERDICT],
        )
        for verdict in VERDICTS:
            reviews.add_metric([verdict], self._reviewer.counts[verdict])
        yield reviews
