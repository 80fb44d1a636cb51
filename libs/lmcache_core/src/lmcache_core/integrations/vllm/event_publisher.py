"""What routers are told, in vLLM's events and by vLLM's own publisher.

vLLM publishes at the end of a step. A chunk that the sidecar evicts while the engine has no
requests would stay announced until the next one. So connectors use the publisher itself: vLLM makes
the one that is registered here, which is of its own class.

Source: `vllm/distributed/kv_events.py`, `vllm/v1/core/block_pool.py` of vLLM 0.27.1 and later.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

from vllm.distributed.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventBatch,
    EventPublisherFactory,
    KVEventBatch,
    ZmqEventPublisher,
)
from vllm.v1.core import kv_cache_utils

from lmcache_core._typing import override
from lmcache_core.engine.guard import DegradingGuard
from lmcache_core.engine.stores import SidecarClient, sidecar_store
from lmcache_core.errors import ConfigError, LayoutError
from lmcache_core.integrations.vllm.groups import CacheGroup
from lmcache_core.integrations.vllm.identity import FMT, KVIdentity
from lmcache_core.integrations.vllm.kv_events import (
    IN_MEMORY,
    ON_DISK,
    AnnouncedChunk,
    Announcement,
    KVEvents,
)
from lmcache_core.integrations.vllm.options import ConnectorOptions
from lmcache_core.integrations.vllm.requests import RequestNamer
from lmcache_core.keys import Lane
from lmcache_core.telemetry import Counters

NAME: Final = "lmcache"
MEDIA: Final = {IN_MEMORY: "CPU", ON_DISK: "STORAGE"}
NS_PER_BATCH: Final = 100_000
"""No engine publishes as many as 10,000 batches in a second for long."""
LLMD_TOPIC: Final = b"kv@"
MAX_EMPTY: Final = 150
"""Half a minute of rounds, in which routers connect again to an engine that has started again."""
MAX_QUIET: Final = 10
_waiting: list[Callable[[Publisher], None]] = []


class Publisher(ZmqEventPublisher):
    """vLLM's publisher, which connectors may use as well.

    vLLM numbers its batches from 0 at each start, and routers ignore them until the number of the
    last start is passed. This one begins higher than any earlier start can have ended.

    Attributes:
        on_cleared: Called after routers were told to forget every block.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._seq_gen = itertools.count(time.time_ns() // NS_PER_BATCH)
        self.on_cleared: list[Callable[[], None]] = []
        self._lock = threading.Lock()
        self._is_open = True
        self._is_empty = True
        self._num_quiet = 0
        self.quiet()

    @override
    def publish(self, events: EventBatch) -> None:
        with self._lock:
            self._is_empty, self._num_quiet = False, 0
            super().publish(events)
        if any(isinstance(event, AllBlocksCleared) for event in events.events):
            for call in self.on_cleared:
                call()

    def tell(self, events: Sequence[Any]) -> None:
        """Publish events of a connector, from any thread; after `shutdown`, do nothing."""
        with self._lock:
            self._is_empty, self._num_quiet = False, 0
            self._put(list(events))

    def quiet(self) -> None:
        """Say that there is no news, a few times: the number of a batch shows a router what it has
        missed. Before any news that is that no block is left, since the GPU is empty.
        """
        with self._lock:
            if self._num_quiet < (MAX_EMPTY if self._is_empty else MAX_QUIET):
                self._num_quiet += 1
                self._put([AllBlocksCleared()] if self._is_empty else [])

    @override
    def shutdown(self) -> None:
        with self._lock:
            self._is_open = False
        super().shutdown()

    @override
    def _service_replay(self) -> None:
        """Send a router the batches from the number on that it asks for. llm-d's router, for which
        the topic is made, asks for all from 0 on, and believes nothing of an answer that begins
        with another number, nor of what follows it. Since there is no batch 0, it gets none.
        """
        client, _, first = self._replay.recv_multipart()
        begin = int.from_bytes(first, "big")
        is_empty = begin == 0 and self._topic_bytes.startswith(LLMD_TOPIC)
        for number, batch in () if is_empty else self._buffer:
            if number >= begin:
                packed = number.to_bytes(8, "big")
                self._replay.send_multipart((client, b"", self._topic_bytes, packed, batch))
        self._replay.send_multipart((client, b"", b"", self.END_SEQ, b""))

    def _put(self, events: list[Any]) -> None:
        if self._is_open:
            super().publish(KVEventBatch(ts=time.time(), events=events))


def when_made(vllm_config: Any, call: Callable[[Publisher], None]) -> None:
    """Call with the publisher of this engine, as soon as vLLM makes it: right after its connectors.

    Raises:
        ConfigError: vLLM publishes no events.
    """
    config = vllm_config.kv_events_config
    if config is None or not config.enable_kv_cache_events or config.publisher not in ("zmq", NAME):
        raise ConfigError(
            "lmcache.kv_events=true: vLLM publishes no events; start it with --kv-events-config"
            ' \'{"enable_kv_cache_events": true, "publisher": "zmq"}\''
        )
    if not _waiting and config.publisher != NAME:
        with contextlib.suppress(KeyError):  # registered for an earlier engine of this process
            EventPublisherFactory.register_publisher(NAME, _make)
    config.publisher = NAME
    _waiting.append(call)


def _make(**options: Any) -> Publisher:
    publisher = Publisher(**options)
    calls, _waiting[:] = list(_waiting), []
    for call in calls:
        call(publisher)
    return publisher


class Describer:
    """Describes the chunks of requests in vLLM's blocks, and announcements in its events.

    Args:
        group: The group that attends to all tokens.
        hash_tokens: Tokens that one of vLLM's hashes adds.
    """

    def __init__(self, group: CacheGroup, chunk_size: int, hash_tokens: int) -> None:
        self._group = group
        self._chunk_size = chunk_size
        self._hash_tokens = hash_tokens
        self._about_group = {
            name: value
            for name, value in (
                ("group_idx", group.index),
                ("kv_cache_spec_kind", _kind_of(group.spec)),
            )
            if name in BlockStored.__struct_fields__
        }

    def describe(self, request: Any, first: int, last: int) -> Iterator[AnnouncedChunk]:
        """Yield the chunks `[first, last)` of a vLLM request, as far as vLLM has named its blocks:
        without prefix caching, none.
        """
        size, block_size, step = self._chunk_size, self._group.block_size, self._hash_tokens
        hashes, lora = request.block_hashes, request.lora_request
        who = (None, None) if lora is None else (lora.adapter_id, lora.name)
        convert = kv_cache_utils.maybe_convert_block_hash
        for chunk in range(first, last):
            begin, end = chunk * size, (chunk + 1) * size
            if end // step > len(hashes):
                return
            # A block's hash is that of the last tokens in it.
            ends = range(begin + block_size, end + 1, block_size)
            yield AnnouncedChunk(
                tuple(convert(hashes[at // step - 1]) for at in ends),
                convert(hashes[begin // step - 1]) if begin else None,
                array("I", request.all_token_ids[begin:end]),
                (who, _extra_keys(request, range(begin, end, block_size), block_size)),
            )

    def event(self, told: Announcement) -> Any:
        """Return vLLM's event."""
        chunk, medium = told.chunk, MEDIA[told.place]
        hashes = list(chunk.block_hashes)
        if not told.is_here:
            group = {"group_idx": self._group.index} if "group_idx" in self._about_group else {}
            return BlockRemoved(block_hashes=hashes, medium=medium, **group)
        (lora_id, lora_name), extra_keys = chunk.context
        return BlockStored(
            block_hashes=hashes,
            parent_block_hash=chunk.parent,
            token_ids=chunk.token_ids.tolist(),
            block_size=self._group.block_size,
            lora_id=lora_id,
            medium=medium,
            lora_name=lora_name,
            extra_keys=extra_keys,
            **self._about_group,
        )


def _extra_keys(request: Any, begins: range, block_size: int) -> list[Any] | None:
    """Return what else goes into the hashes of these blocks, as vLLM's own events say it."""
    extra_keys = kv_cache_utils.generate_block_hash_extra_keys
    if extra_keys(request, begins[0], begins[-1] + block_size, 0)[0] is None:
        return None
    keys, at = [], 0
    for begin in begins:
        key, at = extra_keys(request, begin, begin + block_size, at)
        keys.append(key)
    said = getattr(kv_cache_utils, "to_event_extra_keys", lambda keys: keys)
    return list(said(keys))


def _kind_of(spec: Any) -> str | None:
    """Return vLLM's word for a kind of KV; None if this vLLM has none."""
    from vllm.v1 import kv_cache_interface

    kind = getattr(kv_cache_interface, "get_kv_cache_spec_kind", None)
    return None if kind is None else str(kind(spec).value)


class RouterEvents:
    """Tells routers what the sidecar has of what an engine names, on a connection of its own.

    Raises:
        ConfigError: vLLM publishes no events.
        LayoutError: No group of layers attends to all tokens, and routers ignore others.
    """

    def __init__(
        self,
        vllm_config: Any,
        options: ConnectorOptions,
        groups: Sequence[CacheGroup],
        identity: KVIdentity,
        namer: RequestNamer,
        guard: DegradingGuard,
    ) -> None:
        whole = [group for group in groups if group.window is None]
        if not whole:
            raise LayoutError("no layer of the model attends to all tokens")
        cache = vllm_config.cache_config
        hash_tokens = getattr(cache, "hash_block_size", None) or cache.block_size
        describer = Describer(whole[0], options.engine.chunk_size, hash_tokens)
        name = f"events/{vllm_config.kv_transfer_config.engine_id}"
        self._store = sidecar_store(
            options.engine, identity.metadata, Counters(), None, SidecarClient(name, groups=())
        )
        self._publisher: Publisher | None = None
        ranks = range(identity.num_ranks)
        model = identity.metadata.model_name
        lanes = [Lane(FMT, model, len(ranks), rank, whole[0].name) for rank in ranks]
        self._events = KVEvents(self._store, lanes, describer.describe, self._tell, guard)
        self._event = describer.event
        namer.on_named = self._events.named
        when_made(vllm_config, self._open)

    def _open(self, publisher: Publisher) -> None:
        self._publisher = publisher
        publisher.on_cleared.append(self._events.cleared)
        self._store.open(lambda salt: None)
        self._events.open()

    def _tell(self, announcements: Sequence[Announcement]) -> None:
        assert self._publisher is not None, "it is open"
        if announcements:
            self._publisher.tell([self._event(told) for told in announcements])
        else:
            self._publisher.quiet()

    def forget(self) -> None:
        """Take back all that routers were told: it will not be loaded again."""
        self._events.forget()

    def close(self) -> None:
        """Tell routers nothing more."""
        self._events.close()
        self._store.close()
