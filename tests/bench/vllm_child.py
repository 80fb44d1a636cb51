"""vLLM engines that are timed, in a process of their own and vLLM's environment: obeys lines of
JSON, as the children of the tests do.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

from tests.vllm.engine_child import Child, serve
from tests.vllm.engines import set_environment

REST_S = 0.001
"""Source: `EngineCoreProc._process_engine_step` in `vllm/v1/engine/core.py`, vLLM 0.32."""


class Watch:
    """Stands before methods of one side of the connector: takes their time, and lets them through
    or not.

    Args:
        side: The scheduler's side or a worker's.
        names: Methods that do not call each other.
    """

    def __init__(self, side: Any, names: Iterable[str]) -> None:
        self.is_on = True
        self.seconds = 0.0
        self.cpu_seconds = 0.0
        for name in names:
            setattr(side, name, self._watched(getattr(side, name)))

    def clear(self) -> None:
        """Begin anew."""
        self.seconds = self.cpu_seconds = 0.0

    def _watched(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*args: Any) -> Any:
            if not self.is_on:
                return None
            begin, cpu_begin = time.perf_counter(), time.process_time()
            answer = method(*args)
            self.seconds += time.perf_counter() - begin
            self.cpu_seconds += time.process_time() - cpu_begin
            return answer

        return watched


class TimedChild(Child):
    """A child that says how long the first token takes."""

    def __init__(self) -> None:
        super().__init__()
        self._watches: dict[str, tuple[Watch, Watch]] = {}

    def open(self, name: str, options: dict[str, Any]) -> None:
        """Make an engine that rests after steps without work, as one in a process of its own does:
        whoever loads beside it needs the interpreter's lock.
        """
        super().open(name, options)
        core = self._engines[name].llm.llm_engine.engine_core.engine_core
        step = core.step_fn

        def resting_step() -> Any:
            outputs, has_computed = step()
            if not has_computed and core.scheduler.has_requests():
                time.sleep(REST_S)
            return outputs, has_computed

        core.step_fn = resting_step

    def first_token(self, name: str, tokens: list[int]) -> dict[str, Any]:
        """Generate one token, greedily; what it took, as `Took` says."""
        from vllm import SamplingParams

        llm = self._engines[name].llm
        sampling = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, detokenize=False)
        watches = self._watches.get(name, ())
        for watch in watches:
            watch.clear()
        begin, cpu_begin = time.perf_counter(), time.process_time()
        (output,) = llm.generate([{"prompt_token_ids": tokens}], sampling, use_tqdm=False)
        took = {
            "seconds": time.perf_counter() - begin,
            "cpu_seconds": time.process_time() - cpu_begin,
        }
        for of, watch in zip(("store", "scheduler"), watches, strict=False):
            took |= {f"{of}_seconds": watch.seconds, f"{of}_cpu_seconds": watch.cpu_seconds}
        (completion,) = output.outputs
        return took | {
            "num_cached": output.num_cached_tokens or 0,
            "token": completion.token_ids[0],
        }

    def watch(self, name: str) -> None:
        """Take the connector's own time from now on."""
        engine = self._engines[name]
        worker, scheduler = engine.worker_connector._worker, engine.connector._scheduler
        called = [
            method
            for method, value in vars(type(scheduler)).items()
            if callable(value) and not method.startswith("_")
        ]
        self._watches[name] = Watch(worker, ("store",)), Watch(scheduler, called)

    def switch_stores(self, name: str, is_on: bool) -> None:
        """Whether what is computed from now on is stored; `watch` comes first."""
        self._watches[name][0].is_on = is_on


if __name__ == "__main__":
    set_environment()
    serve(TimedChild())
