"""The pulls that this broker has granted and that are not over: whose they are, and at whom."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from lmcache_broker.peers.record import PeerRecord


@dataclass(frozen=True, slots=True)
class Pull:
    """One pull.

    Attributes:
        pull_id: Known to its requester alone.
        tenant: Of the requester.
        requester: Who pulls.
        record: Who serves.
        ends_s: When its ticket ends, monotonic seconds.
    """

    pull_id: str
    tenant: str
    requester: str
    record: PeerRecord
    ends_s: float


class PullBook:
    """Pulls by id. Tickets live equally long, so that the oldest is the first to expire; as many as peers may serve at once."""

    def __init__(self) -> None:
        self._pulls: dict[str, Pull] = {}
        self._by_tenant: Counter[str] = Counter()
        self._by_requester: Counter[tuple[str, str]] = Counter()

    def __len__(self) -> int:
        return len(self._pulls)

    def add(self, pull_id: str, tenant: str, requester: str, record: PeerRecord, ends_s: float) -> None:
        """A pull begins."""
        self._pulls[pull_id] = Pull(pull_id, tenant, requester, record, ends_s)
        self._by_tenant[tenant] += 1
        self._by_requester[tenant, requester] += 1

    def end(self, pull_id: str, tenant: str, requester: str) -> Pull | None:
        """That pull of that requester is over; None when there is none."""
        pull = self._pulls.get(pull_id)
        if pull is None or (pull.tenant, pull.requester) != (tenant, requester):
            return None
        return self._drop(pull)

    def expire(self, now_s: float) -> None:
        """Forget those whose tickets have ended."""
        while self._pulls:
            pull = next(iter(self._pulls.values()))
            if pull.ends_s > now_s:
                break
            self._drop(pull)

    def share(self, tenant: str, requester: str) -> tuple[int, int]:
        """Pulls of that tenant, and of that requester: who has the fewest is next."""
        return (self._by_tenant[tenant], self._by_requester[tenant, requester])

    def _drop(self, pull: Pull) -> Pull:
        del self._pulls[pull.pull_id]
        self._by_tenant[pull.tenant] -= 1
        self._by_requester[pull.tenant, pull.requester] -= 1
        if self._by_tenant[pull.tenant] <= 0:
            del self._by_tenant[pull.tenant]
        if self._by_requester[pull.tenant, pull.requester] <= 0:
            del self._by_requester[pull.tenant, pull.requester]
        return pull
