"""Engines beside the sidecars: requests that share prefixes, each answer compared with its tokens."""

from __future__ import annotations

import random
import time

from tests.simulation.cluster import Cluster


class SimulatedEngine:
    """The engine process of a node.

    Args:
        cluster: Where.
        node: Beside which sidecar.
        seed: Of its prompts.
        pause_s: Mean time between two requests.
    """

    def __init__(self, cluster: Cluster, node: str, seed: int, pause_s: float) -> None:
        self.cluster = cluster
        self.node = node
        self.seed = seed
        self.pause_s = pause_s
        self.is_working = True
        self.faults: list[str] = []
        self.totals: dict[str, int] = {}
        self.prompt: int | None = None
        """A prompt family to store and to find again, by request of a check."""
        self.found: int | None = None

    def main(self) -> int:
        """Serve requests until the process ends."""
        from tests.chaos.cluster.worker import Worker, open_engine, prompt_of

        dice = random.Random(self.seed)
        engine = open_engine(str(self.cluster.socket(self.node)))
        worker = Worker(engine, self.seed)
        worker._faults = self.faults
        worker._totals = self.totals_of(worker)
        while self.is_working or self.prompt is not None:
            if self.prompt is not None:
                tokens = prompt_of(self.prompt, 0, 0, 0)
                worker.store(tokens)
                time.sleep(1.0)
                self.found = worker.retrieve(tokens)
                self.prompt = None
                continue
            worker.request()
            until = time.monotonic() + dice.expovariate(1 / self.pause_s)
            while self.is_working and self.prompt is None and time.monotonic() < until:
                time.sleep(0.5)
        engine.close()
        return 0

    def totals_of(self, worker: object) -> dict[str, int]:
        """Let the worker count here."""
        self.totals = worker._totals  # type: ignore[attr-defined]
        return self.totals
