"""One simulated run: engines and operators at work, scheduled faults, invariants, and an orderly
end.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import signal
import traceback
from collections import Counter
from collections.abc import Collection
from functools import partial
from typing import Any

import msgspec
from lmcache_lookup.index.packing import (
    LEASES_KEY,
    NUM_BUCKETS,
    TENANTS_KEY,
    StoredLease,
    bucket_key,
    unpack_holders,
)

from tests.simulation import inside
from tests.simulation.cluster import (
    GB,
    SERVICES,
    SIDECARS,
    STORAGES,
    TENANTS,
    Cluster,
    engine_of,
)
from tests.simulation.engines import SimulatedEngine
from tests.simulation.faults import DISKS, Fault, Faults, focus_of
from tests.simulation.operators import CALLS, MORE_CALLS, Operator
from tests.simulation.world import World

CALM_PAUSE_S = 3.0
END_S = 60.0
"""Everything ends within this time of its signal."""
FOUND_S = 30.0
"""A prompt that was stored is found by every node within this time."""
FOUND_PAUSE_S = 2.0
FIRST_REMOTE_PROMPT, FIRST_BROKEN_PROMPT = 100, 500
REMOTE_TRIES = 20
"""A tier whose reads looked too dear is read once in 16 times, until it is known to be quick."""
REMOTE_TRY_S = 8.0
DIRECTORY_BYTES = 16 << 20
"""An operator's job keeps directories that are remote tiers this small."""
CLOCK_BACK_S = 3600.0
CLEARED_S = 5.0
LATE_CALL_S = 30.0
"""A call whose caller has given up may be carried out this much later."""
SWEPT_STEPS = 60
"""A lookup looks at all buckets of a few tenants twice in this many sweeps."""
NUM_VLLM = (1, 3, 4)
"""How many of the four engines are vLLM; the others call the library. Only those of one kind share
chunks: fewer than three have no choice of peers.
"""
EMBEDDED_CHANCE = 0.6
"""How often one engine of vLLM has its tiers in its own process, if that leaves three sidecars with
engines of one kind.
"""
NUM_VICTIMS = (2, len(DISKS))
"""How many of the nodes and storages meet faults: on few of them, faults meet each other."""
ASKED_CHUNKS = 20
DISK_SLACK = 1.1
"""A disk tier may exceed its limit by this much, for files being written."""
MAX_HEAD_BYTES = 1024
"""Sizes of chunks in memory include headers of up to so much that are not kept there."""
IDLE_THREADS = {
    "asyncio", "lmcache-codec", "lmcache-decoding", "lmcache-disk", "lmcache-encoding",
    "lmcache-files",
}  # fmt: skip
"""Pools that a service keeps when idle."""
MAX_IDLE = {"descriptors": 128, "threads": 32, "tasks": 96}
"""What a service without clients has at most; a pool keeps up to 64 connections to Redis."""


class Scenario:
    """A run of a schedule.

    Args:
        world: The installed world.
        seed: Decides everything that is not in the schedule.
        work_s: Virtual seconds of work.
        schedule: The faults during this time.
        only_first: Whether to end soon after the first violation.

    Attributes:
        violations: Invariants that were violated.
        pairs: How often each operation began during each kind of fault.
    """

    def __init__(
        self,
        world: World,
        seed: int,
        work_s: float,
        schedule: Collection[Fault],
        only_first: bool = False,
    ) -> None:
        from tests.chaos.cluster.worker import CHUNK_BYTES
        from tests.simulation.vllm_engines import draw_shape

        self._world = world
        self._kernel = world.kernel
        self._seed = seed
        self._work_s = work_s
        self._schedule = schedule
        self._only_first = only_first
        self._is_working = True
        self._is_watching = True
        self._is_done = False
        dice = random.Random(f"settings {seed}")
        self._engine_pause_s = dice.choice(world.pace.engine_s)
        sizes, tenants = random.Random(f"sizes {seed}"), random.Random(f"tenants {seed}")
        remotes = random.Random(f"remote {seed}")
        self.cluster = Cluster(world, CHUNK_BYTES, dice, sizes, tenants, remotes)
        engine_dice = random.Random(f"engines {seed}")
        self._vllm_nodes = engine_dice.sample(SIDECARS, engine_dice.choice(NUM_VLLM))
        is_embedded = len(self._vllm_nodes) != 3 and engine_dice.random() < EMBEDDED_CHANCE
        self._shape = draw_shape(random.Random(f"shape {seed}"))
        is_embedded &= self._shape.num_ranks == 1  # tiers in a process serve one worker
        self._embedded_nodes = set(self._vllm_nodes[:1] if is_embedded else ())
        self.engines: dict[str, SimulatedEngine] = {}
        victims, focus = random.Random(f"victims {seed}"), focus_of(seed)
        machines = DISKS if focus is None else focus.machines
        self.faults = Faults(
            world,
            self.cluster,
            self._start_engine,
            self._complain,
            lambda *call: self.operator.call(*call),
            victims.sample(machines, min(len(machines), victims.choice(NUM_VICTIMS))),
        )
        self.operator = Operator(
            world, self.cluster, seed, self.faults, self._count_pairs, self._complain
        )
        for mover in self.cluster.movers.values():
            mover.ended = self._count_mover_read
        self._call = self.operator.call
        self._seen_ids: set[tuple[str, str]] = set()
        self._leaked: dict[str, set[tuple[int, float, str]]] = {name: set() for name in SIDECARS}
        self._unserved: dict[str, set[tuple[object, ...]]] = {}
        self._pins: dict[str, tuple[tuple[int, float], dict[Any, float]]] = {}
        """By node: its process and since when it ran without a pause, and when each pin ends."""
        self.violations: list[str] = []
        self.pairs: Counter[tuple[str, str]] = Counter()
        self.totals: Counter[str] = Counter()

    def run(self) -> list[str]:
        """Run the schedule; return the violations."""
        self._kernel.start_process("operator", self._world.machine("operator"), self._operate)
        longest_s = self._work_s + self._world.pace.calm_s + 12 * FOUND_S + 4 * self._index_s
        longest_s += len(self.cluster.tenants) * (
            self._world.pace.calm_s + self._world.pace.lease_s
        )
        longest_s += len(SIDECARS) * REMOTE_TRIES * REMOTE_TRY_S
        longest_s += SWEPT_STEPS * self._world.pace.sweep_s + (len(SERVICES) + 4) * END_S
        try:
            self._kernel.run(longest_s)
        except BaseException:
            self._complain(f"a thread failed:\n{traceback.format_exc()}")
        else:
            if not self._is_done:
                self._complain("the run has not ended")
        return self.violations

    def _complain(self, text: str) -> None:
        self.violations.append(f"{self._kernel.now:.3f} {text}")
        self._kernel.record(f"violation {text}")
        if self._only_first:
            self._is_done = True
            self._kernel.stop()

    def _operate(self) -> int:
        kernel = self._kernel
        process = kernel.process
        assert process is not None
        self.cluster.start_all()
        kernel.sleep(3.0)
        for node in SIDECARS:
            self._start_engine(node)
        for name, calls in (("operator", CALLS), ("operator of more", MORE_CALLS)):
            work = partial(self.operator.work, name, calls, lambda: self._is_working)
            kernel.spawn(process, "admin", work)
        kernel.spawn(process, "commands", lambda: self.operator.command(lambda: self._is_working))
        kernel.spawn(process, "look", self._look)
        begin = kernel.now
        for fault in self._schedule:
            kernel.sleep(max(0.0, begin + fault.at_s - kernel.now))
            self.faults.do(fault)
        kernel.sleep(max(0.0, begin + self._work_s - kernel.now))
        self._is_working = False
        self.faults.heal()
        self._announce_all()
        self._slow_down()
        kernel.sleep(self._world.pace.calm_s)
        self._is_watching = False
        self._check_found()
        self._check_found_in_remote()
        self._check_replaced()
        for engine in self.engines.values():
            engine.is_working = False
        self._await_end([f"engine-{node}" for node in SIDECARS])
        self._check_idle()
        self._check_tokens()
        self._check_peers()
        self._check_status()
        self._check_index()
        self._check_swept()
        self._check_announced_again()
        self._check_cleared()
        self._check_temporary()
        for name in reversed(SERVICES):
            self._world.signal(self.cluster.processes[name], signal.SIGTERM)
            self._await_end([name])
        self._check_alive()
        self._is_done = True
        kernel.stop()
        return 0

    def _announce_all(self) -> None:
        """Let all chunks be announced again if lookup was told to forget holders of some."""
        for tenant in self.cluster.tenants if self.operator.has_forgotten else ():
            deadline = self._kernel.now + self._world.pace.calm_s
            while self._kernel.now < deadline:
                status, _ = self._call("lookup-0", "POST", "/v1/admin/clear", None, tenant)
                if status == 204:
                    break
                self._kernel.sleep(1.0)
            # For each tenant alone: what is announced for one of them must not hide the next.
            self._kernel.sleep(self._world.pace.lease_s)

    def _slow_down(self) -> None:
        """Let engines ask now and then only: calm shows whether everything works again."""
        self._engine_pause_s = max(self._engine_pause_s, CALM_PAUSE_S)
        for engine in self.engines.values():
            engine.pause_s = self._engine_pause_s

    def _start_engine(self, node: str) -> None:
        engine = self.engines.get(node)
        if engine is not None:
            self._collect(engine)
        number = len(self._kernel.processes)
        new = SimulatedEngine(
            self.cluster,
            node,
            1000 * number + self._seed,
            self._engine_pause_s,
            node in self._vllm_nodes,
            node in self._embedded_nodes,
            self._shape,
            self._count_pairs,
        )
        name = f"engine-{node}"
        for worker in self.cluster.processes_of(name)[1:]:
            del self.cluster.processes[worker]
        self.engines[node] = new
        self.cluster.processes[name] = self._kernel.start_process(
            name, self.cluster.machines[node], new.main
        )

    def _count_pairs(self, operation: str) -> None:
        self.totals[operation] += 1
        for kind, number in self.faults.active.items():
            if number:
                self.pairs[kind, operation] += 1

    def _count_mover_read(self, error: str) -> None:
        self._count_pairs("mover read, failed" if error else "mover read")

    def _await_end(self, names: list[str]) -> None:
        for name in names:
            process = self.cluster.processes[name]
            self.faults.expected_deaths.add(process.pid)
            code = self._kernel.wait_process(process, END_S)
            if code != 0:
                self._complain(f"{name} ended with {code} at the end of the run")

    # --- Invariants ------------------------------------------------------------------------------

    def _look(self) -> None:
        while self._is_watching:
            self._kernel.sleep(self._world.pace.check_s)
            self._check_alive()
            self._check_sizes()
            self._check_lent()
            self._check_pins()
            self._check_pinned_memory()
            self._check_intact()
            for name, path in self.cluster.directories.items():
                self._world.files.disks[name].remove_oldest(path, DIRECTORY_BYTES)

    def _collect(self, engine: SimulatedEngine) -> None:
        for fault in engine.faults:
            self._complain(f"engine-{engine.node}: {fault}")
        engine.faults.clear()
        for name, number in engine.totals.items():
            self.totals[name] += number
        engine.totals.clear()

    def _check_alive(self) -> None:
        for name, process in self.cluster.processes.items():
            has_ended = name != engine_of(name) and process.exit_code == 0  # with its engine
            if process.is_dead and not has_ended and process.pid not in self.faults.expected_deaths:
                self.faults.expected_deaths.add(process.pid)
                self._complain(f"{name} has ended by itself, exit code {process.exit_code}")
                self.faults.start_again(name)
        for engine in self.engines.values():
            self._collect(engine)
        for text in self._world.complaints:
            self._complain(text)
        self._world.complaints.clear()

    def _check_sizes(self) -> None:
        for name in (*SIDECARS, *STORAGES):
            self._check_disk_size(name)
            if self.faults.damaged.isdisjoint({name, *self.cluster.machines_of_remote(name)}):
                num_damaged = self._num_damaged(name)
                if num_damaged:
                    self._complain(f"{name} took {num_damaged} intact chunks for damaged")
            for tier, quota_gb in self._tiers(name):
                by_tenant: Counter[str] = Counter()
                for key, num_bytes in tier.held():
                    by_tenant[key.tenant] += num_bytes - MAX_HEAD_BYTES
                for tenant, used in by_tenant.items():
                    if quota_gb and used > quota_gb * GB:
                        limit = round(quota_gb * GB)
                        self._complain(f"{name} has {used} bytes of {tenant}, which has {limit}")

    def _check_disk_size(self, name: str) -> None:
        """Check the bytes on a disk; no file that cannot be read is removed to make room."""
        if not self._has_read_disk(name):
            return
        room = inside.room_of(inside.store_of(self._world.nodes[name].tiers.disk))
        limit = max(self.cluster.disk_bytes(name), room.unread_bytes)
        used = self._world.files.disks[name].used_bytes(self.cluster.disk_path(name))
        if used > limit * DISK_SLACK:
            self._complain(f"{name} has {used} bytes on its disk; the limit is {limit}")

    def _check_lent(self) -> None:
        """Check that a sidecar that ran since the last check lends nothing to clients that are
        gone.
        """
        for name in SIDECARS:
            process, server = self.cluster.processes[name], self._world.socket_servers.get(name)
            if process.is_dead or process.is_paused or server is None:
                continue
            clients = [session.memory for session in server.sessions]
            lent = {
                "reserved": server.context.reserved_bytes
                - sum(one.reserved_bytes for one in clients),
                "pinned": server.context.pinned.used_bytes
                - sum(one.pinned_bytes for one in clients),
            }
            leaked = {(process.pid, process.paused_s, what) for what, n in lent.items() if n > 0}
            for *_, what in sorted(leaked & self._leaked[name]):
                self._complain(f"{name} has {lent[what]} bytes {what} for no client")
            self._leaked[name] = leaked

    def _check_pins(self) -> None:
        """Check that pinned chunks are in memory and stay there, and that they take no more of it
        than they may.
        """
        for name in (*SIDECARS, *STORAGES):
            node, process, now = self._running(name), self.cluster.processes[name], self._kernel.now
            before = self._pins.pop(name, None)
            if node is None or process.is_paused or not hasattr(node, "pins") or node.is_draining:
                continue
            if node.pins.num_bytes > node.pins.max_bytes:
                self._complain(f"{name} has pinned {node.pins.num_bytes} bytes")
            life = process.pid, process.paused_s
            self._pins[name] = (
                life,
                {pin.key: now + pin.expires_in_s for pin in node.pins.pins() if pin.expires_in_s},
            )
            # A call without an answer, or one of a fault, may end pins late.
            is_sure = now - self.operator.unpinned_s.get(name, -LATE_CALL_S) >= LATE_CALL_S
            if before is None or before[0] != life or not is_sure or node.settings.chunk_ttl_s:
                continue
            keys = [key for key, until in before[1].items() if until > now + 1.0]
            held = node.stack.hot.contains_many(keys)
            for key, is_held in zip(keys, held, strict=True):
                if not is_held or key not in node.pins:
                    self._complain(f"{name} has lost {key.key.to_url()}, which was pinned")

    def _check_pinned_memory(self) -> None:
        """Check that a node that ran since the last check pins no chunks that it does not serve."""
        for name in (*SIDECARS, *STORAGES):
            node, process = self._running(name), self.cluster.processes[name]
            if node is None or process.is_paused:
                continue
            served = inside.chunks_in_memory(node.stack.hot)
            unserved: set[tuple[object, ...]] = {
                (process.pid, process.paused_s, pin.ends_at, key)
                for key, pin in inside.pinned_chunks(node).items()
                if key not in served or served[key].memory is not pin.chunk.memory
            }
            if both := unserved & self._unserved.get(name, set()):
                self._complain(f"{name} pins {len(both)} chunks that it does not serve")
            self._unserved[name] = unserved

    def _check_intact(self) -> None:
        """Check that chunks in memory are what their digests say; note which there are."""
        from lmcache_core.errors import RecordError
        from lmcache_core.record import verify_payload

        for name in (*SIDECARS, *STORAGES):
            for tier, _ in self._tiers(name):
                self._seen_ids.update(
                    (key.tenant, key.key.chunk_id().hex()) for key, _ in tier.held()
                )
            node = self._running(name)
            hot = None if node is None else node.stack.hot
            chunks = [] if hot is None else list(inside.chunks_in_memory(hot).values())
            for chunk in chunks:
                try:
                    if chunk.is_sealed:
                        verify_payload(chunk.header, chunk.memory.byte_array)
                except RecordError as exc:
                    self._complain(f"{name} serves {chunk.key.key.to_url()} from memory: {exc}")
                    return

    def _has_read_disk(self, name: str) -> bool:
        """Return whether a node runs and knows its files: lost power brings back some that it had
        removed, and how much is in a directory that cannot be listed is not known.
        """
        node, disk = self._running(name), self._world.files.disks[name]
        if node is None or node.tiers.disk is None:
            return False
        store = inside.store_of(node.tiers.disk)
        unread = inside.room_of(store).unread
        return bool(store.is_loaded) and not any(disk.is_folder(str(path)) for path in unread)

    def _running(self, name: str) -> Any:
        """Return the `Node` of a process that runs; None while there is none."""
        process = self.cluster.processes[name]
        is_served = self._world.served_by.get(name) is process and not process.is_dead
        return self._world.nodes[name] if is_served else None

    def _num_damaged(self, name: str) -> int:
        node = self._world.nodes.get(name)
        if node is None:
            return 0
        tiers = [] if node.tiers.disk is None else [node.tiers.disk]
        if node.tiers.remote is not None:
            tiers.append(node.tiers.remote)
        return sum(tier.stats()["corrupt_chunks"] for tier in tiers)

    def _tiers(self, name: str) -> list[tuple[Any, float | None]]:
        """Return the tiers of a running node, and the tenant's quota in each."""
        node = self._running(name)
        if node is None:
            return []
        quotas = node.settings.tenant_quota_gb, node.settings.tenant_disk_quota_gb
        return list(zip(node.tiers.local, quotas, strict=False))

    def _check_found(self) -> None:
        """Check that all engines of a model find what one of them stored within `FOUND_S`."""
        for engine in self.engines.values():
            engine.is_idle = True
        for tenant in self.cluster.tenants:
            engines = [
                self.engines[node]
                for node in SIDECARS
                if self.cluster.tenant_of(node) == tenant and not self._refuses(node)
            ]
            for is_vllm in (False, True):
                self._check_found_by([one for one in engines if one.is_vllm == is_vllm])
        self._check_alive()

    def _check_found_by(self, engines: list[SimulatedEngine]) -> None:
        for shift in range(len(engines)):
            deadline = self._kernel.now + FOUND_S
            asked = [
                (engine, 50 + (number + shift) % len(engines))
                for number, engine in enumerate(engines)
            ]
            while asked and self._kernel.now < deadline:
                for engine, prompt in asked:
                    if engine.prompt is None:
                        engine.found, engine.prompt = None, prompt
                self._kernel.sleep(FOUND_PAUSE_S)
                asked = [one for one in asked if (one[0].found or 0) < 7 * 32]
            for engine, prompt in asked:
                self._complain(
                    f"engine-{engine.node} found {engine.found} of 224 tokens of prompt {prompt}"
                )

    def _check_found_in_remote(self) -> None:
        """Check that each engine finds in its remote tier what the next one with the same remote
        tier stored.
        """
        groups: dict[tuple[object, ...], list[SimulatedEngine]] = {}
        for node, url in self.cluster.remotes.items():
            is_embedded = node in self._embedded_nodes  # as one of the default tenant
            is_other = is_embedded and not url.startswith("lm:")
            salt = self.cluster.salt_of(node, is_embedded=is_embedded)
            kind = node in self._vllm_nodes, self.cluster.tenant_of(node), is_other, salt, url
            groups.setdefault(kind, []).append(self.engines[node])
        readers = {
            engine: group[number - 1]
            for group in groups.values()
            for number, engine in enumerate(group)
            if (len(group) > 1 or engine.node not in self._embedded_nodes)
            and not any(map(self._refuses, (engine.node, group[number - 1].node)))
            and not any(map(self._refuses, self.cluster.machines_of_remote(engine.node)))
            and self._serde_of(group[number - 1]) in ("naive", *self._decodable(engine))
        }
        prompt = FIRST_REMOTE_PROMPT
        for reader, writer in readers.items():  # one at a time: storages may be small
            for _ in range(REMOTE_TRIES):
                self._ask({writer: prompt})
                for name in SIDECARS:
                    self._call(name, "POST", "/v1/admin/clear")
                self._ask({reader: prompt})
                prompt += 1
                if (reader.found or 0) >= 7 * 32:
                    break
            if (reader.found or 0) < 7 * 32:
                self._complain(
                    f"engine-{reader.node} found {reader.found} of 224 tokens that"
                    f" engine-{writer.node} stored in {self.cluster.remotes[reader.node]}"
                )
        self._check_alive()

    def _check_replaced(self) -> None:
        """Check that stores replace files of remote tiers whose payloads cannot be read."""
        directories = self.cluster.directories
        asked = {
            self.engines[node]: FIRST_BROKEN_PROMPT + number
            for number, node in enumerate(SIDECARS)
            if self.cluster.remotes[node].startswith("file:")
            and node not in self._embedded_nodes
            and not self._refuses(node)
        }
        for number in range(REMOTE_TRIES if asked else 0):
            self._ask(asked)
            if number > 1:  # the first two store, the second one over broken files
                asked = {one: asked[one] for one in asked if (one.found or 0) < 7 * 32}
                if not asked:
                    break
            for name in SIDECARS:
                self._call(name, "POST", "/v1/admin/clear")
            for name, path in directories.items() if number == 0 else ():
                self._world.files.disks[name].break_ends(path)
        for engine, prompt in asked.items():
            self._complain(
                f"engine-{engine.node} found {engine.found} of 224 tokens of prompt {prompt},"
                " which replaced files that could not be read"
            )

    def _refuses(self, name: str) -> bool:
        """Return whether a quota of this node refuses each chunk."""
        node = self._world.nodes.get(name)
        quota_gb = None if node is None else node.settings.tenant_quota_gb
        is_used = name not in self._embedded_nodes
        return is_used and quota_gb is not None and quota_gb * GB < self.cluster.memory_chunk

    def _serde_of(self, writer: SimulatedEngine) -> str:
        if writer.node in self._embedded_nodes:
            return "naive"
        serde: str = self._world.nodes[writer.node].settings.remote_serde
        return serde

    def _decodable(self, reader: SimulatedEngine) -> set[str]:
        """Return the encodings that an engine's tiers decode: those with which they are set up."""
        if reader.node in self._embedded_nodes:
            return set()
        settings = self._world.nodes[reader.node].settings
        return {settings.disk_serde, settings.remote_serde, settings.peer_serde}

    def _ask(self, prompts: dict[SimulatedEngine, int]) -> None:
        if not prompts:
            return
        for engine, prompt in prompts.items():
            engine.found, engine.prompt = None, prompt
        deadline = self._kernel.now + FOUND_S
        while any(one.prompt is not None for one in prompts) and self._kernel.now < deadline:
            self._kernel.sleep(FOUND_PAUSE_S)
        self._kernel.sleep(FOUND_PAUSE_S)  # slower tiers are written to later

    @property
    def _index_s(self) -> float:
        """Time in which the index becomes right: periodic work notices that it was lost."""
        return max(FOUND_S, 2 * self._world.pace.repeat_s)

    def _check_peers(self) -> None:
        """Check that all brokers know all nodes and storages, and count no pulls without engines,
        within `_index_s`.
        """
        deadline = self._kernel.now + self._index_s
        while (wrong := self._wrong_peers()) and self._kernel.now < deadline:
            self._kernel.sleep(5.0)
        for text in wrong:
            self._complain(text)

    def _wrong_peers(self) -> list[str]:
        wrong = []
        for name, tenant in itertools.product(self.cluster.brokers, self.cluster.tenants):
            own = {node for node in SIDECARS if self.cluster.tenant_of(node) == tenant}
            _, answer = self._call(name, "GET", "/v1/peers", None, tenant)
            peers = {peer["id"]: peer for peer in answer["peers"]} if answer else {}
            if peers.keys() != {*own, *STORAGES}:
                wrong.append(f"{name} shows {tenant} the peers {sorted(peers)}")
            for one, peer in peers.items():
                if peer["draining"] or peer["num_pulls"]:
                    wrong.append(
                        f"{name} says of {one}: draining={peer['draining']},"
                        f" pulls={peer['num_pulls']}"
                    )
        return wrong

    def _check_index(self) -> None:
        """Check that lookup names exactly the holders of each chunk within `_index_s`."""
        deadline = self._kernel.now + self._index_s
        while (wrong := self._wrong_holders()) and self._kernel.now < deadline:
            self._kernel.sleep(5.0)
        for text in wrong[:5]:
            self._complain(text)

    def _check_swept(self) -> None:
        """Check that the index forgets what instances held in earlier lives."""
        deadline = self._kernel.now + SWEPT_STEPS * self._world.pace.sweep_s
        while (num_left := self._num_of_earlier_lives()) and self._kernel.now < deadline:
            self._kernel.sleep(5.0)
        if num_left:
            self._complain(f"lookup keeps {num_left} entries of earlier lives")

    def _num_of_earlier_lives(self) -> int:
        store = self.cluster.redis.store

        def values(key: str) -> list[bytes]:
            return store.execute([b"HGETALL", key.encode()])[1::2]

        leases = [msgspec.json.decode(lease, type=StoredLease) for lease in values(LEASES_KEY)]
        alive = {(lease.number, int(lease.incarnation)) for lease in leases}
        return sum(
            (holder.number, holder.incarnation) not in alive
            for tenant in store.execute([b"SMEMBERS", TENANTS_KEY.encode()])
            for bucket in range(NUM_BUCKETS)
            for holders in values(bucket_key(tenant.decode(), bucket))
            for holder in unpack_holders(holders)
        )

    def _check_announced_again(self) -> None:
        """Check that the index is right after it was lost twice, and clocks were set back in
        between.
        """
        for offset_s in (CLOCK_BACK_S, 0.0):
            for name in (*SIDECARS, *STORAGES):
                self.cluster.machines[name].wall_offset_s = offset_s
            self.cluster.redis.flush()
            self._kernel.sleep(self._index_s)
        self._check_index()

    def _wrong_holders(self) -> list[str]:
        holders: dict[tuple[str, str], set[str]] = {}
        expiring = set()  # they drop expired chunks only when they access them
        for name in (*SIDECARS, *STORAGES):
            for tier, _ in self._tiers(name):
                if self._world.nodes[name].settings.chunk_ttl_s:
                    expiring.add(name)
                for key, _ in tier.held():
                    # A sidecar serves one tenant; others may have had its disk before.
                    if name in STORAGES or key.tenant == self.cluster.tenant_of(name):
                        chunk = (key.tenant, key.key.chunk_id().hex())
                        holders.setdefault(chunk, set()).add(name)
        wrong = []
        for tenant in self.cluster.tenants:
            num_held = sum(of == tenant for of, _ in holders)
            _, stats = self._call("lookup-0", "GET", "/v1/stats", None, tenant)
            surplus = (stats["num_chunks"] or 0) - num_held if stats else -1
            if surplus < 0 or (surplus > 0 and not expiring):
                wrong.append(f"{num_held} chunks of {tenant} are held; lookup says {stats}")
        dice, ids, gone = (
            random.Random(self._seed),
            sorted(holders),
            sorted(self._seen_ids - holders.keys()),
        )
        asked = dice.sample(ids, min(ASKED_CHUNKS, len(ids)))
        for tenant, chunk_id in asked + dice.sample(gone, min(ASKED_CHUNKS, len(gone))):
            where = f"/v1/chunks/{chunk_id}/locations"
            _, answer = self._call("lookup-0", "GET", where, None, tenant)
            known = {one["instance"] for one in answer["holders"]} if answer else set()
            held_by = holders.get((tenant, chunk_id), set())
            if known - expiring != held_by - expiring or not known >= held_by:
                wrong.append(
                    f"lookup names {sorted(known)} as holders of {chunk_id} of {tenant}, which"
                    f" {sorted(held_by)} hold"
                )
        return wrong

    def _check_idle(self) -> None:
        """Check that without clients no resource is held for one."""
        for name in SIDECARS:
            self._call(name, "POST", "/v1/admin/unpin")
        self._kernel.sleep(10.0)
        for name in SERVICES:
            process = self.cluster.processes[name]
            threads = self._kernel.threads(process)
            have = {
                "descriptors": len(process.descriptors),
                "threads": len(threads),
                "tasks": sum(
                    len(asyncio.all_tasks(loop)) for loop in process.loops if not loop.is_closed()
                ),
            }
            self._kernel.record(f"idle {name} {have}")
            for what, number in have.items():
                if number > MAX_IDLE[what]:
                    self._complain(f"{name} has {number} {what} when idle")
            for one in {one.rpartition("_")[0] or one for one in threads} - IDLE_THREADS:
                if one != f"{name}.main":
                    self._complain(f"{name} has threads {one} when idle")
            for one in process.descriptors.values():
                if self._is_in_remote(getattr(one, "path", "")):
                    self._complain(f"{name} keeps {one.path} open when idle")
        for name in (*SIDECARS, *STORAGES):
            self._check_memory(name)
            self._check_files(name)
            if name in self._embedded_nodes:
                continue  # no call has shown the sidecar that its tiers answer again
            for tier, figures in self._world.nodes[name].stack.stats().items():
                if figures.get("breaker_open"):
                    self._complain(f"{name} still bypasses {tier}")
        for name in SIDECARS:
            code, status = self._call(name, "GET", "/v1/status")
            if code != 200:
                self._complain(f"{name} answers {code} when idle")
                continue
            held = {
                what: status[what]
                for what in ("num_clients", "reserved_bytes", "held_bytes", "pinned_bytes")
                if status[what]
            }
            if status["arena"]["lent_bytes"]:
                held["lent_bytes"] = status["arena"]["lent_bytes"]
            if held or not status["settled"] or status["registered"] is False:
                self._complain(
                    f"{name} is not idle: {held} settled={status['settled']}"
                    f" registered={status['registered']}"
                )
            self._check_serves(name, status)
        for name in STORAGES:
            code, status = self._call(name, "GET", "/v1/stats")
            if code == 200:
                self._check_serves(name, status)
            else:
                self._complain(f"{name} answers {code} when idle")

    def _check_status(self) -> None:
        """Check that `lmcachectl` finds nothing wrong with the cluster."""
        for words in ("status", "doctor") if len(self.cluster.tenants) == 1 else ():
            if self.operator.run(words, TENANTS[0]) != 0:
                self._complain(f"lmcachectl {words} finds something:\n{self.operator.shown}")

    def _check_serves(self, name: str, status: Any) -> None:
        """Check that no drain is left of those that were cancelled."""
        if status["draining"] or status["drain"]["state"] != "serving":
            self._complain(f"{name} still drains: {status['drain']}")

    def _check_tokens(self) -> None:
        """Check that all services accept the current token, and refuse the one before it."""
        for name in SERVICES:
            for token in range(max(0, self.cluster.shown - 1), self.cluster.shown + 1):
                code, _ = self._call(name, "GET", "/v1/admin/log-level", token=token)
                if code != (200 if token == self.cluster.shown else 401):
                    self._complain(
                        f"{name} answers {code} to token {token} of {self.cluster.shown}"
                    )

    def _is_in_remote(self, path: str) -> bool:
        return any(path.startswith(f"{one}/") for one in self.cluster.directories.values())

    def _check_cleared(self) -> None:
        """Check that no memory is in use once all chunks are removed."""
        for name in SIDECARS:
            self._call(name, "POST", "/v1/admin/clear")
        for name in STORAGES:
            self._call(name, "POST", "/v1/admin/clear", {"all_tenants": True})
        self._kernel.sleep(CLEARED_S)
        for name in (*SIDECARS, *STORAGES):
            used = self._world.nodes[name].stack.hot.stats()["arena_used_bytes"]
            if used:
                self._complain(f"{name} uses {used} bytes of memory and was cleared")

    def _check_files(self, name: str) -> None:
        """Check that each file on a disk is one that its tier charges."""
        if not self._has_read_disk(name):
            return
        tier, disk = self._world.nodes[name].tiers.disk, self._world.files.disks[name]
        root = self.cluster.disk_path(name)
        known = {str(path) for path in inside.files_of_disk(tier, root)}
        if stray := sorted(path for path in disk.paths(root) if path not in known):
            self._complain(f"{name} has {len(stray)} files that its tier forgot, as {stray[0]}")

    def _check_temporary(self) -> None:
        """Check that a later start removes files that dead writers left in remote tiers."""
        from lmcache_core.storage.disk.files import DiskFiles
        from lmcache_core.storage.remote.file import STALE_S, SharedDirectory

        process = self._kernel.process
        assert process is not None
        machine = process.machine
        machine.wall_offset_s = 2 * STALE_S
        for name, path in self.cluster.directories.items():
            SharedDirectory(path, DiskFiles()).remove_stale()
            if left := self._world.files.disks[name].temporary_files(path):
                self._complain(f"{path} keeps {len(left)} files of dead writers")
        machine.wall_offset_s = 0.0

    def _check_memory(self, name: str) -> None:
        """Check that all memory in use is that of chunks that are served."""
        node = self._world.nodes[name]
        used, chunks = (
            node.stack.hot.stats()["arena_used_bytes"],
            inside.chunks_in_memory(node.stack.hot),
        )
        held = sum(chunk.memory.metadata.phy_size for chunk in chunks.values())
        if used != held:
            self._complain(f"{name} uses {used} bytes of memory for {held} bytes of chunks")
