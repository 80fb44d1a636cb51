"""Simulated engines. Their requests share prefixes; each hit is compared with what was computed."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, Protocol

from tests.simulation.cluster import TENANTS, Cluster
from tests.simulation.kernel import Process


class Client(Protocol):
    """The operations of an engine's process on its cache; see `SimulatedEngine` for faults and
    totals.
    """

    def request(self) -> None:
        """Serve one request, or a few at once."""

    def find(self, family: int) -> int:
        """Load the beginning of the first prompt of a family, and then all of it; store what was
        not cached.

        Returns:
            How many tokens of the prompt were cached.
        """

    def close(self) -> None:
        """Shut down."""


class SimulatedEngine:
    """The engine process of a node.

    Args:
        cluster: Where.
        node: The node whose sidecar it uses.
        seed: Seed of its prompts.
        pause_s: Mean time between two requests.
        is_vllm: Whether it is vLLM with the connector; otherwise it calls the library.
        is_embedded: Whether vLLM has tiers in its own process instead of a sidecar.
        shape: Of vLLM's KV.
        on_call: Called with the name of each call of the engine as it begins.

    Attributes:
        is_working: Set to False to end it.
        is_idle: Set to True to let it do nothing but what `prompt` asks for.
        faults: Its failures.
        totals: Counts of its operations.
        prompt: A prompt family to load, and to store if `found` is too little, by request of a
            check.
        found: How many tokens of it there were; None: not asked yet.
    """

    def __init__(
        self,
        cluster: Cluster,
        node: str,
        seed: int,
        pause_s: float,
        is_vllm: bool,
        is_embedded: bool,
        shape: Any,
        on_call: Callable[[str], object],
    ) -> None:
        self.cluster = cluster
        self.node = node
        self.seed = seed
        self.pause_s = pause_s
        self.is_vllm = is_vllm
        self.is_embedded = is_embedded
        self.shape = shape
        self.on_call = on_call
        self.is_working = True
        self.is_idle = False
        self.faults: list[str] = []
        self.totals: Counter[str] = Counter()
        self.prompt: int | None = None
        self.found: int | None = None

    def main(self) -> int:
        """Serve requests until the process ends."""
        process = self.cluster.world.kernel.process
        assert process is not None
        dice = random.Random(self.seed)
        client = self._open(process)
        while self.is_working or self.prompt is not None:
            if self.prompt is not None:
                self.found = client.find(self.prompt)
                self.prompt = None
                continue
            if not self.is_idle:
                client.request()
            until = time.monotonic() + dice.expovariate(1 / self.pause_s)
            while self.is_working and self.prompt is None and time.monotonic() < until:
                time.sleep(min(2.0, self.pause_s))
        client.close()
        return 0

    def _open(self, process: Process) -> Client:
        if self.is_vllm:
            from tests.simulation.vllm_engines import VllmClient

            return VllmClient(self, process)
        return _library_client(self, process)


def _library_client(engine: SimulatedEngine, process: Process) -> Client:
    """Return the worker of the chaos tests."""
    from tests.chaos.cluster.worker import (
        CHUNK_SIZE,
        HEAD_CHUNKS,
        Worker,
        open_engine,
        prompt_of,
    )

    class Counted(Worker):
        def _timed(self, name: str, call: Any) -> Any:
            engine.on_call(name)
            paused_s, num_faults = process.paused_s, len(self._faults)
            result = super()._timed(name, call)
            if process.paused_s > paused_s:  # the call itself did not take that long
                new = self._faults[num_faults:]
                self._faults[num_faults:] = [one for one in new if not one.startswith("late")]
            return result

        def find(self, family: int) -> int:
            prompt = prompt_of(family, 0, 0, 0)
            for tokens in (prompt[: HEAD_CHUNKS * CHUNK_SIZE], prompt):
                found = self.retrieve(tokens)
                if found < len(tokens):
                    self.store(tokens)
            return found

        def close(self) -> None:
            self._engine.close()

    # With it, a hit across tenants is wrong KV.
    model = TENANTS.index(engine.cluster.tenant_of(engine.node))
    worker = Counted(open_engine(str(engine.cluster.socket(engine.node))), engine.seed, model)
    worker._faults, worker._totals = engine.faults, engine.totals
    return worker
