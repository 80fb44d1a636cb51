"""Faults of a simulated run: a schedule drawn from a seed, and the implementation of each fault."""

from __future__ import annotations

import itertools
import random
import signal
import threading
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from tests.simulation import inside
from tests.simulation.cluster import (
    BROKERS,
    LOOKUPS,
    REDIS_URL,
    SERVICES,
    SIDECARS,
    STORAGES,
    TWO_TENANTS_CHANCE,
    Cluster,
    engine_of,
    has_movers,
)
from tests.simulation.kernel import MAX_DESCRIPTORS, MAX_THREADS, Machine, Process
from tests.simulation.pace import pace_of
from tests.simulation.world import World

ENGINES = tuple(f"engine-{node}" for node in SIDECARS)
DISKS = (*SIDECARS, *STORAGES)
MACHINES = ("redis", *SERVICES)
STOP_S = 40.0
"""A service ends within this time of a signal, whatever other faults are active."""
USUAL_LATENCY_S = (50e-6, 400e-6)
LONGEST_S = 60.0
"""No fault of a busy run lasts longer."""
MORE_KINDS = ("drain", "move", "mover")
"""Kinds with dice of their own; nodes move between tenants if there are two, and movers are hurt if
there are any.
"""
MORE_CHANCE = 0.5
"""How many runs have faults of each of them."""
DENSE = {"busy", "memory"}
"""Kinds that stop processes many times: they last no longer in slow runs."""


@dataclass(frozen=True)
class Fault:
    """One fault of a schedule.

    Attributes:
        number: Its index in the schedule of its seed, by which it can be left out.
        at_s: When it begins, in virtual seconds after the engines began.
        kind: Name of a method of `Faults`, with spaces.
        seed: Decides its details, independent of the rest of the schedule.
    """

    number: int
    at_s: float
    kind: str
    seed: int


@dataclass(frozen=True)
class Focus:
    """What faults of a run are about.

    Attributes:
        kinds: The kinds of most of its faults.
        machines: Nodes and storages that they hit.
    """

    kinds: frozenset[str]
    machines: Sequence[str]


ENGINE_FOCUS = Focus(
    frozenset(
        {"arena", "busy", "clear", "copying", "kill engine", "reset", "slow link", "stop engine"}
    ),
    SIDECARS,
)
LINK_FOCUS = Focus(
    frozenset({"clear", "cut", "interrupted", "kill", "reset", "slow link", "stop"}), DISKS
)
STORAGE_FOCUS = Focus(frozenset({"clear", "kill", "restart", "rolling restart", "scale"}), STORAGES)
DISK_FOCUS = Focus(
    frozenset({"bad sectors", "clear", "clock", "crash", "disk error", "flush", "power"}), DISKS
)
REDIS_FOCUS = Focus(
    frozenset({"clear", "flush", "kill", "redis", "redis failover", "redis refusal", "redis stop"}),
    DISKS,
)
FOCUSES = (None, ENGINE_FOCUS, LINK_FOCUS, STORAGE_FOCUS, None, DISK_FOCUS, REDIS_FOCUS)


def focus_of(seed: int) -> Focus | None:
    """Return what the faults of a run are about; None: anything."""
    return FOCUSES[seed % len(FOCUSES)]


def draw_schedule(seed: int, work_s: float) -> list[Fault]:
    """Draw the faults of a run.

    Each seed has its own frequency and some of the kinds, a third of them or more, so that some
    runs lack the faults that hide others (swarm testing). Every other seed prefers those of its
    focus.

    Args:
        seed: Seed of the run.
        work_s: Time during which faults begin.
    """
    dice = random.Random(f"schedule {seed}")
    share = dice.choice([0.35, 0.6])
    focus = focus_of(seed)
    kinds = [
        kind
        for kind in KINDS
        if dice.random() < (share if focus is None else 0.9 if kind in focus.kinds else 0.25)
    ] or ["kill"]
    # Storages that hardly ever run have nothing to hand over.
    pause_s = dice.choice([3.0, 6.0] if focus is STORAGE_FOCUS else [0.7, 1.5, 3.0])
    pause_s *= pace_of(work_s).fault_factor
    schedule = []
    at_s = dice.expovariate(1 / pause_s)
    while at_s < work_s:
        schedule.append(Fault(len(schedule), at_s, dice.choice(kinds), dice.getrandbits(32)))
        at_s += dice.expovariate(1 / pause_s)
    for kind in MORE_KINDS:
        if kind == "move" and random.Random(f"tenants {seed}").random() >= TWO_TENANTS_CHANCE:
            continue
        if kind == "mover" and not has_movers(seed):
            continue
        schedule += _draw_more(kind, seed, work_s, len(schedule))
    return sorted(schedule, key=lambda fault: fault.at_s)


def _draw_more(kind: str, seed: int, work_s: float, number: int) -> list[Fault]:
    """Draw faults of a kind with dice of its own; the first has this number."""
    dice = random.Random(f"{kind}s {seed}")
    pause_s = dice.choice([10.0, 30.0]) * pace_of(work_s).fault_factor
    faults: list[Fault] = []
    at_s = dice.expovariate(1 / pause_s) if dice.random() < MORE_CHANCE else work_s
    while at_s < work_s:
        faults.append(Fault(number + len(faults), at_s, kind, dice.getrandbits(32)))
        at_s += dice.expovariate(1 / pause_s)
    return faults


class Faults:
    """Carries out faults.

    Args:
        world: The simulated world.
        cluster: The cluster to disturb.
        start_engine: Starts the engine of a node.
        complain: Records a violation.
        call: Sends a request to a service: name, method, path, and possibly body and tenant.
        victims: Nodes and storages that faults hit.

    Attributes:
        active: The active kinds, each with its number of faults.
        counts: How often each kind occurred.
        damaged: Machines whose files may be damaged.
        expected_deaths: Processes that were told to end.
        num_orders: How often each node and storage was told to drain.
        open_orders: How many of these orders may still be carried out.
    """

    def __init__(
        self,
        world: World,
        cluster: Cluster,
        start_engine: Callable[[str], None],
        complain: Callable[[str], None],
        call: Callable[..., tuple[int | None, Any]],
        victims: Sequence[str] = DISKS,
    ) -> None:
        self._world = world
        self._kernel = world.kernel
        self._cluster = cluster
        self._start_engine = start_engine
        self._complain = complain
        self._call = call
        self._disks = tuple(victims)
        self._services = (*LOOKUPS, *BROKERS, *victims)
        self._sidecars = tuple(name for name in victims if name in SIDECARS) or SIDECARS
        self._engines = tuple(f"engine-{node}" for node in self._sidecars)
        self._dice = random.Random()
        self._kind = ""
        self._undo: dict[int, Callable[[], None]] = {}
        self._numbers = itertools.count()
        self.num_orders: Counter[str] = Counter()
        self.open_orders: Counter[str] = Counter()
        self.active: Counter[str] = Counter()
        self.counts: Counter[str] = Counter()
        self.damaged: set[str] = set()
        self.expected_deaths: set[int] = set()

    def do(self, fault: Fault) -> None:
        """Begin a fault; it ends by itself."""
        self._kernel.record(f"fault {fault.number} {fault.kind}")
        self._dice = random.Random(fault.seed)
        self._kind = fault.kind
        self.counts[fault.kind] += 1
        getattr(self, fault.kind.replace(" ", "_"))()

    def heal(self) -> None:
        """End all faults now, set the clocks, and start what does not run."""
        self._kernel.record("heal")
        for undo in list(self._undo.values()):
            undo()
        for machine in self._cluster.machines.values():
            machine.wall_offset_s = 0.0  # tickets expire where clocks differ
        for disk in self._world.files.disks.values():
            disk.crash_in(1 << 62, lambda: None)
            disk.mend_sectors()
        for name, process in list(self._cluster.processes.items()):
            if process.is_paused:
                self._world.signal(process, signal.SIGCONT)
            self.start_again(name)
        for mover in self._cluster.movers.values():
            mover.start()

    def start_again(self, name: str) -> None:
        """Start a service or an engine unless it runs; an engine starts its workers."""
        if name != engine_of(name):
            return
        process = self._cluster.processes[name]
        for worker in self._cluster.processes_of(name)[1:]:
            if self._cluster.processes[worker].exit_code:  # what is left of its engine ends
                self._signal(name, signal.SIGKILL)
        if not process.is_dead or not self._world.network.has_power(process.machine):
            return
        if name in ENGINES:
            self._start_engine(name.removeprefix("engine-"))
        else:
            self._cluster.start(name)

    def _for(self, most_s: float, undo: Callable[[], None]) -> None:
        """Undo a fault later, or at `heal`."""
        kind, number = self._kind, next(self._numbers)
        self.active[kind] += 1

        def once() -> None:
            if self._undo.pop(number, None) is not None:
                self.active[kind] -= 1
                undo()

        def wait() -> None:
            self._kernel.sleep(seconds)
            once()

        length = 1.0 if kind in DENSE else self._world.pace.fault_length
        seconds = self._dice.uniform(0.1, most_s * length)
        self._undo[number] = once
        process = self._kernel.process
        assert process is not None
        self._kernel.spawn(process, f"end of {kind}", wait)

    def _signal(self, name: str, number: int) -> None:
        process = self._cluster.processes[name]
        self.expected_deaths |= {process.pid, self._cluster.processes[engine_of(name)].pid}
        self._world.signal(process, number)

    def _part(self, engine: str) -> str:
        """Return one of the processes of an engine."""
        return self._dice.choice(self._cluster.processes_of(engine))

    def _pairs(self, names: Sequence[str] = MACHINES) -> list[tuple[Machine, Machine]]:
        """Return two of these machines, or one with each of the others."""
        one, *others = self._dice.sample(names, len(names))
        machines = self._cluster.machines
        if self._dice.random() < 0.5:
            del others[1:]
        return [(machines[one], machines[other]) for other in others]

    def _disk(self, is_damaged: bool = False) -> Any:
        name = self._dice.choice(self._disks)
        if is_damaged:
            self.damaged.add(name)
        return self._world.files.disks[name]

    # --- Processes -------------------------------------------------------------------------------

    def kill(self) -> None:
        """SIGKILL to a service."""
        name = self._dice.choice(self._services)
        self._signal(name, signal.SIGKILL)
        self._for(20, lambda: self.start_again(name))

    def restart(self) -> None:
        """SIGTERM to a service, and a start as soon as it has ended."""
        self._restart([self._dice.choice(self._services)])

    def rolling_restart(self) -> None:
        """Restart all services of a kind, one after the other."""
        self._restart(list(self._dice.choice((LOOKUPS, BROKERS, STORAGES, SIDECARS))))

    def scale(self) -> None:
        """Drain a service, end it, and start it again later; its network may be slow."""
        name = self._dice.choice(self._disks)
        if self._dice.random() < 0.5:
            machines = self._cluster.machines
            self._slow([(machines[name], machines[one]) for one in MACHINES if one != name])
        self._restart(
            [name],
            lambda: self._order_drain(name, (name, "POST", "/v1/admin/drain")),
            self._dice.uniform(1, 30),
        )

    def _restart(
        self, names: list[str], before: Callable[[], object] = lambda: None, away_s: float = 0.0
    ) -> None:
        self.active[kind := self._kind] += 1
        longest_s = LONGEST_S * self._world.pace.fault_length

        def roll() -> None:
            before()
            for name in names:
                process = self._cluster.processes[name]
                self._signal(name, signal.SIGTERM)
                began_s, waited_s = self._kernel.now, 0.0
                while self._kernel.wait_process(process, 1.0) is None:
                    # Time in which it could not run does not count.
                    waited_s += not process.is_paused and not self._is_hanging(process)
                    if waited_s > STOP_S or self._kernel.now - began_s > 4 * longest_s:
                        self._complain(f"{name} did not end within {waited_s:.0f} s of SIGTERM")
                        self._signal(name, signal.SIGKILL)
                        break
                self._kernel.sleep(away_s)
                self.start_again(name)
                self._kernel.sleep(2.0)
            self.active[kind] -= 1

        process = self._kernel.process
        assert process is not None
        self._kernel.spawn(process, f"restart {names}", roll)

    def _is_hanging(self, process: Any) -> bool:
        disk = self._world.files.disks.get(process.machine.name)
        return disk is not None and disk.is_hanging

    def drain(self) -> None:
        """Drain a node or a storage, or let a broker order it; cancel that later."""
        name, operator = self._dice.choice(self._disks), self._kernel.process
        assert operator is not None
        calls = [
            (name, "POST", f"/v1/admin/drain?wait={self._dice.choice(('true', 'false'))}"),
            (self._dice.choice(BROKERS), "POST", f"/v1/admin/peers/{name}:drain"),
        ]
        call, lease_s = self._dice.choice(calls), self._world.pace.lease_s
        self._kernel.spawn(operator, "drain", lambda: self._order_drain(name, call))

        def cancel() -> None:
            # An order may arrive late: a broker passes it on as long as the lease lasts.
            since, cancelled = self._kernel.now, None
            while self._kernel.now - since < lease_s:
                process, node = self._cluster.processes[name], self._world.nodes.get(name)
                is_draining = (
                    node is not None
                    and self._world.served_by[name] is process
                    and node.is_draining
                    and not node.drain.is_last
                )
                known = None if self.open_orders[name] else (process.pid, self.num_orders[name])
                if is_draining and known is not None and known == cancelled:
                    self._complain(f"{name} drains again after that was cancelled")
                status, answer = self._call(name, "POST", "/v1/admin/undrain")
                if (
                    status == 200
                    and answer["draining"]
                    and known == (process.pid, self.num_orders[name])
                ):
                    self._complain(f"{name} still drains after that was cancelled")
                if status == 200 and is_draining and not answer["draining"]:
                    cancelled = known
                self._kernel.sleep(lease_s / 15)
                if status != 200 or answer["draining"]:
                    since = self._kernel.now

        self._for(30, lambda: self._kernel.spawn(operator, "undrain", cancel))

    def _order_drain(self, name: str, call: tuple[str, str, str]) -> None:
        self.num_orders[name] += 1
        self.open_orders[name] += 1
        status, _ = self._call(*call, None, self._cluster.tenant_of(name))
        process = self._kernel.process
        assert process is not None

        def end() -> None:
            if status is None:  # it may still be carried out
                self._kernel.sleep(LONGEST_S * self._world.pace.fault_length)
            self.open_orders[name] -= 1

        self._kernel.spawn(process, "end of order", end)

    def move(self) -> None:
        """Give a node to the other tenant, with what is on its disk and in its arena."""
        node = self._dice.choice(self._sidecars)
        names = (node, f"engine-{node}")
        for name in names:
            self._signal(name, signal.SIGKILL)
        self._cluster.move(node)

        def undo() -> None:
            for name in names:
                self.start_again(name)

        self._for(20, undo)

    def mover(self) -> None:
        """SIGKILL to a mover, or SIGSTOP to its worker, which may then be killed, or to both."""
        mover = self._cluster.movers[self._dice.choice(self._sidecars)]
        process, kind = mover.process, self._dice.choice(("kill", "stop the worker", "stop"))
        if process is None:
            return
        if kind == "kill":
            self._world.signal(process, signal.SIGKILL)
            self._for(5, lambda: self._world.network.has_power(process.machine) and mover.start())
        elif kind == "stop":
            self._world.signal(process, signal.SIGSTOP)
            self._for(20, lambda: self._world.signal(process, signal.SIGCONT))
        else:
            mover.is_stopped = True
            self._for(20, lambda: setattr(mover, "is_stopped", False))

    def stop(self) -> None:
        """SIGSTOP to a service, and SIGCONT."""
        self._pause(self._dice.choice(self._services), 30)

    def stop_engine(self) -> None:
        """SIGSTOP to an engine, possibly while it writes to the arena; SIGCONT after its sidecar
        may have dropped it.
        """
        self._pause(self._part(self._dice.choice(self._engines)), LONGEST_S)

    def _pause(self, name: str, most_s: float) -> None:
        process = self._cluster.processes[name]
        self._world.signal(process, signal.SIGSTOP)
        self._for(most_s, lambda: self._world.signal(process, signal.SIGCONT))

    def memory(self) -> None:
        """Make a machine short of memory: while it swaps, nothing on it runs."""
        machine = self._cluster.machines[self._dice.choice(self._disks)]
        dice, is_over = random.Random(self._dice.random()), threading.Event()

        def swap() -> None:
            while not is_over.is_set():
                stopped = [
                    process
                    for process in self._cluster.processes.values()
                    if process.machine is machine and not process.is_paused
                ]
                for process in stopped:
                    self._world.signal(process, signal.SIGSTOP)
                self._kernel.sleep(dice.uniform(0.05, 1.0))
                for process in stopped:
                    self._world.signal(process, signal.SIGCONT)
                self._kernel.sleep(dice.uniform(0.02, 0.3))

        process = self._kernel.process
        assert process is not None
        self._kernel.spawn(process, "swap", swap)
        self._for(20, is_over.set)

    def busy(self) -> None:
        """Give sidecars a part of a core: they are stopped some or most of the time, briefly."""
        operator, is_over = self._kernel.process, threading.Event()
        assert operator is not None
        longest_s = self._dice.choice([0.02, 0.1])

        def throttle(process: Process, dice: random.Random) -> None:
            while not is_over.is_set():
                if not process.is_paused:
                    self._world.signal(process, signal.SIGSTOP)
                    self._kernel.sleep(dice.uniform(0.005, longest_s))
                    self._world.signal(process, signal.SIGCONT)
                self._kernel.sleep(dice.uniform(0.001, 0.02))

        for name in self._dice.sample(SIDECARS, self._dice.randint(1, len(SIDECARS))):
            process, dice = self._cluster.processes[name], random.Random(self._dice.random())
            self._kernel.spawn(operator, "throttle", partial(throttle, process, dice))
        self._for(30, is_over.set)

    def arena(self) -> None:
        """SIGKILL to a sidecar and its engine; meanwhile bits flip in the arena, which is one that
        the next sidecar can recover if there is one.
        """
        arenas = {
            node: self._world.place(self._cluster.machines[node]) / "shm" / "arena"
            for node in SIDECARS
        }
        recorded = [node for node, place in arenas.items() if (place / "kv.journal").exists()]
        node = self._dice.choice(recorded or self._sidecars)
        names = (node, *self._cluster.processes_of(f"engine-{node}"))
        for name in names:
            self._signal(name, signal.SIGKILL)
        for path in arenas[node].glob("kv.arena"):
            content = bytearray(path.read_bytes())
            for _ in range(self._dice.choice([20, 200])):
                content[self._dice.randrange(len(content))] ^= 1 << self._dice.randrange(8)
            with path.open("r+b") as file:
                file.write(content)

        def undo() -> None:
            for name in names:
                self.start_again(name)

        self._for(20, undo)

    def kill_engine(self) -> None:
        """SIGKILL to an engine, now or when it copies KV next."""
        engine = self._dice.choice(self._engines)
        name = self._part(engine)
        process = self._cluster.processes[name]

        def undo() -> None:
            process.at_copy = None
            self.start_again(engine)

        if self._dice.random() < 0.5:
            self._signal(name, signal.SIGKILL)
        else:
            process.at_copy = lambda: self._signal(name, signal.SIGKILL)
        self._for(10, undo)

    def copying(self) -> None:
        """While an engine copies KV: SIGSTOP, so that it continues after its sidecar has dropped
        it; or SIGKILL to it, to its sidecar, or to both.
        """
        node = self._dice.choice(self._sidecars)
        engine, killed = f"engine-{node}", self._dice.choice([[], [0], [1], [1], [0, 1]])
        is_stopped = not killed or self._dice.random() < 0.3
        part = self._dice.choice(self._cluster.processes_of(engine)[1:] or [engine])
        process = self._cluster.processes[part]

        def at_copy() -> None:
            for name in [(node, part)[one] for one in killed if one == 0 or not is_stopped]:
                self._signal(name, signal.SIGKILL)
            if is_stopped:
                self._world.signal(process, signal.SIGSTOP)

        def undo() -> None:
            process.at_copy = None
            self._world.signal(process, signal.SIGCONT)
            self.start_again(node)
            self.start_again(engine)

        process.at_copy = at_copy
        self._for(LONGEST_S, undo)

    def descriptors(self) -> None:
        """Deny a service new descriptors. A service that is still starting would rightly exit."""
        process = self._cluster.processes[self._dice.choice(self._disks)]
        if self._kernel.now - process.started_s < LONGEST_S:
            return
        process.max_descriptors = len(process.descriptors)

        def undo() -> None:
            process.max_descriptors = MAX_DESCRIPTORS

        self._for(20, undo)

    def no_threads(self) -> None:
        """Deny a service or an engine new threads; not one that is still starting."""
        process = self._cluster.processes[self._dice.choice((*self._disks, *self._engines))]
        if self._kernel.now - process.started_s < LONGEST_S:
            return
        process.max_threads = len(self._kernel.threads(process))

        def undo() -> None:
            process.max_threads = MAX_THREADS

        self._for(20, undo)

    def power(self) -> None:
        """Cut the power of a machine."""
        self._lose_power(self._dice.choice(self._disks))

    def crash(self) -> None:
        """Cut the power of a machine between two operations of its disk."""
        name, kind, seed = self._dice.choice(self._disks), self._kind, self._dice.random()

        def lose_power() -> None:
            self._dice, self._kind = random.Random(seed), kind
            self._lose_power(name)

        operator = self._kernel.process
        assert operator is not None
        disk = self._world.files.disks[name]
        disk.crash_in(
            self._dice.randint(1, 40), lambda: self._kernel.spawn(operator, "crash", lose_power)
        )

    def _lose_power(self, name: str) -> None:
        machine = self._cluster.machines[name]
        self.damaged.add(name)
        names = [
            name for name, process in self._cluster.processes.items() if process.machine is machine
        ]
        node = self._world.nodes.get(name)
        disk = None if node is None else node.tiers.disk
        from lmcache_core.storage.disk.layout import DiskLayout

        layout = DiskLayout(self._cluster.disk_path(name))
        held = {layout.record(key): key for key in inside.names_on_disk(disk)}
        self._world.network.lose_power(machine)
        for one in names:
            self._signal(one, signal.SIGKILL)
        for process in self._kernel.processes:  # also workers of an engine that was killed before
            if process.machine is machine and not process.is_dead:
                self.expected_deaths.add(process.pid)
                self._world.signal(process, signal.SIGKILL)
        self._world.files.lose_power(machine)
        synced = self._world.synced.get(name, set())
        for path, key in sorted(held.items()):
            if str(path) in synced and not self._world.files.disks[name].has(str(path)):
                self._complain(f"{name} lost {key.key.to_url()}, which it had synced")

        is_clock_wrong = self._dice.random() < 0.5
        offset_s, wrong_s = self._dice.choice([-3600, -30, 30, 3600]), self._dice.uniform(1, 10)

        def undo() -> None:
            self._world.network.restore(machine)
            if is_clock_wrong:  # until the network has told the time
                machine.wall_offset_s += offset_s
                self._kernel.spawn(operator, "clock", set_right)
            for one in names:
                self.start_again(one)

        def set_right() -> None:
            self._kernel.sleep(wrong_s)
            machine.wall_offset_s = 0.0

        operator = self._kernel.process
        assert operator is not None
        self._for(20, undo)

    # --- Network ---------------------------------------------------------------------------------

    def cut(self) -> None:
        """Let no packet pass between two machines, or from and to one."""
        network, pairs = self._world.network, self._pairs()
        for pair in pairs:
            network.cut(*pair)

        def undo() -> None:
            for pair in pairs:
                network.mend(*pair)

        self._for(30, undo)

    def cut_one_way(self) -> None:
        """Let no packet pass in one direction."""
        network, pairs = self._world.network, self._pairs()
        for pair in pairs:
            network.cut_one_way(*pair)

        def undo() -> None:
            for pair in pairs:
                network.mend(*pair)

        self._for(30, undo)

    def lossy_link(self) -> None:
        """Lose packets, which are sent again."""
        links = [self._world.network.link(*pair) for pair in self._pairs()]
        loss = self._dice.choice([0.01, 0.2, 0.8])
        for link in links:
            link.loss = loss

        def undo() -> None:
            for link in links:
                link.loss = 0.0

        self._for(30, undo)

    def slow_link(self) -> None:
        """Raise the latency and lower the bandwidth between two machines, or of one; of all, or of
        those that have sidecars.
        """
        self._slow(self._pairs(self._dice.choice((MACHINES, SIDECARS))))

    def _slow(self, pairs: Sequence[tuple[Machine, Machine]]) -> None:
        links = [self._world.network.link(*pair) for pair in pairs]
        longest_s = self._dice.choice([0.05, 0.5, 3.0])
        for link in links:
            link.latency_s, link.bytes_per_s = (0.01, longest_s), 1e6

        def undo() -> None:
            for link in links:
                link.latency_s, link.bytes_per_s = USUAL_LATENCY_S, 1e9

        self._for(30, undo)

    def reset(self) -> None:
        """Reset a connection."""
        pipes = list(self._world.network.connections)
        if pipes:
            pipe = self._dice.choice(pipes)
            for end in (pipe.reader, pipe.writer):
                for one in (end.incoming, end.outgoing) if end is not None else ():
                    if one is not None:
                        one.break_off()

    def interrupted(self) -> None:
        """Stop large packets in the middle, and break their connections or send the rest late."""
        network = self._world.network
        network.breaks_interrupted = self._dice.random() < 0.5
        network.interrupt_s = self._dice.choice([0.05, 1.0, 6.0])
        network.interrupt_chance = self._dice.choice([0.02, 0.1, 0.3])

        def undo() -> None:
            network.interrupt_chance = 0.0

        self._for(30, undo)

    def pieces(self) -> None:
        """Let reads return less than has arrived."""
        network = self._world.network
        network.piece_chance = self._dice.choice([0.1, 0.5, 0.9])

        def undo() -> None:
            network.piece_chance = 0.0

        self._for(LONGEST_S, undo)

    # --- Disks -----------------------------------------------------------------------------------

    def disk_full(self) -> None:
        """ENOSPC."""
        disk = self._disk()
        disk.is_full = True
        self._for(30, disk.heal)

    def disk_error(self) -> None:
        """EIO, EMFILE, EACCES or ENOMEM, now and then or always."""
        disk = self._disk()
        disk.error_chance = self._dice.choice([0.01, 0.3, 1.0])
        disk.error = self._dice.choice([5, 24, 13, 12])
        self._for(30, disk.heal)

    def disk_hang(self) -> None:
        """Let no disk operation end."""
        disk = self._disk()
        disk.is_hanging = True
        self._for(LONGEST_S, disk.heal)

    def disk_slow(self) -> None:
        """Let operations take 10 to 10,000 times as long."""
        disk = self._disk()
        disk.slowness = self._dice.choice([10, 1000, 10_000])
        self._for(30, disk.heal)

    def disk_stall(self) -> None:
        """Let some operations take 5 s longer."""
        disk = self._disk()
        disk.stall_chance = self._dice.choice([0.01, 0.2])
        self._for(30, disk.heal)

    def bad_sectors(self) -> None:
        """Let some sectors be unreadable until they are written."""
        self._disk().break_sectors(self._dice.choice([1, 5, 20, 200]))

    def corrupt(self) -> None:
        """Flip bits on a disk, and damage chunks in Redis."""
        self._disk(is_damaged=True).corrupt(self._dice.choice([1, 10]))
        if any(url.startswith(REDIS_URL) for url in self._cluster.remotes.values()):
            self.damaged.add("redis")
            for _ in range(self._dice.choice([1, 10])):
                self._cluster.redis.store.damage(b"lmc:", self._dice)

    # --- Redis, clocks, operators ----------------------------------------------------------------

    def redis(self) -> None:
        """SIGKILL to Redis, which keeps its keys."""
        self._signal("redis", signal.SIGKILL)
        self._for(20, lambda: self.start_again("redis"))

    def redis_stop(self) -> None:
        """SIGSTOP to Redis."""
        self._pause("redis", 30)

    def redis_refusal(self) -> None:
        """Redis is full, or a replica: it refuses what takes memory, or all writes."""
        store = self._cluster.redis.store
        begin, end = self._dice.choice(
            [
                (b"CONFIG SET maxmemory 1", b"CONFIG SET maxmemory 0"),
                (b"REPLICAOF 127.0.0.1 1", b"REPLICAOF NO ONE"),
            ]
        )
        store.execute(begin.split())
        self._for(30, lambda: store.execute(end.split()))

    def redis_failover(self) -> None:
        """A replica takes over from Redis, without the latest changes."""
        restore = self._cluster.redis.store.copy()

        def take_over() -> None:
            self._signal("redis", signal.SIGKILL)
            restore()
            self.start_again("redis")

        self._for(self._dice.choice([1, 10, LONGEST_S]), take_over)

    def flush(self) -> None:
        """FLUSHALL."""
        self._cluster.redis.flush()

    def clock(self) -> None:
        """Set the wall clocks of some machines, and set them right again later."""
        names = self._dice.sample(self._services, self._dice.randint(1, len(self._services)))
        machines = [self._cluster.machines[name] for name in names]
        offset_s = self._dice.choice([-3600, -30, 30, 3600])
        for machine in machines:
            machine.wall_offset_s += offset_s

        def undo() -> None:
            for machine in machines:
                machine.wall_offset_s -= offset_s

        self._for(LONGEST_S, undo)

    def rotate(self) -> None:
        """Replace the token and the keys of tickets: add the new ones, use them, remove the old
        ones.
        """
        cluster, process = self._cluster, self._kernel.process
        assert process is not None
        if cluster.is_rotating:
            return
        cluster.is_rotating = True
        # Services look at their files as seldom as they do other periodic work.
        pause_s = self._dice.uniform(1, 2) * (self._world.pace.repeat_s + 1)

        def rotate() -> None:
            old, new = cluster.shown, cluster.shown + 1
            cluster.accept(old, new)
            self._kernel.sleep(pause_s)
            cluster.show(new)
            cluster.accept(new, old)
            self._kernel.sleep(pause_s)
            cluster.accept(new)
            cluster.is_rotating = False

        self._kernel.spawn(process, "rotate", rotate)

    def clear(self) -> None:
        """Clear a node or a storage."""
        name, process = self._dice.choice(self._disks), self._kernel.process
        assert process is not None
        self._kernel.spawn(process, "clear", lambda: self._call(name, "POST", "/v1/admin/clear"))


KINDS = tuple(
    name.replace("_", " ")
    for name, member in vars(Faults).items()
    if callable(member)
    and not name.startswith("_")
    and name not in {"do", "heal", "start_again", *MORE_KINDS}
)
"""Kinds that all seeds draw from."""


def kept(schedule: Collection[Fault], numbers: Collection[int] | None) -> list[Fault]:
    """Return the faults of these numbers; None: all."""
    return [fault for fault in schedule if numbers is None or fault.number in numbers]
