"""Calls of `LMCacheTier` that vLLM's scheduler makes, timed in vLLM's environment: writes the time
of each call and its thread's processor time, both in seconds, to its output as JSON.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from tests.vllm.tiering import JOB_BOUND_S, Offloading, key_of

NUM_KEYS = 400
NUM_ROUNDS = 150
NUM_SETS = 64
"""Of keys that are stored in turn; the arena has room for all."""
BESIDE = ("alone", "beside jobs")
"""Background work while calls are timed."""
NUM_JOBS = 2
"""Of each kind, that are under way while calls are timed."""
MAX_MISSED = 0.01
"""A sidecar that is slower than the tier waits says nothing of a chunk."""
STEP_S = 0.01
"""Between the ends of steps, a model's turn."""


class TimedTier:
    """The tier, with a stopwatch before its calls.

    Args:
        socket: The sidecar's.
    """

    def __init__(self, socket: Path) -> None:
        self._offloading = Offloading(
            socket, num_rows=(1 + 2 * NUM_JOBS) * NUM_KEYS * 4, timeout_s=JOB_BOUND_S
        )
        (self._tier,) = self._offloading.manager.secondary_tiers
        self._num_jobs = 0
        self._num_stores = 0
        self._pending = 0
        self.num_missed = 0
        self.seconds: dict[str, list[tuple[float, float]]] = {}

    def fill(self) -> None:
        """Store what is loaded later."""
        self._submit(False, range(NUM_KEYS), "")
        self._await_jobs("")

    def round(self, number: int, *, is_busy: bool) -> None:
        """Call everything once, with jobs under way or without."""
        from vllm.v1.kv_offload.base import ReqContext, ScheduleEndContext

        beside = BESIDE[is_busy]
        context = ReqContext(f"{beside} {number}")
        tier, keys = self._tier, [key_of(n) for n in range(NUM_KEYS)]
        tier.on_new_request(context)
        if is_busy:
            self._submit_all(NUM_JOBS, beside)

        def look_up() -> list[Any]:
            return [tier.lookup(key, context) for key in keys]

        self._timed(f"nothing but a loop of Python, {beside}", lambda: list(map(_hash, keys)))
        self._timed(f"lookup, new keys, {beside}", look_up)
        end = ScheduleEndContext((), ())
        self._timed(f"on_schedule_end, {beside}", lambda: tier.on_schedule_end(end))
        time.sleep(STEP_S)
        found = self._timed(f"lookup, {beside}", look_up)
        self._timed(f"touch, {beside}", lambda: tier.touch(keys, context))
        self._timed(f"take_events, {beside}", lambda: list(tier.take_events()))
        if not is_busy:
            self._submit_all(1, beside)
        else:
            self._finished(beside)
        self._await_jobs(beside)
        deadline = time.monotonic() + JOB_BOUND_S
        while any(one.name == "RETRY" for one in found):
            assert time.monotonic() < deadline, "a lookup hangs"
            tier.on_schedule_end(end)
            time.sleep(STEP_S)
            found = look_up()
        self.num_missed += sum(one.name != "HIT" for one in found)
        self._timed(f"on_request_finished, {beside}", lambda: tier.on_request_finished(context))

    def close(self) -> None:
        """Shut it down."""
        self._offloading.close()

    def _submit_all(self, num_jobs: int, beside: str) -> None:
        for _ in range(num_jobs):
            self._submit(True, range(NUM_KEYS), beside)
            self._num_stores += 1
            first = (1 + self._num_stores % NUM_SETS) * NUM_KEYS
            self._submit(False, range(first, first + NUM_KEYS), beside)

    def _submit(self, is_promotion: bool, numbers: Iterable[int], beside: str) -> None:
        from vllm.v1.kv_offload.base import ReqContext
        from vllm.v1.kv_offload.tiering.base import TransferJob

        self._num_jobs += 1
        first = self._num_jobs % (1 + 2 * NUM_JOBS) * NUM_KEYS
        job = TransferJob(
            job_id=self._num_jobs,
            keys=tuple(key_of(n) for n in numbers),
            chunk_ids=np.arange(first, first + NUM_KEYS),
            is_promotion=is_promotion,
            req_context=ReqContext("jobs"),
        )
        self._pending += 1
        name = "submit_load" if is_promotion else "submit_store"
        self._timed(f"{name}, {beside}", lambda: getattr(self._tier, name)(job))

    def _finished(self, beside: str) -> None:
        results = self._timed(
            f"get_finished_jobs, {beside}", lambda: list(self._tier.get_finished_jobs())
        )
        assert all(result.success for result in results), "a job fails"
        self._pending -= len(results)

    def _await_jobs(self, beside: str) -> None:
        deadline = time.monotonic() + JOB_BOUND_S
        while self._pending:
            assert time.monotonic() < deadline, "a job hangs"
            time.sleep(STEP_S)
            self._finished(beside)

    def _timed(self, name: str, work: Callable[[], Any]) -> Any:
        begin, cpu_begin = time.perf_counter(), time.thread_time()
        answer = work()
        cpu_s, wall_s = time.thread_time() - cpu_begin, time.perf_counter() - begin
        self.seconds.setdefault(name, []).append((wall_s, cpu_s))
        return answer


def _hash(key: bytes) -> int:
    """Take about a microsecond: what the machine itself adds to its time shows how busy it is."""
    return hash((key, key[:8], key[8:]))


def main() -> None:
    """Time everything; takes about two minutes."""
    tier = TimedTier(Path(sys.argv[1]))
    tier.fill()
    for number in range(NUM_ROUNDS):
        tier.round(number, is_busy=False)
        tier.round(number, is_busy=True)
    tier.close()
    share = tier.num_missed / (2 * NUM_ROUNDS * NUM_KEYS)
    assert share < MAX_MISSED, f"{share:.1%} of the chunks were not found"
    timed = {name: seconds for name, seconds in tier.seconds.items() if not name.endswith(", ")}
    sys.stdout.write(json.dumps(timed) + "\n")


if __name__ == "__main__":
    main()
