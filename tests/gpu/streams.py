"""An engine that calls the connector as vLLM does, its forward passes on a stream of their own and
late, and copies late as well: every block that attention reads must hold exactly the KV of its
tokens.
"""

from __future__ import annotations

import contextlib
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lmcache_core.gpu_connectors import copy_engine
from lmcache_core.gpu_connectors.staging import StagingPair
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
from tests.gpu.copies import LOADS, STORES, Copies, require_pinned
from tests.gpu.facts import SHARED_MEMORY
from tests.gpu.report import Report, WrongBytes
from tests.gpu.wrong_bytes import WRONG_BYTES

NUM_STEPS, NUM_DRY_STEPS = 3000, 2400
"""Steps that compute something, in all worlds together."""
MAX_SPIN_CYCLES = 20_000_000
"""10 ms on a GPU of 2 GHz: a forward pass that ends long after its launch."""
MAX_COPY_SPIN_CYCLES = 10_000_000
"""A copy that begins after the next forward passes, if nothing orders them."""
MOVING_CHANCE = 0.25
"""How often, in a dry run, what threads wait for may end in a step."""
IDLE_CHANCES = (0.0, 0.5, 1.0)
"""How often, in a dry run, a forward pass runs when it is launched, as on a device that is idle;
otherwise when something waits for it. Each round has one of these chances.
"""
NUM_PROMPTS, MAX_REQUESTS = 12, 16
MAX_NEW, PREFILL_CHANCE = 16, 0.5
"""Tokens after a prompt; often one, so that requests end while they are stored."""
ABORT_CHANCE, PREEMPT_CHANCE = 0.02, 0.05
"""How often, before a step, a request is aborted, and all that run are preempted."""
SETTLE_CHANCE = 0.5
"""How often, between two rounds, everything is stored."""
ARENA_BYTES = 1 << 15
"""So little that chunks are evicted, and stored again."""
WORLDS = {
    "whole prompts": Shape((FULL,), layout=HND, num_blocks=24),
    "windows": Shape((FULL, window(6)), layout=NHD, num_blocks=38),
    "two ranks": Shape((FULL,), layout=NHD, num_blocks=24, num_ranks=2),
    "latent": Shape((MLA,), layout=LATENT_3D, num_blocks=24),
    "zeroed early": Shape((FULL,), layout=HND, num_blocks=24, zeroes_early=True),
}
"""Engines by name. Their few blocks make vLLM preempt, and use blocks again at once."""
BY_COPY_ENGINES = {"two ranks"}
"""Those whose runs, however short, are moved without kernels."""


@dataclass
class Compute:
    """Where forward passes run.

    Attributes:
        copies: What the connector copies meanwhile.
        threads: Those that copy on streams of their own.
        runtime: The fakes of a dry run.
    """

    copies: Copies
    threads: set[str] = field(default_factory=set)
    runtime: cuda_streams.Runtime | None = None
    idle_chance: float = 0.0

    def late(self, forward: Callable[[Any], Any], dice: random.Random) -> Callable[[Any], Any]:
        """Return a forward pass that ends some time after it is launched, as other work does."""

        def launched(output: Any) -> Any:
            if self.runtime is None:
                if output.total_num_scheduled_tokens:
                    torch.cuda._sleep(dice.randrange(MAX_SPIN_CYCLES))
                return forward(output)
            if dice.random() < MOVING_CHANCE:
                self.runtime.is_moving.set()
            else:
                self.runtime.is_moving.clear()
            spoiled = forward(output)
            if dice.random() < self.idle_chance:
                self.runtime.compute.run(self.runtime.compute.num_launched)
            return spoiled

        return launched

    def begin_round(self, dice: random.Random) -> None:
        """Choose how idle a dry run's device is."""
        self.idle_chance = dice.choice(IDLE_CHANCES)

    def end_round(self) -> None:
        """Let everything end that threads wait for."""
        if self.runtime is not None:
            self.runtime.is_moving.set()


def run(report: Report) -> None:
    """Every world."""
    num_steps = (NUM_DRY_STEPS if report.is_dry else NUM_STEPS) // len(WORLDS)
    requests = list[Request]()
    for seed, name in enumerate(WORLDS):
        requests += run_world(report, name, report.device, seed, num_steps)
    num_preemptions = sum(request.num_preemptions for request in requests)
    num_aborted = sum(one.status is Status.FINISHED_ABORTED for one in requests)
    report.note("all worlds", preemptions=num_preemptions, aborted_requests=num_aborted)
    if not (num_preemptions and num_aborted):
        raise AssertionError(f"{num_preemptions} preemptions, {num_aborted} aborted requests")
    _second_device(report)


def run_world(report: Report, name: str, device: str, seed: int, num_steps: int) -> list[Request]:
    """Take so many steps in a world; what was requested.

    Raises:
        WrongBytes: A forward pass has read other KV than that of its tokens.
    """
    shape = replace(WORLDS[name], device=device, runs_ahead=True)
    with contextlib.ExitStack() as opened:
        place = Path(opened.enter_context(tempfile.TemporaryDirectory(dir=SHARED_MEMORY)))
        socket = opened.enter_context(_sidecar(report, place))
        if socket is None and shape.num_ranks > 1:
            return []
        options = {"layout": "tokens"}
        extra = embedded(**options) if socket is None else with_sidecar(socket, **options)
        module = opened.enter_context(imported_connector())
        compute = opened.enter_context(compute_stream(report, name in BY_COPY_ENGINES))
        limits = Limits(32, 6, reserves_whole_prompt=False)
        kind = torch.device(device).type
        try:
            with running(
                module, make_model(place), extra, shape=shape, limits=limits, device=kind
            ) as engine:
                requests = _drive(compute, engine, random.Random(seed), num_steps)
        except WrongKV as exc:
            raise WrongBytes(f"{name}: {exc}") from exc
        num_loaded = sum(engine.tally(request).num_external for request in requests)
        report.note(
            name,
            steps=engine.num_steps,
            loaded_tokens=num_loaded,
            are_pinned=compute.copies.are_pinned,
        )
        if not num_loaded:
            raise AssertionError(f"{name}: nothing was loaded")
        if not compute.threads >= {STORES, LOADS}:
            raise AssertionError(f"{name}: only {compute.threads} have a stream")
        if socket is not None and not report.is_dry:
            require_pinned(compute.copies.are_pinned)
    return requests


def _second_device(report: Report) -> None:
    """A rank that is not the first, in a process of its own; a dry run has no second device."""
    if not report.is_dry and torch.cuda.device_count() < 2:
        report.note("second device", text="left out: this machine has one device")
        return
    command = [sys.executable, "-W", "default", "-m", "tests.gpu.second_device"]
    done = subprocess.run(
        [*command, report.path, report.device], capture_output=True, text=True, check=False
    )
    if done.returncode:
        error = WrongBytes if done.returncode == WRONG_BYTES else AssertionError
        raise error(f"second device: {done.stderr[-4000:]}")


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


def _drive(compute: Compute, engine: Engine, dice: random.Random, num_steps: int) -> list[Request]:
    """Take steps with requests that come, are aborted and come again; the requests."""
    requests, num_computed = list[Request](), 0
    engine.compute = compute.late(engine.compute, dice)  # type: ignore[method-assign]
    while num_computed < num_steps:
        compute.begin_round(dice)
        for _ in range(dice.randrange(1, MAX_REQUESTS)):
            tokens = prompt(dice.randrange(NUM_PROMPTS), dice.randrange(9, 60))
            num_new = 1 if dice.random() < PREFILL_CHANCE else dice.randrange(2, MAX_NEW)
            requests.append(engine.add(tokens, num_new))
        try:
            while engine.scheduler.has_requests:
                if dice.random() < ABORT_CHANCE:
                    engine.abort(dice.choice(requests))
                if dice.random() < PREEMPT_CHANCE:
                    engine.scheduler.preempt_all()
                if engine.step():
                    num_computed += 1
                else:
                    time.sleep(0.0005)
        finally:
            compute.end_round()
        if dice.random() < SETTLE_CHANCE:
            engine.settle()
        engine.forget()
    return requests


@contextlib.contextmanager
def compute_stream(report: Report, has_copy_engines: bool = False) -> Iterator[Compute]:
    """As vLLM computes: on a stream that does not wait for the default one, a fake one in a dry
    run.

    Args:
        has_copy_engines: They move runs of any length.
    """
    compute = Compute(Copies(MAX_COPY_SPIN_CYCLES))
    own = ThreadStreams.own

    def noted(streams: ThreadStreams, device: torch.device) -> Any:
        compute.threads.add(threading.current_thread().name)
        return own(streams, device)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ThreadStreams, "own", noted)
        patch.setattr(StagingPair, "near", compute.copies.watched(StagingPair.near))
        in_order = compute.copies.watched_runs(StagingPair.in_order)
        patch.setattr(StagingPair, "in_order", in_order)
        if has_copy_engines:
            patch.setattr(copy_engine, "LEAST_RUN_BYTES", 1)
        if report.is_dry:
            compute.runtime = cuda_streams.install(patch, has_copy_engines)
            for name, ordered in IN_ORDER.items():
                patch.setattr(
                    RankMemory, name, ordered(compute.runtime.compute, getattr(RankMemory, name))
                )
            yield compute
            return
        with torch.cuda.stream(torch.cuda.Stream()):
            yield compute
        torch.cuda.synchronize()


def _launched(stream: cuda_streams.Stream, work: Callable[..., None]) -> Callable[..., None]:
    """Work as a kernel does: when the stream comes to it."""
    return lambda *args: stream.launch(lambda: work(*args))


def _waiting(stream: cuda_streams.Stream, work: Callable[..., Any]) -> Callable[..., Any]:
    """Work when the stream has done all that it has been given."""

    def waited(*args: Any) -> Any:
        stream.run(stream.num_launched)
        return work(*args)

    return waited


IN_ORDER = {
    **dict.fromkeys(("write", "copy", "zero", "compare"), _launched),
    **dict.fromkeys(("read", "marked"), _waiting),
}
"""How a dry run uses an engine's KV, by method."""
