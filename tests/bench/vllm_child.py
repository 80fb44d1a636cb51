"""vLLM engines that are timed, in a process of their own and vLLM's environment: obeys lines of
JSON, as the children of the tests do.
"""

from __future__ import annotations

import time
from typing import Any

from tests.vllm.engine_child import Child, serve
from tests.vllm.engines import set_environment

REST_S = 0.001
"""Source: `EngineCoreProc._process_engine_step` in `vllm/v1/engine/core.py`, vLLM 0.32."""


class Watch:
    """Stands before the stores of a worker's connector: takes their time, and lets them through or
    not.
    """

    def __init__(self, connector: Any) -> None:
        self.is_on = True
        self.seconds = self.cpu_seconds = 0.0
        self._save = connector.wait_for_save
        connector.wait_for_save = self._watched

    def _watched(self) -> None:
        if not self.is_on:
            return
        began, cpu_began = time.perf_counter(), time.process_time()
        self._save()
        self.seconds += time.perf_counter() - began
        self.cpu_seconds += time.process_time() - cpu_began


class TimedChild(Child):
    """A child that says how long the first token takes."""

    def __init__(self) -> None:
        super().__init__()
        self._watches: dict[str, Watch] = {}

    def open(self, name: str, options: dict[str, Any]) -> None:
        """Make an engine that rests after steps without work, as one in a process of its own does:
        its loading threads need the interpreter's lock.
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
        """Generate one token, greedily; return what it took, as `Took` has it."""
        from vllm import SamplingParams

        llm = self._engines[name].llm
        sampling = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, detokenize=False)
        watch = self._watches.get(name)
        if watch is not None:
            watch.seconds = watch.cpu_seconds = 0.0
        began, cpu_began = time.perf_counter(), time.process_time()
        (output,) = llm.generate([{"prompt_token_ids": tokens}], sampling, use_tqdm=False)
        seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - cpu_began
        (completion,) = output.outputs
        return {
            "seconds": seconds,
            "cpu_seconds": cpu_seconds,
            "num_cached": output.num_cached_tokens or 0,
            "token": completion.token_ids[0],
            "store_seconds": 0.0 if watch is None else watch.seconds,
            "store_cpu_seconds": 0.0 if watch is None else watch.cpu_seconds,
        }

    def watch(self, name: str) -> None:
        """Take the time of the connector's stores from now on."""
        self._watches[name] = Watch(self._engines[name].worker_connector)

    def switch_stores(self, name: str, is_on: bool) -> None:
        """Choose whether what is computed from now on is stored; `watch` comes first."""
        self._watches[name].is_on = is_on


if __name__ == "__main__":
    set_environment()
    serve(TimedChild())
