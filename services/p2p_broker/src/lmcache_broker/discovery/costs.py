"""Sets which model pods Kubernetes ends first on a scale-down: those with the least to lose.

The annotation `controller.kubernetes.io/pod-deletion-cost` of a pod is set to the MiB that only it
holds, as reported by its sidecar. A ReplicaSet ends pods with a lower cost first. Kubernetes
advises against frequent changes, so it is set only after a large change, a few pods at a time. All
brokers do so, and set the same values.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Final

from lmcache_core.errors import UnavailableError

from lmcache_broker.discovery.cluster import ClusterApi
from lmcache_broker.discovery.watch import Sighting
from lmcache_broker.peers.registry import PeerRegistry

logger = logging.getLogger(__name__)

ANNOTATION: Final = "controller.kubernetes.io/pod-deletion-cost"
COST_INTERVAL_S: Final = 30.0
MAX_PATCHES_PER_ROUND: Final = 20
MAX_COST: Final = (1 << 31) - 1
MIN_CHANGE: Final = 64
"""Smallest change in MiB, and as a part of the old cost (`CHANGE_SHARE`), for which it is set
again.
"""
CHANGE_SHARE: Final = 0.2
_BYTES_PER_UNIT: Final = 1 << 20


class DeletionCosts:
    """Annotates pods with what would be lost with them.

    Args:
        api: Must stay open while `update` is repeated.

    Attributes:
        num_patches: Annotations set.
        num_failures: Rounds that ended early because the API refused or was unavailable.
    """

    def __init__(self, api: ClusterApi, registry: PeerRegistry) -> None:
        self._api = api
        self._registry = registry
        self._set: dict[str, int] = {}
        self._is_refused = False
        self.num_patches = 0
        self.num_failures = 0

    async def update(self, seen: Mapping[str, Sighting]) -> None:
        """Set what has changed. Call it repeatedly: a round ends at the first failure, and the next
        one retries.

        Args:
            seen: The peers that are pods of the namespace.
        """
        await self._registry.refresh()
        wanted = self._wanted(seen)
        self._set = {pod: cost for pod, cost in self._set.items() if pod in wanted}
        changed = [
            (pod, cost)
            for pod, cost in wanted.items()
            # The values set by an earlier broker are unknown.
            if (known := self._set.get(pod)) is None
            or abs(cost - known) >= max(MIN_CHANGE, CHANGE_SHARE * known)
        ]
        try:
            for pod, cost in changed[:MAX_PATCHES_PER_ROUND]:
                if await self._api.annotate_pod(pod, ANNOTATION, str(cost)):
                    self.num_patches += 1
                self._set[pod] = cost
        except (UnavailableError, OSError) as exc:
            self.num_failures += 1
            self._note(True, f"cannot be set: error={type(exc).__name__}: {exc}")
            return
        self._note(False, "can be set again")

    def _wanted(self, seen: Mapping[str, Sighting]) -> dict[str, int]:
        """Return the cost of each pod that reports its exclusive bytes and is not about to end;
        pods without a cost so far come first.
        """
        found: dict[str, int] = {}
        for pod, sighting in seen.items():
            for record in self._registry.directory.at(sighting.peer):
                figures = record.figures
                if figures is not None and figures.sole_bytes is not None and not record.draining:
                    found[pod] = min(MAX_COST, figures.sole_bytes // _BYTES_PER_UNIT)
        return dict(sorted(found.items(), key=lambda entry: entry[0] in self._set))

    def _note(self, is_refused: bool, detail: str) -> None:
        if is_refused != self._is_refused:
            self._is_refused = is_refused
            logger.log(
                logging.WARNING if is_refused else logging.INFO, "pod deletion costs %s", detail
            )
