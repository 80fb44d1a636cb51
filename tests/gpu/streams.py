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
from dataclasses import replace
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
from tests.fixtures.vllm_engine.memory import RankMemory
from tests.fixtures.vllm_engine.requests import Status
from tests.fixtures.vllm_engine.shapes import HND, LATENT_3D, NHD
from tests.fixtures.vllm_engine.worlds import embedded, make_model, prompt, with_sidecar
from tests.gpu.report import Report, WrongBytes

NUM_STEPS, NUM_DRY_STEPS = 3000, 2400
MAX_SPIN_CYCLES = 40_000_000
"""20 ms on a GPU of 2 GHz: a forward pass that ends long after its launch."""
MAX_DRY_DELAY_S = 0.005
"""In a dry run, copies are late instead."""
NUM_PROMPTS, MAX_REQUESTS = 12, 8
ABORT_CHANCE = 0.02
SETTLE_CHANCE = 0.5
"""How often, between two rounds, everything is stored."""
ARENA_BYTES = 1 << 20
WORLDS = {
    "whole prompts": Shape((FULL,), layout=HND),
    "windows": Shape((FULL, window(6)), layout=NHD),
    "two ranks": Shape((FULL,), layout=NHD, num_ranks=2),
    "latent": Shape((MLA,), layout=LATENT_3D),
    "zeroed early": Shape((FULL,), layout=HND, zeroes_early=True),
}
"""Engines by name. Their few blocks make vLLM preempt."""


def run(report: Report) -> None:
    """Every world."""
    num_steps = (NUM_DRY_STEPS if report.is_dry else NUM_STEPS) // len(WORLDS)
    num_preemptions = num_aborted = 0
    for number, (name, world) in enumerate(WORLDS.items()):
        shape = replace(world, num_blocks=48, device=report.device)
        with contextlib.ExitStack() as opened:
            place = Path(opened.enter_context(tempfile.TemporaryDirectory()))
            socket = opened.enter_context(_sidecar(report, place))
            if socket is None and shape.num_ranks > 1:
                continue
            options = {"layout": "tokens"}
            extra = embedded(**options) if socket is None else with_sidecar(socket, **options)
            module = opened.enter_context(imported_connector())
            used = opened.enter_context(compute_stream(report))
            limits = Limits(32, 6, reserves_whole_prompt=False)
            engine = opened.enter_context(
                running(module, make_model(place), extra, shape=shape, limits=limits)
            )
            try:
                requests = _drive(report, engine, random.Random(number), num_steps)
            except WrongKV as exc:
                raise WrongBytes(f"{name}: {exc}") from exc
            num_loaded = sum(engine.tally(request).num_external for request in requests)
            num_preemptions += sum(request.num_preemptions for request in requests)
            num_aborted += sum(one.status is Status.FINISHED_ABORTED for one in requests)
            report.note(name, steps=engine.num_steps, loaded_tokens=num_loaded)
            if not num_loaded:
                raise AssertionError(f"{name}: nothing was loaded")
            if not used >= {"lmcache-stores", "lmcache-loads"}:
                raise AssertionError(f"{name}: only {used} have a stream")
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
        if dice.random() < SETTLE_CHANCE:
            engine.settle()
        engine.forget()
    return requests


@contextlib.contextmanager
def compute_stream(report: Report) -> Iterator[set[str]]:
    """As vLLM computes: on a stream that does not wait for the default one, a fake one in a dry
    run. Gives the names of threads that copy on streams of their own.
    """
    used: set[str] = set()
    own = ThreadStreams.own

    def noted(streams: ThreadStreams, device: torch.device) -> Any:
        used.add(threading.current_thread().name)
        return own(streams, device)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ThreadStreams, "own", noted)
        if report.is_dry:
            runtime = cuda_streams.install(patch, MAX_DRY_DELAY_S)
            for name in ("write", "zero"):
                patch.setattr(RankMemory, name, _in_order(runtime, getattr(RankMemory, name)))
            yield used
            return
        with torch.cuda.stream(torch.cuda.Stream()):
            yield used
        torch.cuda.synchronize()


def _in_order(runtime: cuda_streams.Runtime, write: Any) -> Any:
    """Write as a kernel on the compute stream does: after what the stream has been given."""

    def written(*args: Any) -> None:
        runtime.compute.run(runtime.compute.num_launched)
        write(*args)

    return written
