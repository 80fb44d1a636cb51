"""Orders further copies of hot chunks: the answer to a holder's next heartbeat asks it to copy the
chunk to a peer without one.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from lmcache_core.p2p import CopyOrder, PeerStatus
from lmcache_core.p2p.messages import MAX_COPIES_PER_LEASE, ChunkHolders, TransferResponse
from lmcache_core.security import Principal

from lmcache_broker.peers.directory import PeerDirectory
from lmcache_broker.peers.record import PlacedOrder

MAX_COUNTED_CHUNKS: Final = 65_536
MAX_ORDERS: Final = 4096
WINDOW_S: Final = 60.0
ORDER_TTL_S: Final = 60.0
"""Lifetime of an order that no heartbeat fetches; then the same chunk may be ordered again."""


@dataclass(frozen=True, slots=True)
class HotLimits:
    """Thresholds for hot chunks.

    Attributes:
        num_pulls: Pulls of a chunk within a minute that make it hot; 0: never.
        num_copies: Holders that a hot chunk should have.
    """

    num_pulls: int
    num_copies: int


@dataclass(slots=True)
class _Heat:
    """How often a chunk is pulled, and the request that brought the longest prefix with it.

    Attributes:
        began_s: When counting began.
        head: First chunk of that request.
        depth: Chunks of that request up to this one.
        requester: The instance that made it.
        num_holders: The latest requester, which does not name itself, and the holders it named.
    """

    began_s: float
    num_pulls: int = 0
    ordered_s: float = float("-inf")
    head: str = ""
    depth: int = 0
    requester: str = ""
    num_holders: int = 0


class HotPrefix(NamedTuple):
    """Chunks of one prompt that are pulled equally often.

    Attributes:
        chunk_id: The last of them; its id stands for all tokens before it, too.
        num_chunks: Number of chunks from the first one that was pulled with it; chunks that the
            requester already had are unknown.
        requester: An instance that pulled them.
        num_holders: Instances that have the last one.
    """

    chunk_id: str
    num_pulls: int
    num_chunks: int
    requester: str
    num_holders: int


class HotChunks:
    """Counts the pulls that this broker grants, and orders copies.

    Attributes:
        num_ordered: Copies ordered since the start.
    """

    def __init__(self, directory: PeerDirectory, limits: HotLimits) -> None:
        self._directory = directory
        self._limits = limits
        self._heat: OrderedDict[tuple[str, str], _Heat] = OrderedDict()
        self._orders: OrderedDict[tuple[str, str, str], tuple[float, CopyOrder]] = OrderedDict()
        self.num_ordered = 0

    def note(
        self,
        principal: Principal,
        requester: str,
        wanted: Mapping[str, ChunkHolders],
        plan: TransferResponse,
        now_s: float,
    ) -> list[PlacedOrder]:
        """Count the pulls of a plan, and order copies of chunks that have become hot.

        Args:
            requester: The instance that will pull; it will have the chunks anyway.
            now_s: Seconds, monotonic.
        """
        placed: list[PlacedOrder] = []
        if not self._limits.num_pulls:
            return placed
        peers: list[PeerStatus] | None = None
        head = next(iter(wanted), "")
        depths = {chunk_id: depth for depth, chunk_id in enumerate(wanted, 1)}
        for pull in plan.assignments:
            for chunk_id in pull.chunk_ids:
                heat = self._count(principal.tenant, chunk_id, now_s)
                if depths[chunk_id] >= heat.depth:
                    heat.head, heat.depth, heat.requester = head, depths[chunk_id], requester
                heat.num_holders = len({*wanted[chunk_id].holders, requester})
                if not self._is_hot(heat, now_s):
                    continue
                if peers is None:
                    peers = [
                        peer
                        for peer in self._directory.visible(principal)
                        if peer.kind == "sidecar" and not peer.draining
                    ]
                placed += self._order(
                    principal,
                    chunk_id,
                    pull.instance,
                    {*wanted[chunk_id].holders, requester},
                    peers,
                    now_s,
                )
        return placed

    def hand_on(self, placed: Sequence[PlacedOrder]) -> None:
        """Drop orders that other brokers deliver."""
        for order in placed:
            self._orders.pop(_key_of(order), None)

    def orders_for(self, principal: Principal, peer_id: str, now_s: float) -> list[CopyOrder]:
        """Return the copies that the peer should make, each once."""
        mine = [key for key in self._orders if key[:2] == (principal.tenant, peer_id)][
            :MAX_COPIES_PER_LEASE
        ]
        taken = [self._orders.pop(key) for key in mine]
        return [order for until_s, order in taken if now_s < until_s]

    def hottest(self, tenant: str, max_prefixes: int, now_s: float) -> list[HotPrefix]:
        """Return what the tenant's peers pulled most within about the last minute. Chunks of one
        prompt count once.
        """
        since_s = now_s - WINDOW_S
        deepest: dict[tuple[str, int], tuple[str, _Heat]] = {}
        for (owner, chunk_id), heat in self._heat.items():
            if heat.began_s < since_s or owner != tenant:
                continue
            prompt = (heat.head, heat.num_pulls)
            known = deepest.get(prompt)
            if known is None or known[1].depth < heat.depth:
                deepest[prompt] = (chunk_id, heat)
        most = heapq.nsmallest(
            max_prefixes,
            deepest.values(),
            key=lambda one: (-one[1].num_pulls, -one[1].depth, one[0]),
        )
        return [
            HotPrefix(chunk_id, heat.num_pulls, heat.depth, heat.requester, heat.num_holders)
            for chunk_id, heat in most
        ]

    def _count(self, tenant: str, chunk_id: str, now_s: float) -> _Heat:
        key = (tenant, chunk_id)
        heat = self._heat.setdefault(key, _Heat(now_s))
        self._heat.move_to_end(key)
        if len(self._heat) > MAX_COUNTED_CHUNKS:
            self._heat.popitem(last=False)
        if now_s - heat.began_s > WINDOW_S:
            heat.began_s, heat.num_pulls, heat.depth = now_s, 0, 0
        heat.num_pulls += 1
        return heat

    def _is_hot(self, heat: _Heat, now_s: float) -> bool:
        if heat.num_pulls < self._limits.num_pulls or now_s - heat.ordered_s < ORDER_TTL_S:
            return False
        heat.ordered_s = now_s
        return True

    def _order(
        self,
        principal: Principal,
        chunk_id: str,
        server: str,
        holders: set[str],
        peers: Sequence[PeerStatus],
        now_s: float,
    ) -> list[PlacedOrder]:
        having = [peer for peer in peers if peer.id in holders]
        missing = self._limits.num_copies - len(having)
        zones, nodes = {peer.zone for peer in having}, {peer.node for peer in having}

        def merit(peer: PeerStatus) -> tuple[bool, bool, float, int, str]:
            """Prefer places without a copy, then idle peers."""
            return (peer.zone in zones, peer.node in nodes, peer.load, peer.num_pulls, peer.id)

        takers = sorted((peer for peer in peers if peer.id not in holders), key=merit)[
            : max(0, missing)
        ]
        placed = [
            PlacedOrder(
                principal.tenant, server, CopyOrder(chunk_id, taker.id, taker.distributed_url)
            )
            for taker in takers
        ]
        for each in placed:
            self._orders[_key_of(each)] = (now_s + ORDER_TTL_S, each.order)
            self.num_ordered += 1
            if len(self._orders) > MAX_ORDERS:
                self._orders.popitem(last=False)
        return placed


def _key_of(placed: PlacedOrder) -> tuple[str, str, str]:
    return (placed.tenant, placed.server, f"{placed.order.chunk_id}/{placed.order.instance}")
