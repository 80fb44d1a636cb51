"""Moves chunks between the serving engine's memory and the chunk store."""

from __future__ import annotations

import logging
import secrets
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from lmcache_core.concurrency import Workers
from lmcache_core.config import LMCacheEngineMetadata
from lmcache_core.engine.digests import SMALL_BYTES, FollowingDigest
from lmcache_core.errors import SerdeError
from lmcache_core.forks import enter_children
from lmcache_core.gpu_connectors.base import GPUConnectorInterface
from lmcache_core.gpu_connectors.streams import LaunchedCopies
from lmcache_core.keys import DEFAULT_TENANT, CacheEngineKey, ChunkKey
from lmcache_core.memory.base import MemoryFormat, MemoryObj, MemoryObjMetadata
from lmcache_core.memory.buffer import BytesBufferMemoryObj
from lmcache_core.memory.counted import CountedMemoryObj
from lmcache_core.memory.dtypes import num_bytes
from lmcache_core.names import MEMORY_TIER
from lmcache_core.record import (
    RAW_SERDE,
    UNSEALED_DIGEST,
    Chunk,
    MissReason,
    RecordHeader,
    TensorSpec,
    decoded_header,
    payload_digest,
    raw_header,
)
from lmcache_core.record.chunk_store import ChunkStore, NotLent
from lmcache_core.telemetry import (
    MISSED_CHUNKS_TOTAL,
    RETRIEVED_BYTES_TOTAL,
    RETRIEVED_CHUNKS_TOTAL,
    RETRIEVED_TOKENS_TOTAL,
    STORED_BYTES_TOTAL,
    STORED_CHUNKS_TOTAL,
    UNSTORED_CHUNKS_TOTAL,
    Counters,
)

if TYPE_CHECKING:
    from lmcache_core.serde.device import DeviceDecoder

logger = logging.getLogger(__name__)

MAX_REMEMBERED_KEYS = 1 << 14
MAX_KNOWN_LENGTHS = 64
_ANY_KEY = CacheEngineKey("", "", 1, 0, "").canonical()
S = TypeVar("S")
T = TypeVar("T")
NamedChunk = tuple[int, int, CacheEngineKey]
"""First token, one past the last, key."""


@dataclass(frozen=True)
class _Expected:
    """What a memory object for a given number of tokens holds."""

    tensors: tuple[TensorSpec, ...]
    num_bytes: int
    metadata: MemoryObjMetadata


@dataclass(eq=False)
class BegunStore:
    """Chunks whose copies out of the serving engine have been launched.

    Attributes:
        named: The chunks, in order.
        reserved: What the chunk store lent for each.
        num_fitting: How many, from the first, are stored or known.
        lent: Index and memory of those that are copied.
        kwargs: Arguments of the copies, which use them until they have ended.
        launched: The copies, if they may still run on a device.
        digests: Known digests, by index.
    """

    named: Sequence[NamedChunk]
    reserved: Sequence[MemoryObj | NotLent]
    num_fitting: int
    lent: Sequence[tuple[int, MemoryObj]]
    kwargs: dict[str, Any] = field(default_factory=dict)
    launched: LaunchedCopies = field(default_factory=LaunchedCopies)
    digests: dict[int, bytes] = field(default_factory=dict)


@dataclass(eq=False)
class BegunLoad:
    """Chunks that are held, to be copied into the serving engine.

    Attributes:
        named: The chunks that were asked for, in order.
        chunks: What the store has returned: a prefix of them.
        num_fitting: How many of these, from the first, are what the serving engine takes.
        reason: Why the next one is not.
        is_promised: As for `begin_load`.
    """

    named: Sequence[NamedChunk]
    chunks: Sequence[Chunk]
    num_fitting: int
    reason: MissReason | None
    is_promised: bool


class KVTransfer:
    """Fills chunks from the serving engine and the serving engine from chunks.

    Args:
        workers: Threads for copies in host memory, and for digests.
        unit_tokens: Tokens per unit of the connector: more than 1 if it moves whole blocks.
        decoder: Decodes records on the device of the serving engine's KV; None: only raw chunks are
            loaded.
    """

    def __init__(
        self,
        store: ChunkStore,
        gpu_connector: GPUConnectorInterface,
        metadata: LMCacheEngineMetadata,
        counters: Counters,
        workers: Workers,
        unit_tokens: int = 1,
        decoder: DeviceDecoder | None = None,
    ) -> None:
        self._unit_tokens = unit_tokens
        self._decoder = decoder
        self._store = store
        self._gpu_connector = gpu_connector
        self._dtype = metadata.kv_dtype_name
        self._counters = counters
        self._workers = workers
        self._loaded_with_loss = LoadedWithLoss()
        self._known: dict[int, _Expected] = {}

    def store(self, named: Sequence[NamedChunk], kwargs: dict[str, Any]) -> list[bool]:
        """Copy the chunks that are not in host memory out of the serving engine and publish them,
        as many from the first as there is memory for.

        Args:
            named: The chunks, in order.
            kwargs: Arguments of the GPU connector.

        Returns:
            Whether each chunk is visible now.
        """
        return self.finish_store(self.begin_store(named, kwargs))

    def begin_store(self, named: Sequence[NamedChunk], kwargs: dict[str, Any]) -> BegunStore:
        """Do the first half of `store`, up to the copies, which may still run on a device. Pass the
        result to `finish_store`.
        """
        #  named     | chunk 0 | chunk 1 | chunk 2 | chunk 3 | chunk 4 |
        #  reserved  | KNOWN   | memory  | memory  | NO_ROOM | memory  |
        #            |<------- num_fitting ------->|<-- given back --->|
        #  lent                | 1       | 2       |
        #
        # Memory behind the first that found no room would hold chunks behind a gap, which no
        # prefix reaches.
        shapes = [self._expected(end - start).metadata.shape for start, end, _ in named]
        reserved = self._store.reserve([key for _, _, key in named], shapes, self._dtype)
        num_fitting = (*reserved, NotLent.NO_ROOM).index(NotLent.NO_ROOM)
        lent = [
            (i, memory)
            for i, memory in enumerate(reserved[:num_fitting])
            if not isinstance(memory, NotLent)
        ]
        begun = BegunStore(named, reserved, num_fitting, lent)
        needs_digests = self._store.needs_digests
        try:
            if lent:
                kwargs = self._gpu_connector.checked(kwargs)
                begun.kwargs = kwargs = self._gpu_connector.launching(kwargs, begun.launched)

            def fill(one: tuple[int, MemoryObj]) -> None:
                start, end, _ = named[one[0]]
                digest = self._fill(one[1], start, end, kwargs, needs_digests)
                if digest is not None:
                    begun.digests[one[0]] = digest

            self._each(fill, lent, named, kwargs)
        except BaseException:
            self._give_up(begun, reserved)
            raise
        return begun

    def finish_store(self, begun: BegunStore, is_intact: bool = True) -> list[bool]:
        """Publish the chunks of a store once their copies have ended.

        Args:
            is_intact: False: the serving engine may have overwritten what was copied, and nothing
                is published.

        Returns:
            Whether each chunk is visible now.
        """
        named, lent = begun.named, begun.lent if is_intact else []
        visible = [memory is NotLent.KNOWN for memory in begun.reserved]
        put: list[Chunk] = []
        try:
            if lent and self._store.needs_digests:
                self._digest(begun)
            begun.launched.wait()
            put = [self._chunk(named[i], memory, begun.digests.get(i)) for i, memory in lent]
            stored = self._store.put(put) if put else []
            num_bytes = 0
            for (i, memory), is_kept in zip(lent, stored, strict=True):
                visible[i] = is_kept
                num_bytes += memory.get_size() if is_kept else 0
            self._counters.add(STORED_CHUNKS_TOTAL, sum(stored))
            self._counters.add(STORED_BYTES_TOTAL, num_bytes)
            self._counters.add(UNSTORED_CHUNKS_TOTAL, visible.count(False))
        finally:
            self._store.release(put)
            self._give_up(begun, begun.reserved[begun.num_fitting :] if put else begun.reserved)
        return visible

    def load(
        self,
        named: Sequence[NamedChunk],
        recompute_s: float | None,
        kwargs: dict[str, Any],
        wanted: tuple[int, int] | None = None,
    ) -> int:
        """Copy chunks into the serving engine. The copies have ended when it returns.

        Args:
            named: The chunks, in order.
            recompute_s: Cost of recomputing one of them; None if unknown.
            kwargs: Arguments of the GPU connector.
            wanted: First token, one past the last, to be written; of chunks that extend beyond,
                only the part inside is written, by a connector that takes `wanted`. None:
                everything.

        Returns:
            How many, from the first, are loaded now.
        """
        return self.finish_load(self.begin_load(named, recompute_s), kwargs, wanted)

    def begin_load(
        self,
        named: Sequence[NamedChunk],
        recompute_s: float | None,
        is_promised: bool = False,
    ) -> BegunLoad:
        """Do the first half of `load`: the chunks are here, and are held until `finish_load`, or
        `abandon_load`.

        Args:
            is_promised: The serving engine counts on them from now on: their digests are checked
                here, and again while they are copied if the store may not have held them.
        """
        #  named      | chunk 0 | chunk 1 | chunk 2 | chunk 3 | chunk 4 |
        #  chunks     | right   | damaged | right   | misfit  |           the store's prefix
        #             |<------- num_fitting ------->|                     copied
        #             |<------->| num_loaded                            no gap: the rest is a miss
        keys = [key for _, _, key in named]
        chunks = self._store.get(keys, recompute_s, check_later=not is_promised)
        misfits = [
            self._misfit(chunk, key, end - start)
            for (start, end, key), chunk in zip(named, chunks, strict=False)
        ]
        num_fitting = next((i for i, reason in enumerate(misfits) if reason), len(chunks))
        reason = misfits[num_fitting] if num_fitting < len(chunks) else None
        return BegunLoad(named, chunks, num_fitting, reason, is_promised)

    @staticmethod
    def joined_loads(loads: Sequence[BegunLoad]) -> BegunLoad:
        """Return promised loads as one, each behind the tokens of those before it."""
        named: list[NamedChunk] = []
        chunks: list[Chunk] = []
        for load in loads:
            at = named[-1][1] if named else 0
            own = load.named[: len(load.chunks)]
            named += [(at + start, at + end, key) for start, end, key in own]
            chunks += load.chunks
        return BegunLoad(named, chunks, len(chunks), None, is_promised=True)

    def shorten_load(self, begun: BegunLoad, num_chunks: int) -> None:
        """Release the chunks of a load behind this many, of those that fit."""
        self._store.release(begun.chunks[num_chunks:])
        begun.chunks, begun.num_fitting, begun.reason = begun.chunks[:num_chunks], num_chunks, None

    def abandon_load(self, begun: BegunLoad) -> None:
        """Release the chunks of a load that does not take place."""
        self.shorten_load(begun, 0)

    def finish_load(
        self,
        begun: BegunLoad,
        kwargs: dict[str, Any],
        wanted: tuple[int, int] | None = None,
        when_group: Callable[[int], None] | None = None,
    ) -> int:
        """Do the second half of `load`, and return how many, from the first, are loaded now.

        Args:
            when_group: Copies one layer group after the other, of chunks that are promised and raw;
                called with the number of each but the last once its copies have ended.
        """
        named, chunks, num_fitting = begun.named, begun.chunks, begun.num_fitting
        num_loaded = 0
        try:
            damaged: list[Chunk] = []
            decoded: dict[int, torch.Tensor] = {}

            def copy(kwargs: dict[str, Any], i: int) -> bool:
                if damaged:  # the chunks that follow are recomputed
                    return False
                start, end, _ = named[i]
                if chunks[i].described.serde == RAW_SERDE:
                    is_right = self._copy(chunks[i], start, end, kwargs, wanted)
                else:
                    status = self._decode(chunks[i], start, end, kwargs, wanted)
                    is_right = status is not None
                    if status is not None and len(status):
                        decoded[i] = status
                if not is_right:
                    damaged.append(chunks[i])
                return is_right

            if num_fitting:
                kwargs = self._gpu_connector.loading(kwargs, named[num_fitting - 1][1])
                kwargs = self._gpu_connector.checked(kwargs)
                launched = LaunchedCopies()
                kwargs = self._gpu_connector.launching(kwargs, launched)
                for part in self._parts(named[0], kwargs, when_group):
                    try:
                        are_right = self._each(partial(copy, part), range(num_fitting), named, part)
                    finally:
                        launched.wait()  # before their chunks are released
                if begun.is_promised and not self._store.holds(chunks):
                    for i, chunk in enumerate(chunks[:num_fitting]):
                        are_right[i] &= (
                            payload_digest(chunk.memory.byte_array) == chunk.header.digest
                        )
                for i in _nonzero(decoded):
                    damaged.append(chunks[i])
                    are_right[i] = False
                num_loaded = (*are_right, False).index(False)
            for chunk in damaged:
                self._store.reject(chunk)
            if num_loaded < len(chunks):
                is_misfit = num_loaded == num_fitting
                reason = (begun.reason if is_misfit else None) or MissReason.CORRUPT
                self._counters.add(MISSED_CHUNKS_TOTAL, len(chunks) - num_loaded, reason)
            for (_, _, key), chunk in zip(named, chunks[:num_loaded], strict=False):
                self._loaded_with_loss.note(key, chunk.lossy)
        finally:
            were_held = self._store.release(chunks)
        if not (were_held or begun.is_promised):
            self._counters.add(MISSED_CHUNKS_TOTAL, num_loaded, MissReason.UNAVAILABLE)
            return 0
        loaded = Counter(
            (chunk.tier, end - start)
            for (start, end, _), chunk in zip(named, chunks[:num_loaded], strict=False)
        )
        for (tier, length), count in loaded.items():
            size = self._expected(length).num_bytes
            self._counters.add(RETRIEVED_TOKENS_TOTAL, count * length * self._unit_tokens, tier)
            self._counters.add(RETRIEVED_CHUNKS_TOTAL, count, tier)
            self._counters.add(RETRIEVED_BYTES_TOTAL, count * size, tier)
        return num_loaded

    def _parts(
        self,
        first: NamedChunk,
        kwargs: dict[str, Any],
        when_group: Callable[[int], None] | None,
    ) -> Iterator[dict[str, Any]]:
        """Yield the arguments of what is copied at once, of a load whose first chunk this is: all,
        or each layer group; `when_group` is called between two.
        """
        if when_group is None:
            yield kwargs
            return
        start, end, _ = first
        for group in range(len(self._expected(end - start).tensors)):
            if group:
                when_group(group - 1)
            yield {**kwargs, "group": group}

    def through_store(self, memory: MemoryObj) -> MemoryObj:
        """Return a copy of `memory` that has been through the chunk store; `memory` itself if the
        store accepts nothing at the moment.
        """
        shape = tuple(memory.metadata.shape)
        key = CacheEngineKey("canary", "canary", 1, 0, secrets.token_hex(32))
        (reserved,) = self._store.reserve([key], [shape], self._dtype)
        if isinstance(reserved, NotLent):
            return memory
        reserved.byte_array[:] = memory.byte_array
        header = raw_header(key, shape, self._dtype, UNSEALED_DIGEST)
        put = [Chunk.unsealed(ChunkKey.of(DEFAULT_TENANT, key), header, reserved, MEMORY_TIER)]
        try:
            self._store.put(put)
        finally:
            self._store.release(put)
        chunks = self._store.get([key])
        try:
            if not chunks:
                return memory
            return BytesBufferMemoryObj(bytes(chunks[0].memory.byte_array), memory.metadata)
        finally:
            self._store.release(chunks)
            self._store.forget([key])

    def _each(
        self,
        work: Callable[[S], T],
        items: Sequence[S],
        named: Sequence[NamedChunk],
        kwargs: dict[str, Any],
    ) -> list[T]:
        """Copy chunks one by one, or in several threads if they are large and in host memory."""
        if len(items) > 1:
            start, end, _ = named[0]
            is_large = self._expected(end - start).num_bytes > SMALL_BYTES
            if is_large and self._gpu_connector.is_on_host(kwargs):
                return self._workers.map(work, items)
        return [work(item) for item in items]

    def _fill(
        self,
        memory: MemoryObj,
        start: int,
        end: int,
        kwargs: dict[str, Any],
        needs_digest: bool,
    ) -> bytes | None:
        """Copy a chunk out of the serving engine; return the digest of a large one in host memory
        if it is needed.
        """
        connector = self._gpu_connector
        is_large = memory.get_size() > SMALL_BYTES
        if not (needs_digest and is_large and connector.is_on_host(kwargs)):
            connector.from_gpu(memory, start, end, **kwargs)
            return None
        digest = FollowingDigest(memory.byte_array)
        if connector.reports_progress:
            kwargs = {**kwargs, "progress": digest.copied}
        connector.from_gpu(memory, start, end, **kwargs)
        return digest.finish()

    def _digest(self, begun: BegunStore) -> None:
        """Compute the missing digests of chunks, each when its copy has ended; large ones in other
        threads.
        """
        pending: dict[int, Future[bytes]] = {}
        try:
            for i, memory in begun.lent:
                begun.launched.wait_for_first()
                if i in begun.digests:
                    continue
                if memory.get_size() <= SMALL_BYTES:
                    begun.digests[i] = payload_digest(memory.byte_array)
                else:
                    pending[i] = self._workers.submit(payload_digest, memory.byte_array)
        finally:
            wait(pending.values())  # released memory must not be read any more
        for i, digest in pending.items():
            begun.digests[i] = digest.result()

    def _give_up(self, begun: BegunStore, reserved: Sequence[MemoryObj | NotLent]) -> None:
        """Return memory that was reserved for a store and is not published, once nothing is copied
        to it.
        """
        try:
            begun.launched.wait()
        finally:
            self._store.abort([memory for memory in reserved if not isinstance(memory, NotLent)])

    def _copy(
        self,
        chunk: Chunk,
        start: int,
        end: int,
        kwargs: dict[str, Any],
        wanted: tuple[int, int] | None,
    ) -> bool:
        """Copy the wanted tokens of a chunk into the serving engine; False if its digest was still
        unchecked and does not match.
        """
        payload = chunk.memory.byte_array
        kv = CountedMemoryObj(payload, self._expected(end - start).metadata, None)
        low, high = (start, end) if wanted is None else (max(start, wanted[0]), min(end, wanted[1]))
        if (low, high) != (start, end):
            if chunk.is_unchecked and payload_digest(payload) != chunk.header.digest:
                return False
            if low < high:
                self._gpu_connector.to_gpu(kv, start, end, wanted=(low, high), **kwargs)
            return True
        if not chunk.is_unchecked or len(payload) <= SMALL_BYTES:
            self._gpu_connector.to_gpu(kv, start, end, **kwargs)
            return not chunk.is_unchecked or payload_digest(payload) == chunk.header.digest
        digest = FollowingDigest(payload)
        if self._gpu_connector.reports_progress:
            kwargs = {**kwargs, "progress": digest.copied}
        self._gpu_connector.to_gpu(kv, start, end, **kwargs)
        return digest.finish() == chunk.header.digest

    def _decode(
        self,
        chunk: Chunk,
        start: int,
        end: int,
        kwargs: dict[str, Any],
        wanted: tuple[int, int] | None,
    ) -> torch.Tensor | None:
        """Begin to decode a chunk into the serving engine.

        Returns:
            All zeros, once the device is done, if the chunk was decoded; None if it is damaged.
        """
        assert self._decoder is not None, "`_misfit` lets no encoded chunk pass"
        payload = chunk.memory.byte_array
        if chunk.is_unchecked and payload_digest(payload) != chunk.header.digest:
            return None
        status: list[torch.Tensor] = []

        def decode(out: torch.Tensor, scratch: torch.Tensor) -> None:
            assert self._decoder is not None
            status.append(self._decoder.begin(chunk.described, payload, out, scratch))

        low, high = (start, end) if wanted is None else (max(start, wanted[0]), min(end, wanted[1]))
        if low >= high:
            return torch.zeros(0)
        try:
            self._gpu_connector.to_gpu(
                chunk.memory, start, end, **kwargs, decode=decode, wanted=(low, high)
            )
        except SerdeError as exc:
            logger.warning("encoded chunk is damaged, recomputing it: error=%s", exc)
            return None
        return status[0]

    def _chunk(self, named: NamedChunk, memory: MemoryObj, digest: bytes | None) -> Chunk:
        """Return filled memory as a chunk, sealed if its digest is known."""
        start, end, key = named
        is_lossy = key in self._loaded_with_loss
        tensors = self._expected(end - start).tensors
        header = RecordHeader(
            key.canonical(), RAW_SERDE, "", is_lossy, tensors, digest or UNSEALED_DIGEST
        )
        chunk = Chunk(ChunkKey.of(DEFAULT_TENANT, key), header, None, memory, MEMORY_TIER)
        chunk.is_sealed = digest is not None  # its head is built only if it leaves the process
        return chunk

    def _expected(self, num_tokens: int) -> _Expected:
        """Return what a memory object of that many tokens holds. Cached, since nearly all chunks
        have the same length.
        """
        known = self._known.get(num_tokens)
        if known is None:
            connector = self._gpu_connector
            shape = torch.Size(connector.get_shape(num_tokens))
            size = num_bytes(shape, self._dtype)
            tensors = connector.tensor_specs(num_tokens)
            if tensors is None:
                tensors = (TensorSpec("", self._dtype, tuple(shape), 0, size),)
            metadata = MemoryObjMetadata(shape, self._dtype, 0, 0, 1, MemoryFormat.KV_BLOB)
            # Built once for all chunks of this length; only the key and the digest differ.
            RecordHeader(_ANY_KEY, RAW_SERDE, "", False, tensors, UNSEALED_DIGEST).check(size)
            known = _Expected(tensors, size, metadata)
            if len(self._known) >= MAX_KNOWN_LENGTHS:
                self._known.clear()
            self._known[num_tokens] = known
        return known

    def _misfit(self, chunk: Chunk, key: CacheEngineKey, num_tokens: int) -> MissReason | None:
        """Return why a chunk is not exactly the KV that the connector takes (raw or decoded on the
        device, with these tensors and nothing else); None if it is.

        Whether it may have been encoded with loss was decided by the tier that it comes from.
        """
        if chunk.key.key != key:
            return MissReason.IDENTITY
        header, expected = chunk.described, self._expected(num_tokens)
        if self._decoder is not None and self._decoder.takes(header):
            is_kv = decoded_header(header).tensors == expected.tensors
            return None if is_kv else MissReason.LAYOUT
        is_kv = header.serde == RAW_SERDE and header.tensors == expected.tensors
        is_whole = chunk.memory.get_size() == expected.num_bytes
        return None if is_kv and is_whole else MissReason.LAYOUT


def _nonzero(found: dict[int, torch.Tensor]) -> list[int]:
    """Return the keys of tensors that are not all zeros. They are read from their device at
    once.
    """
    if not found:
        return []
    flags: list[bool] = torch.stack([tensor.any() for tensor in found.values()]).tolist()
    return [key for key, flag in zip(found, flags, strict=True) if flag]


class LoadedWithLoss:
    """A bounded set of keys of chunks that the serving engine loaded with loss. Thread-safe.

    The serving engine may store such a chunk again once no tier of this process has it. Its values
    are not the computed ones, and must not be stored as if they were.
    """

    def __init__(self) -> None:
        self._keys: OrderedDict[CacheEngineKey, None] = OrderedDict()
        self.enter_child()
        enter_children(self)

    def enter_child(self) -> None:
        """Remember with a new lock."""
        self._lock = threading.Lock()

    def __contains__(self, key: CacheEngineKey) -> bool:
        return key in self._keys  # atomic

    def note(self, key: CacheEngineKey, is_lossy: bool) -> None:
        """Record that a chunk has just been loaded, with or without loss."""
        if not is_lossy and not self._keys:
            return
        with self._lock:
            self._keys.pop(key, None)
            if is_lossy:
                self._keys[key] = None
                if len(self._keys) > MAX_REMEMBERED_KEYS:
                    self._keys.popitem(last=False)
