"""`SharedPeers` in Redis: one script a call, every call within a deadline, every failure an
`UnavailableError`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, TypeVar

import msgspec
from lmcache_core.errors import UnavailableError
from lmcache_core.p2p import CopyOrder, DrainReport, Peer, PeerFigures
from lmcache_servicekit.errors import StoreRefusedError
from lmcache_servicekit.redis_client import RedisClient, Script
from typing_extensions import override

from lmcache_broker.peers import redis_scripts as scripts
from lmcache_broker.peers.pulls import MAX_PULL_S
from lmcache_broker.peers.shared import (
    Changes,
    PlacedOrder,
    PullClaim,
    PullUnderway,
    PullVerdict,
    SharedPeer,
    SharedPeers,
)

T = TypeVar("T")

MAX_CONNECTIONS: Final = 32
MAX_TOLD_AT_ONCE: Final = 256
MAX_ORDERING_PEERS: Final = 4096
MAX_ORDER_BYTES_PER_PEER: Final = 16 << 10
RETRY_S: Final = 0.5
"""After a failure nothing is asked for so long: a Redis that is away must not cost each request
its deadline.
"""

_HEAD_CHARS: Final = 37


class RedisPeers(SharedPeers):
    """Peers in Redis. The constructor connects to nothing.

    Args:
        client: Redis; belongs to this object.
        timeout_s: Limit on a call, from waiting for a connection to the last byte.
        clock: Seconds, monotonic.
    """

    def __init__(
        self, client: RedisClient, timeout_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._client = client
        self.where = client.where
        self._timeout_s = timeout_s
        self._clock = clock
        self._away_until = float("-inf")
        self._epoch = b""
        self._seen = 0

    @override
    async def announce(self, peers: Sequence[SharedPeer]) -> list[bool | None]:
        found: list[bool | None] = []
        for begin in range(0, len(peers), MAX_TOLD_AT_ONCE):
            argv: list[str | int] = []
            for shared in peers[begin : begin + MAX_TOLD_AT_ONCE]:
                incarnation = f"{shared.peer.incarnation:020d}"
                argv += [
                    _field(shared.owner, shared.peer.id),
                    incarnation,
                    int(shared.draining),
                    shared.ttl_ms,
                    _packed(shared),
                ]
            found += [
                None if state < 0 else bool(state)
                for state in await self._run(scripts.ANNOUNCE, argv)
            ]
        return found

    @override
    async def remove(self, owner: str, peer_id: str) -> None:
        await self._run(scripts.REMOVE, [_field(owner, peer_id)])

    @override
    async def drain(self, owner: str, peer_id: str) -> None:
        await self._run(scripts.DRAIN, [_field(owner, peer_id)])

    @override
    async def changes(self) -> Changes:
        epoch, seq, now_ms, *rest = await self._run(scripts.CHANGES, [self._seen])
        is_anew = epoch != self._epoch
        if is_anew and self._seen:  # what it told was told of another life of the numbers
            epoch, seq, now_ms, *rest = await self._run(scripts.CHANGES, [0])
        peers = [
            _unpacked(field.decode(), raw.decode(), num, now_ms)
            for field, raw, num in zip(rest[::3], rest[1::3], rest[2::3], strict=True)
        ]
        self._epoch, self._seen = epoch, seq
        return Changes(peers, is_anew)

    @override
    async def claim(
        self, who: str, claims: Sequence[PullClaim], max_pulls: int, ttl_ms: int
    ) -> list[PullVerdict]:
        argv: list[str | int] = [who, max_pulls, ttl_ms]
        for claim in claims:
            argv += [claim.life, claim.pull_id]
        found = await self._run(scripts.CLAIM, argv)
        return [
            PullVerdict(bool(granted), num)
            for granted, num in zip(found[::2], found[1::2], strict=True)
        ]

    @override
    async def restore_pulls(self, pulls: Sequence[PullUnderway]) -> None:
        for begin in range(0, len(pulls), MAX_TOLD_AT_ONCE):
            argv: list[str | int] = []
            for pull in pulls[begin : begin + MAX_TOLD_AT_ONCE]:
                argv += [pull.who, pull.claim.life, pull.claim.pull_id, pull.age_ms, pull.ttl_ms]
            await self._run(scripts.RESTORE_PULLS, argv)

    @override
    async def renew_pulls(self, who: str, pull_ids: Sequence[str], ttl_ms: int) -> list[str | None]:
        lives = await self._run(
            scripts.RENEW_PULLS, [who, ttl_ms, round(MAX_PULL_S * 1000), *pull_ids]
        )
        return [life.decode() or None for life in lives]

    @override
    async def end_pulls(self, who: str, pull_ids: Sequence[str]) -> list[bool]:
        return [
            bool(was_there) for was_there in await self._run(scripts.END_PULLS, [who, *pull_ids])
        ]

    @override
    async def order_copies(self, orders: Sequence[PlacedOrder], ttl_ms: int) -> None:
        for begin in range(0, len(orders), MAX_TOLD_AT_ONCE):
            argv: list[str | int] = [ttl_ms, MAX_ORDERING_PEERS, MAX_ORDER_BYTES_PER_PEER]
            for placed in orders[begin : begin + MAX_TOLD_AT_ONCE]:
                order = placed.order
                argv += [
                    _field(placed.tenant, placed.server),
                    f"{order.chunk_id} {order.instance} {order.distributed_url}",
                ]
            await self._run(scripts.ORDER_COPIES, argv)

    @override
    async def take_orders(self, tenant: str, peer_id: str) -> list[CopyOrder]:
        now_ms, lines = await self._run(scripts.TAKE_ORDERS, [_field(tenant, peer_id)])
        found = [line.split(" ") for line in lines.decode().splitlines()]
        return list(
            dict.fromkeys(CopyOrder(*order) for end_ms, *order in found if int(end_ms) > now_ms)
        )

    @override
    async def ping(self) -> None:
        await self._within(self._client.ping(scripts.KEYS[0]))

    @override
    async def close(self) -> None:
        await self._client.close()

    async def _run(self, script: Script, argv: Sequence[str | int]) -> Any:
        if self._clock() < self._away_until:
            raise UnavailableError("redis did not answer a moment ago")
        return await self._within(self._client.run(script, scripts.KEYS, argv))

    async def _within(self, work: Awaitable[T]) -> T:
        try:
            answer = await self._client.within(self._timeout_s, work)
        except StoreRefusedError:  # a refusal is quick, and other calls may succeed
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


def _unpacked(field: str, raw: str, num_pulls: int, now_ms: int) -> SharedPeer:
    owner, _, peer_id = field.partition("/")
    url, kind, zone, node, load, drain, *more = json.loads(
        raw[_HEAD_CHARS:]
    )  # a newer broker may say more, an older one less
    ttl_ms = max(0, int(raw[22:_HEAD_CHARS]) - now_ms)
    peer = Peer(peer_id, int(raw[:20]), url, kind, zone, node)
    return SharedPeer(
        owner,
        peer,
        load,
        raw[20] == "1",
        ttl_ms,
        num_pulls,
        is_gone=raw[21] == "1",
        drain=_drain(drain),
        figures=_figures(more[0]) if more else None,
    )


def _drain(raw: object) -> DrainReport | None:
    """For looking at alone, as figures are; a newer broker may say more, behind what is known."""
    try:
        said = msgspec.convert(raw, list[Any] | None) or ()
        return (
            msgspec.convert(
                dict(zip(DrainReport.__struct_fields__, said, strict=False)), DrainReport
            )
            if said
            else None
        )
    except msgspec.ValidationError:
        return None


def _figures(raw: object) -> PeerFigures | None:
    """For looking at alone: what another version writes differently is no reason not to know the
    peer.
    """
    try:
        return None if raw is None else msgspec.convert(raw, PeerFigures)
    except msgspec.ValidationError:
        return None
