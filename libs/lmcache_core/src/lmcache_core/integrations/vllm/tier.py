"""The pod's sidecar as a secondary tier of vLLM's `TieringOffloadingSpec`: chunks go there from
vLLM's host memory, and come back from wherever the sidecar finds them. vLLM copies between GPU and
host memory itself.
"""

from __future__ import annotations

import hashlib
import json
import logging
import queue
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
import vllm
from vllm import envs
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.platforms import current_platform

from lmcache_core._typing import override
from lmcache_core.concurrency import StartedPool, Workers
from lmcache_core.config import LMCacheEngineMetadata
from lmcache_core.engine.guard import DegradingGuard
from lmcache_core.engine.stores import SidecarClient, create_chunk_store, sidecar_store
from lmcache_core.engine.transfer import KVTransfer, NamedChunk
from lmcache_core.errors import ConfigError, LayoutError, UnavailableError
from lmcache_core.gpu_connectors import GPUConnectorInterface
from lmcache_core.integrations.vllm.groups import described
from lmcache_core.integrations.vllm.identity import (
    block_text,
    check_shareable,
    contents_fingerprint,
    revision_text,
)
from lmcache_core.integrations.vllm.kv_settings import VLLM_SETTINGS, set_variables
from lmcache_core.integrations.vllm.memory import create_scales
from lmcache_core.integrations.vllm.options import read_options
from lmcache_core.integrations.vllm.tier_events import TierEvents
from lmcache_core.integrations.weights import shared_name
from lmcache_core.keys import CacheEngineKey, Lane
from lmcache_core.memory.base import MemoryObj
from lmcache_core.sidecar import SidecarChunkStore
from lmcache_core.telemetry import Counters
from lmcache_core.token_database import identity_root

try:
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import (
        OffloadingConnector,
    )
    from vllm.v1.kv_offload.base import LookupResult, RequestOffloadingContext
    from vllm.v1.kv_offload.file_mapper import FileMapper
    from vllm.v1.kv_offload.tiering.backpressure import BackpressureDetector
    from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager
except ImportError as exc:
    raise ConfigError(
        f"vLLM {vllm.__version__} has no secondary tiers that LMCacheTier knows: use vLLM 0.31"
        ' or later, or the connector "LMCacheConnector"'
    ) from exc

logger = logging.getLogger(__name__)

FMT = "vllm-tier"
TIER = "LMCacheTier"
BATCH_CHUNKS = 32
"""Chunks that one request to the sidecar reserves or reads: a job of any length holds no more of
its memory.
"""
DRAIN_S = 30.0
"""How long vLLM waits for running jobs before they are given up: longer than the deadlines of all
their calls.
"""
STORING_SHARE = 4
"""Waiting stores may keep one part in this many of vLLM's host memory from being reused; what comes
on top is not stored.
"""


class LMCacheOffloadingConnector(OffloadingConnector):
    """vLLM's offloading connector; it tells each `LMCacheTier` which KV this engine computes.

    An engine whose KV cannot be shared is served by vLLM's host memory alone, and the log says why.

    Raises:
        ConfigError: No `LMCacheTier` is configured.
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        tiers = extra.get("secondary_tiers")
        is_ours = [isinstance(one, dict) and one.get("type") == TIER for one in tiers or ()]
        if not any(is_ours):
            raise ConfigError(
                f'kv_connector_extra_config: "secondary_tiers" is {tiers!r}; it must name a tier'
                f' of type "{TIER}", or use vLLM\'s OffloadingConnector'
            )
        if role is KVConnectorRole.SCHEDULER:
            extra["secondary_tiers"] = [
                {**tier, "identity": identity} if own else tier
                for tier, own in zip(tiers, is_ours, strict=True)
                for identity in [_identity(vllm_config, kv_cache_config, tier) if own else ""]
                if identity is not None
            ]
        super().__init__(vllm_config, role, kv_cache_config)

    @override
    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        create_scales(self._vllm_config, kv_caches)
        super().register_kv_caches(kv_caches)


class LMCacheTier(SecondaryTierManager):
    """The pod's sidecar behind vLLM's host memory.

    Methods are called by any thread of vLLM, one at a time, and do not wait; only `drain_jobs` and
    `shutdown` do. Without a sidecar nothing is found, and stores fail; a job waits for it no longer
    than `timeout_s` per `BATCH_CHUNKS` chunks.

    After `drain_jobs`, which vLLM calls when its caches are reset or weights change, this engine
    neither shares nor finds earlier KV until it restarts.

    Args:
        primary_kv_view: vLLM's host memory, `[num_chunks, chunk_bytes]` of bytes.
        identity: Text that differs if equal tokens have other KV. `LMCacheOffloadingConnector`
            makes it of what is given here, or of the weights, and of vLLM's settings.
        enable_kv_events: Whether routers are told of the sidecar's chunks, if vLLM publishes
            events at all.

    Raises:
        ConfigError: An option is missing or invalid.
    """

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        sidecar_socket: str = "",
        identity: str = "",
        timeout_s: float = 2.0,
        enable_kv_events: bool = False,
        backpressure_detector: BackpressureDetector | None = None,
    ) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        if not sidecar_socket:
            raise ConfigError(
                f'secondary_tiers: {TIER} needs "sidecar_socket", the socket of the pod\'s sidecar'
            )
        if not identity:
            raise ConfigError(
                f'secondary_tiers: {TIER} needs the connector "LMCacheOffloadingConnector", which'
                ' knows the weights; or set "identity" to a text that names them'
            )
        told = str(enable_kv_events).lower()
        self._info = dict(zip(self.config_info_keys({}), (sidecar_socket, told), strict=True))
        self._rows = np.frombuffer(primary_kv_view, np.uint8).reshape(-1, self.block_size_bytes)
        self._root = b""
        self._epoch = b""
        self._max_storing = len(self._rows) // STORING_SHARE
        self._num_storing = 0
        self._jobs: dict[int, tuple[Any, Future[None]]] = {}
        self._finished: queue.SimpleQueue[JobResult] = queue.SimpleQueue()
        self._access = _Access(self._finished)
        self._counters = Counters()
        self._guard = DegradingGuard(self._counters, raised=())
        self._workers = Workers("lmcache-copy")
        self._workers.open()
        fields = FileMapper.from_offloading_spec(
            "", offloading_spec, offloading_spec.blocks_per_chunk, parallel_agnostic=True
        ).get_run_config()
        fields["model_name"] = shared_name(fields["model_name"])
        layout = json.dumps(fields, sort_keys=True)
        self._metadata = LMCacheEngineMetadata(
            *(fields["model_name"], 1, 0, FMT, "uint8", (1, 1, 1, 1, self.block_size_bytes)),
            revision=identity,
            layout=hashlib.sha256(layout.encode()).hexdigest(),
        )
        options = {"sidecar_socket": sidecar_socket, "tier_timeout_s": timeout_s}
        engine = read_options(options, "cpu").engine
        store = create_chunk_store(
            engine,
            self._metadata,
            None,
            self._counters,
            self._workers,
            SidecarClient(
                f"vllm/{offloading_spec.config.engine_id}",
                (),
                loads_beside=True,
                chunk_bytes=self.block_size_bytes,
            ),
        )
        self._store = cast("SidecarChunkStore", store)
        self._transfer = KVTransfer(
            store, _Rows(self.block_size_bytes), self._metadata, self._counters, self._workers
        )
        self._loads = StartedPool(1, "lmcache-load")
        self._stores = StartedPool(1, "lmcache-store")
        self._lookups = _Lookups(self._present)
        self._lane = Lane(FMT, self._metadata.model_name, 1, 0, "")
        self._events: TierEvents | None = None
        if enable_kv_events and offloading_spec.kv_events_config.enable_kv_cache_events:
            client = SidecarClient(f"events/{offloading_spec.config.engine_id}", ())
            self._events = TierEvents(
                sidecar_store(engine, self._metadata, Counters(), None, client),
                self._lane,
                self._guard,
            )
        store.open(self._use_salt)

    @classmethod
    def config_info_keys(cls, tier_config: dict[str, Any]) -> tuple[str, ...]:
        """Return the labels of `config_info`. Called since 0.33."""
        return ("sidecar_socket", "enable_kv_events")

    def config_info(self) -> dict[str, str]:
        """Return what vLLM's metric of the configuration says. Called since 0.33."""
        return self._info

    @override
    def on_new_request(self, req_context: Any) -> RequestOffloadingContext:
        return RequestOffloadingContext()

    @override
    def on_request_finished(self, req_context: Any) -> None:
        self._lookups.forget(req_context.req_id)

    @override
    def on_schedule_end(self, context: Any) -> None:
        self._lookups.flush()

    @override
    def lookup(self, key: bytes, req_context: Any) -> LookupResult:
        return self._lookups.lookup(key, req_context.req_id)

    @override
    def submit_store(self, job_metadata: Any) -> None:
        num_chunks = len(job_metadata.keys)
        if self._num_storing and self._num_storing + num_chunks > self._max_storing:
            self._finished.put(JobResult(job_metadata.job_id, False))
            return
        self._num_storing += num_chunks
        self._begin(self._stores, job_metadata, self._store_batch)

    @override
    def submit_load(self, job_metadata: Any) -> None:
        self._begin(self._loads, job_metadata, self._load_batch)

    @override
    def get_finished_jobs(self) -> Iterable[JobResult]:
        results = []
        while not self._finished.empty():
            result = self._finished.get()
            results.append(result)
            job, _ = self._jobs.pop(result.job_id, (None, None))
            if job is None:
                continue
            if not job.is_promotion:
                self._num_storing -= len(job.keys)
            elif not result.success:
                # Else vLLM would find, and begin to load, the same chunks again.
                self._lookups.mark_miss(set(job.keys) - set(result.successful_keys or ()))
        return results

    @override
    def drain_jobs(self) -> None:
        """Wait for all jobs, and give up those that have not ended after `DRAIN_S`: they have
        failed, and touch vLLM's memory no more.
        """
        wait([future for _, future in self._jobs.values()], DRAIN_S)
        access, self._access = self._access, _Access(self._finished)
        left = access.end()
        for job_id in left:
            self._jobs[job_id][1].cancel()
            self._finished.put(JobResult(job_id, False))
        if left:
            logger.error(
                "jobs did not end, giving them up: jobs=%d waited_s=%g", len(left), DRAIN_S
            )
        self._epoch = secrets.token_bytes(16)
        if self._events is not None:
            self._events.forget()

    @override
    def take_events(self) -> Iterator[Any]:
        return iter(()) if self._events is None else self._events.take()

    @override
    def shutdown(self) -> None:
        self._access.end()  # so a job that runs ends with the call it is in, which has a deadline
        for pool in (self._loads, self._stores):
            pool.shutdown(cancel_futures=True)
        if self._events is not None:
            self._events.close()
        self._store.close()
        self._lookups.shutdown()
        self._workers.close()
        self._rows = self._rows[:0].copy()  # vLLM unmaps its memory next

    def _use_salt(self, salt: str) -> None:
        self._root = identity_root(self._metadata, salt)

    def _names(self, keys: Sequence[bytes], epoch: bytes) -> list[CacheEngineKey]:
        """Return the names of chunks, from now on followed; none as long as the tenant's salt is
        unknown.
        """
        if not self._root:
            return []
        root = self._root + epoch
        hashes = [hashlib.sha256(root + key).digest() for key in keys]
        if self._events is not None:
            self._events.named(keys, b"".join(hashes))
        return [self._lane.key(one) for one in hashes]

    def _present(self, keys: Sequence[bytes]) -> list[bool]:
        present: list[bool] = []
        with self._guard("lookup"):
            present = self._store.contains(self._names(keys, self._epoch))
        return present + [False] * (len(keys) - len(present))

    def _begin(
        self, pool: StartedPool, job: Any, work: Callable[[list[NamedChunk], Any], int]
    ) -> None:
        self._access.begin(job.job_id)
        future = pool.submit(self._run, job, work, self._access, self._epoch)
        self._jobs[job.job_id] = job, future

    def _run(
        self,
        job: Any,
        work: Callable[[list[NamedChunk], Any], int],
        access: _Access,
        epoch: bytes,
    ) -> None:
        """Do the work for the chunks of a job, batch by batch, up to the first that fails."""
        began, num_done = time.monotonic(), 0
        keys: list[bytes] = list(job.keys)
        with self._guard("load" if job.is_promotion else "store"):
            for at in range(0, len(keys), BATCH_CHUNKS):
                names = self._names(keys[at : at + BATCH_CHUNKS], epoch)
                rows = [self._rows[i] for i in job.chunk_ids[at : at + BATCH_CHUNKS]]
                named = [(i, i + 1, name) for i, name in enumerate(names)]
                num_done += work(named, {"rows": rows, "access": access})
                if num_done < min(at + BATCH_CHUNKS, len(keys)):
                    break
        access.report(
            JobResult(
                job.job_id,
                num_done == len(keys),
                tuple(keys[:num_done]) if job.is_promotion else None,
                time.monotonic() - began,
                num_done * self.block_size_bytes,
            )
        )

    def _store_batch(self, named: list[NamedChunk], kwargs: dict[str, Any]) -> int:
        return (*self._transfer.store(named, kwargs), False).index(False)

    def _load_batch(self, named: list[NamedChunk], kwargs: dict[str, Any]) -> int:
        return self._transfer.load(named, None, kwargs)


class _Access:
    """The permission of running jobs to touch vLLM's memory and to report. Once it has ended, vLLM
    uses the memory for something else.
    """

    def __init__(self, finished: queue.SimpleQueue[JobResult]) -> None:
        self._finished = finished
        self._has_changed = threading.Condition()
        self._unreported: set[int] = set()
        self._num_copies = 0
        self._has_ended = False

    def begin(self, job_id: int) -> None:
        self._unreported.add(job_id)

    def report(self, result: JobResult) -> None:
        """Report a job's result, unless the job has been given up."""
        with self._has_changed:
            if not self._has_ended:
                self._unreported.discard(result.job_id)
                self._finished.put(result)

    @contextmanager
    def copying(self) -> Iterator[None]:
        """Copy a row in the context.

        Raises:
            UnavailableError: The permission has ended.
        """
        with self._has_changed:
            if self._has_ended:
                raise UnavailableError("the job was given up")
            self._num_copies += 1
        try:
            yield
        finally:
            with self._has_changed:
                self._num_copies -= 1
                self._has_changed.notify_all()

    def end(self) -> set[int]:
        """Let no row be copied from here on, and return the jobs that have not reported."""
        with self._has_changed:
            self._has_ended = True
            self._has_changed.wait_for(lambda: not self._num_copies)  # copies in memory do not hang
            return self._unreported


@dataclass(slots=True)
class _Answer:
    """Whether a chunk is there.

    Attributes:
        result: `RETRY` until the sidecar has answered.
        num_requests: Requests of vLLM that have asked and not finished.
    """

    result: LookupResult = LookupResult.RETRY
    num_requests: int = 0


class _Lookups:
    """Asks which chunks there are, in a thread of its own; requests share the answers. vLLM's
    `AsyncLookupManager` takes more than twice the time in the scheduler's thread.
    """

    def __init__(self, present: Callable[[Sequence[bytes]], list[bool]]) -> None:
        self._present = present
        self._answers: dict[bytes, _Answer] = {}
        self._of_requests: dict[str, dict[bytes, _Answer]] = {}
        self._unasked: list[tuple[bytes, _Answer]] = []
        self._thread = StartedPool(1, "lmcache-lookup")

    def lookup(self, key: bytes, request_id: str) -> LookupResult:
        of_request = self._of_requests.get(request_id)
        if of_request is None:
            of_request = self._of_requests[request_id] = {}
        answer = of_request.get(key)
        if answer is None:
            answer = self._answers.get(key)
            if answer is None:
                answer = self._answers[key] = _Answer()
                self._unasked.append((key, answer))
            answer.num_requests += 1
            of_request[key] = answer
        return answer.result

    def flush(self) -> None:
        """Ask the sidecar what the step's lookups could not answer."""
        if self._unasked:
            self._thread.submit(self._ask, self._unasked)
            self._unasked = []

    def mark_miss(self, keys: Iterable[bytes]) -> None:
        """Chunks that could not be loaded are not there for the requests that have asked."""
        for key in keys:
            if key in self._answers:
                self._answers[key].result = LookupResult.MISS

    def forget(self, request_id: str) -> None:
        for key, answer in self._of_requests.pop(request_id, {}).items():
            answer.num_requests -= 1
            if not answer.num_requests:
                del self._answers[key]

    def shutdown(self) -> None:
        self._thread.shutdown(cancel_futures=True)

    def _ask(self, asked: list[tuple[bytes, _Answer]]) -> None:
        for at in range(0, len(asked), BATCH_CHUNKS):
            batch = asked[at : at + BATCH_CHUNKS]
            present = self._present([key for key, _ in batch])
            for (_, answer), is_there in zip(batch, present, strict=True):
                answer.result = LookupResult.HIT if is_there else LookupResult.MISS


class _Rows(GPUConnectorInterface):
    """Copies between rows of vLLM's host memory and memory objects; "token" i is `rows[i]`."""

    def __init__(self, num_bytes: int) -> None:
        self._num_bytes = num_bytes

    @override
    def get_shape(self, num_tokens: int) -> torch.Size:
        return torch.Size((num_tokens, self._num_bytes))

    @override
    def is_on_host(self, kwargs: dict[str, Any]) -> bool:
        return True

    @override
    def from_gpu(self, memory_obj: MemoryObj, start: int, end: int, **kwargs: Any) -> None:
        (row,) = kwargs["rows"][start:end]
        with kwargs["access"].copying():
            np.copyto(np.frombuffer(memory_obj.byte_array, np.uint8), row)

    @override
    def to_gpu(self, memory_obj: MemoryObj, start: int, end: int, **kwargs: Any) -> None:
        (row,) = kwargs["rows"][start:end]
        with kwargs["access"].copying():
            np.copyto(row, np.frombuffer(memory_obj.byte_array, np.uint8))


def _identity(vllm_config: Any, kv_cache_config: Any, tier: dict[str, Any]) -> str | None:
    """Return text that differs if equal tokens have other KV; None if the KV cannot be shared.

    A tier's own `identity` names the weights, and answers for its adapters.
    """
    # What a newer vLLM calls otherwise fails here: it must not end the engine.
    with DegradingGuard(Counters(), raised=(ConfigError, ValueError))("identity"):
        try:
            return _identity_of(vllm_config, kv_cache_config, tier.get("identity"))
        except LayoutError as exc:
            logger.error("KV stays in vLLM's host memory: reason=%s", exc)
    return None


def _identity_of(vllm_config: Any, kv_cache_config: Any, weights: str | None) -> str:
    check_shareable(vllm_config)
    cache = vllm_config.cache_config
    adapters = getattr(vllm_config, "lora_config", None)
    if adapters is not None and not weights:
        raise LayoutError("vLLM names a chunk by its LoRA adapter's name, not by its weights")
    if not cache.prefix_caching_hash_algo.startswith("sha256"):
        raise LayoutError(
            f"prefix_caching_hash_algo={cache.prefix_caching_hash_algo}: other tokens may have the"
            " same hash; use sha256 or sha256_cbor"
        )
    contents = contents_fingerprint(vllm_config)
    if contents is None:
        raise LayoutError("vLLM numbers images and other content instead of hashing them")
    facts = {
        "weights": revision_text(vllm_config, weights, set_variables(envs.environment_variables)),
        "adapters": VLLM_SETTINGS.fingerprint(adapters, "lora_config"),
        "hash": cache.prefix_caching_hash_algo,
        "kv": cache.cache_dtype,
        "contents": contents,
    }
    if not vllm_config.kv_transfer_config.kv_connector_extra_config.get("canonical_layout"):
        release = f"{vllm.__version__};{current_platform.get_device_capability()}"
        facts["blocks"] = block_text(vllm_config, kv_cache_config, release)
        facts["groups"] = "|".join(
            described(group.kv_cache_spec) for group in kv_cache_config.kv_cache_groups
        )
    return json.dumps(facts, sort_keys=True)
