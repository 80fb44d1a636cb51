"""The peer store that brokers share, in Redis: one script per call, every call within a deadline,
every failure an `UnavailableError`.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import lru_cache
from typing import Any, Final, NamedTuple, TypeVar

import msgspec
from lmcache_core.errors import UnavailableError
from lmcache_core.p2p import CopyOrder, DrainReport, Peer, PeerFigures
from lmcache_servicekit.errors import ConflictError, StoreRefusedError
from lmcache_servicekit.redis_client import RedisClient, Script

from lmcache_broker.peers import redis_scripts as scripts
from lmcache_broker.peers.pulls import MAX_PULL_S
from lmcache_broker.peers.record import PlacedOrder, SharedPeer

T = TypeVar("T")

MAX_CONNECTIONS: Final = 32
MAX_PER_CALL: Final = 256
MAX_ORDERING_PEERS: Final = 4096
MAX_ORDER_BYTES_PER_PEER: Final = 16 << 10
RETRY_S: Final = 0.5
"""Pause after a failure, so that an unavailable Redis does not cost each request its deadline."""

_HEAD_CHARS: Final = 36
MAX_PARSED: Final = 8192
"""Records that are parsed once and not at each read: most heartbeats come between reads."""


class RedisPeers:
    """Peers in Redis, shared between brokers. The constructor does not connect.

    Args:
        client: Client of Redis; belongs to this object.
        timeout_s: Limit on a call, from waiting for a connection to the last byte.
    """

    def __init__(
        self, client: RedisClient, timeout_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._client = client
        self.where = client.where
        self._timeout_s = timeout_s
        self._clock = clock
        self._away_until = float("-inf")

    async def announce(self, shared: SharedPeer) -> bool:
        """Register or renew; return whether it drains.

        Raises:
            ConflictError: A newer incarnation is live.
        """
        peer = shared.peer
        state = await self._run(
            scripts.ANNOUNCE,
            [
                _field(shared.owner, peer.id),
                f"{peer.incarnation:020d}",
                int(shared.draining),
                shared.ttl_ms,
                _packed(shared),
            ],
        )
        if state < 0:
            raise ConflictError(f"peer {peer.id}: a later incarnation is registered")
        return bool(state)

    async def remove(self, owner: str, peer_id: str) -> None:
        """End a lease."""
        await self._run(scripts.REMOVE, [_field(owner, peer_id)])

    async def drain(self, owner: str, peer_id: str) -> None:
        """Stop new pulls from this incarnation of a peer."""
        await self._run(scripts.DRAIN, [_field(owner, peer_id)])

    async def read(self) -> list[SharedPeer]:
        """Return all live peers."""
        now_ms, *rest = await self._run(scripts.READ, [])
        return [
            _unpacked(field, raw, num_pulls, now_ms)
            for field, raw, num_pulls in zip(rest[::3], rest[1::3], rest[2::3], strict=True)
        ]

    async def claim(
        self, who: str, claims: Sequence[tuple[str, str]], max_pulls: int, ttl_ms: int
    ) -> list[tuple[bool, int]]:
        """Count a requester's pulls, each with a peer's life and an id, if the peer stays within
        `max_pulls`; they count until ended or `ttl_ms` have passed.

        Returns:
            For each whether it counts, and how many its peer serves now.
        """
        argv: list[str | int] = [who, max_pulls, ttl_ms, *itertools.chain.from_iterable(claims)]
        found = await self._run(scripts.CLAIM, argv)
        return list(zip(map(bool, found[::2]), found[1::2], strict=True))

    async def renew_pulls(self, who: str, pull_ids: Sequence[str], ttl_ms: int) -> list[str | None]:
        """Extend a requester's pulls; return for each the life of the peer, or None if there is no
        such pull.
        """
        lives = await self._run(
            scripts.RENEW_PULLS, [who, ttl_ms, round(MAX_PULL_S * 1000), *pull_ids]
        )
        return [life.decode() or None for life in lives]

    async def end_pulls(self, who: str, pull_ids: Sequence[str]) -> list[bool]:
        """End a requester's pulls; return for each whether there was one."""
        return [
            bool(was_there) for was_there in await self._run(scripts.END_PULLS, [who, *pull_ids])
        ]

    async def order_copies(self, orders: Sequence[PlacedOrder], ttl_ms: int) -> None:
        """Order copies; an order that no heartbeat fetches within `ttl_ms` is dropped."""
        for begin in range(0, len(orders), MAX_PER_CALL):
            argv: list[str | int] = [ttl_ms, MAX_ORDERING_PEERS, MAX_ORDER_BYTES_PER_PEER]
            for placed in orders[begin : begin + MAX_PER_CALL]:
                order = placed.order
                argv += [
                    _field(placed.tenant, placed.server),
                    f"{order.chunk_id} {order.instance} {order.distributed_url}",
                ]
            await self._run(scripts.ORDER_COPIES, argv)

    async def take_orders(self, tenant: str, peer_id: str) -> list[CopyOrder]:
        """Return the copies that the peer should make for the tenant, each once."""
        now_ms, lines = await self._run(scripts.TAKE_ORDERS, [_field(tenant, peer_id)])
        found = [line.split(" ") for line in lines.decode().splitlines()]
        return list(
            dict.fromkeys(CopyOrder(*order) for end_ms, *order in found if int(end_ms) > now_ms)
        )

    async def ping(self) -> None:
        """Raise `UnavailableError` unless Redis responds."""
        await self._within(self._client.ping(scripts.KEYS[0]))

    async def close(self) -> None:
        """Close connections. Idempotent."""
        await self._client.close()

    async def _run(self, script: Script, argv: Sequence[str | int]) -> Any:
        if self._clock() < self._away_until:
            raise UnavailableError("redis did not answer a moment ago")
        return await self._within(self._client.run(script, scripts.KEYS, argv))

    async def _within(self, work: Awaitable[T]) -> T:
        try:
            answer = await self._client.within(self._timeout_s, work)
        except StoreRefusedError:  # a refusal is fast, and other calls may succeed
            raise
        except UnavailableError:
            self._away_until = self._clock() + RETRY_S
            raise
        self._away_until = float("-inf")
        return answer


def _field(owner: str, peer_id: str) -> str:
    return f"{owner}/{peer_id}"


def _packed(shared: SharedPeer) -> str:
    peer = shared.peer
    return json.dumps(
        [
            peer.distributed_url,
            peer.kind,
            peer.zone,
            peer.node,
            shared.load,
            None if shared.drain is None else msgspec.structs.astuple(shared.drain),
            None if shared.figures is None else msgspec.to_builtins(shared.figures),
        ]
    )


class _Parsed(NamedTuple):
    owner: str
    peer: Peer
    load: float
    draining: bool
    ends_ms: int
    drain: DrainReport | None
    figures: PeerFigures | None


@lru_cache(MAX_PARSED)
def _parsed(field: bytes, raw: bytes) -> _Parsed:
    owner, _, peer_id = field.decode().partition("/")
    head = raw[:_HEAD_CHARS].decode()
    # A newer broker may write more fields, an older one fewer.
    url, kind, zone, node, load, drain, *more = json.loads(raw[_HEAD_CHARS:])
    if isinstance(drain, list):
        drain = dict(zip(DrainReport.__struct_fields__, drain, strict=False))
    return _Parsed(
        owner,
        Peer(peer_id, int(head[:20]), url, kind, zone, node),
        load,
        head[20] == "1",
        int(head[21:]),
        _read(drain, DrainReport),
        _read(more[0], PeerFigures) if more else None,
    )


def _unpacked(field: bytes, raw: bytes, num_pulls: int, now_ms: int) -> SharedPeer:
    parsed = _parsed(field, raw)
    return SharedPeer(
        parsed.owner,
        parsed.peer,
        parsed.load,
        parsed.draining,
        parsed.ends_ms - now_ms,
        num_pulls,
        parsed.drain,
        parsed.figures,
    )


def _read(raw: object, kind: type[T]) -> T | None:
    """Parse a value that is only displayed: a peer stays known even if another version wrote it
    differently.
    """
    try:
        return msgspec.convert(raw, kind)
    except msgspec.ValidationError:
        return None
