"""The broker's requests: copies of hot chunks to the peers that it names, and the drain."""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from lmcache_core.concurrency import TaskSupervisor
from lmcache_core.errors import AuthenticationError, ProtocolError, UnavailableError
from lmcache_core.keys import ChunkKey
from lmcache_core.p2p import CopyOrder, DrainReport, LeaseListener
from lmcache_core.record import Chunk
from lmcache_core.storage.sealing import seal_all
from lmcache_core.telemetry import Counters
from lmcache_core.wire.client import LmClient
from lmcache_node.drain import NodeDrain
from lmcache_node.local_chunks import LocalChunks
from typing_extensions import override

from lmcache_sidecar import metrics
from lmcache_sidecar.handover.takers import MAX_BATCH_CHUNKS

logger = logging.getLogger(__name__)

MAX_WAITING_ORDERS: Final = 256
_STEP: Final = 1024
"""Keys compared before other work gets its turn; a large arena has many."""


@dataclass
class BrokerRequests(LeaseListener):
    """Carries out the broker's requests to this sidecar: begins the drain and reports its progress,
    and sends copies of hot chunks, one peer after the other, in the background. Copies that cannot
    be sent are dropped: the broker orders them again.

    Attributes:
        connect: Creates the client of a peer, from its distributed URL.
        counters: Counters of copies, under the names of `lmcache_sidecar.metrics`.
    """

    drain: NodeDrain
    chunks: LocalChunks
    connect: Callable[[str], LmClient]
    tasks: TaskSupervisor
    counters: Counters
    _waiting: dict[CopyOrder, None] = field(init=False, default_factory=dict)
    _is_copying: bool = field(init=False, default=False)

    @override
    def drain_wanted(self) -> None:
        self.drain.begin()

    @override
    def drain_report(self) -> DrainReport | None:
        if not self.drain.has_begun:
            return None
        progress = self.drain.progress
        return DrainReport(
            progress.state.value,
            progress.total,
            progress.handed_over,
            progress.already_elsewhere,
            progress.failed,
            progress.left,
        )

    @override
    def copies_wanted(self, orders: Sequence[CopyOrder]) -> None:
        if self.drain.has_begun:  # the drain hands over everything instead
            return
        for order in orders:
            if len(self._waiting) < MAX_WAITING_ORDERS:
                self._waiting[order] = None
        if self._waiting and not self._is_copying:
            self._is_copying = self.tasks.start("copies", self._copy())

    async def _copy(self) -> None:
        try:
            while self._waiting:
                orders, self._waiting = self._waiting, {}
                by_peer: defaultdict[str, list[str]] = defaultdict(list)
                for order in orders:
                    by_peer[order.distributed_url].append(order.chunk_id)
                keys = await self._keys({order.chunk_id for order in orders})
                for url, chunk_ids in by_peer.items():
                    await self._copy_to(
                        url, [keys[chunk_id] for chunk_id in chunk_ids if chunk_id in keys]
                    )
        finally:
            self._is_copying = False

    async def _keys(self, chunk_ids: set[str]) -> dict[str, ChunkKey]:
        """Return the keys of those chunks that are here, by chunk id."""
        found: dict[str, ChunkKey] = {}
        for i, (key, _) in enumerate(await asyncio.to_thread(self.chunks.hottest_first)):
            if i % _STEP == _STEP - 1:
                await asyncio.sleep(0)
            chunk_id = key.key.chunk_id().hex()
            if chunk_id in chunk_ids:
                found[chunk_id] = key
                if len(found) == len(chunk_ids):
                    break
        return found

    async def _copy_to(self, url: str, keys: Sequence[ChunkKey]) -> None:
        try:
            client = self.connect(url)
        except ValueError as exc:
            logger.warning("copies not sent: peer=%r error=%s", url, exc)
            return
        try:
            for begin in range(0, len(keys), MAX_BATCH_CHUNKS):
                batch = keys[begin : begin + MAX_BATCH_CHUNKS]
                is_there = await client.contains(batch)
                await self._send(
                    client, [key for key, has in zip(batch, is_there, strict=True) if not has]
                )
        except (UnavailableError, AuthenticationError, ProtocolError) as exc:
            logger.info("copies not sent: peer=%s error=%s", url, exc)
        finally:
            await client.close()

    async def _send(self, client: LmClient, keys: Sequence[ChunkKey]) -> None:
        if not keys:
            return
        chunks = [result for result in await self.chunks.read(keys) if isinstance(result, Chunk)]
        try:
            await seal_all(chunks)
            for chunk, is_taken in zip(chunks, await client.put(chunks), strict=True):
                self.counters.add(metrics.COPIED_CHUNKS_TOTAL, is_taken)
                self.counters.add(metrics.COPIED_BYTES_TOTAL, chunk.num_bytes * is_taken)
        finally:
            for chunk in chunks:
                chunk.release()
