"""An engine that calls the connector as vLLM does, its forward passes on a stream of their own and
late: every block that attention reads must hold exactly the KV of its tokens.
"""

from __future__ import annotations

import contextlib
import random
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lmcache_core.gpu_connectors.streams import ThreadStreams

from tests.fixtures import cuda_streams
from tests.fixtures.fake_vllm import imported_connector
from tests.fixtures.vllm_engine import (
    FULL,
    MLA,
    Engine,
    Limits,
    Request,
    Shape,
    WrongKV,
    running,
    window,
)
from tests.fixtures.vllm_engine.requests import Status
from tests.fixtures.vllm_engine.shapes import HND, LATENT_3D, NHD
from tests.fixtures.vllm_engine.worlds import beside, embedded, make_model, prompt
from tests.gpu.report import Report, WrongBytes

NUM_STEPS, NUM_DRY_STEPS = 3000, 480
MAX_SPIN_CYCLES = 40_000_000
"""20 ms on a GPU of 2 GHz: a forward pass that ends long after its launch."""
NUM_PROMPTS, MAX_REQUESTS = 12, 8
ABORT_CHANCE = 0.02
ARENA_BYTES = 1 << 20
WORLDS = {
    "whole prompts": ((FULL,), HND, 1),
    "windows": ((FULL, window(6)), NHD, 1),
    "two ranks": ((FULL,), NHD, 2),
    "latent": ((MLA,), LATENT_3D, 1),
}
"""Cache groups, layout and ranks, by name. The few blocks make vLLM preempt."""


def run(report: Report) -> None:
    """Every world with synchronous and with asynchronous loads."""
    num_steps = (NUM_DRY_STEPS if report.is_dry else NUM_STEPS) // (2 * len(WORLDS))
    num_preemptions = num_aborted = 0
    for number, (name, (groups, layout, num_ranks)) in enumerate(WORLDS.items()):
        shape = Shape(groups, 4, 48, layout, num_ranks, device=report.device)
        for load in ("sync", "async"):
            with contextlib.ExitStack() as opened:
                place = Path(opened.enter_context(tempfile.TemporaryDirectory()))
                socket = opened.enter_context(_sidecar(report, place))
                if socket is None and num_ranks > 1:
                    continue
                options = {"load": load, "layout": "tokens"}
                extra = embedded(**options) if socket is None else beside(socket, **options)
                module = opened.enter_context(imported_connector())
                used = opened.enter_context(compute_stream(report))
                limits = Limits(32, 6, reserves_whole_prompt=False)
                engine = opened.enter_context(
                    running(module, make_model(place), extra, shape=shape, limits=limits)
                )
                try:
                    requests = _drive(report, engine, random.Random(number), num_steps)
                except WrongKV as exc:
                    raise WrongBytes(f"{name}, {load} loads: {exc}") from exc
                num_loaded = sum(engine.tally(request).num_external for request in requests)
                num_preemptions += sum(request.num_preemptions for request in requests)
                num_aborted += sum(one.status is Status.FINISHED_ABORTED for one in requests)
                report.note(
                    f"{name}, {load} loads", steps=engine.num_steps, loaded_tokens=num_loaded
                )
                if not num_loaded:
                    raise AssertionError(f"{name}, {load} loads: nothing was loaded")
                if not used >= {"lmcache-stores", *(["lmcache-loads"] if load == "async" else [])}:
                    raise AssertionError(f"{name}, {load} loads: only {used} have a stream")
    report.note("all worlds", preemptions=num_preemptions, aborted_requests=num_aborted)
    if not (num_preemptions and num_aborted):
        raise AssertionError(f"{num_preemptions} preemptions, {num_aborted} aborted requests")


@contextlib.contextmanager
def _sidecar(report: Report, place: Path) -> Iterator[Path | None]:
    """The socket of a sidecar; None where its packages are missing: then the cache is inside the
    engine, and has one rank.
    """
    try:
        from tests.fixtures.sidecar import running_socket
    except ImportError as exc:
        report.note("without a sidecar", text=str(exc))
        yield None
        return
    with running_socket(place, ARENA_BYTES) as running_one:
        yield running_one.path


def _drive(report: Report, engine: Engine, dice: random.Random, num_steps: int) -> list[Request]:
    """Take steps with requests that come, are aborted and come again; the requests."""
    compute, requests = engine.compute, list[Request]()

    def late(output: Any) -> Any:
        if not report.is_dry:
            torch.cuda._sleep(dice.randrange(MAX_SPIN_CYCLES))
        return compute(output)

    engine.compute = late  # type: ignore[method-assign]
    while engine.num_steps < num_steps:
        for _ in range(dice.randrange(1, MAX_REQUESTS)):
            tokens = prompt(dice.randrange(NUM_PROMPTS), dice.randrange(9, 60))
            requests.append(engine.add(tokens, dice.randrange(1, 8)))
        while engine.scheduler.has_requests:
            if dice.random() < ABORT_CHANCE:
                engine.abort(dice.choice(requests))
            if not engine.step():
                time.sleep(0.0005)
        engine.forget()
    return requests


@contextlib.contextmanager
def compute_stream(report: Report) -> Iterator[set[str]]:
    """As vLLM computes: on a stream that does not wait for the default one, a fake one in a dry
    run. Gives the names of threads that copy on streams of their own.
    """
    used: set[str] = set()
    after = ThreadStreams.after

    def noted(streams: ThreadStreams, event: Any) -> Any:
        if event is not None:
            used.add(threading.current_thread().name)
        return after(streams, event)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ThreadStreams, "after", noted)
        if report.is_dry:
            cuda_streams.install(patch)
            yield used
            return
        with torch.cuda.stream(torch.cuda.Stream()):
            yield used
        torch.cuda.synchronize()
