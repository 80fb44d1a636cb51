"""One simulated run: engines at work, faults drawn from a seed, invariants, an end in peace."""

from __future__ import annotations

import random
import signal
import traceback
from collections import Counter
from collections.abc import Callable
from typing import Any

from tests.simulation.cluster import BROKERS, LOOKUPS, SERVICES, SIDECARS, STORAGES, Cluster
from tests.simulation.engines import SimulatedEngine
from tests.simulation.world import World

CALM_S = 60.0
"""After the last fault, everything works again within this time."""
END_S = 60.0
"""A service that is told to end has ended after this time."""


class Scenario:
    """A run of one seed.

    Args:
        world: Installed.
        seed: Draws which faults there are, how often, and when.
        hours_s: Virtual seconds of work under faults.
    """

    def __init__(self, world: World, seed: int, work_s: float) -> None:
        self.world = world
        self.kernel = world.kernel
        self.work_s = work_s
        self.dice = random.Random(f"scenario {seed}")
        self.violations: list[str] = []
        self.counts: Counter[str] = Counter()
        from tests.chaos.cluster.worker import CHUNK_BYTES

        self.cluster = Cluster(world, CHUNK_BYTES)
        self.engines: dict[str, SimulatedEngine] = {}
        self.expected_deaths: set[int] = set()
        self.faults: dict[str, Callable[[], None]] = {
            "kill": self._kill,
            "stop": self._stop,
            "restart": self._restart,
            "power": self._power,
            "cut": self._cut,
            "slow link": self._slow_link,
            "reset": self._reset,
            "disk full": self._disk_full,
            "disk error": self._disk_error,
            "disk hang": self._disk_hang,
            "disk slow": self._disk_slow,
            "corrupt": self._corrupt,
            "descriptors": self._descriptors,
            "redis": self._redis,
            "flush": self._flush,
            "clock": self._clock,
            "kill engine": self._kill_engine,
            "stop engine": self._stop_engine,
        }
        # Swarm testing: each seed has some kinds of fault and not others.
        self.enabled = [name for name in self.faults if self.dice.random() < 0.5] or ["kill"]
        self.pause_s = self.dice.choice([2.0, 5.0, 15.0])
        world.network.piece_chance = self.dice.choice([0.0, 0.0, 0.1, 0.5])

    def run(self) -> list[str]:
        """Run; return what went wrong."""
        operator = self.world.machine("operator")
        self.kernel.start_process("operator", operator, self._operate)
        end_s = self.work_s + 4 * CALM_S + END_S + 120
        try:
            self.kernel.run(end_s)
        except BaseException:
            self.violations.append(f"a thread failed:\n{traceback.format_exc()}")
        else:
            if not self.is_done:
                self.violations.append("the run has not ended")
        return self.violations

    is_done = False

    def _note(self, text: str) -> None:
        self.violations.append(f"{self.kernel.now:.3f} {text}")
        self.kernel.record(f"violation {text}")

    def _operate(self) -> int:
        sleep = self.kernel.sleep
        self.cluster.start_all()
        sleep(3.0)
        for number, node in enumerate(SIDECARS):
            self._start_engine(node, number)
        begin = self.kernel.now
        while self.kernel.now < begin + self.work_s:
            sleep(self.dice.expovariate(1 / self.pause_s))
            name = self.dice.choice(self.enabled)
            self.counts[name] += 1
            self.kernel.record(f"fault {name}")
            self.faults[name]()
            self._check_alive()
        self._heal()
        sleep(CALM_S)
        self._check_alive()
        self._check_found()
        self._end()
        self.is_done = True
        return 0

    def _start_engine(self, node: str, number: int) -> None:
        engine = self.engines.get(node)
        faults = engine.faults if engine else []
        self.engines[node] = SimulatedEngine(
            self.cluster, node, 1000 * len(self.kernel.processes) + number, 5.0
        )
        self.engines[node].faults = faults
        name = f"engine-{node}"
        self.cluster.processes[name] = self.kernel.start_process(
            name, self.cluster.machines[node], self.engines[node].main
        )

    # --- Faults ----------------------------------------------------------------------------------

    def _later(self, seconds: float, name: str, function: Callable[[], None]) -> None:
        process = self.kernel.process
        assert process is not None

        def wait() -> None:
            self.kernel.sleep(seconds)
            function()

        self.kernel.spawn(process, name, wait)

    def _signal(self, name: str, number: int) -> None:
        process = self.cluster.processes[name]
        self.expected_deaths.add(process.pid)
        self.world.signal(process, number)

    def _start_again(self, name: str) -> None:
        if self.cluster.processes[name].is_dead:
            if name.startswith("engine-"):
                self._start_engine(name.removeprefix("engine-"), 7)
            else:
                self.cluster.start(name)

    def _some(self, names: tuple[str, ...]) -> str:
        return self.dice.choice([one for one in names if not self.cluster.processes[one].is_dead])

    def _kill(self) -> None:
        name = self._some(SERVICES)
        self._signal(name, signal.SIGKILL)
        self._later(self.dice.uniform(0.1, 20), f"start {name}", lambda: self._start_again(name))

    def _restart(self) -> None:
        name = self._some(SERVICES)
        process = self.cluster.processes[name]
        self._signal(name, signal.SIGTERM)

        def finish() -> None:
            code = self.kernel.wait_process(process, 40.0)
            if code is None:
                self._note(f"{name} did not end within 40 s of SIGTERM")
                self._signal(name, signal.SIGKILL)
            self._start_again(name)

        self._later(0.0, f"restart {name}", finish)

    def _stop(self) -> None:
        name = self._some(SERVICES)
        process = self.cluster.processes[name]
        self.world.signal(process, signal.SIGSTOP)
        self._later(
            self.dice.uniform(0.1, 30),
            f"continue {name}",
            lambda: self.world.signal(process, signal.SIGCONT),
        )

    def _kill_engine(self) -> None:
        name = self._some(tuple(f"engine-{node}" for node in SIDECARS))
        self._signal(name, signal.SIGKILL)
        self._later(self.dice.uniform(0.1, 5), f"start {name}", lambda: self._start_again(name))

    def _stop_engine(self) -> None:
        name = self._some(tuple(f"engine-{node}" for node in SIDECARS))
        process = self.cluster.processes[name]
        self.engines[name.removeprefix("engine-")].was_stopped = True
        self.world.signal(process, signal.SIGSTOP)
        self._later(
            self.dice.uniform(0.1, 60),
            f"continue {name}",
            lambda: self.world.signal(process, signal.SIGCONT),
        )

    def _power(self) -> None:
        name = self.dice.choice((*SIDECARS, *STORAGES))
        machine = self.cluster.machines[name]
        names = [
            one for one, process in self.cluster.processes.items() if process.machine is machine
        ]
        for one in names:
            self._signal(one, signal.SIGKILL)
        self.world.files.lose_power(machine)

        def back() -> None:
            for one in names:
                self._start_again(one)

        self._later(self.dice.uniform(1, 20), f"power {name}", back)

    def _pair(self) -> tuple[Any, Any]:
        one, other = self.dice.sample(["redis", *SERVICES], 2)
        return self.cluster.machines[one], self.cluster.machines[other]

    def _cut(self) -> None:
        one, other = self._pair()
        self.world.network.cut(one, other)
        self._later(
            self.dice.uniform(0.1, 30), "mend", lambda: self.world.network.mend(one, other)
        )

    def _slow_link(self) -> None:
        link = self.world.network.link(*self._pair())
        before = link.latency_s, link.bytes_per_s
        link.latency_s, link.bytes_per_s = (0.01, self.dice.choice([0.05, 0.5, 3.0])), 1e6

        def back() -> None:
            link.latency_s, link.bytes_per_s = before

        self._later(self.dice.uniform(1, 30), "fast again", back)

    def _reset(self) -> None:
        pipes = list(self.world.network.connections)
        if pipes:
            pipe = self.dice.choice(pipes)
            for end in (pipe.reader, pipe.writer):
                if end is not None:
                    for one in (end.incoming, end.outgoing):
                        if one is not None:
                            one.break_off()

    def _disk(self) -> Any:
        return self.world.files.disks[self.dice.choice((*SIDECARS, *STORAGES))]

    def _disk_full(self) -> None:
        disk = self._disk()
        disk.is_full = True
        self._later(self.dice.uniform(1, 30), "heal", disk.heal)

    def _disk_error(self) -> None:
        disk = self._disk()
        disk.error_chance = self.dice.choice([0.01, 0.3, 1.0])
        disk.error = self.dice.choice([5, 24, 13, 12])
        self._later(self.dice.uniform(1, 30), "heal", disk.heal)

    def _disk_hang(self) -> None:
        disk = self._disk()
        disk.is_hanging = True
        self._later(self.dice.uniform(1, 60), "heal", disk.heal)

    def _disk_slow(self) -> None:
        disk = self._disk()
        disk.slowness = self.dice.choice([10, 1000, 10_000])
        self._later(self.dice.uniform(1, 30), "heal", disk.heal)

    def _corrupt(self) -> None:
        self._disk().corrupt(self.dice.choice([1, 10]))

    def _descriptors(self) -> None:
        name = self._some((*SIDECARS, *STORAGES))
        process = self.cluster.processes[name]
        before, process.max_descriptors = process.max_descriptors, len(process.descriptors)

        def back() -> None:
            process.max_descriptors = before

        self._later(self.dice.uniform(1, 20), "descriptors", back)

    def _redis(self) -> None:
        self._signal("redis", signal.SIGKILL)
        self._later(self.dice.uniform(0.1, 20), "redis", lambda: self._start_again("redis"))

    def _flush(self) -> None:
        self.cluster.redis.flush()

    def _clock(self) -> None:
        machine = self.cluster.machines[self.dice.choice(SERVICES)]
        machine.wall_offset_s += self.dice.choice([-3600, -30, 30, 3600])

    # --- Invariants ------------------------------------------------------------------------------

    def _check_alive(self) -> None:
        for name, process in self.cluster.processes.items():
            if process.is_dead and process.pid not in self.expected_deaths:
                self.expected_deaths.add(process.pid)
                self._note(f"{name} has ended by itself, exit code {process.exit_code}")
                self._start_again(name)
        for node, engine in self.engines.items():
            for fault in engine.faults:
                self._note(f"engine-{node}: {fault}")
            engine.faults.clear()

    def _heal(self) -> None:
        """End all faults and start what does not run."""
        self.kernel.record("heal")
        network = self.world.network
        for link in network._links.values():
            link.is_cut = False
            link.latency_s, link.bytes_per_s = (50e-6, 400e-6), 1e9
        for pipe in list(network.connections):
            pipe.deliver_later()
        for disk in self.world.files.disks.values():
            disk.heal()
        self.kernel.sleep(61.0)  # what is to be continued or started later has been
        for name, process in list(self.cluster.processes.items()):
            process.max_descriptors = 1024
            if process.is_paused:
                self.world.signal(process, signal.SIGCONT)
            self._start_again(name)

    def _check_found(self) -> None:
        """Whatever an engine stores now is found again, by itself and by another node."""
        for number, engine in enumerate(self.engines.values()):
            engine.found = None
            engine.prompt = 50 + number
        self.kernel.sleep(10.0)
        for node, engine in self.engines.items():
            if engine.found is None:
                self._note(f"engine-{node} does not answer after the faults have ended")
            elif engine.found < 7 * 32:
                self._note(f"engine-{node} found {engine.found} of 224 tokens that it had stored")
        others = list(self.engines.values())
        for number, engine in enumerate(others):
            engine.found = None
            engine.prompt = 50 + (number + 1) % len(others)
        self.kernel.sleep(10.0)
        self._check_alive()

    def _end(self) -> None:
        for engine in self.engines.values():
            engine.is_working = False
        for name in reversed(self.cluster.processes):
            if name == "redis":
                continue
            process = self.cluster.processes[name]
            if not name.startswith("engine-"):
                self.world.signal(process, signal.SIGTERM)
            code = self.kernel.wait_process(process, END_S)
            if code != 0:
                self._note(f"{name} ended with {code} at the end of the run")
