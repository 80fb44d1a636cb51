"""A replica's copy of the leases in Redis: which instance numbers are alive, and in which
incarnation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
from lmcache_core.errors import UnavailableError
from lmcache_core.lookup import InstanceKind


class StoredLease(msgspec.Struct, array_like=True, frozen=True):
    """A lease as `redis_scripts` writes it."""

    number: int
    incarnation: str
    kind: InstanceKind
    expires_ms: int
    next_sequence: int
    resync: int


@dataclass(frozen=True, slots=True)
class LiveInstance:
    """One live lease.

    Attributes:
        owner: The tenant that took it.
        instance: Whose.
        lease: As stored.
        expires_at: When it ends, in this process's clock.
    """

    owner: str
    instance: str
    lease: StoredLease
    expires_at: float


@dataclass(frozen=True, slots=True)
class LiveTable:
    """All live leases at one moment.

    Attributes:
        version: Of the picture in Redis.
        by_identity: (instance number, incarnation) -> who that is.
        stale_at: When the first of the leases ends unless it was renewed meanwhile: time to look
            again.
    """

    version: bytes
    by_identity: dict[tuple[int, int], LiveInstance] = field(default_factory=dict)
    stale_at: float = float("inf")

    @classmethod
    def from_reply(cls, reply: Sequence[object], now: float) -> LiveTable:
        """Read what the script `TABLE` returns. `now` is this process's time at which the question
        was asked.

        Raises:
            UnavailableError: Something else than our leases is stored there.
        """
        try:
            return cls._read(reply, now)
        except (msgspec.DecodeError, UnicodeDecodeError, ValueError, TypeError) as exc:
            raise UnavailableError(f"the leases in Redis cannot be read: {exc}") from exc

    @classmethod
    def _read(cls, reply: Sequence[object], now: float) -> LiveTable:
        now_ms, version, flat = reply
        assert isinstance(now_ms, int)
        assert isinstance(version, bytes)
        assert isinstance(flat, list)
        by_identity: dict[tuple[int, int], LiveInstance] = {}
        for name, raw in zip(flat[::2], flat[1::2], strict=True):
            lease = msgspec.json.decode(raw, type=StoredLease)
            if lease.expires_ms > now_ms:
                owner, _, instance = name.decode().partition("/")
                expires_at = now + (lease.expires_ms - now_ms) / 1000
                by_identity[lease.number, int(lease.incarnation)] = LiveInstance(
                    owner, instance, lease, expires_at
                )
        stale_at = min((live.expires_at for live in by_identity.values()), default=float("inf"))
        return cls(version, by_identity, stale_at)
