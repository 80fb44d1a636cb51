"""The broker's client: one HTTP call per method, bounded in time and size; every failure is an
`UnavailableError`.
"""

from __future__ import annotations

import ssl
from collections.abc import Sequence

import httpx
import msgspec

from lmcache_core.lookup.messages import MAX_HOLDERS_PER_CHUNK
from lmcache_core.p2p import messages as m
from lmcache_core.p2p.distributed_url import parse_distributed_url
from lmcache_core.p2p.messages import Assignment, HeldBy, Peer
from lmcache_core.security import ShownToken, validate_instance_id
from lmcache_core.wire.json_http import JsonHttpClient


class BrokerClient(JsonHttpClient):
    """Talks to one broker. The constructor does no I/O; `open` and `close` belong to the owner.

    Args:
        base_url: `http://host:port` or `https://host:port`, without credentials.
        token: Bearer token; None if the broker requires none.
        timeout_s: Limit on each call, from connecting to the last byte.
        transport: Replaces the network in tests.
        tls: Trusted authorities and client certificate for https; None: the system's authorities.

    Raises:
        ConfigError: `base_url` is not of that form, or `token` is not a valid header value.
    """

    def __init__(
        self,
        base_url: str,
        token: ShownToken,
        timeout_s: float,
        *,
        transport: httpx.AsyncBaseTransport | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        super().__init__("broker", base_url, token, timeout_s, transport=transport, tls=tls)

    async def register(
        self,
        peer: Peer,
        *,
        load: float,
        ttl_ms: int | None,
        draining: bool = False,
        drain: m.DrainReport | None = None,
        figures: m.PeerFigures | None = None,
    ) -> m.Lease:
        """Announce a peer, or renew its lease: the same call, so that it also works for a broker
        that has lost its state.

        Args:
            load: 0 (idle) to 1 (full).
            ttl_ms: The lease to request, None for the default; the broker may grant another.
            draining: The peer accepts no new pulls.

        Raises:
            UnavailableError: The broker did not answer, or refused.
        """
        body = m.AnnounceRequest(
            peer.incarnation,
            peer.distributed_url,
            peer.kind,
            peer.zone,
            peer.node,
            min(max(load, 0.0), 1.0),
            ttl_ms,
            draining,
            drain or msgspec.UNSET,
            figures or msgspec.UNSET,
        )
        return self.decode(await self.call("PUT", _peer_path(peer.id), body), m.Lease)

    async def deregister(self, instance_id: str) -> None:
        """End a peer's lease, if there is one.

        Raises:
            UnavailableError: The broker did not answer, or refused.
        """
        await self.call("DELETE", _peer_path(instance_id), absent_ok=True)

    async def drain(self, instance_id: str) -> None:
        """Assign no new pulls to a peer. Needs the role `admin`; a peer drains itself with
        `register(draining=True)`.

        Raises:
            UnavailableError: The broker did not answer, or refused.
        """
        await self.call("POST", f"{_peer_path(instance_id, '/v1/admin')}:drain")

    async def peers(self) -> list[m.PeerStatus]:
        """List the live peers that this token may see.

        Raises:
            UnavailableError: The broker did not answer, or refused.
        """
        return self.decode(await self.call("GET", "/v1/peers"), m.PeersResponse).peers

    async def transfers(
        self,
        requester: str,
        chunks: Sequence[tuple[bytes, Sequence[str | HeldBy]]],
        *,
        wait_ms: int = 0,
    ) -> list[Assignment]:
        """Ask for peers to serve chunks.

        Args:
            requester: The instance that will pull.
            chunks: Distinct chunk ids (16 bytes) with the ids of their possible holders, optionally
                with their tiers. Only the first 4096 chunks and the first 16 holders of each are
                sent.
            wait_ms: How long the broker may wait for a free holder; must be less than this client's
                timeout.

        Returns:
            Pulls that cover each chunk at most once. A chunk that is in none of them cannot be
                served now.

        Raises:
            UnavailableError: The broker did not answer, refused, or its answer does not fit.
        """
        named = [
            _holders_of(chunk_id, holders[:MAX_HOLDERS_PER_CHUNK])
            for chunk_id, holders in chunks[: m.MAX_CHUNKS_PER_TRANSFER]
        ]
        asked = {chunk.chunk_id: chunk.holders for chunk in named}
        if not asked:
            return []
        body = m.TransferRequest(validate_instance_id(requester), named, wait_ms)
        answer = self.decode(await self.call("POST", "/v1/transfers", body), m.TransferResponse)
        for assignment in answer.assignments:
            self._check(assignment, requester, asked)
        return answer.assignments

    async def renew(self, requester: str, pull: str) -> m.Renewal | None:
        """Extend a pull by the lifetime of another ticket.

        Args:
            pull: `Assignment.pull`.

        Returns:
            The new ticket; None if the broker does not know the pull, or considers it too long.

        Raises:
            UnavailableError: The broker did not answer, refused, or its answer does not fit.
        """
        body = m.PullsRequest(validate_instance_id(requester), [pull])
        answer = self.decode(await self.call("POST", "/v1/transfers:renew", body), m.RenewResponse)
        return next((renewal for renewal in answer.renewed if renewal.pull == pull), None)

    async def done(self, requester: str, pulls: Sequence[str]) -> None:
        """Report that pulls have ended, so that others need not wait for their tickets to expire.

        Args:
            pulls: `Assignment.pull` of each; only the first 4096 are sent, empty ones are skipped.

        Raises:
            UnavailableError: The broker did not answer, or refused.
        """
        told = [pull for pull in pulls if pull][: m.MAX_CHUNKS_PER_TRANSFER]
        if told:
            await self.call(
                "POST",
                "/v1/transfers:done",
                m.PullsRequest(validate_instance_id(requester), told),
            )

    def _check(self, assignment: Assignment, requester: str, asked: dict[str, list[str]]) -> None:
        """Check an assignment against the request. Removes its chunks from `asked`, so that a
        second mention fails.
        """
        try:
            parse_distributed_url(assignment.distributed_url)
        except ValueError as exc:
            raise self.unusable(str(exc)) from exc
        if assignment.instance == requester:
            raise self.unusable("it assigns the requester to itself")
        for chunk_id in assignment.chunk_ids:
            if assignment.instance not in asked.pop(chunk_id, ()):
                raise self.unusable(
                    "it assigns a chunk that was assigned before, not requested, or not held there"
                )


def _peer_path(instance_id: str, prefix: str = "/v1") -> str:
    return f"{prefix}/peers/{validate_instance_id(instance_id)}"


def _holders_of(chunk_id: bytes, holders: Sequence[str | HeldBy]) -> m.ChunkHolders:
    if len(chunk_id) != m.CHUNK_ID_BYTES:
        raise ValueError(f"a chunk id has {m.CHUNK_ID_BYTES} bytes, not {len(chunk_id)}")
    ids = [holder if isinstance(holder, str) else holder.instance for holder in holders]
    tiers = [holder.tier for holder in holders if not isinstance(holder, str)]
    return m.ChunkHolders(chunk_id.hex(), ids, tiers if len(tiers) == len(ids) else [])
