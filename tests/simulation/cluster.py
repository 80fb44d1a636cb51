"""The cluster under test: nodes with a sidecar each, storages, a lookup, brokers, Redis."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import random
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from lmcache_core.mover.messages import Attach

from tests.fixtures.model_mover import Fabric, ModelMover
from tests.simulation.kernel import Machine, Process
from tests.simulation.redis_server import RedisServer
from tests.simulation.world import World

SIDECARS = tuple(f"node-{i}" for i in range(4))
STORAGES = tuple(f"storage-{i}" for i in range(2))
LOOKUPS = ("lookup-0", "lookup-1")
BROKERS = ("broker-0", "broker-1")
SERVICES = (*LOOKUPS, *BROKERS, *STORAGES, *SIDECARS)
REST_PORT, LM_PORT = 8080, 7777
REDIS_URL = "redis://redis:6379"
GB = 1 << 30
LOCAL_BUFFER_BYTES = (128, 1 << 18)
_DISK_CHUNKS = {"storage": 250, "node": 80}
_MEMORY_CHUNKS = {"storage": 150, "node": 70}
SCALES = (0.4, 1.0)
"""Factors on the capacities of a run, of memory and of disks: small tiers evict often, large ones
hit often.
"""
REDIS_CHANCE = 0.8
"""How often lookups and brokers share a Redis; otherwise they keep everything in their memory."""
RESIZED_CHANCE = 0.5
"""How many runs change sizes between two starts of a service."""
MEMORY_SIZES = (1.0, 1.0, 0.7, 1.5)
DISK_SIZES = (1.0, 1.0, 0.3, 0.6, 1.5, 0.0)
"""Factors on the size of a tier in such runs, drawn at each start; 0: no disk tier."""
TENANTS = ("acme", "beta")
TWO_TENANTS_CHANCE = 0.25
ONE_SALT_CHANCE = 0.5
"""How often two tenants have the same salt: then only their names keep their chunks apart."""
ROLES = ("admin", "client", "storage")
SALTS = {"acme": "the-salt-of-acme-0123456789", "beta": "the-salt-of-beta-0123456789"}

DRAWN: dict[str, tuple[Any, ...]] = {
    "disk_fsync": (False, True),
    "eviction_policy": ("adaptive", "lru", "s3fifo"),
    "chunk_ttl_s": (None, None, None, None, None, 60.0),
    "verify_hot": ("auto", "sampled", "never"),
    "accept_handover": (False, True),
    "arena_recover": (True, True, False),
    "disk_serde": ("naive", "naive", "lossless"),
    "remote_serde": ("naive", "naive", "lossless"),
    "rebalance": (True, True, False),
    "hand_over_on_stop": (True, True, False),
    # Half a chunk refuses each
    "tenant_quota_gb": (None, None, None, None, 50, 50, 0.5),
    "tenant_disk_quota_gb": (None, None, 60),
    "drain_timeout_s": (1.0, 10.0),
    "peer_serde": ("naive", "naive", "lossless"),
    "arena_wait_s": (0.0, 0.0, 3.0),
    "hot_chunk_pulls": (2, 16),
    "max_pulls_per_peer": (1, 64),
    "ticket_ttl_ms": (1000, 5000),
}
"""Settings that differ between runs, and between two starts of a service; sizes in chunks of
the run's scale.
"""
BROKER_SETTINGS = ("hot_chunk_pulls", "max_pulls_per_peer", "ticket_ttl_ms")
STORAGE_SETTINGS = (
    "disk_fsync", "eviction_policy", "chunk_ttl_s", "rebalance", "hand_over_on_stop",
    "tenant_quota_gb", "tenant_disk_quota_gb", "drain_timeout_s",
)  # fmt: skip
SIDECAR_SETTINGS = tuple(
    name for name in DRAWN if name not in {"rebalance", "hand_over_on_stop", *BROKER_SETTINGS}
)
OTHER_REMOTE_CHANCE = 0.25
"""How often some nodes of a run have another remote tier than the storages by lm://."""
NODE_CHANCE = 0.75
"""How often a node of such a run has it."""
REMOTES = ("redis", "own directory", "shared directory")
REDIS_TTL_S = (None, 20)
"""Expiry of chunks in Redis."""
DIRECTORY_OF = "storage-0"
"""The machine whose disk has the directory that nodes share."""
EMBEDDED_DISK_CHANCE = 0.5
MOVERS_CHANCE = 0.4
"""How often sidecars have movers."""
STEPS_S = (0.001, 0.001, 0.4)
"""How long they take for a chunk, drawn at each start: so slow ones go on writing when they were
given up.
"""


def worker_name(engine: str, rank: int) -> str:
    """Return the name of an engine's worker in its own process."""
    return f"{engine}.rank-{rank}"


def engine_of(process: str) -> str:
    """Return the name of the engine of a worker; of another process, its own name."""
    return process.partition(".")[0]


def has_movers(seed: int) -> bool:
    """Return whether sidecars of this run have movers."""
    return random.Random(f"movers {seed}").random() < MOVERS_CHANCE


class Cluster:
    """Starts and stops the services' real code in a world.

    Args:
        world: The simulated world.
        chunk_bytes: Size of a chunk, which determines all capacities.
        dice: Draws settings.
        size_dice: Draws what sizes change to.
        tenant_dice: Draws whether there are two tenants, and which nodes the second one has.
        remote_dice: Draws remote tiers, and whether an embedded engine has a disk tier.

    Attributes:
        lookups: Those that are used; one and one broker without Redis.
        brokers: Likewise.
        shown: Number of the token that services and engines show.
        is_rotating: Whether the token is being replaced.
        memory_chunk: Bytes that a chunk takes in memory.
        tenants: The tenants that have nodes.
        directories: Remote tiers that are directories, each by the machine that has its disk.
        remotes: The URL of the remote tier of each node.
        movers: The mover of each node, in runs that have them.
        prefilled: Prompts that engines of each tenant have computed for others, the latest ones,
            with what a proxy passes on.
    """

    def __init__(
        self,
        world: World,
        chunk_bytes: int,
        dice: random.Random,
        size_dice: random.Random,
        tenant_dice: random.Random,
        remote_dice: random.Random,
    ) -> None:
        self.tenants = TENANTS[: 1 + (tenant_dice.random() < TWO_TENANTS_CHANCE)]
        others = tenant_dice.sample(SIDECARS, len(SIDECARS) // 2)
        self._others = set(others if len(self.tenants) == 2 else ())
        self._salts = dict.fromkeys(TENANTS, SALTS["acme"])
        if tenant_dice.random() >= ONE_SALT_CHANCE:
            self._salts = SALTS
        self._dice = dice
        self._size_dice = size_dice
        self._is_resized = size_dice.random() < RESIZED_CHANCE
        self._disk_bytes: dict[str, int] = {}
        self.world = world
        self.chunk_bytes = chunk_bytes
        self.memory_chunk = dice.choice(SCALES) * chunk_bytes
        self._disk_chunk = dice.choice(SCALES) * chunk_bytes
        self.redis = RedisServer()
        self.prefilled = {tenant: deque[tuple[list[int], Any]](maxlen=8) for tenant in self.tenants}
        self.processes: dict[str, Process] = {}
        self.machines: dict[str, Machine] = {
            name: world.machine(name) for name in ("redis", *SERVICES)
        }
        world.network.local_buffer_bytes = dice.choice(LOCAL_BUFFER_BYTES)
        self._has_redis = random.Random(f"redis {world.kernel.seed}").random() < REDIS_CHANCE
        num = None if self._has_redis else 1
        self.lookups, self.brokers = LOOKUPS[:num], BROKERS[:num]
        names = world.network.names
        for service, members in {"lookup": self.lookups, "broker": self.brokers}.items():
            names[service] = [self.machines[one].address for one in members]
        names["storage"] = self._running_storages
        self._secrets = world.files.root / "secrets"
        self._secrets.mkdir()
        for tenant, salt in self._salts.items():
            (self._secrets / f"salt-{tenant}").write_text(salt)
        self._storages = f"lm://storage:{LM_PORT}"
        # Without it, the broker names the other storages.
        self._replicas_url = dice.choice((None, self._storages))
        self.is_rotating = False
        self.accept(0)
        self.show(0)
        self.directories: dict[str, Path] = {}
        self.remotes = self._draw_remotes(remote_dice)
        self._has_embedded_disk = remote_dice.random() < EMBEDDED_DISK_CHANCE
        self.movers: dict[str, Mover] = {}
        if has_movers(world.kernel.seed):
            from lmcache_core.p2p import by_mover

            by_mover.TRIED_EVERY = 2  # so near to each other, lm:// is the faster way
            fabric = Fabric()
            for node in SIDECARS:
                self.movers[node] = Mover(world, node, self.machines[node], fabric)

    def start(self, name: str) -> None:
        """Start a service."""
        kernel, machine = self.world.kernel, self.machines[name]
        if name == "redis":
            self.processes[name] = kernel.start_process(name, machine, self.redis.main)
            return
        if name in self.movers:
            self.movers[name].start()
        kind = name.split("-")[0]
        self.processes[name] = self.world.start_service(
            name, machine, _mains()[kind], self._settings(kind, name)
        )

    def start_all(self) -> None:
        """Start everything."""
        for name in ("redis", *SERVICES):
            self.start(name)

    def disk_bytes(self, name: str) -> int:
        """Return the limit on the disk tier of a service since its last start; 0: it has none."""
        return self._disk_bytes[name]

    def tenant_of(self, name: str) -> str:
        """Return the tenant of a node; that of the services is the first one."""
        return TENANTS[name in self._others]

    def move(self, node: str) -> None:
        """Give a node to the other tenant from its next start on."""
        self._others ^= {node}

    def processes_of(self, engine: str) -> list[str]:
        """Return the names of an engine's processes: its own, and those of its workers."""
        return [name for name in self.processes if engine_of(name) == engine]

    def socket(self, name: str) -> Path:
        """Where engines reach the sidecar of a node."""
        return self.world.place(self.machines[name]) / "run" / "sidecar.sock"

    def admin_file(self, tenant: str) -> Path:
        """Return the file with the token of a tenant's operator."""
        return self._secrets / f"admin-{tenant}"

    def disk_path(self, name: str) -> Path:
        """Return the directory of the disk tier of a service."""
        return self.world.place(self.machines[name]) / "disk" / "chunks"

    def embedded(self, node: str) -> dict[str, object]:
        """Return options of an engine of a node that uses no sidecar."""
        url = self.remotes[node]
        has_token = url.startswith("lm:")
        options: dict[str, object] = {
            "max_local_cpu_size": _MEMORY_CHUNKS["node"] * self.memory_chunk / GB,
            "remote_url": url,
            "salt": self.salt_of(node, is_embedded=True),
        }
        if has_token:
            options["remote_token_file"] = str(self._token_file(node))
        if self._has_embedded_disk and self.disk_bytes(node):
            options["local_disk"] = str(self.disk_path(node).with_name("engine"))
            options["max_local_disk_size"] = self.disk_bytes(node) / GB
        return options

    def salt_of(self, node: str, *, is_embedded: bool) -> str:
        """Return the salt of the keys of a node's engine, which may use no sidecar."""
        # Only a token tells tenants apart in tiers of engines; files stay when a node moves.
        has_files = self._has_embedded_disk or not self.remotes[node].startswith("lm:")
        return (SALTS if is_embedded and has_files else self._salts)[self.tenant_of(node)]

    def machines_of_remote(self, name: str) -> Sequence[str]:
        """Return the machines that hold the remote tier of a node."""
        url = self.remotes.get(name, "")
        if url.startswith(REDIS_URL):
            return ("redis",)
        owners = [one for one, path in self.directories.items() if path.as_uri() == url]
        return owners or STORAGES

    def _draw_remotes(self, dice: random.Random) -> dict[str, str]:
        """Draw the URL of each node's remote tier."""
        remotes = dict.fromkeys(SIDECARS, self._storages)
        if dice.random() >= OTHER_REMOTE_CHANCE:
            return remotes
        kind, ttl_s = dice.choice(REMOTES), dice.choice(REDIS_TTL_S)
        for node in SIDECARS:
            if dice.random() < NODE_CHANCE:
                remotes[node] = self._remote_url(kind, node, ttl_s)
        return remotes

    def _remote_url(self, kind: str, node: str, ttl_s: int | None) -> str:
        if kind == "redis":
            return f"{REDIS_URL}/0" + (f"?ttl_s={ttl_s}" if ttl_s else "")
        machine = node if kind == "own directory" else DIRECTORY_OF
        path = self.disk_path(machine).with_name("remote")
        if machine not in self.directories:
            self.directories[machine] = path
            path.mkdir()
        return path.as_uri()

    def _running_storages(self) -> list[str]:
        """Return what the name of a headless service resolves to."""
        return [
            self.machines[one].address
            for one in STORAGES
            if one in self.processes and not self.processes[one].is_dead
        ]

    def accept(self, *numbers: int) -> None:
        """Let services accept the tokens of these numbers, and tickets signed with their keys, the
        first of which signs.
        """
        entries = [
            {"name": f"{role}-{tenant}-{number}", "tenant": tenant, "role": role}
            | {"token": self.token(number, tenant, role)}
            for number in numbers
            for tenant in TENANTS
            for role in ROLES
        ]
        keys = "".join(
            f"k{one}:{base64.b64encode(bytes([one]) * 32).decode()}\n" for one in numbers
        )
        self._replace("tokens.yaml", json.dumps({"tokens": entries}))
        self._replace("ticket-keys", keys)

    def show(self, number: int) -> None:
        """Let services, engines and operators show the tokens of this number."""
        for tenant in TENANTS:
            for role in ROLES:
                self._replace(f"{role}-{tenant}", self.token(number, tenant, role))
        self.shown = number

    def token(self, number: int, tenant: str, role: str = "admin") -> str:
        """Return a token."""
        return f"simulated-token-{number}-of-{role}-{tenant}"

    def _replace(self, name: str, text: str) -> None:
        new = self._secrets / f"{name}.new"
        new.write_text(text)
        new.replace(self._secrets / name)

    def _token_file(self, name: str) -> Path:
        role = "storage" if name in STORAGES else "client"
        return self._secrets / (
            f"{role}-{self.tenant_of(name)}" if len(self.tenants) == 2 else "admin-acme"
        )

    def _settings(self, kind: str, name: str) -> dict[str, object]:
        place = self.world.place(self.machines[name])
        common = {
            "host": "0.0.0.0",
            "allow_plaintext": True,
            "port": REST_PORT,
            "instance_id": name,
            "auth_tokens_file": self._secrets / "tokens.yaml",
        }
        keys = {"ticket_keys_file": self._secrets / "ticket-keys"}
        redis = {"redis_url": "redis://redis:6379" if self._has_redis else None}
        node = {
            "lm_host": "0.0.0.0",
            "lm_port": LM_PORT,
            "lookup_url": f"http://lookup:{REST_PORT}",
            "broker_url": f"http://broker:{REST_PORT}",
            "service_token_file": self._token_file(name),
            "tenant": self.tenant_of(name),
            "node": name,
        }
        own: dict[str, object]
        lease_ms = round(self.world.pace.lease_s * 1000)
        match kind:
            case "lookup":
                own = {
                    "sweep_interval_s": self.world.pace.sweep_s,
                    "default_ttl_ms": lease_ms,
                    "max_ttl_ms": 4 * lease_ms,
                }
                return common | redis | own
            case "broker":
                own = {"default_lease_ttl_ms": lease_ms, "max_lease_ttl_ms": 4 * lease_ms}
                return common | redis | keys | own | self._drawn(BROKER_SETTINGS)
            case "storage":
                own = {
                    "advertise_url": f"lm://{name}:{LM_PORT}",
                    "replicas_url": self._replicas_url,
                    "memory_gb": self._memory_gb(kind),
                }
                return common | node | own | self._with_disk(name, self._drawn(STORAGE_SETTINGS))
        own = {
            "distributed_url": f"lm://{name}:{LM_PORT}",
            "remote_url": self.remotes[name],
            "salt_file": self._secrets / f"salt-{self.tenant_of(name)}",
            "arena_gb": self._memory_gb(kind),
            "socket_path": self.socket(name),
            "arena_path": place / "shm" / "arena",
        }
        if name in self.movers:
            own |= {"peer_transport": "nixl", "mover_socket": self.movers[name].path}
        drawn = self._with_disk(name, self._drawn(SIDECAR_SETTINGS))
        return common | node | keys | own | drawn

    def _memory_gb(self, kind: str) -> float:
        return _MEMORY_CHUNKS[kind] * self.memory_chunk * self._size(MEMORY_SIZES) / GB

    def _with_disk(self, name: str, drawn: dict[str, object]) -> dict[str, object]:
        """Return these settings and those of the disk, if there is one at this start."""
        size = self._disk_chunk * _DISK_CHUNKS[name.split("-")[0]] * self._size(DISK_SIZES)
        self._disk_bytes[name] = int(size)
        if size:
            return drawn | {"disk_path": self.disk_path(name), "disk_gb": int(size) / GB}
        left_out = {"disk_serde", "tenant_disk_quota_gb"}
        return {option: value for option, value in drawn.items() if option not in left_out}

    def _size(self, factors: tuple[float, ...]) -> float:
        return self._size_dice.choice(factors) if self._is_resized else 1.0

    def _drawn(self, names: tuple[str, ...]) -> dict[str, object]:
        drawn = {name: self._dice.choice(DRAWN[name]) for name in names}
        for name, value in drawn.items():
            if name.endswith("_gb") and value:
                drawn[name] = value * (self._disk_chunk if "disk" in name else self.memory_chunk)
                drawn[name] /= GB
        return drawn


class Mover(ModelMover):
    """A mover in a process of its own.

    Args:
        world: The simulated world.
        node: Its sidecar.
        machine: That of the node.
        fabric: All movers.
    """

    def __init__(self, world: World, node: str, machine: Machine, fabric: Fabric) -> None:
        self.path = world.place(machine) / "run" / "mover.sock"
        super().__init__(self.path, _attached, fabric)
        self._kernel = world.kernel
        self._name = f"mover-{node}"
        self._machine = machine
        self._dice = random.Random(f"{self._name} {world.kernel.seed}")
        self.process: Process | None = None

    def state(self) -> str:
        if self.process is None or self.process.is_dead:
            return "dead"
        return "stopped" if self.is_stopped or self.process.is_paused else "running"

    def start(self) -> None:
        """Start it, unless it runs."""
        if self.state() == "dead":
            self.is_stopped, self.life = False, None
            self.step_s = self._dice.choice(STEPS_S)
            self.process = self._kernel.start_process(self._name, self._machine, self._main)

    def _main(self) -> None:
        asyncio.run(self.run())


@contextlib.contextmanager
def _attached(attach: Attach) -> Iterator[memoryview]:
    from lmcache_core.memory.shared import attach_shared_arena

    arena = attach_shared_arena(Path(attach.path), attach.num_bytes, attach.generation)
    try:
        yield arena.store_view
    finally:
        arena.lock.release()


def _mains() -> dict[str, Any]:
    from lmcache_broker.app import create_app as create_broker
    from lmcache_broker.settings import BrokerSettings
    from lmcache_lookup.app import create_app as create_lookup
    from lmcache_lookup.settings import LookupSettings
    from lmcache_servicekit.runner import run_service
    from lmcache_sidecar.app import create_app as create_sidecar
    from lmcache_sidecar.settings import SidecarSettings
    from lmcache_storage.app import create_app as create_storage
    from lmcache_storage.settings import StorageSettings

    def main(name: str, settings: Any, create: Any) -> Any:
        return lambda argv: run_service(name, settings, create, argv)

    return {
        "lookup": main("lmcache-lookup", LookupSettings, create_lookup),
        "broker": main("lmcache-broker", BrokerSettings, create_broker),
        "storage": main("lmcache-storage", StorageSettings, create_storage),
        "node": main("lmcache-sidecar", SidecarSettings, create_sidecar),
    }
