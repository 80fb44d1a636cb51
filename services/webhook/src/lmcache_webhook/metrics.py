"""The webhook's figures, for Prometheus. Names are constants here and nowhere else."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from prometheus_client.metrics_core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from lmcache_webhook.review.service import VERDICTS, Reviewer

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
            "Pods that were reviewed, by what became of them.",
            labels=[LABEL_VERDICT],
        )
        for verdict in VERDICTS:
            reviews.add_metric([verdict], self._reviewer.counts[verdict])
        yield reviews
