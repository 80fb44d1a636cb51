"""The unfinished pulls that this broker has granted: their requesters and serving peers."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Final, NamedTuple

from lmcache_broker.peers.record import PeerRecord

MAX_PULL_S: Final = 600.0
"""Age from which a pull is not renewed, so that no requester keeps a slot forever."""


class Requester(NamedTuple):
    """An instance that pulls, and its tenant."""

    tenant: str
    instance: str

    def __str__(self) -> str:
        """Return its name in Redis. Neither part contains a slash."""
        return f"{self.tenant}/{self.instance}"


@dataclass(slots=True)
class BookedPull:
    """One pull. Times are monotonic seconds.

    Attributes:
        pull_id: Known only to its requester.
        record: The serving peer.
        began_s: When it was granted.
        ends_s: When its ticket expires.
    """

    pull_id: str
    requester: Requester
    record: PeerRecord
    began_s: float
    ends_s: float


class PullBook:
    """Pulls by id. Tickets have equal lifetimes, so the oldest expires first. At most as many as
    peers may serve at a time.
    """

    def __init__(self) -> None:
        self._pulls: dict[str, BookedPull] = {}
        self._by_tenant: Counter[str] = Counter()
        self._by_requester: Counter[Requester] = Counter()

    def add(self, pull: BookedPull) -> None:
        """Begin a pull."""
        self._pulls[pull.pull_id] = pull
        self._by_tenant[pull.requester.tenant] += 1
        self._by_requester[pull.requester] += 1
        pull.record.pulls[pull.pull_id] = pull.ends_s

    def end(self, pull_id: str, requester: Requester) -> BookedPull | None:
        """End that pull of that requester; return None if there is none."""
        pull = self._find(pull_id, requester)
        if pull is not None:
            self._drop(pull)
            pull.record.pulls.pop(pull_id, None)
        return pull

    def renew(
        self, pull_id: str, requester: Requester, now_s: float, ends_s: float
    ) -> BookedPull | None:
        """Extend a requester's pull; return None if there is none, or it has lasted too long."""
        pull = self._find(pull_id, requester)
        if pull is None or now_s - pull.began_s > MAX_PULL_S:
            return None
        pull.ends_s = ends_s
        self._pulls[pull_id] = self._pulls.pop(pull_id)  # the last to expire
        pull.record.pulls[pull_id] = ends_s
        return pull

    def expire(self, now_s: float) -> None:
        """Forget pulls whose tickets have expired."""
        while self._pulls:
            pull = next(iter(self._pulls.values()))
            if pull.ends_s > now_s:
                break
            self._drop(pull)
            pull.record.pulls.pop(pull.pull_id, None)

    def share(self, requester: Requester) -> tuple[int, int]:
        """Return the number of its tenant's pulls, and of its own among them."""
        return (self._by_tenant[requester.tenant], self._by_requester[requester])

    def _find(self, pull_id: str, requester: Requester) -> BookedPull | None:
        pull = self._pulls.get(pull_id)
        return pull if pull is not None and pull.requester == requester else None

    def _drop(self, pull: BookedPull) -> None:
        del self._pulls[pull.pull_id]
        tenant = pull.requester.tenant
        self._by_tenant[tenant] -= 1
        self._by_requester[pull.requester] -= 1
        if self._by_tenant[tenant] <= 0:
            del self._by_tenant[tenant]
        if self._by_requester[pull.requester] <= 0:
            del self._by_requester[pull.requester]
