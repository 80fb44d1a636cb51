"""The cache engine: `retrieve` and `store` between a serving engine's KV and the tiers.

The one data path, in five hops: `LMCacheEngine.retrieve` -> `TokenDatabase.process_tokens` ->
`ChunkStore.get` -> (tiers) -> `GPUConnectorInterface.to_gpu`; `store` is its mirror.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch

from lmcache_core.concurrency import Workers, close_apart
from lmcache_core.config import LMCacheEngineConfig, LMCacheEngineMetadata
from lmcache_core.engine.guard import CallGuard, DegradingGuard
from lmcache_core.engine.prefill_rate import PrefillRate
from lmcache_core.engine.stores import BYTES_PER_GB, SidecarClient, create_chunk_store
from lmcache_core.engine.transfer import KVTransfer, NamedChunk
from lmcache_core.gpu_connectors.base import GPUConnectorInterface
from lmcache_core.memory.base import MemoryAllocatorInterface
from lmcache_core.memory.dtypes import num_bytes
from lmcache_core.names import DOCUMENTED_TIERS, tier_name
from lmcache_core.record.chunk_store import ChunkStore
from lmcache_core.telemetry import REQUESTED_TOKENS_TOTAL, Counters
from lmcache_core.token_database import ChunkedTokenDatabase, MultimodalSpan, TokenDatabase

if TYPE_CHECKING:
    from lmcache_core.gpu_connectors import EngineMemory

TIERS = frozenset(DOCUMENTED_TIERS.values())
"""The tiers that `lookup` can be limited to."""
CLOSE_MARGIN_S = 2.0
"""How much longer than `close_drain_s` closing an engine may hold its caller."""


class LMCacheEngine:
    """Stores and retrieves the KV of token prefixes.

    A context manager: entering opens it unless it is open, leaving closes it.
    `LMCacheEngineBuilder.get_or_create` returns it opened. Thread-safe.

    Args:
        memory_allocator: Host memory for chunks in embedded mode; None with a sidecar, whose arena
            is used.
        store: The chunk store; by default the one that the config selects (embedded tiers or the
            sidecar).
    """

    def __init__(
        self,
        config: LMCacheEngineConfig,
        metadata: LMCacheEngineMetadata,
        memory_allocator: MemoryAllocatorInterface | None,
        token_database: TokenDatabase,
        gpu_connector: GPUConnectorInterface,
        store: ChunkStore | None = None,
    ) -> None:
        self.config = config
        self.metadata = metadata
        self.naming = threading.RLock()
        """Held while the revision of the model changes. Hold it to store KV that must not get a
        name given meanwhile.
        """
        self.counters = Counters()
        self._token_database = token_database
        self._gpu_connector = gpu_connector
        self._workers = Workers("lmcache-digest")
        client = SidecarClient(
            f"engine-{os.getpid()}",
            chunk_bytes=_chunk_bytes(token_database, gpu_connector, metadata),
        )
        self._store = store or create_chunk_store(
            config, metadata, memory_allocator, self.counters, self._workers, client
        )
        self._transfer = KVTransfer(
            self._store, gpu_connector, metadata, self.counters, self._workers
        )
        self._prefill = PrefillRate(config.prefill_tokens_per_s)
        self._is_open = False
        self._guard: CallGuard = nullcontext
        if config.error_handling:
            self._guard = DegradingGuard(self.counters)

    def open(self) -> None:
        """Start the tiers, or connect to the sidecar, unless that has been done. An absent remote
        tier or sidecar is not an error.
        """
        if self._is_open:
            return
        self._workers.open()
        try:
            self._store.open(self._token_database.use_salt)
        except BaseException:
            self._workers.close()
            raise
        self._is_open = True

    def close(self) -> None:
        """Finish or abandon background work and free everything; `LMCacheEngineBuilder` forgets the
        engine. Idempotent.

        Pending writes have `close_drain_s` seconds. It may be called from anywhere: by several
        threads, by an exit handler or a finalizer, and by a signal handler in the middle of another
        call. Closing then ends with that call at the latest.
        """
        LMCacheEngineBuilder._forget(self)
        self._is_open = False
        close_apart(self._close, self.config.close_drain_s + CLOSE_MARGIN_S)

    def _close(self) -> None:
        try:
            self._store.close()
        finally:
            self._workers.close()

    def __enter__(self) -> Self:
        self.open()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def attach(self, kvcaches: Any, engine_memory: EngineMemory) -> None:
        """Check, before the first request, that the connector for paged memory reads and writes it
        as the serving engine does.

        Sends a known pattern through gather, store, load and scatter for each layer group and
        compares it; the memory is restored afterwards. If the store accepts nothing at the moment
        (no sidecar), only the layout is checked.

        Args:
            kvcaches: The argument that the connector will get in service; nothing else may use its
                first and last blocks during the check.
            engine_memory: The serving engine's own view of that memory, for example
                `LogicalMemory`.

        Raises:
            ValueError: The pattern came back changed: the layout is not as declared.
            TypeError: The connector is not one for paged memory.
        """
        from lmcache_core.gpu_connectors import PagedConnector, run_canary

        if not isinstance(self._gpu_connector, PagedConnector):
            raise TypeError(
                f"{type(self._gpu_connector).__name__} does not work on paged memory; there is"
                " nothing to check"
            )
        run_canary(self._gpu_connector, kvcaches, engine_memory, self._transfer.through_store)

    def store(
        self,
        tokens: torch.Tensor,
        mask: torch.Tensor | None = None,
        spans: Sequence[MultimodalSpan] = (),
        **kwargs: Any,
    ) -> None:
        """Store the KV of these tokens (of whole chunks only, unless `save_unfull_chunk` is set);
        returns before slow tiers have written it.

        Args:
            tokens: Token ids, shape `[seq_len]`, any integer dtype.
            mask: Booleans, shape `[seq_len]`, Falses first: tokens whose KV is already stored.
            spans: Images and other inputs that placeholder tokens stand for; without them equal
                placeholders would share KV.
            **kwargs: Arguments of the GPU connector, for example `kvcaches`.

        Raises:
            ValueError: A token id is not an integer in 0..2^32-1, the number of Falses in the mask
                is not a multiple of the chunk size, or engine memory is not as declared.
        """
        with self._guard("store"):
            least = 1 if self.config.save_unfull_chunk else self.config.chunk_size
            named = [
                chunk for chunk in self._named(tokens, mask, spans) if chunk[1] - chunk[0] >= least
            ]
            for start, _, key in named:
                if self._prefill.is_open(key):
                    self._prefill.stored(key, len(tokens) - start)
                    break
            self._transfer.store(named, kwargs)

    def retrieve(
        self,
        tokens: torch.Tensor,
        mask: torch.Tensor | None = None,
        spans: Sequence[MultimodalSpan] = (),
        **kwargs: Any,
    ) -> torch.Tensor:
        """Copy the cached KV of the longest prefix of these tokens into the serving engine.

        A chunk that takes longer to load than to compute (see `PrefillRate`) is a miss.

        Args:
            tokens: Token ids, shape `[seq_len]`, any integer dtype.
            mask: Booleans, shape `[seq_len]`, Falses first: tokens that are not wanted.
            spans: As in `store`.
            **kwargs: Arguments of the GPU connector, for example `kvcaches`.

        Returns:
            Booleans on CPU, shape `[seq_len]`: True where KV has been copied into the serving
                engine. Memory for the tokens after these may contain parts of a damaged chunk:
                their KV must be computed in any case.

        Raises:
            ValueError: A token id is not an integer in 0..2^32-1, the number of Falses in the mask
                is not a multiple of the chunk size, or engine memory is not as declared.
        """
        loaded = torch.zeros(_num_tokens(tokens), dtype=torch.bool)
        with self._guard("retrieve"):
            named = self._named(tokens, mask, spans)
            self.counters.add(REQUESTED_TOKENS_TOTAL, sum(end - start for start, end, _ in named))
            num_loaded = self._transfer.load(
                named, self._prefill.recompute_s(self.config.chunk_size), kwargs
            )
            if num_loaded:
                loaded[named[0][0] : named[num_loaded - 1][1]] = True
            if num_loaded < len(named):
                self._prefill.missed(named[num_loaded][2])
        return loaded

    def lookup(
        self,
        tokens: torch.Tensor,
        search_range: list[str] | None = None,
        spans: Sequence[MultimodalSpan] = (),
    ) -> int:
        """Return how many tokens, from the first, are cached.

        Args:
            tokens: Token ids, shape `[seq_len]`, any integer dtype.
            search_range: Tiers ("memory", "disk", "peers", "storage"), also by LMCache's names
                ("Hot", "LocalDiskBackend", "P2PBackend", "RemoteBackend"); None: all.
            spans: As in `store`.

        Raises:
            ValueError: A name in the range is not one of these, or a token id is not an integer in
                0..2^32-1.
        """
        tiers = None
        if search_range is not None:
            tiers = [tier_name(name) for name in search_range]
            unknown = ", ".join(repr(name) for name in tiers if name not in TIERS)
            if unknown:
                known = ", ".join(sorted(TIERS))
                raise ValueError(f"search_range names {unknown}; tiers are {known}")
        num_tokens = 0
        with self._guard("lookup"):
            named = self._named(tokens, None, spans)
            num_prefix = self._store.lookup([key for _, _, key in named], tiers)
            num_tokens = named[num_prefix - 1][1] if num_prefix else 0
        return num_tokens  # noqa: RET504 (the guard may have ended the block)

    def prefetch(
        self,
        tokens: torch.Tensor,
        mask: torch.Tensor | None = None,
        spans: Sequence[MultimodalSpan] = (),
    ) -> None:
        """Begin to read the KV of these tokens into host memory; returns immediately.

        Args:
            tokens: Token ids, shape `[seq_len]`.
            mask: As in `retrieve`.
            spans: As in `store`.

        Raises:
            ValueError: A token id is not an integer in 0..2^32-1, or the number of Falses in the
                mask is not a multiple of the chunk size.
        """
        with self._guard("prefetch"):
            self._store.prefetch([key for _, _, key in self._named(tokens, mask, spans)])

    def note_prefill(self, num_tokens: int, elapsed_s: float) -> None:
        """Record how long the serving engine took to compute `num_tokens`, for integrations that
        measure it.
        """
        self._prefill.note(num_tokens, elapsed_s)

    def use_revision(self, revision: str) -> None:
        """Name KV by another revision of the model from now on: its weights or its state have
        changed. What the old name has is kept, and found again under that name.

        Raises:
            ConfigError: The token database does not support it.
        """
        with self.naming:
            if revision != self.metadata.revision:
                self._token_database.use_revision(revision)
                self.metadata = replace(self.metadata, revision=revision)

    def stats(self) -> dict[str, dict[str, int]]:
        """Return the figures of the tiers, by name."""
        return self._store.stats()

    def _named(
        self, tokens: torch.Tensor, mask: torch.Tensor | None, spans: Sequence[MultimodalSpan]
    ) -> list[NamedChunk]:
        # A token database need not have the parameter `spans` if there are none.
        more = (spans,) if spans else ()
        return list(self._token_database.process_tokens(tokens, mask, *more))


def _chunk_bytes(
    database: TokenDatabase, connector: GPUConnectorInterface, metadata: LMCacheEngineMetadata
) -> int:
    """Return the size of a whole chunk; 0 for a token database with chunks of any length."""
    if not isinstance(database, ChunkedTokenDatabase):
        return 0
    return num_bytes(connector.get_shape(database.chunk_size), metadata.kv_dtype_name)


def _num_tokens(tokens: torch.Tensor) -> int:
    try:
        return len(tokens)
    except TypeError as exc:
        raise ValueError(f"tokens must be one row of integers: {exc}") from exc


def create_engine(
    config: LMCacheEngineConfig,
    metadata: LMCacheEngineMetadata,
    gpu_connector: GPUConnectorInterface,
) -> LMCacheEngine:
    """Return an engine with the memory and the token database that the config asks for; not
    opened.
    """
    allocator: MemoryAllocatorInterface | None = None
    if config.sidecar_socket is None:
        from lmcache_core.memory import PinMemoryAllocator

        allocator = PinMemoryAllocator(int(config.max_local_cpu_size * BYTES_PER_GB))
    database = ChunkedTokenDatabase(config, metadata)
    return LMCacheEngine(config, metadata, allocator, database, gpu_connector)


class LMCacheEngineBuilder:
    """Creates, finds and destroys the engines of this process: the documented registry, by instance
    id.
    """

    _instances: ClassVar[dict[str, LMCacheEngine]] = {}
    _lock: ClassVar[threading.RLock] = threading.RLock()  # a signal handler may close an engine

    @classmethod
    def get_or_create(
        cls,
        instance_id: str,
        config: LMCacheEngineConfig,
        metadata: LMCacheEngineMetadata,
        gpu_connector: GPUConnectorInterface,
    ) -> LMCacheEngine:
        """Return the engine of that id, created and opened if it does not exist.

        Raises:
            ValueError: It exists with another config or metadata.
        """
        with cls._lock:
            engine = cls._instances.get(instance_id)
            if engine is None:
                engine = create_engine(config, metadata, gpu_connector)
                engine.open()
                cls._instances[instance_id] = engine
            elif (engine.config, engine.metadata) != (config, metadata):
                raise ValueError(
                    f"engine {instance_id!r} exists with another configuration; destroy it first or"
                    " use another id"
                )
            return engine

    @classmethod
    def get(cls, instance_id: str) -> LMCacheEngine | None:
        """Return the engine of that id, or None."""
        with cls._lock:
            return cls._instances.get(instance_id)

    @classmethod
    def destroy(cls, instance_id: str) -> None:
        """Close and remove the engine of that id, if there is one."""
        with cls._lock:
            engine = cls._instances.pop(instance_id, None)
        if engine is not None:
            engine.close()

    @classmethod
    def _enter_child(cls) -> None:
        """Begin without engines in a forked child: it opens its own."""
        cls._instances, cls._lock = {}, threading.RLock()

    @classmethod
    def _forget(cls, engine: LMCacheEngine) -> None:
        """Drop a closed engine, so that its id makes another one."""
        with cls._lock:
            for instance_id, known in list(cls._instances.items()):
                if known is engine:
                    del cls._instances[instance_id]


os.register_at_fork(after_in_child=LMCacheEngineBuilder._enter_child)
