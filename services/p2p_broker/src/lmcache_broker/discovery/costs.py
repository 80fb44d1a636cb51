"""Tells Kubernetes which model pods to end first when their number goes down: those with which the
least would be lost.

The annotation `controller.kubernetes.io/pod-deletion-cost` of a pod is set to the MiB that it alone
holds, as its sidecar says. A ReplicaSet ends pods with a lower cost first. Kubernetes asks not to
change it often, so it is set only when it has changed much, a few pods at a time. Every broker does
so: what they set is the same.
"""

from __future__ import annotations

import logging
from typing import Final

from lmcache_core.errors import UnavailableError

from lmcache_broker.discovery.cluster import ClusterApi
from lmcache_broker.discovery.discovery import Discovery
from lmcache_broker.peers.registry import PeerRegistry

logger = logging.getLogger(__name__)

ANNOTATION: Final = "controller.kubernetes.io/pod-deletion-cost"
COST_INTERVAL_S: Final = 30.0
MAX_PATCHES_PER_ROUND: Final = 20
MAX_COST: Final = (1 << 31) - 1
MIN_CHANGE: Final = 64
"""MiB; and besides, the new cost is above or below the old one by `CHANGE_SHARE` of it."""
CHANGE_SHARE: Final = 0.2
_BYTES_PER_UNIT: Final = 1 << 20


class DeletionCosts:
    """Annotates pods with what would be lost with them.

    Args:
        api: Open for as long as this is repeated.
        discovery: Which peers are pods of the namespace.
        registry: What they say of themselves.

    Attributes:
        num_patches: Annotations set.
        num_failures: Rounds that ended early because the API refused or was away.
    """

    def __init__(self, api: ClusterApi, discovery: Discovery, registry: PeerRegistry) -> None:
        self._api = api
        self._discovery = discovery
        self._registry = registry
        self._set: dict[str, int] = {}
        self._is_refused = False
        self.num_patches = 0
        self.num_failures = 0

    async def update(self) -> None:
        """Set what has changed; to be repeated. Ends at the first failure: the next round tries
        again.
        """
        await self._registry.refresh()
        wanted = self._wanted()
        self._set = {pod: cost for pod, cost in self._set.items() if pod in wanted}
        changed = [
            (pod, cost) for pod, cost in wanted.items() if _is_news(self._set.get(pod), cost)
        ]
        try:
            for pod, cost in changed[:MAX_PATCHES_PER_ROUND]:
                if await self._api.annotate_pod(pod, ANNOTATION, str(cost)):
                    self.num_patches += 1
                self._set[pod] = cost
        except (UnavailableError, OSError) as exc:
            self.num_failures += 1
            self._note(True, f"cannot be set: {type(exc).__name__}: {exc}")
            return
        self._note(False, "can be set again")

    def _wanted(self) -> dict[str, int]:
        """Return the cost of each pod that says what it alone holds, and that is not about to end;
        those never set come first.
        """
        found: dict[str, int] = {}
        for sighting in self._discovery.seen.values():
            for record in self._registry.directory.at(sighting.id, sighting.distributed_url):
                figures = record.figures
                if figures is not None and figures.sole_bytes is not None and not record.draining:
                    found[sighting.id] = min(MAX_COST, figures.sole_bytes // _BYTES_PER_UNIT)
        return dict(sorted(found.items(), key=lambda entry: entry[0] in self._set))

    def _note(self, is_refused: bool, detail: str) -> None:
        """Log changes only."""
        if is_refused != self._is_refused:
            self._is_refused = is_refused
            logger.log(
                logging.WARNING if is_refused else logging.INFO, "deletion costs of pods %s", detail
            )


def _is_news(known: int | None, cost: int) -> bool:
    """Return whether a cost is to be set; what an earlier broker has set is not known."""
    return known is None or abs(cost - known) >= max(MIN_CHANGE, CHANGE_SHARE * known)
