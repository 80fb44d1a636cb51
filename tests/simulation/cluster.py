"""The cluster under test: nodes with a sidecar each, storages, a lookup, brokers, Redis."""

from __future__ import annotations

import base64
import hashlib
import random
from pathlib import Path
from typing import Any

from tests.simulation.kernel import Machine, Process
from tests.simulation.redis_server import RedisServer
from tests.simulation.world import World

SIDECARS = tuple(f"node-{i}" for i in range(4))
STORAGES = tuple(f"storage-{i}" for i in range(2))
LOOKUPS = ("lookup-0",)
BROKERS = ("broker-0", "broker-1")
SERVICES = (*LOOKUPS, *BROKERS, *STORAGES, *SIDECARS)
REST_PORT, LM_PORT = 8080, 7777
GB = 1 << 30
LOCAL_BUFFER_BYTES = (128, 1 << 18)
_DISK_CHUNKS = {"storage": 250, "node": 80}
_MEMORY_CHUNKS = {"storage": 150, "node": 70}
SCALES = (0.4, 1.0)
"""Factors on the capacities of a run, of memory and of disks: small tiers evict often, large ones
hit often.
"""
TOKEN = "simulated-token-0123456789"
SALT = "the-salt-of-acme-0123456789"


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
    "tenant_quota_gb": (None, None, 50),
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


def worker_name(engine: str, rank: int) -> str:
    """Return the name of an engine's worker in its own process."""
    return f"{engine}.rank-{rank}"


def engine_of(process: str) -> str:
    """Return the name of the engine of a worker; of another process, its own name."""
    return process.partition(".")[0]


class Cluster:
    """Starts and stops the services' real code in a world.

    Args:
        world: The simulated world.
        chunk_bytes: Size of a chunk, which determines all capacities.
        dice: Draws settings.
    """

    def __init__(self, world: World, chunk_bytes: int, dice: random.Random) -> None:
        self._dice = dice
        self.world = world
        self.chunk_bytes = chunk_bytes
        self._memory_chunk = dice.choice(SCALES) * chunk_bytes
        self._disk_chunk = dice.choice(SCALES) * chunk_bytes
        self.redis = RedisServer()
        self.processes: dict[str, Process] = {}
        self.machines: dict[str, Machine] = {
            name: world.machine(name) for name in ("redis", *SERVICES)
        }
        world.network.local_buffer_bytes = dice.choice(LOCAL_BUFFER_BYTES)
        names = world.network.names
        for service, members in {"lookup": LOOKUPS, "broker": BROKERS}.items():
            names[service] = [self.machines[one].address for one in members]
        names["storage"] = self._running_storages
        self._secrets = world.files.root / "secrets"
        self._storages = f"lm://storage:{LM_PORT}"
        # Without it, the broker names the other storages.
        self._replicas_url = dice.choice((None, self._storages))
        self._write_secrets()

    def start(self, name: str) -> None:
        """Start a service."""
        kernel, machine = self.world.kernel, self.machines[name]
        if name == "redis":
            self.processes[name] = kernel.start_process(name, machine, self.redis.main)
            return
        kind = name.split("-")[0]
        self.processes[name] = self.world.start_service(
            name, machine, _mains()[kind], self._settings(kind, name)
        )

    def start_all(self) -> None:
        """Start everything."""
        for name in ("redis", *SERVICES):
            self.start(name)

    def disk_bytes(self, name: str) -> int:
        """Return the limit on the disk tier of a service."""
        return int(self._disk_chunk * _DISK_CHUNKS[name.split("-")[0]])

    def processes_of(self, engine: str) -> list[str]:
        """Return the names of an engine's processes: its own, and those of its workers."""
        return [name for name in self.processes if engine_of(name) == engine]

    def socket(self, name: str) -> Path:
        """Where engines reach the sidecar of a node."""
        return self.world.place(self.machines[name]) / "run" / "sidecar.sock"

    def embedded(self) -> dict[str, object]:
        """Return options of an engine that uses no sidecar."""
        return {
            "max_local_cpu_size": _MEMORY_CHUNKS["node"] * self._memory_chunk / GB,
            "remote_url": self._storages,
            "remote_token_file": str(self._secrets / "token"),
            "salt": SALT,
        }

    def _running_storages(self) -> list[str]:
        """Return what the name of a headless service resolves to."""
        return [
            self.machines[one].address
            for one in STORAGES
            if one in self.processes and not self.processes[one].is_dead
        ]

    def _write_secrets(self) -> None:
        self._secrets.mkdir()
        (self._secrets / "token").write_text(TOKEN)
        digest = hashlib.sha256(TOKEN.encode()).hexdigest()
        (self._secrets / "tokens.yaml").write_text(
            f"tokens:\n  - {{name: pods, tenant: acme, role: admin, token_sha256: {digest}}}\n"
        )
        key = base64.b64encode(bytes(range(32))).decode()
        (self._secrets / "ticket-keys").write_text(f"k1:{key}\n")
        (self._secrets / "salt").write_text(SALT)

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
        redis = {"redis_url": "redis://redis:6379"}
        node = {
            "lm_host": "0.0.0.0",
            "lm_port": LM_PORT,
            "lookup_url": f"http://lookup:{REST_PORT}",
            "broker_url": f"http://broker:{REST_PORT}",
            "service_token_file": self._secrets / "token",
            "tenant": "acme",
            "disk_path": place / "disk" / "chunks",
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
                    "memory_gb": _MEMORY_CHUNKS[kind] * self._memory_chunk / GB,
                    "disk_gb": self.disk_bytes(name) / GB,
                }
                return common | node | own | self._drawn(STORAGE_SETTINGS)
        own = {
            "distributed_url": f"lm://{name}:{LM_PORT}",
            "remote_url": self._storages,
            "salt_file": self._secrets / "salt",
            "arena_gb": _MEMORY_CHUNKS[kind] * self._memory_chunk / GB,
            "disk_gb": self.disk_bytes(name) / GB,
            "socket_path": self.socket(name),
            "arena_path": place / "shm" / "arena",
        }
        return common | node | keys | own | self._drawn(SIDECAR_SETTINGS)

    def _drawn(self, names: tuple[str, ...]) -> dict[str, object]:
        drawn = {name: self._dice.choice(DRAWN[name]) for name in names}
        for name, value in drawn.items():
            if name.endswith("_gb") and value:
                drawn[name] = value * (self._disk_chunk if "disk" in name else self._memory_chunk)
                drawn[name] /= GB
        return drawn


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
