"""What KV events cost an engine, in a process of its own and vLLM's environment: obeys lines of
JSON, as the children of the tests do.
"""

from __future__ import annotations

import random
import time
import tracemalloc
from collections.abc import Sequence
from typing import Any

import msgspec
from lmcache_core.engine.guard import DegradingGuard
from lmcache_core.integrations.vllm.kv_events import Announcement, KVEvents
from lmcache_core.keys import CacheEngineKey
from lmcache_core.telemetry import Counters
from lmcache_core.wire.messages import Changes
from vllm.distributed.kv_events import KVEventBatch

from tests.vllm.engine_child import Child, serve
from tests.vllm.engines import set_environment
from tests.vllm.models import FIRST_WORD, VOCABULARY
from tests.vllm.routing_judge import (
    BLOCK_TOKENS,
    CHUNK_TOKENS,
    LANE,
    PROMPT_CHUNKS,
    Request,
    describer,
    names_of,
)


class Everything:
    """A sidecar that has every chunk."""

    def changes(self, since: Changes | None) -> Changes:
        """Return that nothing has changed."""
        return Changes(1, 1, True, b"")

    def present(self, keys: Sequence[CacheEngineKey], tier: str | None = None) -> list[bool]:
        """Return that all are there."""
        return [True] * len(keys)


class EventChild(Child):
    """A child that times its scheduler's steps, and the thread that tells routers."""

    def __init__(self) -> None:
        super().__init__()
        self._tells = True
        self._num_named = 0
        named = KVEvents.named

        def counted(events: KVEvents, *args: Any) -> None:
            self._num_named += 1
            if self._tells:
                named(events, *args)

        KVEvents.named = counted  # type: ignore[method-assign, assignment]

    def steps(
        self, name: str, seed: int, tells: bool, num_requests: int, num_tokens: int, num_new: int
    ) -> list[float]:
        """Serve requests together, and tell routers of their chunks or not. Return the seconds of
        the scheduler in each step that gives all of them a token.
        """
        from vllm import SamplingParams

        engine = self._engines[name]
        scheduler = engine.scheduler
        seconds: list[float] = []
        schedule, update = scheduler.schedule, scheduler.update_from_output
        took_s = 0.0

        def timed_schedule(*args: Any, **kwargs: Any) -> Any:
            nonlocal took_s
            began = time.perf_counter()
            output = schedule(*args, **kwargs)
            took_s = time.perf_counter() - began
            return output

        def timed_update(output: Any, *args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            answer = update(output, *args, **kwargs)
            if output.total_num_scheduled_tokens == num_requests:
                seconds.append(took_s + time.perf_counter() - began)
            return answer

        rng = random.Random(seed)
        words = range(FIRST_WORD, VOCABULARY)
        prompts = [
            {"prompt_token_ids": rng.choices(words, k=num_tokens)} for _ in range(num_requests)
        ]
        sampling = SamplingParams(
            temperature=0.0, max_tokens=num_new, ignore_eos=True, detokenize=False
        )
        scheduler.schedule, scheduler.update_from_output = timed_schedule, timed_update
        self._tells, self._num_named = tells, 0
        engine.llm.generate(prompts, sampling, use_tqdm=False)
        scheduler.schedule, scheduler.update_from_output = schedule, update
        self._tells = True
        assert self._num_named >= num_requests, "there is nothing to tell"
        engine.reset()
        return seconds

    def told(self, num_prompts: int) -> dict[str, float]:
        """Return the processor time that a chunk takes of the thread that tells routers, and the
        bytes that one of its blocks takes as long as it is followed.
        """
        num_chunks = num_prompts * PROMPT_CHUNKS
        _, seconds = _followed(num_prompts)
        tracemalloc.start()
        followed, _ = _followed(num_prompts)
        num_bytes, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        followed.close()
        return {
            "seconds_per_chunk": seconds / num_chunks,
            "bytes_per_block": num_bytes / (num_chunks * CHUNK_TOKENS // BLOCK_TOKENS),
        }


def _followed(num_prompts: int) -> tuple[KVEvents, float]:
    """Tell routers of prompts that share nothing; return what follows them, and its seconds."""
    encoder, describe = msgspec.msgpack.Encoder(), describer()

    def tell(announcements: Sequence[Announcement]) -> None:
        told = [describe.event(one) for one in announcements]
        encoder.encode(KVEventBatch(ts=time.time(), events=told))

    guard = DegradingGuard(Counters(), raised=(Exception,))
    events = KVEvents(Everything(), [LANE], describe.describe, tell, guard)
    rng = random.Random(1)
    took_s = 0.0
    for _ in range(num_prompts):
        tokens = [rng.randrange(1 << 17) for _ in range(PROMPT_CHUNKS * CHUNK_TOKENS)]
        events.named(Request(tokens), b"".join(names_of(tokens)), 0)
        began = time.thread_time()
        events.round()
        took_s += time.thread_time() - began
    return events, took_s


if __name__ == "__main__":
    set_environment()
    serve(EventChild())
