"""The section `event-cost` of docs/benchmarks.md: what our KV events cost an engine."""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path

from tests.bench.events import BLOCK_TOKENS
from tests.bench.measure import OtherLoad, Run, median_ratio
from tests.bench.report import Findings, Section
from tests.bench.vllm import HOME, PYTHON, check_vllm, vllm_environment
from tests.vllm import models
from tests.vllm.engines import CHUNK_SIZE, engine_options, transfer_config
from tests.vllm.processes import EngineProcess, Owner
from tests.vllm.sidecars import sidecar, socket_of

NUM_REQUESTS, NUM_TOKENS, NUM_NEW = 64, 250, 270
"""Served together; each names two chunks of 256 tokens meanwhile."""
ROUNDS = 9
NUM_PROMPTS = 256
"""Of 8 chunks of 256 tokens each."""
GOAL_STEP, GOAL_BYTES = 1.01, 200
TIMEOUT_S = 300.0


def measure(run: Run) -> Findings:
    """Measure it; takes three minutes.

    Raises:
        VLLMMissingError: vLLM is not installed.
    """
    check_vllm()
    with tempfile.TemporaryDirectory() as scratch, Owner(Path(scratch)) as owner:
        engine = run("KV events: engine", lambda: _engine(owner))
        silent: list[float] = []
        telling: list[float] = []
        with OtherLoad() as others:
            for number in range(ROUNDS + 1):
                name = f"KV events: round {number} of {ROUNDS}"
                for tells, seconds in ((False, silent), (True, telling)):
                    took_s = run(name, lambda: _step_s(engine, number, tells))  # noqa: B023 (run at once)
                    if number:
                        seconds.append(took_s)
            told = run(
                "KV events: a chunk",
                lambda: engine.call(TIMEOUT_S, do="told", num_prompts=NUM_PROMPTS),
            )
    step_s, ratio = statistics.median(telling), median_ratio(telling, silent)
    rows = [
        (
            f"vLLM's scheduler, a step of {NUM_REQUESTS} requests",
            f"{step_s * 1e6:,.0f} us",
            f"{ratio:.3f} times a step with vLLM's events alone; goal: {GOAL_STEP:g}",
        ),
        (
            "a thread of the scheduler's process, for a chunk",
            f"{told['seconds_per_chunk'] * 1e6:,.0f} us",
            "processor time, at priority of the process",
        ),
        (
            "memory, for a block",
            f"{told['bytes_per_block']:,.0f} bytes",
            f"of {BLOCK_TOKENS} tokens; goal: {GOAL_BYTES}",
        ),
    ]
    title = "What our KV events cost an engine"
    return Findings([Section(title, ("what", "figure", "note"), rows)], [others.remark])


def _engine(owner: Owner) -> EngineProcess:
    sidecar(owner)
    extra = {
        "lmcache.sidecar_socket": str(socket_of(owner)),
        "lmcache.chunk_size": CHUNK_SIZE,
        "lmcache.kv_events": True,
    }
    options = engine_options(
        models.made_models(HOME) / models.LLAMA,
        max_num_seqs=NUM_REQUESTS,
        kv_transfer_config=transfer_config(extra),
        kv_events_config={
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": f"ipc://{owner.directory}/events",
        },
    )
    command = [str(PYTHON), "-m", "tests.bench.event_child"]
    engine = owner.engine("engine", vllm_environment(), command)
    engine.open(options)
    return engine


def _step_s(engine: EngineProcess, number: int, tells: bool) -> float:
    """Return the mean of the steps of a round."""
    sizes = {"num_requests": NUM_REQUESTS, "num_tokens": NUM_TOKENS, "num_new": NUM_NEW}
    asked = {"do": "steps", "name": "engine", "seed": 2 * number + tells, "tells": tells}
    return statistics.fmean(engine.call(TIMEOUT_S, **asked, **sizes))
