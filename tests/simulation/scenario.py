"""One simulated run: engines and operators at work, scheduled faults, invariants, and an orderly
end.
"""

from __future__ import annotations

import asyncio
import random
import signal
import traceback
from collections import Counter
from collections.abc import Collection
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

from tests.simulation.cluster import (
    GB,
    REST_PORT,
    SERVICES,
    SIDECARS,
    STORAGES,
    TOKEN,
    Cluster,
    engine_of,
)
from tests.simulation.engines import SimulatedEngine
from tests.simulation.faults import DISKS, Fault, Faults, focus_of
from tests.simulation.world import World

CALM_PAUSE_S = 3.0
END_S = 60.0
"""Everything ends within this time of its signal."""
FOUND_S = 30.0
"""A prompt that was stored is found by every node within this time."""
FOUND_PAUSE_S = 2.0
CLOCK_BACK_S = 3600.0
CLEARED_S = 5.0
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
ADMIN_BOUND_S = 15.0
ASKED_CHUNKS = 20
DISK_SLACK = 1.1
"""A disk tier may exceed its limit by this much, for files being written."""
QUOTA_SLACK = 1.05
"""Sizes of chunks in memory include headers of up to 1 KiB that are not kept there."""
IDLE_THREADS = {
    "asyncio", "lmcache-codec", "lmcache-decoding", "lmcache-disk", "lmcache-encoding",
}  # fmt: skip
"""Pools that a service keeps when idle."""
MAX_IDLE = {"descriptors": 128, "threads": 32, "tasks": 96}
"""What a service without clients has at most; a pool keeps up to 64 connections to Redis."""
CALLS = {
    "node": (
        ("GET", "/v1/status"),
        ("GET", "/v1/tiers"),
        ("GET", "/v1/clients"),
        ("GET", "/v1/admin/chunks"),
        ("GET", "/v1/admin/pins"),
        ("GET", "/metrics"),
        ("POST", "/v1/admin/pin"),
        ("POST", "/v1/admin/unpin"),
        ("POST", "/v1/admin/clear"),
        ("POST", "/v1/admin/evict"),
    ),
    "storage": (
        ("GET", "/v1/stats"),
        ("GET", "/v1/chunks"),
        ("GET", "/metrics"),
        ("POST", "/v1/admin/pin"),
        ("POST", "/v1/admin/clear"),
        ("POST", "/v1/admin/evict"),
    ),
    "lookup": (("GET", "/v1/stats"), ("GET", "/v1/admin/tenants"), ("POST", "/v1/admin/clear")),
    "broker": (("GET", "/v1/peers"), ("GET", "/v1/overview"), ("GET", "/metrics")),
}


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
        self.cluster = Cluster(world, CHUNK_BYTES, dice)
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
            self._call,
            victims.sample(machines, min(len(machines), victims.choice(NUM_VICTIMS))),
        )
        self._seen_ids: set[str] = set()
        self._leaked: dict[str, set[tuple[int, float, str]]] = {name: set() for name in SIDECARS}
        self.violations: list[str] = []
        self.pairs: Counter[tuple[str, str]] = Counter()
        self.totals: Counter[str] = Counter()

    def run(self) -> list[str]:
        """Run the schedule; return the violations."""
        self._kernel.start_process("operator", self._world.machine("operator"), self._operate)
        longest_s = self._work_s + self._world.pace.calm_s + 5 * FOUND_S + 4 * self._index_s
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
        kernel.spawn(process, "admin", self._administrate)
        kernel.spawn(process, "look", self._look)
        begin = kernel.now
        for fault in self._schedule:
            kernel.sleep(max(0.0, begin + fault.at_s - kernel.now))
            self.faults.do(fault)
        kernel.sleep(max(0.0, begin + self._work_s - kernel.now))
        self._is_working = False
        self.faults.heal()
        self._slow_down()
        kernel.sleep(self._world.pace.calm_s)
        self._is_watching = False
        self._check_found()
        for engine in self.engines.values():
            engine.is_working = False
        self._await_end([f"engine-{node}" for node in SIDECARS])
        self._check_idle()
        self._check_index()
        self._check_swept()
        self._check_announced_again()
        self._check_cleared()
        for name in reversed(SERVICES):
            self._world.signal(self.cluster.processes[name], signal.SIGTERM)
            self._await_end([name])
        self._check_alive()
        self._is_done = True
        kernel.stop()
        return 0

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

    def _await_end(self, names: list[str]) -> None:
        for name in names:
            process = self.cluster.processes[name]
            self.faults.expected_deaths.add(process.pid)
            code = self._kernel.wait_process(process, END_S)
            if code != 0:
                self._complain(f"{name} ended with {code} at the end of the run")

    # --- An operator's calls ---------------------------------------------------------------------

    def _administrate(self) -> None:
        dice = random.Random(f"operator {self._seed}")
        pause_s = dice.choice(self._world.pace.operator_s)
        # Each run has its own habits, so that some calls are frequent in it.
        habits = {
            kind: dice.sample(calls, dice.randint(2, len(calls))) for kind, calls in CALLS.items()
        }
        while self._is_working:
            self._kernel.sleep(dice.expovariate(1 / pause_s))
            name = dice.choice(SERVICES)
            method, path = dice.choice(habits[name.split("-")[0]])
            body = self._body(name, path, dice)
            operation = f"{method} {name.split('-')[0]}{path}"
            self._count_pairs(operation)
            begin = self._kernel.now
            status, _ = self._call(name, method, path, body)
            lasted_s = self._kernel.now - begin
            self._kernel.record(f"operator {operation} {name} {status}")
            if status in {404, 405, 422} or status == 500:
                self._complain(f"{operation} on {name} was answered by {status}")
            if lasted_s > ADMIN_BOUND_S and not self.faults.active:
                self._complain(f"{operation} on {name} lasted {lasted_s:.1f} s")

    def _body(self, name: str, path: str, dice: random.Random) -> object:
        if path.endswith("/evict"):
            return {"num_bytes": 1 << dice.randint(10, 24)}
        if not path.endswith("/pin"):
            return None
        from lmcache_core.keys import CacheEngineKey

        where = "/v1/chunks" if name in STORAGES else "/v1/admin/chunks"
        _, listed = self._call(name, "GET", where)
        chunks = listed.get("chunks", []) if isinstance(listed, dict) else []
        chunks = dice.sample(chunks, min(len(chunks), 8))
        ttl_s = {"ttl_s": dice.choice((5, 60))}
        if name in STORAGES:
            keys = [chunk["key"] for chunk in chunks]
            return {
                "keys": keys or [CacheEngineKey("vllm", "none", 1, 0, "0" * 64).to_url()]
            } | ttl_s
        hashes = [CacheEngineKey.from_url(key).chunk_hash for key in chunks]
        return {"chunk_hashes": hashes or ["0" * 64]} | ttl_s

    def _call(
        self, name: str, method: str, path: str, body: object = None
    ) -> tuple[int | None, Any]:
        """Return the status and the body of an answer; None if there was none."""
        import httpx

        headers = {"Authorization": f"Bearer {TOKEN}"}
        url = f"http://{name}:{REST_PORT}{path}"
        try:
            with httpx.Client(timeout=ADMIN_BOUND_S, verify=False, trust_env=False) as client:
                answer = client.request(method, url, json=body, headers=headers)
        except httpx.HTTPError:
            return None, None
        is_json = bool(answer.content) and "json" in answer.headers.get("content-type", "")
        return answer.status_code, answer.json() if is_json else answer.text

    # --- Invariants ------------------------------------------------------------------------------

    def _look(self) -> None:
        while self._is_watching:
            self._kernel.sleep(self._world.pace.check_s)
            self._check_alive()
            self._check_sizes()
            self._check_lent()
            self._check_intact()

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
            limit = self.cluster.disk_bytes(name)
            used = self._world.files.disks[name].used_bytes()
            if used > limit * DISK_SLACK and self._has_read_disk(name):
                self._complain(f"{name} has {used} bytes on its disk; the limit is {limit}")
            if name not in self.faults.damaged:
                num_damaged = self._num_damaged(name)
                if num_damaged:
                    self._complain(f"{name} took {num_damaged} intact chunks for damaged")
            for tier, quota_gb in self._tiers(name):
                used = sum(num_bytes for _, num_bytes in tier.held())
                if quota_gb and used > quota_gb * GB * QUOTA_SLACK:
                    self._complain(f"{name} has {used} bytes of a tenant with {quota_gb * GB:.0f}")

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

    def _check_intact(self) -> None:
        """Check that chunks in memory are what their digests say; note which there are."""
        from lmcache_core.errors import RecordError
        from lmcache_core.record import verify_payload

        for name in (*SIDECARS, *STORAGES):
            for tier, _ in self._tiers(name):
                self._seen_ids.update(key.key.chunk_id().hex() for key, _ in tier.held())
            node = self._running(name)
            for chunk in [] if node is None else list(node.stack.hot._chunks.values()):
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
        if node is None:
            return False
        store = node.tiers.disk_files._store
        return store.is_loaded and not any(disk.is_folder(str(path)) for path in store._room.unread)

    def _running(self, name: str) -> Any:
        """Return the `Node` of a process that runs; None while there is none."""
        process = self.cluster.processes[name]
        is_served = self._world.served_by.get(name) is process and not process.is_dead
        return self._world.nodes[name] if is_served else None

    def _num_damaged(self, name: str) -> int:
        node = self._world.nodes.get(name)
        return 0 if node is None else node.tiers.disk_files.stats()["corrupt_chunks"]

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
        for is_vllm in (False, True):
            self._check_found_by(
                [self.engines[node] for node in SIDECARS if self.engines[node].is_vllm == is_vllm]
            )
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

    @property
    def _index_s(self) -> float:
        """Time in which the index becomes right: periodic work notices that it was lost."""
        return max(FOUND_S, 2 * self._world.pace.repeat_s)

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
        holders: dict[str, set[str]] = {}
        expiring = set()  # they drop expired chunks only when they access them
        for name in (*SIDECARS, *STORAGES):
            for tier, _ in self._tiers(name):
                if self._world.nodes[name].settings.chunk_ttl_s:
                    expiring.add(name)
                for key, _ in tier.held():
                    holders.setdefault(key.key.chunk_id().hex(), set()).add(name)
        wrong = []
        _, stats = self._call("lookup-0", "GET", "/v1/stats")
        surplus = (stats["num_chunks"] or 0) - len(holders) if stats else -1
        if surplus < 0 or (surplus > 0 and not expiring):
            wrong.append(f"{len(holders)} chunks are held; lookup says {stats}")
        dice, ids, gone = (
            random.Random(self._seed),
            sorted(holders),
            sorted(self._seen_ids - holders.keys()),
        )
        asked = dice.sample(ids, min(ASKED_CHUNKS, len(ids)))
        for chunk_id in asked + dice.sample(gone, min(ASKED_CHUNKS, len(gone))):
            _, answer = self._call("lookup-0", "GET", f"/v1/chunks/{chunk_id}/locations")
            known = {one["instance"] for one in answer["holders"]} if answer else set()
            held_by = holders.get(chunk_id, set())
            if known - expiring != held_by - expiring or not known >= held_by:
                wrong.append(
                    f"lookup names {sorted(known)} as holders of {chunk_id}, which"
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
        for name in (*SIDECARS, *STORAGES):
            self._check_memory(name)
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

    def _check_cleared(self) -> None:
        """Check that no memory is in use once all chunks are removed."""
        for name in (*SIDECARS, *STORAGES):
            self._call(name, "POST", "/v1/admin/clear")
        self._kernel.sleep(CLEARED_S)
        for name in (*SIDECARS, *STORAGES):
            used = self._world.nodes[name].stack.hot.stats()["arena_used_bytes"]
            if used:
                self._complain(f"{name} uses {used} bytes of memory and was cleared")

    def _check_memory(self, name: str) -> None:
        """Check that all memory in use is that of chunks that are served."""
        hot = self._world.nodes[name].stack.hot
        used = hot.stats()["arena_used_bytes"]
        held = sum(chunk.memory.metadata.phy_size for chunk in hot._chunks.values())
        if used != held:
            self._complain(f"{name} uses {used} bytes of memory for {held} bytes of chunks")
