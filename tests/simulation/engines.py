"""Simulated engines. Their requests share prefixes; each hit is compared with what was computed."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

from tests.simulation.cluster import Cluster


class SimulatedEngine:
    """The engine process of a node.

    Args:
        cluster: Where.
        node: The node whose sidecar it uses.
        seed: Of its prompts.
        pause_s: Mean time between two requests.
        on_call: Called with the name of each call of the engine as it begins.

    Attributes:
        is_working: Set to False to end it.
        is_idle: Set to True to let it do nothing but what `prompt` asks for.
        faults: What went wrong.
        totals: What it did.
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
        on_call: Callable[[str], object],
    ) -> None:
        self.cluster = cluster
        self.node = node
        self.seed = seed
        self.pause_s = pause_s
        self.on_call = on_call
        self.is_working = True
        self.is_idle = False
        self.faults: list[str] = []
        self.totals: dict[str, int] = {}
        self.prompt: int | None = None
        self.found: int | None = None

    def main(self) -> int:
        """Serve requests until the process ends."""
        from tests.chaos.cluster.worker import Worker, open_engine, prompt_of

        on_call = self.on_call

        class Counted(Worker):
            def _timed(self, name: str, call: Any) -> Any:
                on_call(name)
                paused_s, num_faults = process.paused_s, len(self._faults)
                result = super()._timed(name, call)
                if process.paused_s > paused_s:  # it is not the call that took so long
                    new = self._faults[num_faults:]
                    self._faults[num_faults:] = [one for one in new if not one.startswith("late")]
                return result

        process = self.cluster.world.kernel.process
        assert process is not None

        dice = random.Random(self.seed)
        engine = open_engine(str(self.cluster.socket(self.node)))
        worker = Counted(engine, self.seed)
        worker._faults = self.faults
        self.totals = worker._totals
        while self.is_working or self.prompt is not None:
            if self.prompt is not None:
                tokens = prompt_of(self.prompt, 0, 0, 0)
                found = worker.retrieve(tokens)
                if found < len(tokens):
                    worker.store(tokens)
                self.prompt, self.found = None, found
                continue
            if not self.is_idle:
                worker.request()
            until = time.monotonic() + dice.expovariate(1 / self.pause_s)
            while self.is_working and self.prompt is None and time.monotonic() < until:
                time.sleep(min(2.0, self.pause_s))
        engine.close()
        return 0
